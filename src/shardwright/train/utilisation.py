"""MFU and HFU of a run, where the model's shape and the device's peak are both known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

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
    """{tokens: number of documents with so many}. A row without document numbers ends one token after its last target."""
    if microbatch.documents is not None:
        spans = PackedRows(microbatch.documents, microbatch.documents.device).spans
        return Counter(end - start for _, start, end in spans)
    width = microbatch.labels.shape[1]
    last = torch.where(microbatch.labels >= 0, torch.arange(2, width + 2), 0).amax(1)
    return Counter(last.clamp(max=width).tolist())


@dataclass(frozen=True)
class DevicePeak:
    """FLOP/s of one device in the compute dtype of a run, and the source of that number."""

    flops: float
    source: str


def device_peak(device: torch.device, dtype: str, hardware: str | None = None) -> DevicePeak | None:
    """The peak of `device`: from `hardware` (a file that `doctor` wrote), else from its data sheet; None where unknown.

    The catalogue's `cpu` is a guess for plans, not a measurement, so it counts as unknown.
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
        return DevicePeak(known.peak(dtype), source) if known else None
    except ConfigError:
        return None


@dataclass(frozen=True)
class Utilisation:
    """How much of the devices' peak updates use, by the convention `arch.flops.UTILISATION`."""

    shape: Shape
    run: RunFile
    axes: Axes
    peak: DevicePeak

    def flops(self, batch: UpdateBatch) -> tuple[float, float]:
        """(FLOPs of forward and backward, of recomputation) of this rank; the sum over ranks is that of the update.

        Ranks that hold the same documents, or parts of them, count them once together.
        """
        mode, length = self.run.memory.activation_checkpointing, self.run.data.max_length
        if self.run.data.batching == "pad":
            tokens = batch.real_tokens / self.axes.world_size
            return tokens * model_flops(self.shape, length).total, tokens * recompute_flops(self.shape, length, mode)
        lengths = sum(map(document_lengths, batch.microbatches), Counter())
        useful, again = document_flops(self.shape, lengths, mode)
        part = self.axes.data_ranks / self.axes.world_size
        return useful * part, again * part

    def share(self, flops: float, seconds: float) -> float:
        """The share of the peak of all ranks that an update of so many FLOPs in all reaches."""
        return flops / seconds / (self.axes.world_size * self.peak.flops)


def make_utilisation(run: RunFile, axes: Axes, device: torch.device, hardware: str | None = None) -> Utilisation | None:
    """The utilisation of this run's devices; None where the peak or the model's shape is not known."""
    peak = device_peak(device, run.precision.param_dtype, hardware)
    shape = shape_of(run) if peak else None
    return Utilisation(shape, run, axes, peak) if shape and peak else None
