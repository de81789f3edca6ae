"""`UpdateEngine.close` frees the memory of an engine at once: what the process runs next has all of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from tests.places import EXAMPLES
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.config.load import load_run_file
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.axes import resolve_axes
from shardwright.train.update import UpdateEngine

RANKS, ROWS, TOKENS = 4, 2, 16


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def closed(values: dict[str, Any]) -> WeakSet[Any]:
    """What is left of the parameters, gradients and optimizer states of an engine that is closed after an update."""
    given = {
        "model.model_name_or_path": str(EXAMPLES / "tiny"),
        "model.init": "random",
        "data.train": ["-"],
        "data.max_length": TOKENS,
        "training.max_steps": 2,
        "training.global_batch_size": RANKS * ROWS,
        "training.per_device_train_batch_size": ROWS,
        "checkpoint.export_hf": "none",
        **values,
    }
    run = load_run_file(None, given).run
    engine = UpdateEngine(run, resolve_axes(run.parallelism, RANKS), torch.device("cpu"), 2)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    slots, rows = RANKS * ROWS * TOKENS, tuple(range(ROWS))
    engine.forward_backward(UpdateBatch(0, (Microbatch(0, ids, ids, rows),), slots, slots, slots, rows))
    kept: WeakSet[Any] = WeakSet([*engine.module.parameters(), *engine.module.buffers()])
    kept.update(gradient for _, gradient in engine.gradients())
    engine.step()
    for state in engine.optimizer.state.values():
        kept.update(value for value in state.values() if isinstance(value, torch.Tensor))
    assert len(kept) > 30
    engine.close()
    return kept


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3", "hsdp"])
@pytest.mark.parametrize("more", [{}, {"precision.param_dtype": "bf16", "memory.activation_checkpointing": "full"}])
def test_a_closed_engine_leaves_no_tensor(kind: str, more: dict[str, Any]) -> None:
    """Without Python's garbage collector, whose time nobody knows: no cycle holds a tensor."""
    if kind == "hsdp":
        more = {**more, "parallelism.dp_replicate_size": 2}
    values = {"parallelism.data_parallel": "zero3" if kind == "hsdp" else kind, **more}
    assert list(closed(values)) == []
