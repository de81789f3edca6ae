"""A shape from the parameters that a model really has, for architectures whose names and sizes are not known here.

The list comes from `shardwright.models.inventory`, which builds the model on the meta device in a process of its own. Sizes of
parameters are then exact; activations and FLOPs are those of a transformer block with as many matrix elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shardwright.arch.families import FAMILIES, refuse_experts
from shardwright.arch.shape import Group, Part, Shape
from shardwright.errors import ConfigError

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len")


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), None)


def _block_groups(sizes: Mapping[str, tuple[int, ...]], blocks: list[str]) -> list[Group]:
    """One group for each parameter of a block; what blocks do not share is spread evenly over them."""
    block = FAMILIES["gpt"].block
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, size in sizes.items():
        home = next((one for one in blocks if name.startswith(one + ".")), None)
        if home is not None:
            found.setdefault(name[len(home) + 1 :], []).append(size)
    groups = []
    for rest, own in found.items():
        part: Part = "attention" if "att" in rest else "norm" if len(own[0]) < 2 else "mlp"
        alike = len(own) == len(blocks) and len(set(own)) == 1
        size = own[0] if alike else (-(-sum(map(prod, own)) // len(blocks)),)
        split = "column" if len(size) >= 2 or not alike else None
        groups.append(
            Group(
                f"{block}.{rest}",
                size,
                len(blocks),
                part,
                "column" if split else None,
                size[0] if split else 0,
            )
        )
    return groups


def shape_from_inventory(inventory: Mapping[str, Any]) -> Shape:
    """The shape of a model from its inventory.

    inventory: `config` (keys of a config.json, may be empty), `parameters` (name -> size), `blocks` (names of the repeated
    modules), `embedding` and `head` (module names or None). Raises `ConfigError` without blocks or a width.
    """
    config, blocks = inventory["config"], list(inventory["blocks"])
    refuse_experts(config)
    sizes = {name: tuple(size) for name, size in inventory["parameters"].items()}
    if not blocks:
        raise ConfigError("The model has no repeated blocks.", "A layout groups and splits blocks.")
    embedding, head = (sizes.get(f"{inventory[key]}.weight") for key in ("embedding", "head"))
    table = embedding or head
    hidden = _first(config, _WIDTH) or (table[1] if table and len(table) > 1 else None)
    if hidden is None:
        raise ConfigError(
            "The width of the model is not known.", "It has no embedding and its config no hidden_size."
        )
    groups = _block_groups(sizes, blocks)
    inside = {name for name in sizes if any(name.startswith(block + ".") for block in blocks)}
    for name, size in sizes.items():
        if name in inside:
            continue
        if name.startswith(f"{inventory['embedding']}."):
            groups.append(Group(name, size, 1, "embedding", "vocabulary", size[0]))
        elif name.startswith(f"{inventory['head']}."):
            groups.append(Group(name, size, 1, "head", "vocabulary", size[0]))
        else:
            groups.append(Group(name, size, 1, "norm" if len(size) < 2 else "positions"))
    heads = _first(config, _HEADS) or 1
    kv_heads = _first(config, ("num_key_value_heads",)) or heads
    head_dim = _first(config, ("head_dim",)) or hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    matrices = sum(group.numel for group in groups if group.count == len(blocks) and len(group.size) >= 2)
    gated = any("gate" in group.name for group in groups)
    return Shape(
        family="gpt",
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=max(round((matrices - attention) / ((3 if gated else 2) * hidden)), 1),
        gated=gated,
        vocab=_first(config, ("vocab_size",)) or (table[0] if table else 1),
        tied=head is None,
        max_positions=_first(config, _LENGTH) or 0,
        name=str(inventory.get("name", "")),
        measured=tuple(groups),
    )
