"""MFU and HFU of a run, where the model's shape and the device's peak are both known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.arch.flops import document_flops, model_flops, recompute_flops
from shardwright.arch.shape import Shape
from shardwright.attention.packed_rows import PackedRows
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.planner.catalogue import CATALOGUE
from shardwright.planner.device import Device
from shardwright.planner.hardware import find_device
from shardwright.train.planned import shape_of

# What a driver calls a device -> the catalogue's name; the memory size tells variants apart.
_DRIVER_NAMES = ("v100", "a100", "h100", "h200", "b200", "gb200", "mi300x", "l40s", "4090")


def device_of(name: str, memory_bytes: int) -> Device | None:
    """The catalogue's entry for a device as its driver calls it; None when none fits within 15% of memory."""
    lowered = name.lower()
    marks = [mark for mark in _DRIVER_NAMES if mark in lowered]
    form = next((form for form in ("pcie", "nvl") if form in lowered), "sxm")  # drivers name the other forms
    found = [
        device
        for key, device in CATALOGUE.items()
        if marks and max(marks, key=len) in key and abs(device.memory_bytes / memory_bytes - 1) < 0.15
    ]
    exact = [device for device in found if form in device.name]
    return next(iter(exact or found), None)


def document_lengths(microbatch: Microbatch) -> Counter[int]:
    """{tokens: how many documents have so many}; a row without numbers of documents ends one token behind its last target."""
    if microbatch.documents is not None:
        spans = PackedRows(microbatch.documents, microbatch.documents.device).spans
        return Counter(end - start for _, start, end in spans)
    width = microbatch.labels.shape[1]
    last = torch.where(microbatch.labels >= 0, torch.arange(2, width + 2), 0).amax(1)
    return Counter(last.clamp(max=width).tolist())


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device in the dtype that a run computes in, and where that is from."""

    flops: float
    source: str


def device_peak(device: torch.device, dtype: str, hardware: str | None = None) -> Peak | None:
    """The peak of `device`: of its data sheet, or of what `hardware` (a file that `doctor` wrote) says; None where unknown.

    The catalogue's `cpu` is a guess to plan with, no measurement, so it counts as unknown.
    """
    known: Device | None
    if hardware is not None:
        known, source = find_device(hardware), hardware
        if known is CATALOGUE["cpu"]:
            return None
    elif device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = device_of(properties.name, properties.total_memory)
        source = f"data sheet of {known.name}" if known else ""
    else:
        return None
    try:
        return Peak(known.peak(dtype), source) if known else None
    except ConfigError:
        return None


class Utilisation:
    """How much of the devices' peak updates use, by the convention `arch.flops.UTILISATION`."""

    def __init__(self, shape: Shape, run: RunFile, axes: Axes, peak: Peak) -> None:
        self._shape, self._run, self._axes, self.peak = shape, run, axes, peak

    def flops(self, batch: UpdateBatch) -> tuple[float, float]:
        """`own_flops` of this rank."""
        return own_flops(self._shape, self._run, self._axes, batch)

    def share(self, flops: float, seconds: float) -> float:
        """The share of the peak that an update of so many FLOPs over all ranks reaches."""
        return flops / seconds / (self._axes.world_size * self.peak.flops)


def make_utilisation(run: RunFile, axes: Axes, device: torch.device, hardware: str | None = None) -> Utilisation | None:
    """The utilisation of this run's devices; None where the peak or the model's shape is not known."""
    peak = device_peak(device, run.precision.param_dtype, hardware)
    shape = shape_of(run) if peak else None
    return Utilisation(shape, run, axes, peak) if shape and peak else None


def own_flops(shape: Shape, run: RunFile, axes: Axes, batch: UpdateBatch) -> tuple[float, float]:
    """(FLOPs of forward and backward, of recomputation): what this rank counts; all ranks' sum is the whole update's.

    Ranks that hold the same documents, or parts of them, count them once together.
    """
    mode, length = run.memory.activation_checkpointing, run.data.max_length
    if run.data.batching == "pad":
        tokens = batch.real_tokens / axes.world_size
        return tokens * model_flops(shape, length).total, tokens * recompute_flops(shape, length, mode)
    lengths = sum(map(document_lengths, batch.microbatches), Counter())
    useful, again = document_flops(shape, lengths, mode)
    part = axes.data_ranks / axes.world_size
    return useful * part, again * part


def update_flops(
    shape: Shape, run: RunFile, axes: Axes, batch: UpdateBatch, device: torch.device
) -> tuple[float, float]:
    """(FLOPs of forward and backward, of recomputation) of the whole update; collective."""
    sums = torch.tensor(own_flops(shape, run, axes, batch), dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    useful, again = sums.tolist()
    return useful, again
