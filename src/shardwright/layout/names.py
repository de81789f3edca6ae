"""Layout names on the command line: `ddp`, `zero1+hsdp2`, `pp2:zero_bubble+zero1+tp2`.

A name is parts joined by `+`. A part is a data-parallel kind (`ddp`, `zero1`, `zero2`, `zero3` = `fsdp2`), `hsdpN`
(dp_replicate_size N, with zero3 unless another zero kind stands beside it), `tpN`, `cpN[:attention]` or `ppN[:schedule]`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any, get_args

from shardwright.config.load import Loaded
from shardwright.config.schema import ContextAttention, DataParallel, Parallelism, Schedule
from shardwright.errors import ConfigError, did_you_mean

KINDS = {**{kind: kind for kind in get_args(DataParallel)}, "fsdp2": "zero3"}
SCHEDULES = get_args(Schedule)
OPTIONS = {
    "pp": ("pp_schedule", "pipeline schedule", SCHEDULES),
    "cp": ("cp_attention", "context-parallel attention", get_args(ContextAttention)),
}
"""What may stand behind a colon: the key, what it is, and the values that it takes."""

_SIZED = {"hsdp": "dp_replicate_size", "tp": "tp_size", "cp": "cp_size", "pp": "pp_size"}
_PART = re.compile(r"(hsdp|tp|cp|pp)(\d*)(?::(\w+))?")
_EXAMPLES = (*KINDS, "hsdp2", "hsdp4", "tp2", "tp4", "cp2", "pp2", "pp4", "all")


def _part(part: str, name: str) -> dict[str, Any]:
    """The keys of `parallelism` that one part of a layout name sets."""
    if part in KINDS:
        return {"data_parallel": KINDS[part]}
    match = _PART.fullmatch(part)
    axis, digits, option = match.groups() if match else ("", "", None)
    if match is None or (not digits and axis != "hsdp") or (option and axis not in OPTIONS):
        shown = f"`{part}` in `{name}`" if part != name else f"`{part}`"
        hint = did_you_mean(part.partition(":")[0], _EXAMPLES)
        raise ConfigError(
            f"{shown} is no layout.",
            "",
            f"{hint} Parts are {', '.join(KINDS)}, hsdpN, tpN, cpN[:attention], ppN[:schedule], joined by +.".strip(),
        )
    size = int(digits or 2)
    if size < 2:
        raise ConfigError(
            f"`{part}` splits nothing.",
            f"A size of {size} is the same as leaving the part out.",
            "Leave it out.",
        )
    if not option:
        return {_SIZED[axis]: size}
    key, what, known = OPTIONS[axis]
    if option not in known:
        raise ConfigError(f"`{option}` in `{name}` is no {what}.", "", did_you_mean(option, known))
    return {_SIZED[axis]: size, key: option}


TUNING = {
    "unit": "zero",
    "prefetch": "zero",
    "reshard_after_forward": "zero3",
    "bucket_bytes": "ddp",
    "cp_attention": "cp",
    "cp_load_balance": "cp",
    "sequence_parallel": "tp",
    "tp_plan": "tp",
    "pp_schedule": "pp",
}
"""Key of section parallelism that no layout name sets -> what a layout needs for the key to have an effect."""


def parse_layout(name: str) -> dict[str, Any]:
    """The keys of `parallelism` that the layout `name` sets, with their values.

    Raises `ConfigError` for a part that is unknown (with the nearest known one), doubled, or in conflict with another.
    """
    keys: dict[str, Any] = {}
    for part in name.strip().split("+"):
        for key, value in _part(part.strip(), name).items():
            if key in keys:
                raise ConfigError(
                    f"`{name}` sets {key} twice: {keys[key]} and {value}.", "", "Keep one of the two parts."
                )
            keys[key] = value
    if "dp_replicate_size" in keys and keys.setdefault("data_parallel", "zero3") == "ddp":
        raise ConfigError(
            f"`{name}` asks for replicas of ddp.",
            "ddp keeps a whole copy on every rank already.",
            "Use ddp, or hsdpN with a zero kind.",
        )
    return keys


def apply_layout(name: str, base: Parallelism) -> Parallelism:
    """The `parallelism` section for the layout `name`.

    Axes that the name leaves out have size 1 and dp_shard takes the remaining ranks. Tuning options of `base` (unit,
    prefetch, bucket_bytes, ...) are kept where they have an effect in this layout and dropped where they have none.
    """
    keys = parse_layout(name)
    kind = keys.setdefault("data_parallel", base.data_parallel)
    sharded = kind != "ddp"
    here = {
        "zero": sharded,
        "zero3": kind == "zero3",
        "ddp": kind == "ddp",
        **{axis: keys.get(f"{axis}_size", 1) > 1 for axis in ("cp", "tp", "pp")},
    }
    kept = {key: getattr(base, key) for key, needs in TUNING.items() if here[needs]}
    return Parallelism(**{**kept, **keys})


def every_layout(world_size: int) -> tuple[str, ...]:
    """What `all` stands for on `world_size` ranks: every size of the axes, with the data-parallel kinds.

    Where an axis beside data parallelism stands alone, its variants too (schedules, attention). What a model or a run file
    cannot do among these is for the gates to refuse.
    """
    names: list[str] = []
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for pp, cp, tp in product(sizes, repeat=3):
        if world_size % (pp * cp * tp):
            continue
        data = world_size // (pp * cp * tp)
        cuts = [f"{axis}{size}" for axis, size in (("pp", pp), ("cp", cp), ("tp", tp)) if size > 1]
        kinds = get_args(DataParallel) if data > 1 or not cuts else ("ddp", "zero3")
        names += ["+".join([kind, *cuts]) for kind in kinds]
        if data > 1:
            replicas = [size for size in sizes if size > 1 and data % size == 0] if not cuts else [2]
            names += ["+".join([f"hsdp{size}", *cuts]) for size in replicas if data % size == 0]
        if len(cuts) == 1 and (option := OPTIONS.get(cuts[0][:2])):
            others = [value for value in option[2] if value not in ("1f1b", "all_gather")]
            names += [f"ddp+{cuts[0]}:{value}" for value in others]
    return tuple(names)


def expand_layouts(text: str, world_size: int) -> tuple[str, ...]:
    """The layout names of a comma-separated list, `all` replaced; each is parsed, so that errors come before any work."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name:
            raise ConfigError(f"`{text}` has an empty layout name.", "", "Write names separated by single commas.")
        for expanded in every_layout(world_size) if name == "all" else (name,):
            parse_layout(expanded)
            if expanded not in names:
                names.append(expanded)
    return tuple(names)


def with_layout(loaded: Loaded, name: str) -> Loaded:
    """`loaded` with the layout `name` for its `parallelism`; origins tell what the layout set and what it dropped."""
    parallelism = apply_layout(name, loaded.run.parallelism)
    named = {f"parallelism.{key}" for key in parse_layout(name)}
    unset = Parallelism.model_validate({})
    origin = dict(loaded.origin)
    for key in type(parallelism).model_fields:
        full = f"parallelism.{key}"
        if full in named:
            origin[full] = f"layout {name}"
        elif getattr(parallelism, key) == getattr(unset, key):
            origin[full] = "default"
    return replace(loaded, run=loaded.run.model_copy(update={"parallelism": parallelism}), origin=origin)
