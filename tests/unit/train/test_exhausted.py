"""What is told of memory that ran out: which errors mean it, what was alive, which change of the run file would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import places
from torch import Tensor

from shardwright.config.load import Loaded, load_run_file
from shardwright.layout.legality import check_run
from shardwright.measure.memory import REST, allocated_bytes, bytes_by_group, in_backward, is_out_of_memory
from shardwright.train.exhausted import nearest_that_fits
from shardwright.train.planned import plan_of, shape_of

TINY = str(places.TINY)
TOO_MUCH = 2**46


class Exhausting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty(TOO_MUCH)


def test_which_errors_mean_it() -> None:
    """An allocation that fails for real, in either pass; not an error that is about something else."""
    with pytest.raises(RuntimeError) as forward:
        torch.empty(TOO_MUCH)
    assert is_out_of_memory(forward.value) and not in_backward(forward.value)
    with pytest.raises(RuntimeError) as backward:
        Exhausting.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert is_out_of_memory(backward.value) and in_backward(backward.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(ValueError("out of memory")) and not is_out_of_memory(RuntimeError("shape"))


def test_storages_count_once() -> None:
    """A view shares its storage; the rest is what no group holds."""
    weight, state = torch.zeros(100), torch.zeros(300)
    groups = {"parameters": [weight, weight.view(10, 10)], "gathered": [weight[:5]], "states": [state]}
    assert bytes_by_group(groups, None) == {"states": 1200, "parameters": 400}
    assert (
        list(bytes_by_group(groups, 2000)) == ["states", "parameters", REST]
        and bytes_by_group(groups, 2000)[REST] == 400
    )
    assert REST not in bytes_by_group(groups, 1000)


def test_the_c_library_tells_what_is_allocated() -> None:
    before = allocated_bytes(torch.device("cpu"))
    if before is None:
        pytest.skip("no mallinfo2 here")
    held = torch.ones(10_000_000)
    during = allocated_bytes(torch.device("cpu"))
    assert during is not None and abs(during - before - held.nbytes) < 1_000_000


def loaded(**more: Any) -> Loaded:
    values = {"model.model_name_or_path": TINY, "model.init": "random", "data.train": ["-"], "data.max_length": 96,
              "training.max_steps": 10, "training.global_batch_size": 16, "checkpoint.export_hf": "none",
              "training.per_device_train_batch_size": 4, "parallelism.data_parallel": "ddp"}  # fmt: skip
    return load_run_file(None, values | {key.replace("__", "."): value for key, value in more.items()})


def planned(run: Loaded) -> float:
    shape = shape_of(run.run)
    assert shape is not None
    return plan_of(run.run, check_run(run, 2), shape, False, "cpu").peak_bytes


def test_the_nearest_change_that_fits() -> None:
    """One key where one is enough, else two; each as the planner says; none that needs a GPU; nothing where nothing fits."""
    run = loaded()
    now, seen = planned(run), []
    for part in (0.95, 0.7, 0.5, 0.35):
        found = nearest_that_fits(run, 2, "cpu", False, part * now)
        assert found is not None
        keys, peak = found
        assert peak == planned(run.replaced(keys, "test")) <= part * now
        assert "memory.cpu_offload" not in keys
        seen.append(len(keys))
    assert seen == sorted(seen) and seen[0] == 1 and seen[-1] > 1
    assert nearest_that_fits(run, 2, "cpu", False, 0.01 * now) is None
    lean = loaded(training__per_device_train_batch_size=1, memory__activation_checkpointing="full",
                  parallelism__data_parallel="zero3")  # fmt: skip
    assert nearest_that_fits(lean, 2, "cpu", False, 0.95 * planned(lean)) is None
