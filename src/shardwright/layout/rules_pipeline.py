"""What a pipeline cannot run, said before any process starts. What depends on the model itself: `parallel/stages.py`."""

from __future__ import annotations

from shardwright.config.schema import Parallelism, RunFile, Schedule
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.layout.batch import accumulation_steps
from shardwright.layout.schedule import chunks_of, legality, rank_stages

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""


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
    if ":" in run.model.model_name_or_path:
        raise ConfigError(
            f"parallelism.pp_size {axes.pp} with the model function {run.model.model_name_or_path}.",
            "Stages are cut from Transformers models, whose parts are known by convention.",
            "Set parallelism.pp_size to 1, or give a Hugging Face directory.",
        )
    if schedule in SPLIT_BACKWARD:
        _check_split_backward(run, schedule)
    count = accumulation_steps(t.global_batch_size, t.per_device_train_batch_size, axes.data_ranks)
    if reason := legality(schedule, axes.pp, chunks_of(schedule), count):
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} cannot run: {reason}.",
            f"Each data rank has {count} microbatches: global_batch_size {t.global_batch_size} / "
            f"(per_device_train_batch_size {t.per_device_train_batch_size} x {axes.data_ranks} data ranks).",
            "Change training.per_device_train_batch_size, or set parallelism.pp_schedule to gpipe, which runs any number.",
        )


def _check_split_backward(run: RunFile, schedule: str) -> None:
    kind, recompute = run.parallelism.data_parallel, run.memory.activation_checkpointing
    if kind != "ddp":
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} with data_parallel {kind}.",
            f"{schedule} computes the gradients of weights apart from those of inputs, by which fully_shard finds the moment "
            "to reduce: gradients come out wrong (tried with torch 2.13).",
            "Set data_parallel to ddp, or pp_schedule to 1f1b or interleaved_1f1b.",
        )
    if recompute == "selective":
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} with memory.activation_checkpointing selective.",
            "Backward runs in two parts, and what selective recomputation keeps can be read once.",
            "Set memory.activation_checkpointing to full (recomputed in both parts) or none, or pp_schedule to 1f1b.",
        )
    if run.memory.compile:
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} with memory.compile.",
            "A compiled block has one backward for inputs and weights together: torch refuses the pair.",
            "Set memory.compile to false, or pp_schedule to 1f1b.",
        )
