"""Pipeline parallelism: this rank's stages under a schedule, run by `torch.distributed.pipelining` or `action_list.py`.

Each microbatch of the update is one microbatch of the pipeline. The last stage divides its loss by the target tokens of the
whole update and torch scales nothing (`scale_grads=False`), so gradients are those of the unsplit model. Data parallelism
is inside each stage: torch's own handling of it is passed by, so that `layout/zero.py` says when parameters are gathered and
gradients reduced, with a pipeline as without. zero3 gathers a stage's units anew for each microbatch.

B rows, T positions, D width of hidden states, K microbatches of this data rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

from shardwright.backends.backend import PipelineRuntime, choose_backend
from shardwright.config.schema import Schedule
from shardwright.layout.pipeline_schedules import rank_actions, stage_rank
from shardwright.parallel.pipeline.stages import Stage

SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")


class DataParallelKind(Protocol):
    """What a pipeline asks of the data parallelism inside a stage."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]: ...
    def finish_gradients(self) -> None: ...
    def release(self) -> None: ...


@dataclass
class _Work:
    """The update that the schedule is running: ids of each microbatch, how to seed, and the loss of the last stage.

    seed: called with (microbatch, stage) before each forward. loss: from (what the model returned, microbatch) to the
    scalar that is differentiated. arguments: of each microbatch, what the model is given beside ids or hidden states.
    """

    ids: Sequence[Tensor] = ()
    seed: Callable[[int, int], None] = lambda k, stage: None
    loss: Callable[[Any, int], Tensor] = lambda output, k: output
    arguments: Sequence[dict[str, Any]] = ()


class _Runner(nn.Module):
    """What torch's schedule calls for one stage. It hides `fully_shard` from torch, which would set its flags itself."""

    def __init__(self, stage: Stage, kind: DataParallelKind, work: _Work) -> None:
        super().__init__()
        self.stage, self.kind, self.work, self.microbatch = stage, kind, work, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_forward(self.microbatch, x)

    def compute_forward(self, k: int, x: Tensor | None) -> Tensor:
        stage, work = self.stage, self.work
        work.seed(k, stage.index)
        output = stage(work.ids[k] if stage.is_first else x, **work.arguments[k])
        return work.loss(output, k) if stage.is_last else output

    def compute_backward(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        with self.kind.microbatch(last=last):
            torch.autograd.backward(output, gradient)


class _TorchStage(PipelineStage):
    """Tells the runner which microbatch is computed, and the data parallelism when its last backward comes."""

    submod: _Runner

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.submod.kind.microbatch(last=kwargs.get("last_backward", False)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


@dataclass(frozen=True)
class Ties:
    """Parameters that the first and the last stage both hold, by name, where these are on two ranks.

    peer: the pipeline rank with the other copy. copies: this rank's are the later ones: the same parameters in a
    checkpoint, and counted once in the norm, by the other rank.
    """

    names: tuple[str, ...] = ()
    peer: int = 0
    copies: bool = False

    @classmethod
    def between(cls, names: Sequence[str], rank: int, first: int, last: int) -> Ties:
        """The ties of pipeline rank `rank` where the ranks `first` and `last` hold the parameters `names`."""
        if first == last or rank not in (first, last):  # on one rank there is one tensor: nothing to exchange
            return cls()
        return cls(tuple(names), last if rank == first else first, rank == last)


class Pipelined:
    """This rank's stages. Collective: every pipeline rank calls the same methods with the same microbatches.

    module: the model without what other ranks hold, names as in the unsplit model.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Stage],
        kinds: Sequence[DataParallelKind],
        group: dist.ProcessGroup,
        schedule: Schedule,
        *,
        width: int,
        dtype: torch.dtype,
        ties: Ties,
    ) -> None:
        """kinds: the data parallelism of each stage, or one for all. width: D. dtype: of hidden states."""
        self.module, self.stages, self.schedule, self.ties = module, tuple(stages), schedule, ties
        self._kinds, self._group, self._width, self._dtype = tuple(kinds), group, width, dtype
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._work = _Work()
        of_stage = kinds if len(kinds) == len(stages) else [kinds[0]] * len(stages)
        self._runners = [_Runner(stage, kind, self._work) for stage, kind in zip(stages, of_stage)]
        self._built: tuple[tuple[int, ...], Any] | None = None
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def copies(self) -> set[str]:
        """Names of this rank's parameters that are copies: the first stage's count in the norm and stand in a checkpoint."""
        return set(self.ties.names) if self.ties.copies else set()

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds `stage`."""
        return stage_rank(self.schedule, self._size, stage)

    # Training

    def forward_backward(
        self,
        ids: Sequence[Tensor],
        *,
        seed: Callable[[int, int], None],
        loss: Callable[[Any, int], Tensor],
        arguments: Sequence[dict[str, Any]],
    ) -> None:
        """Forward and backward of every microbatch `ids` [B, T] of this data rank, in the order of the schedule.

        Gradients are not complete before `finish_gradients`. Shapes may differ from call to call, not within one.
        """
        for stage in self.stages:
            if not stage.training:  # behind an evaluation
                stage.train()
        vars(self._work).update(ids=ids, seed=seed, loss=loss, arguments=arguments)
        runtime = choose_backend(ids[0].device.type).pipeline_runtime(self.schedule)
        if runtime is not None:
            self._actions(runtime, ids).run()
            return
        schedule = self.torch_schedule(len(ids), ids[0])
        # Stages look up their microbatch by number: torch sees numbers in place of ids and targets.
        numbers = torch.zeros(len(ids), dtype=torch.int64, device=ids[0].device)
        inputs = (numbers,) if self.stages[0].is_first else ()
        target = numbers if self.stages[-1].is_last else None
        schedule.step(*inputs, target=target, losses=[], return_outputs=False)

    def _actions(self, runtime: type[PipelineRuntime], ids: Sequence[Tensor]) -> PipelineRuntime:
        """This rank's part of the schedule for microbatches like `ids`, without torch's runtime."""
        count = self.stages[0].count
        chunks = count // self._size
        return runtime(
            rank_actions(self.schedule, self._size, chunks, len(ids), self._rank),
            {runner.stage.index: runner for runner in self._runners},
            count,
            self.rank_of,
            self._group,
            lambda: self._hidden(ids[0], ids[0].device),
        )

    def torch_schedule(self, microbatches: int, ids: Tensor) -> Any:
        """torch's schedule for so many microbatches like `ids`; made anew when the number or the shape changes.

        Its buffers have the shape of the microbatches that it was made for.
        """
        key = (microbatches, *ids.shape)
        if self._built is None or self._built[0] != key:
            hidden = self._hidden(ids, torch.device("meta")).requires_grad_()
            wide = torch.float64 if self._dtype == torch.float64 else torch.float32
            number, loss = (
                torch.empty(1, dtype=torch.int64, device="meta"),
                torch.empty((), dtype=wide, device="meta"),
            )
            loss.requires_grad_()
            stages = [
                _TorchStage(
                    runner,
                    runner.stage.index,
                    runner.stage.count,
                    ids.device,
                    input_args=(number if runner.stage.is_first else hidden,),
                    output_args=(loss if runner.stage.is_last else hidden,),
                    group=self._group,
                )
                for runner in self._runners
            ]
            made = SCHEDULES[self.schedule](
                stages[0] if self.schedule in ONE_STAGE else stages,
                n_microbatches=microbatches,
                loss_fn=lambda output, target: output,
                scale_grads=False,
            )
            self._built = (key, made)
        return self._built[1]

    def _hidden(self, ids: Tensor, device: torch.device) -> Tensor:
        """An empty tensor like what passes between stages for `ids` [B, T]: [B, T, D], or this rank's piece of it."""
        peers = self.stages[0].peers
        tokens = ids.shape[1] // (peers.size if peers is not None else 1)
        return torch.empty(ids.shape[0], tokens, self._width, dtype=self._dtype, device=device)

    def finish_gradients(self) -> None:
        """Completes gradients: what the data parallelism has left to do, then tied parameters over first and last stage."""
        for kind in self._kinds:
            kind.finish_gradients()
        named = dict(self.module.named_parameters()) if self.ties.names else {}
        for name in self.ties.names:
            self._exchange(named[name])

    def _exchange(self, p: nn.Parameter) -> None:
        """Adds the other copy's gradient. Both ranks add the same two numbers, so the copies stay bitwise equal."""
        gradient = p.grad
        if gradient is None:  # frozen
            return
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        peer = dist.get_global_rank(self._group, self.ties.peer)
        transfers = [
            dist.P2POp(dist.isend, sent, peer, self._group),
            dist.P2POp(dist.irecv, received, peer, self._group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        own.add_(received)

    # Evaluation

    def __call__(self, ids: Tensor, **arguments: Any) -> Any | None:
        """What the model returns for `ids` [B, T], forward only, on the rank of the last stage; None elsewhere.

        A rank goes on to its next call while later stages work on this one.
        """
        hidden: Any = ids
        for index in range(self.stages[0].count):
            stage = next((stage for stage in self.stages if stage.index == index), None)
            if stage is None:
                continue
            stage.eval()
            if index and self.rank_of(index - 1) != self._rank:
                hidden = self._hidden(ids, ids.device)
                dist.recv(hidden, self._global(index - 1), group=self._group)
            hidden = stage(hidden, **arguments)
            if not stage.is_last and self.rank_of(index + 1) != self._rank:
                work = dist.isend(hidden, self._global(index + 1), group=self._group)
                assert work is not None, "this rank is part of the pipeline's group"
                self._sends.append((work, hidden))
        while len(self._sends) > 2 * len(self.stages):
            self._sends.popleft()[0].wait()
        return hidden if self.stages[-1].is_last else None

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self.rank_of(stage))

    def release(self) -> None:
        """Ends evaluation: waits until everything is received, and drops gathered parameters."""
        while self._sends:
            self._sends.popleft()[0].wait()
        for kind in self._kinds:
            kind.release()
