"""The table of features that do not combine. `check_run` refuses them, and the planner skips them.

All other features combine, which `check --layouts all` proves.
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
        "These schedules compute the gradients of weights later than those of inputs. fully_shard reduces when the gradients "
        "of inputs are there: gradients come out wrong (tried with torch 2.13).",
        "Set data_parallel to ddp, or pp_schedule to 1f1b or interleaved_1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("selective", "alternate", "full"),
        "torch computes the gradients of weights group by group. Full recomputation would run the block's forward again for "
        "each group (10 times for one block of a Llama). Selective recomputation keeps tensors that can be read only once.",
        "Set memory.activation_checkpointing to none, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("compile",),
        "A compiled block has one backward for inputs and weights together, which torch cannot divide.",
        "Set memory.compile to false, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        SPLIT_BACKWARD,
        ("loss_chunks",),
        "A loss in chunks computes the gradients of hidden states and of the head together.",
        "Set memory.loss_chunk_tokens to auto or 0, or pp_schedule to 1f1b.",
    ),
    Exclusion(
        ("loss_chunks",),
        ("own_loss",),
        "A loss function of your own is called with whole logits.",
        "Set memory.loss_chunk_tokens to auto or 0.",
    ),
    Exclusion(
        ("pp",),
        ("module",),
        "Stages can be cut only from Transformers models, whose conventions name the parts.",
        "Set parallelism.pp_size to 1, or give a Hugging Face directory.",
    ),
    Exclusion(
        ("offload",),
        ("ddp",),
        "ddp keeps whole parameters on every rank, so there are no shards to move to the host.",
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
