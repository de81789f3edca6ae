"""A device, the node that it stands in, and the share of the data sheet's rates that training reaches on it.

Rates are dense (no 2:4 sparsity), bandwidths are in one direction, bytes are decimal as on the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwright.errors import ConfigError

DeviceKind = Literal["cuda", "cpu"]
"""Decides which program is planned: GPUs use NCCL, CPUs use gloo, with other kernels, chunks and buffers."""


@dataclass(frozen=True)
class Efficiency:
    """The constants of one device in the laws of `planner/kernels.py` and `planner/network.py`. Shares are from 0 to 1."""

    matmul: float  # share of the peak that a large product reaches in a training step: power limit and memory stalls counted
    wave: float  # elements of the result at which a product reaches half of that: half a wave of output tiles
    depth: float  # length of the inner dim at which a product reaches half of that
    attention_forward: float  # share of the peak that a flash attention kernel reaches at head width 128, forward
    attention_backward: float  # the same, backward
    attention_ramp: float  # keys at which a flash attention kernel reaches half its rate
    bandwidth: float  # share of the memory bandwidth that element-wise kernels and the optimizer reach
    link: float  # share of the link bandwidth that a large collective inside a node reaches
    network: float  # share of the network bandwidth that a large collective between nodes reaches
    fitted: str  # the measurements that the constants were fitted on, or the device that they were taken over from
    matmul_16bit: float = 1.0  # `matmul` of bf16 and fp16 products relative to `matmul` of the other dtypes
    attention_peak: float | None = (
        None  # FLOP/s that the shares of attention refer to; None: the peak of the compute dtype
    )


@dataclass(frozen=True)
class Node:
    """How devices are joined. The latencies of the A100 and H100 nodes are fitted; other nodes take them over."""

    devices: int  # devices in a node
    link_bandwidth: float  # bytes/s of a device to the others of its node, one direction
    network_bandwidth: float  # bytes/s of a device to other nodes, one direction
    link_latency: float = 13e-6  # seconds of one step of a collective inside a node
    network_latency: float = 50e-6  # seconds of one step of a collective between nodes
    source: str = ""  # where these figures are from
    transfer_load: float | None = (
        None  # core seconds that a second of transfer takes from computing; None: network cards do it
    )


@dataclass(frozen=True, eq=False)
class Device:
    """One device and the node that it usually stands in."""

    name: str  # of the catalogue, or of the hardware file
    memory_bytes: int  # memory of the device
    memory_bandwidth: float  # bytes/s
    peak_flops: dict[str, float]  # dense FLOP/s by dtype
    node: Node
    host_bandwidth: float  # bytes/s between device and host memory, one direction: offload
    matmul_measured: float | None  # FLOP/s of the best matrix product that was published or measured; None: not known
    efficiency: Efficiency
    sources: dict[str, str] = field(default_factory=dict)  # name of a field -> where its figure is from
    kind: DeviceKind = "cuda"

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in `dtype`; fp16 and bf16 stand in for each other. Raises `ConfigError` for a dtype without a rate."""
        value = self.peak_flops.get(dtype) or self.peak_flops.get({"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype))
        if value is None:
            raise ConfigError(
                f"The peak rate of {self.name} in {dtype} is not known.",
                f"Known are its rates in {', '.join(self.peak_flops)}.",
                "Choose one of these as precision.param_dtype, or describe the device in a hardware file.",
            )
        return value
