"""The shape of the model that a run file or a flag names: read from its config.json, or counted where that is not enough.

A model is counted from its inventory (`shardwright.models.parameter_inventory`), which builds the model on the meta device, in
a process of its own where torch is not loaded. Parameters and FLOPs are then exact; activations are those of a transformer
block with as many products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from shardwright.arch.config_json import read_config, shape_from_config, windows
from shardwright.arch.families import FAMILIES, is_known, refuse_quantized
from shardwright.arch.known_models import known_shape
from shardwright.arch.parameters import named_sizes
from shardwright.arch.shape import Counted, ParameterGroup, Part, Shape, Split
from shardwright.errors import ConfigError
from shardwright.layout.import_path import is_import_path

Inventory = Callable[[dict[str, Any]], dict[str, Any]]
"""Builds the model of a `model` section without memory, as what `shardwright.models.parameter_inventory.inventory`."""


def shape_of_model(name: str, inventory: Inventory | None = None, section: Mapping[str, Any] | None = None) -> Shape:
    """The shape of `name`: a directory, a config.json, `package.module:function`, or a well-known model.

    section: keys of the run file's `model` that decide what is built. inventory: None where no model can be built. A model with
    overrides is built too, so that one place decides what overrides make of the config. Raises `ConfigError` where the shape
    cannot be known, and any error of building the model.
    """
    exists, section = Path(name).exists(), dict(section or {})
    if not exists and not is_import_path(name):
        return known_shape(name)
    if exists:
        config = read_config(name)
        refuse_quantized(config, name)
        if is_known(config) and (inventory is None or not section.get("config_overrides")):
            return shape_from_config({**config, **section.get("config_overrides", {}), "_name_or_path": name})
    if inventory is None:
        raise ConfigError(
            f"`{name}` is Python code."
            if not exists
            else f"The parameters of {name} do not follow from its config.json.",
            "The model has to be built to be planned, and no model can be built here.",
            "Give the sizes of the model: --layers --hidden --heads --vocab --ffn.",
        )
    return shape_from_inventory(inventory({**section, "model_name_or_path": name}))


def built_by(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run file's `model` that decide what is built."""
    return {key: section[key] for key in ("config_overrides", "kwargs", "attn_implementation")}


# ---- models that were built

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len")

Sizes = Mapping[str, tuple[int, ...]]


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), None)


def _block_groups(sizes: Sizes, blocks: list[str]) -> list[ParameterGroup]:
    """One group for each parameter of a block; a parameter that some blocks lack is spread evenly over all blocks."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, size in sizes.items():
        block = next((block for block in blocks if name.startswith(block + ".")), None)
        if block is not None:
            found.setdefault(name[len(block) + 1 :], []).append(size)
    groups = []
    for rest, own in found.items():
        part: Part = "attention" if "att" in rest else "norm" if len(own[0]) < 2 else "mlp"
        alike = len(own) == len(blocks) and len(set(own)) == 1
        each, left = divmod(sum(map(prod, own)), len(blocks))
        size = own[0] if alike else (each,)
        split: Split | None = "column" if len(size) >= 2 or not alike else None
        if prod(size):
            name = f"{FAMILIES['gpt'].block}.{rest}"
            groups.append(ParameterGroup(name, size, len(blocks), part, split, size[0] if split else 0))
        if left and not alike:
            groups.append(ParameterGroup(rest, (left,), 1, "positions"))
    return groups


def _other_groups(inventory: Mapping[str, Any], sizes: Sizes) -> list[ParameterGroup]:
    """Groups of the parameters outside of blocks."""
    groups, blocks = [], tuple(f"{block}." for block in inventory["blocks"])
    for name, size in sizes.items():
        part = next((part for part in ("embedding", "head") if name.startswith(f"{inventory[part]}.")), None)
        if name.startswith(blocks):
            continue
        if part:
            groups.append(ParameterGroup(name, size, 1, part, "vocabulary", size[0]))  # type: ignore[arg-type]
        else:
            groups.append(ParameterGroup(name, size, 1, "norm" if len(size) < 2 else "positions"))
    return groups


def _refuse_other_products(inventory: Mapping[str, Any], sizes: Sizes) -> None:
    """Raises `ConfigError` where the forward is more or less than attention and a product of every weight with every token."""
    name, products, width = inventory["name"], inventory["products"], inventory["attention_width"]
    if products is None:
        raise ConfigError(
            f"The matrix products of {name} cannot be counted: its forward fails on tensors without values "
            f"({inventory['uncounted']}).",
            "plan would have to guess the FLOPs and the time of the model.",
            "`shardwright bench` measures the model as it is.",
        )
    blocks = tuple(f"{block}." for block in inventory["blocks"])
    matrices = [size for name, size in sizes.items() if name.startswith(blocks) and sum(n > 1 for n in size) >= 2]
    held = inventory["head_weights"] + sum(map(prod, matrices))
    # A plain module may have no attention; a language model without attention has a recurrence.
    least = 1 if inventory["config"] else 0
    if products < held or width < least or products != int(products) or width != int(width):
        experts = any("expert" in key and value for key, value in inventory["config"].items())
        raise ConfigError(
            f"{name} cannot be planned: its forward is not just attention and a product of each token with every matrix.",
            f"A token uses some experts only: {max(products, 0):,.0f} of the {held:,} weights in blocks and head."
            if experts and products < held
            else "The model has recurrences, experts, or parts that do not run; plan cannot tell their memory and time.",
            "`shardwright bench` measures the model as it is.",
        )


def shape_from_inventory(inventory: Mapping[str, Any]) -> Shape:
    """The shape of a model from its inventory (`models.parameter_inventory.inventory`).

    Raises `ConfigError` without blocks or a width, and for a model whose FLOPs are not those of products with every weight and
    attention: mixtures of experts, recurrences.
    """
    config, blocks = inventory["config"], list(inventory["blocks"])
    sizes = {name: tuple(size) for name, size in inventory["parameters"].items()}
    if is_known(config):
        known = shape_from_config(config)
        if named_sizes(known) == sizes:
            return known
    if not blocks:
        raise ConfigError("The model has no repeated blocks.", "A layout groups and splits blocks.")
    _refuse_other_products(inventory, sizes)
    embedding, head = (sizes.get(f"{inventory[key]}.weight") for key in ("embedding", "head"))
    table = embedding or head
    hidden = _first(config, _WIDTH) or (table[1] if table and len(table) > 1 else None)
    if hidden is None:
        raise ConfigError(
            "The width of the model is not known.", "The model has no embedding, and its config no hidden_size."
        )
    heads = _first(config, _HEADS) or 1
    kv_heads = _first(config, ("num_key_value_heads",)) or heads
    head_dim = _first(config, ("head_dim",)) or hidden // heads
    vocab = _first(config, ("vocab_size",)) or (table[0] if table else 1)
    groups = _block_groups(sizes, blocks) + _other_groups(inventory, sizes)
    gated = any("gate" in group.name for group in groups)
    products = inventory["products"]
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mlp = (products - vocab * hidden) / len(blocks) - attention
    window, window_layers = windows(config, len(blocks))
    return Shape(
        family="gpt",
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=max(round(mlp / ((3 if gated else 2) * hidden)), 1),
        gated=gated,
        vocab=vocab,
        tied=head is None,
        window=window,
        window_layers=window_layers,
        max_positions=_first(config, _LENGTH) or 0,
        name=str(inventory["name"]),
        counted=Counted(tuple(groups), products, inventory["attention_width"]),
    )
