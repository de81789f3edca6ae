"""Binds a rank to the CPU cores of the NUMA node that its GPU hangs on: copies to the GPU then cross no other socket."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys")


def cores_of_list(text: str) -> set[int]:
    """The cores of a list as Linux writes it: `0-3,8` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def node_of(pci_address: str, system: Path = SYSTEM) -> tuple[int, set[int]] | None:
    """(NUMA node, its cores) of a PCI device such as `0000:17:00.0`; None where the system does not say.

    A machine with one node, and a virtual machine, may say -1.
    """
    try:
        node = int((system / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
        if node < 0:
            return None
        return node, cores_of_list((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return None


def bind_to(pci_address: str, system: Path = SYSTEM) -> str:
    """Binds this process to the node of a PCI device, and returns a line that says so, or why not.

    Cores that a batch system has taken from this process stay taken.
    """
    found = node_of(pci_address, system)
    if found is None:
        return f"NUMA binding: the system does not say which node GPU {pci_address} hangs on; ranks are not bound."
    node, cores = found
    allowed = os.sched_getaffinity(0)
    if not cores & allowed:
        return f"NUMA binding: none of the cores of node {node} is given to this rank; ranks are not bound."
    os.sched_setaffinity(0, cores & allowed)
    return f"NUMA binding: each rank runs on the cores of its GPU's node (rank 0: node {node}, {len(cores & allowed)} cores)."
