"""MFU and HFU of a run, where the model's shape and the device's peak are both known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.arch.flops import model_flops, recompute_flops, utilisation
from shardwright.arch.inventory import read_config, shape_from_config
from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError
from shardwright.plan.catalogue import CATALOGUE
from shardwright.plan.device import Device

Utilisation = Callable[[float], tuple[float, float]]

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


def make_utilisation(run: RunFile, device: torch.device, world_size: int) -> Utilisation | None:
    """tokens/s of the whole run -> (MFU, HFU); None where the peak or the shape is not known.

    Convention: matrix products of the model with the head in and the embedding lookup out; attention counted full, not
    halved for causality; HFU adds what is recomputed. The denominator is all devices' peaks.
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
    peak, length = known.peak(run.precision.param_dtype), run.data.max_length
    useful = model_flops(shape, length).total
    again = recompute_flops(shape, length, run.memory.activation_checkpointing)

    def at(tokens_per_second: float) -> tuple[float, float]:
        return (
            utilisation(useful, tokens_per_second, world_size, peak),
            utilisation(useful + again, tokens_per_second, world_size, peak),
        )

    return at
