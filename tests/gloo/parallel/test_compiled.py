"""Compiled blocks with packed rows, context parallelism and tensor parallelism: the gradients of the same blocks as they are.

One graph serves all blocks, microbatches and updates, whatever documents the rows hold. In float64, on GPT-2 and a Llama
whose norms compute in float64.
"""

from __future__ import annotations

import shutil
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from tests import tolerance
from tests.gloo.engine import GPT2, LLAMA, SMALL, batches_for, make_engine, run_file, whole_gradients, worst
from tests.gloo.parallel import test_documents as documents
from tests.gloo.ranks import run_ranks

from shardwright.config.load import Loaded

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("c++") is None and shutil.which("g++") is None, reason="compiling needs a C++ compiler"
    ),
]

WIDTH, UPDATES = 16, 3
PACKED = {"data__batching": "pack"}
CP = {"parallelism__cp_size": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": (GPT2, {"parallelism__data_parallel": "ddp", **PACKED}),
    "packed, zero3": (GPT2, {**PACKED, "memory__activation_checkpointing": "selective"}),
    "packed, recomputed": (GPT2, {**PACKED, "memory__activation_checkpointing": "full"}),
    "cp": (GPT2, {**CP, "memory__activation_checkpointing": "selective"}),
    "cp, packed": (GPT2, {**CP, **PACKED, "parallelism__data_parallel": "ddp"}),
    "ring, packed": (GPT2, {**CP, **PACKED, "parallelism__cp_attention": "ring"}),
    "ring": (GPT2, {**CP, "parallelism__cp_attention": "ring", "memory__activation_checkpointing": "alternate"}),
    "tp": (LLAMA, {"parallelism__tp_size": 2, "parallelism__data_parallel": "ddp"}),
    "tp, packed": (LLAMA, {"parallelism__tp_size": 2, "memory__activation_checkpointing": "selective", **PACKED}),
}


def _train(loaded: Loaded) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(gradients of the first update, losses)."""
    engine, packed = make_engine(loaded), loaded.run.data.batching == "pack"
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for update in range(UPDATES):
        # the rows of update 0 and 1 hold other documents, and the rows of update 2 those of update 0
        batch = documents.packed_batch(engine, update % 2) if packed else batches_for(engine, update, length=WIDTH)
        engine.forward_backward(batch)
        gradients = gradients or {name: g.clone() for name, g in whole_gradients(engine).items()}
        losses.append(engine.step().loss)
    return gradients, losses


def _all(cases: dict[str, tuple[Loaded, Loaded]]) -> dict[str, Any]:
    torch._inductor.config.compile_threads = 1
    found: dict[str, Any] = {}
    with mock.patch.object(documents, "WIDTHS", (WIDTH, WIDTH)):
        for name, (plain, compiled) in cases.items():
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            found[name] = (*_train(plain), *_train(compiled), torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    runs = {
        name: tuple(run_file(model, data__max_length=WIDTH, memory__compile=on, **options) for on in (False, True))
        for name, (model, options) in CASES.items()
    }
    return run_ranks(_all, 2, runs)


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_have_the_gradients_of_plain_ones(name: str, ranks: list[dict[str, Any]]) -> None:
    model = CASES[name][0]
    # a Llama's norms compute in float32, which a compiled block sums in another order
    dtype, layers = (torch.float32, 3) if model == LLAMA else (torch.float64, SMALL[GPT2]["n_layer"])
    for rank in ranks:
        plain, losses, compiled, compiled_losses, graphs = rank[name]
        assert graphs == 1, "one graph for all blocks, microbatches and lengths of documents"
        assert worst(compiled, plain)[0] <= tolerance.of_blocks(layers, dtype)
        assert abs(compiled_losses[0] - losses[0]) <= tolerance.of_blocks(layers, dtype) * abs(losses[0])
