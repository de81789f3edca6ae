"""The error of a rank that ran out of memory: what was alive, what was planned, and the smallest change that fits."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwright.config.load import Loaded
from shardwright.errors import ConfigError, MemoryExhausted
from shardwright.launch import Heartbeat
from shardwright.layout.axes import Axes
from shardwright.layout.legality import check_device, check_run
from shardwright.measure.memory import allocated_bytes, bytes_by_group, in_backward, is_out_of_memory
from shardwright.train.planned import plan_of, shape_of
from shardwright.train.update import UpdateEngine
from shardwright.units import format_bytes_binary

MARGIN = 0.95
"""A change fits when its planned peak is at most this fraction of the memory in use when the rank failed."""
LATER_KINDS = {"ddp": ["zero1", "zero2", "zero3"], "zero1": ["zero2", "zero3"], "zero2": ["zero3"]}
LATER_MODES = {"none": ["selective", "alternate", "full"], "selective": ["alternate", "full"], "alternate": ["full"]}


@dataclass
class Watched:
    """A running rank. base_bytes: allocated before it built its model. engine: None until the model is built."""

    loaded: Loaded
    axes: Axes
    rank: int
    device: torch.device
    heartbeat: Heartbeat
    base_bytes: int
    engine: UpdateEngine | None = None


@contextmanager
def explaining_exhaustion(
    loaded: Loaded, axes: Axes, rank: int, device: torch.device, heartbeat: Heartbeat
) -> Iterator[Watched]:
    """A context in which an out-of-memory error becomes a `MemoryExhausted`; the caller sets `engine` once it is built."""
    watched = Watched(loaded, axes, rank, device, heartbeat, allocated_bytes(device) or 0)
    try:
        yield watched
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _explained(watched, error) from error


def _explained(watched: Watched, error: BaseException) -> MemoryExhausted:
    beat = watched.heartbeat.last()
    moment = str(beat)
    if beat.phase == "forward_backward":
        moment = moment.replace("forward_backward", "backward" if in_backward(error) else "forward")
    total = allocated_bytes(watched.device)
    held = bytes_by_group(_groups(watched.engine), None if total is None else total - watched.base_bytes)
    traceback.clear_frames(error.__traceback__)  # frees the tensors of these frames: the lines below need memory
    asked = (str(error).splitlines() or ["no memory"])[0][:200]
    what = f"Rank {watched.rank} ran out of memory in {moment}: {type(error).__name__}: {asked}"
    lines = ["", f"Alive then, {_listed(held)}."]
    shape = shape_of(watched.loaded.run)
    if shape is None:
        return MemoryExhausted(what, "\n".join([*lines, "Planned: n/a, because the planner cannot read this model.\n"]))
    chunked = bool(watched.engine and watched.engine.loss_chunks.tokens)
    planned = plan_of(watched.loaded.run, watched.axes, shape, chunked, watched.device.type)
    lines.append(f"Planned at the peak ({planned.moment}), {_listed(planned.composition)}.\n")
    limit = MARGIN * min(planned.peak_bytes, sum(held.values()) if total is not None else planned.peak_bytes)
    return MemoryExhausted(what, "\n".join(lines), _advice(watched, chunked, limit))


def _groups(engine: UpdateEngine | None) -> dict[str, list[Tensor]]:
    """The tensors of a rank that can be listed, by the planner's categories."""
    if engine is None:
        return {}
    states = engine.optimizer.state.values()
    return {
        "parameters": [tensor for local in engine.params for tensor in (local.tensor, local.parameter)],
        "gradients": [gradient for _, gradient in engine.gradients()],
        "optimizer states": [v for state in states for v in state.values() if isinstance(v, Tensor)],
        "gathered parameters": list(engine.module.parameters()),
        "buffers": list(engine.module.buffers()),
    }


def _listed(parts: Mapping[str, float]) -> str:
    """`1.2 GiB: parameters 0.8 GiB, gradients 0.4 GiB`: in the unit of torch's own message and of `plan`."""
    sizes = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: -part[1])
    return f"{format_bytes_binary(sum(parts.values()))}: " + ", ".join(
        f"{name} {format_bytes_binary(size)}" for name, size in sizes
    )


def _advice(watched: Watched, chunked: bool, limit: float) -> str:
    found = nearest_that_fits(watched.loaded, watched.axes.world_size, watched.device.type, chunked, limit)
    if found is None:
        return (
            f"The planner finds no recomputation, smaller microbatch, data-parallel kind or offload that stays below "
            f"{format_bytes_binary(limit)} on {watched.axes.world_size} ranks: add ranks, or ask `shardwright plan`."
        )
    keys, peak = found
    settings = " ".join(f"--{key} {value}" for key, value in keys.items())
    return f"The nearest change that fits, with a planned peak of {format_bytes_binary(peak)}: {settings}."


def nearest_that_fits(
    loaded: Loaded, world_size: int, device: str, chunked: bool, limit_bytes: float
) -> tuple[dict[str, Any], float] | None:
    """(keys to set, planned peak bytes) of the change of fewest keys whose planned peak is at most `limit_bytes`, or None.

    Only what keeps the objective and the number of ranks is tried. chunked: as `plan_of`.
    """
    shape = shape_of(loaded.run)
    for keys in _changes(loaded) if shape else ():
        try:
            changed = loaded.replaced(keys, "proposed")
            axes = check_run(changed, world_size)
            check_device(changed.run, device)
        except ConfigError:
            continue
        assert shape is not None
        peak = plan_of(changed.run, axes, shape, chunked, device).peak_bytes
        if peak <= limit_bytes:
            return keys, peak
    return None


def _changes(loaded: Loaded) -> list[dict[str, Any]]:
    """Changes of the run, those of fewest keys first; among equally many keys, the cheapest change first."""
    run = loaded.run
    rows = run.training.per_device_train_batch_size
    options: dict[str, list[Any]] = {
        "memory.activation_checkpointing": LATER_MODES.get(run.memory.activation_checkpointing, []),
        "training.per_device_train_batch_size": [n for n in range(rows - 1, 0, -1) if rows % n == 0],
        "parallelism.data_parallel": LATER_KINDS.get(run.parallelism.data_parallel, []),
        "memory.cpu_offload": ["params"],
    }
    now = loaded.settings()
    choices = product(*([None, *values] for values in options.values()))
    found = [{k: v for k, v in zip(options, chosen) if v is not None} for chosen in choices]
    found.sort(key=len)
    return [keys for keys in found if keys and all(now[key] != value for key, value in keys.items())]
