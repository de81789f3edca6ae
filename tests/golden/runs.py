"""The runs whose losses are kept in losses.json: three tiny models in fp32, on one rank and on two under zero3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.gloo.engine import GPT2, LLAMA, QWEN3, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks

FILE = Path(__file__).with_name("losses.json")
UPDATES = 8
FP32 = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gpt2": (
        GPT2,
        {
            "training__optimizer": "sgd",
            "training__optimizer_kwargs": {"momentum": 0.9},
            "training__learning_rate": 1.0,
        },
    ),
    "qwen3": (QWEN3, {"training__lr_scheduler_type": "cosine", "training__warmup_steps": 2}),
}


def _losses() -> dict[str, list[float]]:
    found = {}
    for name, (model, options) in MODELS.items():
        engine = make_engine(run_file(model, training__max_steps=UPDATES, **FP32, **options))
        losses = []
        for update in range(UPDATES):
            engine.forward_backward(batches_for(engine, update))
            losses.append(engine.step().loss)
        found[name] = losses
    return found


def found_losses() -> dict[str, list[float]]:
    """Losses of every run by `model, ranks`."""
    return {
        f"{name}, {ranks} rank{'s' if ranks > 1 else ''}": losses
        for ranks in (1, 2)
        for name, losses in run_ranks(_losses, ranks, timeout=150.0)[0].items()
    }


def machine() -> dict[str, str]:
    """What the bits of a loss depend on beside the code."""
    return {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def kept() -> dict[str, Any]:
    """The content of losses.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))
