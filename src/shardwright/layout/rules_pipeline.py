"""What a pipeline cannot run, said before any process starts. What depends on the model: `parallel/pipeline/stages.py`."""

from __future__ import annotations

from shardwright.config.schema import Parallelism, RunFile, Schedule
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.layout.batch import accumulation_steps
from shardwright.layout.pipeline_schedules import chunks_of, legality, rank_stages


def schedule_of(p: Parallelism) -> Schedule:
    """The pipeline schedule of a layout."""
    return p.pp_schedule or "1f1b"


def stages_of(p: Parallelism) -> int:
    """Pipeline stages: one for each pipeline rank, or as many more as the schedule is made for."""
    return p.pp_size * chunks_of(schedule_of(p))


def own_stages(p: Parallelism, pp_rank: int) -> tuple[int, ...]:
    """The stages that pipeline rank `pp_rank` holds, first to last."""
    return rank_stages(schedule_of(p), p.pp_size, chunks_of(schedule_of(p)), pp_rank)


def check_pipeline(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` for a pipeline that this version or torch cannot run, with the reason."""
    t, schedule = run.training, schedule_of(run.parallelism)
    if axes.pp == 1:
        return
    count = accumulation_steps(t.global_batch_size, t.per_device_train_batch_size, axes.data_ranks)
    if reason := legality(schedule, axes.pp, chunks_of(schedule), count):
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} cannot run: {reason}.",
            f"Each data rank has {count} microbatches: global_batch_size {t.global_batch_size} / "
            f"(per_device_train_batch_size {t.per_device_train_batch_size} x {axes.data_ranks} data ranks).",
            "Change training.per_device_train_batch_size, or set parallelism.pp_schedule to gpipe, which runs any number.",
        )
