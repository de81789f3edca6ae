"""Runs a pipeline rank's action list on gloo, with messages of its own.

torch's runtime begins to receive when a rank has nothing else to do, and waits for its sends. gloo moves a message in a
thread of its own, once both sides have asked for it: here each receive is asked for some actions ahead of its use, and no
send is waited for before the update's end, so that hidden states travel while blocks are computed. Decision 0014.

B rows, T positions, D width of hidden states, K microbatches of this data rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from shardwright.backends.backend import RunsStage
from shardwright.layout.pipeline_schedules import Action

AHEAD = 2
"""How many actions before its use a receive is asked for: the next forward and the next backward."""


class ActionList:
    """The forwards (F) and backwards (B) of this rank for one update; a `PipelineRuntime`."""

    def __init__(
        self,
        actions: Sequence[Action],
        stages: dict[int, RunsStage],
        count: int,
        rank_of: Callable[[int], int],
        group: dist.ProcessGroup,
        empty: Callable[[], Tensor],
    ) -> None:
        self._actions, self._stages, self._last = actions, stages, count - 1
        self._group, self._empty = group, empty
        self._ranks = [dist.get_global_rank(group, rank_of(stage)) for stage in range(count)]
        self._microbatches = 1 + max(action.microbatch for action in actions)
        self._arriving: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self._sends: list[tuple[dist.Work | None, Tensor]] = []

    def run(self) -> None:
        """Computes every action; returns when all that was sent is received."""
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        left = Counter(action.stage for action in self._actions if action.kind == "B")
        asked = 0
        for number, action in enumerate(self._actions):
            while asked < min(number + 1 + AHEAD, len(self._actions)):
                self._ask(self._actions[asked])
                asked += 1
            stage, kind, k = action
            received = self._received(action)
            if kind == "F":
                x = None if received is None else received.requires_grad_()
                output = self._stages[stage].compute_forward(k, x)
                kept[stage, k] = (x, output)
                if stage < self._last:
                    self._send(output.detach(), Action(stage + 1, "F", k))
            else:
                x, output = kept.pop((stage, k))
                left[stage] -= 1
                self._stages[stage].compute_backward(output, received, last=not left[stage])
                if x is not None:
                    assert x.grad is not None, "each stage has a trained parameter behind its input"
                    self._send(x.grad, Action(stage - 1, "B", k))
        for work, _ in self._sends:
            _wait(work)
        self._sends.clear()

    def _ask(self, action: Action) -> None:
        """Begins to receive what `action` needs from another rank."""
        stage, kind, _ = action
        source = stage - 1 if kind == "F" else stage + 1
        if not 0 <= source <= self._last:
            return
        buffer = self._empty()
        work = dist.irecv(buffer, self._ranks[source], self._group, self._tag(action))
        self._arriving[action] = (work, buffer)

    def _received(self, action: Action) -> Tensor | None:
        """What came for `action`; None for the first stage's forward and the last one's backward."""
        if action not in self._arriving:
            return None
        work, buffer = self._arriving.pop(action)
        _wait(work)
        return buffer

    def _send(self, tensor: Tensor, to: Action) -> None:
        """Begins to send what the action `to` of another rank needs."""
        whole = tensor.contiguous()
        work = dist.isend(whole, self._ranks[to.stage], self._group, self._tag(to))
        self._sends.append((work, whole))

    def _tag(self, action: Action) -> int:
        """A number of its own for each message of an update; 0 is left to others."""
        stage, kind, k = action
        return 1 + 2 * (stage * self._microbatches + k) + (kind == "B")


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is part of the pipeline's group"
    work.wait()
