"""The job and the layout of a run file, as the planner sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.layout.loss import CROSS_ENTROPY
from shardwright.layout.pipeline_schedules import chunks_of
from shardwright.layout.zero import PREFETCH, STAGES
from shardwright.planner.device import DeviceKind
from shardwright.planner.job import Job, Layout, Loss

if TYPE_CHECKING:
    from shardwright.arch.shape import Shape
    from shardwright.config.schema import RunFile
    from shardwright.layout.axes import Axes


def _kind(run: RunFile, device: str | None) -> DeviceKind:
    """Of `device`, or of what the run file asks for."""
    return "cpu" if (device or run.hardware.device) == "cpu" else "cuda"


def job_of(run: RunFile, shape: Shape, device: str | None = None) -> Job:
    """What the run trains; no layout changes it. device: torch's type of the device where it runs, if it does."""
    t, precision = run.training, run.precision
    return Job(
        shape,
        run.data.max_length,
        t.global_batch_size,
        precision.param_dtype,
        precision.reduce_dtype,
        precision.master_dtype,
        t.optimizer,
        "eager" if run.model.attn_implementation == "eager" else "flash",
        loss_of(run),
        run.data.batching == "pack",
        device_kind=_kind(run, device),
    )


def loss_of(run: RunFile) -> Loss:
    """Whether the loss is made in chunks, as far as the run file says it."""
    asked = run.memory.loss_chunk_tokens
    if run.training.loss != CROSS_ENTROPY or asked == 0:
        return "full"
    return "auto" if asked == "auto" else "chunked"


def layout_of(run: RunFile, axes: Axes, device: str | None = None) -> Layout:
    """How the run is split over ranks; `axes` from `check_run`. device: as of `job_of`."""
    p, schedule = run.parallelism, None
    if axes.pp > 1:
        schedule = p.pp_schedule or "1f1b"
    reshard = STAGES[p.data_parallel].reshard_after_forward
    return Layout(
        axes,
        p.data_parallel,
        run.training.per_device_train_batch_size,
        schedule,
        1 if schedule is None else chunks_of(schedule),
        p.sequence_parallel is not False,
        run.memory.activation_checkpointing,
        reshard if p.reshard_after_forward is None else p.reshard_after_forward,
        PREFETCH[_kind(run, device)] if p.prefetch is None else p.prefetch,
        p.unit,
        run.memory.cpu_offload,
        p.cp_attention or "all_gather",
    )
