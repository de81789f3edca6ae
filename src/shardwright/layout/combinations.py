"""What does not combine with what, as one table: the gate refuses from it, the planner leaves it out, the docs print it.

Everything that is not in the table combines, and `check --layouts all` proves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.errors import ConfigError
from shardwright.layout.axes import AXES, MODEL_AXES, Axes
from shardwright.layout.import_path import is_import_path
from shardwright.layout.size_rules import schedule_of

if TYPE_CHECKING:  # the planner reads the table and loads no pydantic
    from shardwright.config.schema import RunFile

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""

FULLY_SHARD = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Exclusion:
    """Two sets of features: no feature of `first` combines with one of `second`. reason, fix: of the error."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    reason: str
    fix: str


EXCLUSIONS = (
    Exclusion(
        SPLIT_BACKWARD,
        FULLY_SHARD,
        "The schedule computes the gradients of weights apart from those of inputs, by which fully_shard finds the moment to "
        "reduce: gradients come out wrong (tried with torch 2.13).",
        "Set data_parallel to ddp, or pp_schedule to 1f1b or interleaved_1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("selective", "full"),
        "torch asks for the gradients of weights group by group, and each time the block's forward would run again (10 times "
        "for one block of a Llama); what selective recomputation keeps can be read once only.",
        "Set memory.activation_checkpointing to none, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("compile",),
        "A compiled block has one backward for inputs and weights together: torch refuses the pair.",
        "Set memory.compile to false, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("loss_chunks",),
        "A loss in chunks makes the gradients of hidden states and of the head together.",
        "Set memory.loss_chunk_tokens to auto or 0, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        ("loss_chunks",),
        ("own_loss",),
        "A loss of your own is given whole logits.",
        "Set memory.loss_chunk_tokens to auto or 0.",
    ),
    Exclusion(
        ("compile",),
        ("cp",),
        "The core attention talks to other ranks inside the block, which torch.compile cannot trace.",
        "Set memory.compile to false or cp_size to 1.",
    ),
    Exclusion(
        ("compile",),
        ("pack",),
        "The documents of a row are other ones in each microbatch, and torch.compile would compile for each anew.",
        "Set memory.compile to false, or data.batching to bucket or pad.",
    ),
    Exclusion(
        ("pp",),
        ("module",),
        "Stages are cut from Transformers models, whose parts are known by convention.",
        "Set parallelism.pp_size to 1, or give a Hugging Face directory.",
    ),
    Exclusion(
        ("offload",),
        ("ddp",),
        "ddp keeps whole parameters on every rank: there are no shards to move.",
        "Set memory.cpu_offload to none.",
    ),
)


def features(run: RunFile, axes: Axes) -> dict[str, str]:
    """{feature of a run: its key and value, as an error shows them}."""
    p, memory = run.parallelism, run.memory
    found: dict[str, str] = {p.data_parallel: f"data_parallel {p.data_parallel}"}
    sizes = {name: getattr(axes, name) for name in MODEL_AXES}
    found |= {name: f"parallelism.{AXES[name].key} {size}" for name, size in sizes.items() if size > 1}
    if axes.pp > 1:
        schedule = schedule_of(p)
        found[schedule] = f"parallelism.pp_schedule {schedule}"
    if memory.activation_checkpointing != "none":
        kind = memory.activation_checkpointing
        found[kind] = f"memory.activation_checkpointing {kind}"
    if memory.compile:
        found["compile"] = "memory.compile"
    if memory.loss_chunk_tokens not in ("auto", 0):
        found["loss_chunks"] = f"memory.loss_chunk_tokens {memory.loss_chunk_tokens}"
    if ":" in run.training.loss:
        found["own_loss"] = f"training.loss {run.training.loss}"
    if memory.cpu_offload != "none":
        found["offload"] = f"memory.cpu_offload {memory.cpu_offload}"
    if run.data.batching == "pack":
        found["pack"] = "data.batching pack"
    if is_import_path(run.model.model_name_or_path):
        found["module"] = f"the model function {run.model.model_name_or_path}"
    return found


def excluded(names: frozenset[str] | set[str]) -> Exclusion | None:
    """The first exclusion that a set of features meets; None when they combine."""
    return next((e for e in EXCLUSIONS if names & set(e.first) and names & set(e.second)), None)


def check_combination(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` for two features that do not combine."""
    spelled = features(run, axes)
    exclusion = excluded(set(spelled))
    if exclusion is None:
        return
    first, second = (next(spelled[n] for n in names if n in spelled) for names in (exclusion.first, exclusion.second))
    raise ConfigError(f"{first} with {second}.", exclusion.reason, exclusion.fix)


def table() -> Iterator[str]:
    """The exclusions as a markdown table, for docs/combinations.md."""
    yield "| this | with this | why not |"
    yield "|---|---|---|"
    for e in EXCLUSIONS:
        first, second = (", ".join(f"`{name}`" for name in names) for names in (e.first, e.second))
        yield f"| {first} | {second} | {e.reason} |"
