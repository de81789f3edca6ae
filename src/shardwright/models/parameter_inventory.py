"""Parameters and matrix products of any model, built on the meta device, as JSON for the planner, which loads no torch itself.

    python -m shardwright.models.parameter_inventory MODEL_SECTION_AS_JSON

The planner starts this in a process of its own. T tokens: a forward of one row costs 2 (a T + b T^2) FLOPs, where a weights
multiply every token, and each token's attention has 2 products of width b / 2 with every key, summed over layers. Forwards of
two lengths give a and b.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.config.schema import Model
from shardwright.errors import ModelError, ShardwrightError
from shardwright.models.build import build_model, quiet_transformers
from shardwright.models.model_parts import find_parts

LENGTHS = (7, 14)
"""Short, for models that loop over tokens, and no multiple of a block or chunk, so that what is padded to one shows."""


def inventory(spec: Model) -> dict[str, Any]:
    """What the model of `spec` is made of; tied parameters once.

    config: of the language model, as Transformers completes it. head: None where it is tied; head_weights: tied or not.
    products, attention_width: of `count_products`; None where the forward needs values, for the reason `uncounted`.
    """
    model: nn.Module = build_model(spec, torch.float32)
    if _has_experts(model):
        model = model.to(torch.bfloat16)  # the only dtype of grouped products on tensors without values
    parts = find_parts(model)
    config = getattr(model, "config", None)
    values = config.get_text_config().to_dict() if config is not None else {}
    names = {name for name, _ in model.named_parameters()}
    products, attention_width, uncounted = None, None, ""
    try:
        products, attention_width = count_products(model.eval())
    except ModelError as error:
        uncounted = str(error)
    return {
        "name": spec.model_name_or_path,
        "config": {key: value for key, value in values.items() if isinstance(value, (int, float, str, list))},
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "blocks": list(parts.blocks),
        "embedding": parts.embedding,
        "head": parts.head if f"{parts.head}.weight" in names else None,
        "head_weights": sum(p.numel() for p in model.get_submodule(parts.head).parameters() if p.dim() > 1)
        if parts.head
        else 0,
        "products": products,
        "attention_width": attention_width,
        "uncounted": uncounted,
    }


def _has_experts(model: Any) -> bool:
    return hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation()


def count_products(model: nn.Module) -> tuple[float, float]:
    """(a, b) of the model on the meta device; see above. Raises `ModelError` where its forward needs values."""
    short, long = (_forward_flops(model, length) for length in LENGTHS)
    n = LENGTHS[0]
    return (4 * short - long) / (4 * n), (long - 2 * short) / (8 * n**2)


def _forward_flops(model: nn.Module, length: int) -> int:
    """FLOPs of a forward of one row of `length` tokens."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    ways: list[dict[str, Any]] = [{}]
    if hasattr(model, "config") and hasattr(model, "generate"):
        # A mask that is already there keeps Transformers from looking at values to decide about one.
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        mask = torch.zeros(1, 1, length, length, dtype=dtype, device="meta")
        ways = [{"use_cache": False, "attention_mask": mask}, {"use_cache": False}]
    reasons = []
    for arguments in ways:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(input_ids=ids, **arguments) if arguments else model(ids)
            return int(counter.get_total_flops())
        except ShardwrightError:
            raise
        except Exception as error:  # a model's own code, on tensors without values
            reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise ModelError(reasons[0])


def main(arguments: list[str]) -> None:
    """Prints the inventory of the model of the section given, or `{"refused": [what, why, fix]}`. A config.json will do."""
    section = json.loads(arguments[0])
    quiet_transformers()
    with tempfile.TemporaryDirectory(prefix="shardwright-config-") as directory:
        name, spec = section["model_name_or_path"], Model.model_validate({**section, "init": "random"})
        if Path(name).is_file():
            shutil.copy(name, Path(directory) / "config.json")
            spec = spec.model_copy(update={"model_name_or_path": directory})
        try:
            found = {**inventory(spec), "name": name}
        except ShardwrightError as error:
            found = {"refused": [error.what.replace(directory, name), error.why, error.fix]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
