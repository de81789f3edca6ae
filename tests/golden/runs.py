"""The runs whose losses are kept in losses.json: three tiny models on one rank and on two under zero3, in fp32 and in float64.

Bits in fp32 belong to a machine (machine.py). In float64, with everything that a model would compute in float32 kept in float64
too, losses are the same anywhere but for rounding. How much rounding may come to is kept beside them: how far the losses move,
relative to a disturbance of every gradient (tests/tolerance.py).
"""

from __future__ import annotations

import json
import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tests import tolerance
from tests.gloo.engine import FP64, GPT2, LLAMA, QWEN3, batches_for, make_engine, run_file, whole_weights
from tests.gloo.ranks import run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.tools.check.force_float64 import ForceFloat64
from shardwright.train.update import UpdateEngine

FILE = Path(__file__).with_name("losses.json")
UPDATES = 8
FP32 = dict.fromkeys(FP64, "fp32")
SGD = {
    "training.optimizer": "sgd",
    "training.optimizer_kwargs": {"momentum": 0.9},
    "training.learning_rate": 1.0,
}
COSINE = {"training.lr_scheduler_type": "cosine", "training.warmup_steps": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gpt2": (GPT2, SGD),
    "qwen3": (QWEN3, COSINE),
}


def _start(engine: UpdateEngine) -> None:
    """First weights that are the same on any machine: in float32 torch draws other normal numbers where there is no AVX2."""
    for name, p in engine.module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = 0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        value = (drawn + (p.dim() == 1 and not name.endswith("bias"))).float().to(p.dtype)
        with torch.no_grad():
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)


def _one(name: str, precision: str, disturb: bool = False) -> tuple[list[float], float]:
    """Losses of a run on these ranks, and the bound of one gradient's rounding."""
    model, options = MODELS[name]
    engine = make_engine(
        run_file(model, training__max_steps=UPDATES, **{"fp32": FP32, "fp64": FP64}[precision], **options)
    )
    _start(engine)
    losses, targets, generator = [], 0, torch.Generator().manual_seed(1)
    wide: AbstractContextManager[Any] = ForceFloat64() if precision == "fp64" else nullcontext()
    for update in range(UPDATES):
        batch = batches_for(engine, update)
        with wide:
            engine.forward_backward(batch)
        if disturb:
            for _, gradient in engine.gradients():
                gradient.copy_(tolerance.disturbed(gradient, generator))
        losses.append(engine.step().loss)
        targets = max(targets, int(batch.target_tokens))
    return losses, tolerance.of_model(whole_weights(engine), targets, TORCH_DTYPES[precision])


def _losses(precisions: tuple[str, ...]) -> dict[str, tuple[list[float], float]]:
    return {f"{name}, {precision}": _one(name, precision) for name in MODELS for precision in precisions}


def _sensitivity() -> dict[str, list[float]]:
    """By model and update: how far its loss has moved at most, relative to the disturbance of the gradients."""
    found = {}
    for name in MODELS:
        (right, _), (other, _) = (_one(name, "fp64", disturb) for disturb in (False, True))
        moved = [abs(a / b - 1) / tolerance.DISTURBANCE for a, b in zip(other, right)]
        found[name] = [max(moved[: update + 1]) for update in range(UPDATES)]
    return found


def found_losses(precisions: tuple[str, ...] = ("fp32", "fp64")) -> dict[str, tuple[list[float], float]]:
    """Losses of every run, and the bound of one gradient's rounding, by `model, precision, ranks`."""
    return {
        f"{name}, {ranks} rank{'s' if ranks > 1 else ''}": found
        for ranks in (1, 2)
        for name, found in run_ranks(_losses, ranks, precisions)[0].items()
    }


def found_sensitivity() -> dict[str, list[float]]:
    """`_sensitivity`, on one rank."""
    return run_ranks(_sensitivity, 1)[0]


def kept() -> dict[str, Any]:
    """The content of losses.json: `machines` with the bits of their fp32 losses, `fp64` losses, `sensitivity`."""
    return json.loads(FILE.read_text(encoding="utf-8"))
