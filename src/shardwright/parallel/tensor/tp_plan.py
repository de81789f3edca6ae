"""The tensor-parallel style of each layer: from Transformers' plan (`_tp_plan`), ours, or a user's `{pattern: style}`.

Nothing here needs ranks: a layer that cannot be divided is refused by name before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwright.attention.calls import blocks_without_attention, trace_forward
from shardwright.config.schema import RunFile
from shardwright.errors import ModelError, did_you_mean
from shardwright.layout.axes import model_axes
from shardwright.layout.size_rules import check_tensor
from shardwright.models.dropout import has_dropout
from shardwright.models.model_parts import Parts
from shardwright.parallel.tensor.styles import features

ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
VOCABULARY = "vocabulary"
COLUMN, ROW = ("colwise", "colwise_gather_output", VOCABULARY), ("rowwise", "rowwise_split_input")
EMBEDDING, SUMMED, WHOLE = "embedding_rowwise", "replicated_with_grad_allreduce", "replicate"
STYLES = (*COLUMN, *ROW, EMBEDDING, SUMMED, WHOLE, *ALIASES)

OWN_PLANS: dict[str, dict[str, str]] = {
    # Fused query, key and value [D, 3 D]: their columns are divided in order, the outputs gathered, and every rank computes the
    # whole attention.
    "gpt2": {
        "*.h.*.attn.c_attn": "colwise_gather_output",
        "*.h.*.attn.c_proj": "rowwise_split_input",
        "*.h.*.mlp.c_fc": "colwise",
        "*.h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans for families without a plan in Transformers."""


@dataclass(frozen=True)
class TensorPlan:
    """styles: module name -> style. regions: modules whose divided layers share one gather or copy of their input."""

    styles: dict[str, str]
    regions: frozenset[str]

    def held_by(self, model: nn.Module) -> TensorPlan:
        """The plan of what `model` holds: a pipeline rank's part of the planned model keeps the names of its modules."""
        held = {n for n, m in model.named_modules(remove_duplicate=False) if any(True for _ in m.parameters())}
        return TensorPlan({n: s for n, s in self.styles.items() if n in held}, self.regions & held)


def plan_tensor(model: nn.Module, parts: Parts, run: RunFile) -> TensorPlan:
    """How `model` (unsplit, on meta) is divided over `run.parallelism.tp_size` ranks.

    Raises `ConfigError` or `ModelError` by name for what cannot be divided, or not with right gradients.
    """
    p = run.parallelism
    if (config := getattr(model, "config", None)) is not None:
        check_tensor(run, model_axes(p), _shape_of(config))
    styles = find_plan(model, parts, p.tp_plan)
    check_plan(model, parts, styles, p.tp_size)
    _check_compiled(model, run)
    return TensorPlan(styles, frozenset(_regions(model, parts, styles, strict=not p.tp_plan)))


def attention_modules(model: nn.Module, parts: Parts) -> tuple[str, ...]:
    """The modules of `model` (on meta) that attend; none where its forward cannot be traced.

    Raises `ModelError` where blocks mix tokens in another way, which would stop at the end of a piece of the sequence.
    """
    try:
        calls = trace_forward(model).calls
    except ModelError:
        return ()
    convolutions = [
        f"{block}.{path}"
        for block in parts.blocks
        for path, module in model.get_submodule(block).named_modules()
        if isinstance(module, nn.Conv1d)
    ]
    if mixing := [*convolutions, *blocks_without_attention(parts.blocks, calls)]:
        raise ModelError(
            f"`{mixing[0]}` of {type(model).__name__} mixes tokens by something other than attention.",
            "With sequence_parallel each rank holds only a piece of the sequence there.",
            "Set parallelism.sequence_parallel to false.",
        )
    return tuple(dict.fromkeys(call.module for call in calls))


def _shape_of(config: Any) -> Any:
    """The sizes that `check_tensor` needs, from a Transformers config, which maps the names of its family."""
    heads = getattr(config, "num_attention_heads", 0)
    return SimpleNamespace(
        family=config.model_type,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        ffn=getattr(config, "intermediate_size", None) or 0,
    )


def _check_compiled(model: nn.Module, run: RunFile) -> None:
    """Refuses dropout in compiled blocks: they switch random streams, which a compiled graph cannot."""
    if run.memory.compile and has_dropout(model):
        raise ModelError(
            f"{type(model).__name__} has dropout, with memory.compile and tp_size = {run.parallelism.tp_size}.",
            "Dropout masks of divided tensors come from another random stream, to which torch.compile cannot switch.",
            "Set memory.compile to false, or the dropout probabilities to 0 in model.config_overrides.",
        )


def find_plan(model: nn.Module, parts: Parts, given: Mapping[str, str]) -> dict[str, str]:
    """Module name -> style, for every module that is divided; `given` (patterns) replaces the model's own plan.

    `*` matches one part of a name. A model's own plan is extended: embedding and head are divided by vocabulary.
    Raises `ModelError` for a model without a plan, a pattern without a match, or a style that is not known.
    """
    patterns = dict(given) or _own_plan(model)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    plan: dict[str, str] = {}
    for pattern, asked in patterns.items():
        style = ALIASES.get(asked, asked)
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"\Z")
        matched = sorted(filter(regex.match, modules))
        parameters = sorted(filter(regex.match, held))
        if (matched or parameters) and (style not in STYLES or parameters):
            raise ModelError(
                f"{(matched or parameters)[0]}: the tensor-parallel style `{asked}` cannot be applied.",
                "Shardwright does not have this style." if style not in STYLES else "A style needs a module.",
                did_you_mean(asked, STYLES) or f"Styles are {', '.join(STYLES)}. Or set parallelism.tp_size to 1.",
            )
        if given and not matched:
            raise ModelError(f"parallelism.tp_plan: `{pattern}` matches no module.", "", did_you_mean(pattern, modules))
        plan |= dict.fromkeys(matched, style)
    if not given:
        plan |= {name: EMBEDDING for name in (parts.embedding,) if name}
        plan |= {name: VOCABULARY for name in (parts.head,) if name}
    return {name: style for name, style in plan.items() if style != WHOLE}


def _own_plan(model: nn.Module) -> dict[str, str]:
    config = getattr(model, "config", None)
    plan = dict(getattr(model, "_tp_plan", None) or OWN_PLANS.get(getattr(config, "model_type", ""), {}))
    if not plan:
        name = type(model).__name__
        raise ModelError(
            f"{name} has no tensor-parallel plan.",
            "Neither Transformers nor Shardwright says how its layers can be divided.",
            "Give a plan as parallelism.tp_plan, or set parallelism.tp_size to 1.",
        )
    return plan


def check_plan(model: nn.Module, parts: Parts, plan: Mapping[str, str], tp_size: int) -> None:
    """Raises `ModelError` for a layer that cannot be divided as the plan says, by name, before anything is changed."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        # a subclass with a forward of its own may compute more than a product
        linear = type(module).forward in (nn.Linear.forward, Conv1D.forward)
        if not (isinstance(module, nn.Embedding) if style == EMBEDDING else linear or style == SUMMED):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which `{style}` cannot divide.",
                "Column- and row-wise styles divide nn.Linear and Conv1D, embedding_rowwise divides nn.Embedding.",
                "Leave this module out of parallelism.tp_plan, or set parallelism.tp_size to 1.",
            )
        if style == SUMMED:
            continue
        if style in (EMBEDDING, VOCABULARY):
            rows = module.num_embeddings if isinstance(module, nn.Embedding) else features(module)[1]
            if -(-rows // tp_size) * (tp_size - 1) >= rows:
                raise ModelError(f"{name} has {rows} rows: on tp_size = {tp_size} ranks, one rank would have none.")
            continue
        inputs, outputs = features(module)
        size, word = (outputs, "output") if style in COLUMN else (inputs, "input")
        if size % tp_size:
            raise ModelError(
                f"{name} has {size} {word} features, not divisible by tp_size = {tp_size}.",
                "Column- and row-wise layers must be cut into pieces of equal size.",
                "Set parallelism.tp_size to a divisor, or leave the layer out of parallelism.tp_plan.",
            )
    _check_ties(parts, plan)


def _check_ties(parts: Parts, plan: Mapping[str, str]) -> None:
    """Refuses a tied weight that two modules would divide differently."""
    how = {EMBEDDING: "rows", **dict.fromkeys(COLUMN, "rows"), **dict.fromkeys(ROW, "columns")}
    for names in parts.tied:
        cuts = {name: how.get(plan.get(name.rpartition(".")[0], ""), "whole") for name in names}
        if len(set(cuts.values())) > 1:
            raise ModelError(
                f"{names[0]} and {names[1]} are one tensor, but tp_plan divides only one of them.",
                "A tied weight has one layout.",
                "Give the embedding embedding_rowwise and the head vocabulary, or neither.",
            )


def _regions(model: nn.Module, parts: Parts, plan: Mapping[str, str], strict: bool) -> set[str]:
    """Modules inside blocks whose column- and row-wise layers share one gather or copy of their input.

    Nothing else in such a module may have parameters: between the layers they would get partial gradients. `strict` (a model's
    own plan) refuses a module with other parameters, unless its column-wise layers all gather their outputs.
    """
    found = set()
    parents = {name.rpartition(".")[0] for name, style in plan.items() if style in ROW}
    for parent in sorted(parents - {""} - set(parts.blocks)):
        if not any(parent.startswith(f"{block}.") for block in parts.blocks):
            continue
        children = {name: style for name, style in plan.items() if name.startswith(f"{parent}.")}
        columns = {style for style in children.values() if style in COLUMN}
        owned = tuple(f"{name}." for name in children)
        other = [
            f"{parent}.{name}"
            for name, p in model.get_submodule(parent).named_parameters()
            if not f"{parent}.{name}".startswith(owned)
        ]
        if not columns:
            continue
        if other and columns != {"colwise_gather_output"}:
            if strict:
                raise ModelError(
                    f"{other[0]} has no tensor-parallel style, but its module {parent} is divided by heads or features.",
                    "Each rank would compute only a part of its gradient.",
                    "Give a parallelism.tp_plan with a style for it (replicated_with_grad_allreduce sums its gradient).",
                )
            continue
        found.add(parent)
    return found
