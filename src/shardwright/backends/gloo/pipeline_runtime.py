"""Runs a pipeline rank's action list on gloo, with messages of its own.

torch's runtime posts a receive when a rank has nothing else to do, and waits for its sends. gloo moves a message in a
thread of its own, once both sides have posted it. Here each receive is posted some actions ahead of its use, and no send is
waited for before the end of the update, so hidden states travel while blocks are computed. Decision 0014.

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
"""How many actions before its use a receive is posted: the next forward and the next backward."""


class ActionList:
    """The forwards (F) and backwards (B) of this rank for one update: a `PipelineRuntime`."""

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
        self._receives: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self._sends: list[tuple[dist.Work | None, Tensor]] = []

    def run(self) -> None:
        """Computes every action; returns when everything sent is received."""
        in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        left = Counter(action.stage for action in self._actions if action.kind == "B")
        posted = 0
        for number, action in enumerate(self._actions):
            while posted < min(number + 1 + AHEAD, len(self._actions)):
                self._post_receive(self._actions[posted])
                posted += 1
            stage, kind, k = action
            received = self._received(action)
            if kind == "F":
                x = None if received is None else received.requires_grad_()
                output = self._stages[stage].compute_forward(k, x)
                in_flight[stage, k] = (x, output)
                if stage < self._last:
                    self._send(output.detach(), Action(stage + 1, "F", k))
            else:
                x, output = in_flight.pop((stage, k))
                left[stage] -= 1
                self._stages[stage].compute_backward(output, received, last=not left[stage])
                if x is not None:
                    assert x.grad is not None, "each stage has a trained parameter behind its input"
                    self._send(x.grad, Action(stage - 1, "B", k))
        for work, _ in self._sends:
            _wait(work)
        self._sends.clear()

    def _post_receive(self, action: Action) -> None:
        """Begins to receive what `action` needs from another rank, if it needs anything."""
        stage, kind, _ = action
        source = stage - 1 if kind == "F" else stage + 1
        if not 0 <= source <= self._last:
            return
        buffer = self._empty()
        work = dist.irecv(buffer, self._ranks[source], self._group, self._tag(action))
        self._receives[action] = (work, buffer)

    def _received(self, action: Action) -> Tensor | None:
        """The tensor received for `action`; None for the first stage's forward and the last stage's backward."""
        if action not in self._receives:
            return None
        work, buffer = self._receives.pop(action)
        _wait(work)
        return buffer

    def _send(self, tensor: Tensor, to: Action) -> None:
        """Begins to send what the action `to` of another rank needs."""
        sent = tensor.contiguous()
        work = dist.isend(sent, self._ranks[to.stage], self._group, self._tag(to))
        self._sends.append((work, sent))

    def _tag(self, action: Action) -> int:
        """Another number for each message of an update; other messages use 0."""
        stage, kind, k = action
        return 1 + 2 * (stage * self._microbatches + k) + (kind == "B")


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is part of the pipeline's group"
    work.wait()
