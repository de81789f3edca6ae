"""What the planner knows of a device, of its node, and of what it reaches of its data sheet.

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
    """What a device reaches of its data sheet. One set per device; see `planner/kernels.py` for the laws.

    matmul: fraction of the peak of a large matrix product in a training step (power limit and memory stalls
    included). wave: elements of the result at which half of that is reached (half a wave of output tiles);
    depth: the same for the inner dim. attention_ramp: keys at which a flash kernel reaches half its rate.
    attention_forward, attention_backward: fraction of the peak of the flash kernels at head width 128.
    bandwidth: fraction of the memory bandwidth that element-wise kernels and the optimizer reach.
    link: fraction of the link bandwidth that a large collective inside a node reaches; network: between
    nodes. fitted: the rows that these were fitted on, or the device they were taken over from. narrow: `matmul` of 16-bit
    products relative to that of others. attention_peak: FLOP/s that the fractions of attention refer to; None: the peak of the
    dtype that computes.
    """

    matmul: float
    wave: float
    depth: float
    attention_forward: float
    attention_backward: float
    attention_ramp: float
    bandwidth: float
    link: float
    network: float
    fitted: str
    narrow: float = 1.0
    attention_peak: float | None = None


@dataclass(frozen=True)
class Node:
    """How devices are joined: bandwidth per device and direction in bytes/s, latency per step in seconds.

    The latencies of the A100 and H100 nodes are fitted with the devices' efficiencies; those of other nodes
    are taken over. transfer_load: core seconds that a second of a transfer takes from a rank that computes on the CPU;
    None where network cards do the work, and the program says how much compute suffers.
    """

    devices: int
    link_bandwidth: float
    network_bandwidth: float
    link_latency: float = 13e-6
    network_latency: float = 50e-6
    source: str = ""
    transfer_load: float | None = None


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator and the node it usually stands in.

    peak_flops: dense FLOP/s by dtype. host_bandwidth: bytes/s to host memory, one direction (for offload).
    matmul_measured: the best matrix product anyone published for it, FLOP/s, or None. sources: figure ->
    where it is from.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    node: Node
    host_bandwidth: float
    matmul_measured: float | None
    efficiency: Efficiency
    sources: dict[str, str] = field(default_factory=dict)
    kind: DeviceKind = "cuda"

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in `dtype`; fp16 and bf16 stand in for each other. Raises `ConfigError` for none."""
        other = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
        value = self.peak_flops.get(dtype) or self.peak_flops.get(other)
        if value is None:
            raise ConfigError(
                f"{self.name} has no {dtype} rate in the hardware catalogue.",
                f"It has {', '.join(self.peak_flops)}.",
                "Choose one of these as precision.param_dtype, or describe the device in a hardware file.",
            )
        return value
