"""The collectives, sends and receives that this rank has issued: they tell which rank a hanging run waits for.

Collectives are read from torch's flight recorder, which keeps the newest of every group, on gloo and on NCCL (torch 2.11 to
2.14). Gloo's recorder leaves sends and receives out, so this module counts them. Reading synchronises nothing, so a rank that
hangs can be asked too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.torch_private import flight_recorders, group_of

KEPT = 64
"""Collectives that are reported of each group; a rank is never further ahead of another than its queue is long."""

_Transfer = tuple[str, int, int]
"""Name of the group, rank of the other side in it, tag."""

_sent: Counter[_Transfer] = Counter()
_received: Counter[_Transfer] = Counter()


def count_transfers() -> None:
    """Counts this rank's sends and receives from now on; a microsecond each. Counting twice is the same as once."""
    if not hasattr(dist.ProcessGroup.send, "counts"):
        dist.ProcessGroup.send = _counting(dist.ProcessGroup.send, _sent)  # type: ignore[method-assign]
        dist.ProcessGroup.recv = _counting(dist.ProcessGroup.recv, _received)  # type: ignore[method-assign]


def _counting(transfer: Callable[..., Any], counter: Counter[_Transfer]) -> Callable[..., Any]:
    def counted(group: dist.ProcessGroup, tensors: Sequence[Any], other: int, tag: int, *rest: Any) -> Any:
        counter[group.group_name, other, tag] += 1
        return transfer(group, tensors, other, tag, *rest)

    counted.counts = True  # type: ignore[attr-defined]
    return counted


def issued() -> dict[str, Any]:
    """The calls that this rank has issued, as plain data for JSON.

    `groups`: name -> its `ranks`, and its newest `collectives` as [number in the group, operation, sizes, whether it is done].
    `sent` and `received`: [rank of the other side, group, tag, how many]. `out_of_memory`: how often the device had none left.
    """
    groups: dict[str, Any] = {}
    for entry in sorted(_recorded(), key=lambda entry: int(entry["collective_seq_id"])):
        name = entry["process_group"][0]
        if name not in groups and (ranks := _ranks(name)):
            groups[name] = {"ranks": ranks, "collectives": []}
        if name in groups:
            operation = entry["profiling_name"].split(":", 1)[-1]
            sizes = [entry["input_sizes"], entry["output_sizes"]]
            groups[name]["collectives"].append([entry["collective_seq_id"], operation, sizes, entry["retired"]])
    for group in groups.values():
        group["collectives"] = group["collectives"][-KEPT:]
    return {
        "groups": groups,
        "sent": _counts(_sent),
        "received": _counts(_received),
        "out_of_memory": torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_initialized() else 0,
    }


def _recorded() -> list[dict[str, Any]]:
    """The collectives in torch's flight recorders, of which gloo and NCCL have one each."""
    entries = [entry for dump in flight_recorders() for entry in json.loads(dump).get("entries", [])]
    return [entry for entry in entries if not entry["is_p2p"]]


def _ranks(name: str) -> list[int]:
    """The ranks of a group; none where the group was destroyed."""
    try:
        return dist.get_process_group_ranks(group_of(name))
    except (RuntimeError, KeyError, ValueError):
        return []


def _counts(counter: Counter[_Transfer]) -> list[tuple[int, str, int, int]]:
    found = []
    for (name, other, tag), count in list(counter.items()):
        if ranks := _ranks(name):
            found.append((ranks[other], name, tag, count))
    return found
