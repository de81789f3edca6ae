"""The parameters of any model, built on the meta device, as JSON for the planner, which loads no torch itself.

    python -m shardwright.models.inventory MODEL [CONFIG_OVERRIDES_AS_JSON]

MODEL is a Hugging Face directory or package.module:function. The planner starts this in a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from shardwright.config.schema import Model
from shardwright.models.adapters import find_parts
from shardwright.models.build import build_model


def inventory(spec: Model) -> dict[str, Any]:
    """Config, parameters by name and size, blocks, embedding and head of the model of `spec`; tied parameters once."""
    model = build_model(spec, torch.bfloat16)
    parts = find_parts(model)
    config = getattr(model, "config", None)
    values = config.get_text_config().to_dict() if config is not None else {}
    names = {name for name, _ in model.named_parameters()}
    return {
        "name": spec.model_name_or_path,
        "config": {key: value for key, value in values.items() if isinstance(value, (int, float, str, bool))},
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "blocks": list(parts.blocks),
        "embedding": parts.embedding,
        "head": parts.head if f"{parts.head}.weight" in names else None,
    }


def main(arguments: list[str]) -> None:
    """Prints the inventory of the model named by the first argument; the second is a JSON object of config_overrides."""
    overrides = json.loads(arguments[1]) if len(arguments) > 1 else {}
    spec = Model(model_name_or_path=arguments[0], init="random", config_overrides=overrides)
    print(json.dumps(inventory(spec)))


if __name__ == "__main__":
    main(sys.argv[1:])
