"""Seconds of collectives: latency of every step plus bytes over bandwidth, on nodes of equal devices.

N ranks of a group, of which `local` are in each node. A ring sends (N - 1) / N of the payload to the next rank in N - 1 steps.
Where a ring crosses nodes, each of the `local` ranks has its own network card: the ring has local x network bandwidth, but at
most that of the links. The costs of rings and trees: Thakur, Rabenseifner, Gropp 2005 (doi:10.1177/1094342005051521).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwright.planner.device import Device

TREE_BANDWIDTH = 0.5
"""A tree sends the payload up and down through every inner rank: half the bandwidth of a ring, log2(N) steps."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective."""

    size: int
    local: int  # ranks of the group in each node

    @property
    def nodes(self) -> float:
        return self.size / self.local


def group_of(size: int, stride: int, devices_per_node: int) -> RankGroup:
    """The group along a mesh axis whose neighbours are `stride` ranks apart."""
    return RankGroup(size, max(1, min(size, devices_per_node // stride if stride <= devices_per_node else 1)))


def ring_bandwidth(device: Device, group: RankGroup) -> float:
    """Bytes/s that each rank of a ring sends."""
    node, e = device.node, device.efficiency
    link = node.link_bandwidth * e.link
    if group.size <= group.local:
        return link
    network = node.network_bandwidth * e.network * group.local
    return min(link, network) if group.local > 1 else network


def step_latency(device: Device, group: RankGroup) -> float:
    """Seconds of one ring step: the slowest hop decides."""
    return device.node.link_latency if group.size <= group.local else device.node.network_latency


class TransferTime(NamedTuple):
    """Seconds of a collective by the alpha-beta model: fixed + per_byte x payload."""

    fixed: float  # seconds
    per_byte: float  # seconds per byte of the payload

    def seconds(self, payload_bytes: float) -> float:
        return self.fixed + self.per_byte * payload_bytes


def gather_time(device: Device, group: RankGroup) -> TransferTime:
    """An all-gather or a reduce-scatter, by the bytes of the full tensor."""
    n = group.size
    if n == 1:
        return TransferTime(0.0, 0.0)
    return TransferTime((n - 1) * step_latency(device, group), (n - 1) / n / ring_bandwidth(device, group))


def all_reduce_times(device: Device, group: RankGroup) -> tuple[TransferTime, TransferTime]:
    """An all-reduce as a ring (reduce-scatter and all-gather) and as a tree; NCCL takes the faster one."""
    if group.size == 1:
        return TransferTime(0.0, 0.0), TransferTime(0.0, 0.0)
    gather = gather_time(device, group)
    steps = device.node.link_latency * log2(group.local)
    if group.nodes > 1:
        steps += device.node.network_latency * log2(group.nodes)
    return TransferTime(2 * gather.fixed, 2 * gather.per_byte), TransferTime(
        2 * steps, 2 / (ring_bandwidth(device, group) * TREE_BANDWIDTH)
    )


def gather_seconds(device: Device, group: RankGroup, payload_bytes: float) -> float:
    """An all-gather or a reduce-scatter whose full tensor has `payload_bytes`."""
    return gather_time(device, group).seconds(payload_bytes)


def all_reduce_seconds(device: Device, group: RankGroup, payload_bytes: float) -> float:
    """The faster of ring and tree."""
    ring, tree = all_reduce_times(device, group)
    return min(ring.seconds(payload_bytes), tree.seconds(payload_bytes))


def send_seconds(device: Device, crosses_nodes: bool, payload_bytes: float) -> float:
    """One point-to-point transfer between neighbours of a pipeline."""
    node, e = device.node, device.efficiency
    if crosses_nodes:
        return node.network_latency + payload_bytes / (node.network_bandwidth * e.network)
    return node.link_latency + payload_bytes / (node.link_bandwidth * e.link)
