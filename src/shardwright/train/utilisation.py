"""MFU and HFU of a run, where the model's shape and the device's peak are both known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwright.arch.flops import document_flops, model_flops, recompute_flops
from shardwright.arch.inventory import read_config, shape_from_config
from shardwright.arch.shape import Shape
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.models.packed_rows import PackedRows
from shardwright.plan.catalogue import CATALOGUE
from shardwright.plan.device import Device

Utilisation = Callable[[UpdateBatch, float], tuple[float, float]]
"""(this rank's part of an update, seconds that it took) -> (MFU, HFU); collective."""

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


def make_utilisation(run: RunFile, axes: Axes, device: torch.device) -> Utilisation | None:
    """How much of the devices' peak an update used; None where the peak or the shape is not known.

    Convention: matrix products of the model with the head in and the embedding lookup out; attention counted full, not
    halved for causality; HFU adds what is recomputed. The denominator is all devices' peaks. Rows that are padded to
    max_length count so many keys for each real token; packed and bucketed ones the tokens of the document.
    """
    if device.type != "cuda" or ":" in run.model.model_name_or_path:
        return None
    properties = torch.cuda.get_device_properties(device)
    known = device_of(properties.name, properties.total_memory)
    try:
        config = {**read_config(run.model.model_name_or_path), **run.model.config_overrides}
        shape = shape_from_config(config)
    except ConfigError:
        return None
    if known is None:
        return None
    peak = axes.world_size * known.peak(run.precision.param_dtype)

    def at(batch: UpdateBatch, seconds: float) -> tuple[float, float]:
        useful, again = update_flops(shape, run, axes, batch, device)
        return useful / seconds / peak, (useful + again) / seconds / peak

    return at


def update_flops(
    shape: Shape, run: RunFile, axes: Axes, batch: UpdateBatch, device: torch.device
) -> tuple[float, float]:
    """(FLOPs of forward and backward, of recomputation) of the whole update; collective unless rows are padded.

    Ranks that hold the same documents, or parts of them, count them once.
    """
    mode, length, tokens = run.memory.activation_checkpointing, run.data.max_length, batch.real_tokens
    if run.data.batching == "pad":
        return tokens * model_flops(shape, length).total, tokens * recompute_flops(shape, length, mode)
    lengths = sum(map(document_lengths, batch.microbatches), Counter())
    sums = torch.tensor(document_flops(shape, lengths, mode), dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    useful, again = (sums * axes.data_ranks / axes.world_size).tolist()
    return useful, again
