"""A pipeline rank's action list without other ranks: what is computed, asked for and sent, and when. Row A86."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.backends.gloo.pipeline_runtime import AHEAD, ActionList
from shardwright.layout.pipeline_schedules import rank_actions

PP, STAGE, MICROBATCHES = 4, 2, 6


class Done:
    def wait(self) -> None: ...


class Doubles:
    """A stage that doubles its input, and what happened in order."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def compute_forward(self, k: int, x: Tensor | None) -> Tensor:
        assert x is not None
        self.log.append(f"F{k}")
        return 2 * x

    def compute_backward(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        self.log.append("last B" if last else "B")
        torch.autograd.backward(output, gradient)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages: microbatch k of a forward holds k, its gradient 10 k."""
    found: list[str] = []

    def irecv(buffer: Tensor, source: int, group: Any, tag: int) -> Done:
        k = (tag - 1) // 2 % MICROBATCHES
        buffer.fill_(10 * k if source > STAGE else k)
        found.append(f"ask {source}:{k}")
        return Done()

    def isend(tensor: Tensor, to: int, group: Any, tag: int) -> Done:
        found.append(f"send {to}:{(tag - 1) // 2 % MICROBATCHES} {tensor.item():g}")
        return Done()

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    return found


def test_what_one_rank_does(log: list[str]) -> None:
    """Outputs are twice what came, gradients too; each receive is asked for before it is needed, and few are ahead."""
    actions = rank_actions("1f1b", PP, 1, MICROBATCHES, STAGE)
    group: Any = None
    ActionList(actions, {STAGE: Doubles(log)}, PP, lambda s: s, group, lambda: torch.zeros(())).run()
    assert [e for e in log if e.startswith("send 3")] == [f"send 3:{k} {2 * k}" for k in range(MICROBATCHES)]
    assert [e for e in log if e.startswith("send 1")] == [f"send 1:{k} {20 * k}" for k in range(MICROBATCHES)]
    assert [e for e in log if "B" in e] == ["B"] * (MICROBATCHES - 1) + ["last B"]
    computed = asked = 0
    for event in log:
        asked += event.startswith("ask")
        if event[0] in "FBl":
            computed += 1
            assert computed <= asked <= computed + AHEAD
    assert computed == asked == 2 * MICROBATCHES
