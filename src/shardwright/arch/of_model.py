"""The shape of the model that a run file or a flag names: read from its config.json or, where that is not enough, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.arch.counted import shape_from_inventory
from shardwright.arch.families import is_known, refuse_quantized
from shardwright.arch.inventory import read_config, shape_from_config
from shardwright.arch.known import known_shape
from shardwright.arch.shape import Shape
from shardwright.errors import ConfigError
from shardwright.layout.import_path import is_import_path

Inventory = Callable[[dict[str, Any]], dict[str, Any]]
"""Builds the model of a `model` section without memory, as what `shardwright.models.parameter_inventory.inventory`."""


def shape_of_model(name: str, inventory: Inventory | None = None, section: Mapping[str, Any] | None = None) -> Shape:
    """The shape of `name`: a directory, a config.json, `package.module:function`, or a well-known model.

    section: keys of the run file's `model` that decide what is built. inventory: None where no model can be built. With
    overrides a model is built too, so that one place decides what overrides make of the config. Raises `ConfigError` where the
    shape cannot be known, and any error of building the model.
    """
    there, section = Path(name).exists(), dict(section or {})
    if not there and not is_import_path(name):
        return known_shape(name)
    if there:
        config = read_config(name)
        refuse_quantized(config, name)
        if is_known(config) and (inventory is None or not section.get("config_overrides")):
            return shape_from_config({**config, **section.get("config_overrides", {}), "_name_or_path": name})
    if inventory is None:
        raise ConfigError(
            f"`{name}` is Python code." if not there else f"{name} has to be built to be planned.",
            "No model can be built here.",
            "Give the sizes of the model: --layers --hidden --heads --vocab --ffn.",
        )
    return shape_from_inventory(inventory({**section, "model_name_or_path": name}))


def built_by(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run file's `model` that decide what is built."""
    return {key: section[key] for key in ("config_overrides", "kwargs", "attn_implementation")}
