"""Layout names on the command line: `ddp`, `zero1+hsdp2`, `pp2:zero_bubble+zero1+tp2`.

A name is parts joined by `+`. A part is a data-parallel kind (`ddp`, `zero1`, `zero2`, `zero3` = `fsdp2`), or the size of an
axis with that axis's prefix in `layout.axes.AXES` and perhaps a choice behind a colon: `tp2`, `cp2:ring`, `pp2:gpipe`.
`hsdpN` (dp_replicate_size N) means zero3 unless another zero kind stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, get_args

from shardwright.config.load import Loaded
from shardwright.config.schema import DataParallel, Parallelism
from shardwright.errors import ConfigError, did_you_mean
from shardwright.layout.axes import AXES, MODEL_AXES, Axis
from shardwright.layout.legality import layout_rules

KINDS = {**{kind: kind for kind in get_args(DataParallel)}, "fsdp2": "zero3"}
_BY_PART = {axis.part: axis for axis in AXES.values() if axis.part}
_PART = re.compile(rf"({'|'.join(_BY_PART)})(\d*)(?::(\w+))?")
_EXAMPLES = (*KINDS, *(f"{part}{size}" for part in _BY_PART for size in (2, 4)), "all")


def _choices(axis: Axis) -> tuple[str, ...]:
    """What may stand behind the colon in a layout name for this axis: the values that the schema allows."""
    if axis.choice is None:
        return ()
    allowed, _none = get_args(Parallelism.model_fields[axis.choice[0]].annotation)
    return get_args(allowed)


def _shown(axis: Axis) -> str:
    return f"{axis.part}N" + (f"[:{axis.choice[1].split()[-1]}]" if axis.choice else "")


def _part(part: str, name: str) -> dict[str, Any]:
    """The keys of `parallelism` that one part of a layout name sets."""
    if part in KINDS:
        return {"data_parallel": KINDS[part]}
    match = _PART.fullmatch(part)
    prefix, digits, option = match.groups() if match else ("", "", None)
    axis = _BY_PART.get(prefix)
    if axis is None or (not digits and prefix != "hsdp") or (option and axis.choice is None):
        shown = f"`{part}` in `{name}`" if part != name else f"`{part}`"
        hint = did_you_mean(part.partition(":")[0], _EXAMPLES)
        parts = ", ".join([*KINDS, *map(_shown, _BY_PART.values())])
        raise ConfigError(f"{shown} is no layout.", "", f"{hint} Parts are {parts}, joined by +.".strip())
    size = int(digits or 2)
    if size < 2:
        raise ConfigError(
            f"`{part}` splits nothing.", f"A size of {size} is the same as leaving the part out.", "Leave the part out."
        )
    if not option or axis.choice is None:
        return {axis.key: size}
    key, what, _ = axis.choice
    if option not in _choices(axis):
        raise ConfigError(f"`{option}` in `{name}` is no {what}.", "", did_you_mean(option, _choices(axis)))
    return {axis.key: size, key: option}


def parse_layout(name: str) -> dict[str, Any]:
    """The keys of `parallelism` that the layout `name` sets, with their values.

    Raises `ConfigError` for a part that is unknown (with the nearest known part), doubled, or in conflict with another.
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


def tuning_keys(p: Parallelism) -> Iterator[tuple[str, bool]]:
    """(key of `parallelism` that only some layouts read, whether the layout `p` reads it)."""
    for rule in layout_rules(p):
        yield from ((key.partition(".")[2], not rule.idle) for key in rule.keys)


def apply_layout(name: str, base: Parallelism) -> Parallelism:
    """The `parallelism` section for the layout `name`.

    Axes that the name leaves out have size 1 and dp_shard takes the remaining ranks. Tuning options of `base` (unit,
    prefetch, bucket_bytes, ...) are kept where they have an effect in this layout and dropped where they have none.
    """
    keys = parse_layout(name)
    keys.setdefault("data_parallel", base.data_parallel)
    kept = {key: getattr(base, key) for key, read in tuning_keys(Parallelism(**keys)) if read}
    return Parallelism(**{**kept, **keys})


def every_layout(world_size: int) -> tuple[str, ...]:
    """What `all` stands for on `world_size` ranks: every size of the axes, with the data-parallel kinds.

    Where an axis beside data parallelism stands alone, its variants too (schedules, attention). `check_run` and
    `plan_model` refuse the layouts that the run file or the model does not allow.
    """
    names: list[str] = []
    axes = [AXES[name] for name in MODEL_AXES]
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for chosen in product(sizes, repeat=len(axes)):
        data, rest = divmod(world_size, prod(chosen))
        if rest:
            continue
        divided = [(axis, f"{axis.part}{size}") for axis, size in zip(axes, chosen) if size > 1]
        parts = [part for _, part in divided]
        kinds = get_args(DataParallel) if data > 1 or not parts else ("ddp", "zero3")
        names += ["+".join([kind, *parts]) for kind in kinds]
        if data > 1:
            replicas = [size for size in sizes if size > 1 and data % size == 0] if not parts else [2]
            names += ["+".join([f"hsdp{size}", *parts]) for size in replicas if data % size == 0]
        if len(divided) == 1 and (choice := divided[0][0].choice):
            others = [value for value in _choices(divided[0][0]) if value != choice[2]]
            names += [f"ddp+{parts[0]}:{value}" for value in others]
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
