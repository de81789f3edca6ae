"""Pipeline parallelism: this rank's stages under a schedule of `torch.distributed.pipelining`, or of the backend's runtime.

Each microbatch of the update is one microbatch of the pipeline. The last stage divides its loss by the target tokens of the
whole update and torch scales nothing (`scale_grads=False`), so gradients are those of the unsplit model. Data parallelism
is inside each stage. `layout/zero.py` says when parameters are gathered and gradients reduced, with a pipeline as without;
torch's schedules do not take part in it. zero3 gathers the units of a stage again for each microbatch.

B rows, T positions, D width of hidden states, K microbatches of this data rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from shardwright.backends.backend import PipelineRuntime, choose_backend
from shardwright.config.schema import Schedule
from shardwright.layout.pipeline_schedules import rank_actions, stage_rank
from shardwright.mesh.shard_geometry import local_tensor
from shardwright.parallel.pipeline.stages import Stage
from shardwright.parallel.strategy import DataParallel, Microbatches, Ties

SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that torch gives one stage, not a list of stages."""


class StageRunner(nn.Module):
    """One stage with its data parallelism, as a schedule calls it.

    torch's schedules set the flags of every `fully_shard` module that they find as their `submod` (torch 2.11 to 2.14). They
    find this module instead, so that the flags stay as `layout/zero.py` says.
    """

    def __init__(self, stage: Stage, data_parallel: DataParallel) -> None:
        super().__init__()
        self.stage, self.data_parallel, self.microbatch = stage, data_parallel, 0
        self.batch: Microbatches | None = None
        self.inputs: Sequence[tuple[Tensor, dict[str, Any]]] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_forward(self.microbatch, x)

    def compute_forward(self, k: int, x: Tensor | None) -> Tensor:
        stage, batch = self.stage, self.batch
        assert batch is not None, "a schedule runs within forward_backward"
        batch.before_forward(k, stage.index)
        if stage.is_last:
            batch.announce(k)
        ids, arguments = self.inputs[k]
        output = stage(ids if stage.is_first else x, **arguments)
        return batch.loss(output, k) if stage.is_last else output

    def compute_backward(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        with self.data_parallel.microbatch(last=last):
            torch.autograd.backward(output, gradient)


class TorchStage(PipelineStage):
    """Tells the runner which microbatch is computed, and the data parallelism when its last backward comes."""

    submod: StageRunner

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.submod.data_parallel.microbatch(last=kwargs.get("last_backward", False)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """This rank's stages: the `Strategy` of pipeline parallelism.

    Collective: every pipeline rank calls the same methods with the same microbatches.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Stage],
        data_parallel: Sequence[DataParallel],
        group: dist.ProcessGroup,
        schedule: Schedule,
        *,
        width: int,
        dtype: torch.dtype,
        ties: Ties,
    ) -> None:
        """data_parallel: of each stage, or one for all stages. width: D. dtype: of hidden states."""
        self.module, self.stages, self.schedule, self.ties = module, tuple(stages), schedule, ties
        self._data_parallel, self._group, self._width, self._dtype = tuple(data_parallel), group, width, dtype
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        of_stage = data_parallel if len(data_parallel) == len(stages) else [data_parallel[0]] * len(stages)
        self._runners = [StageRunner(stage, own) for stage, own in zip(stages, of_stage)]
        self._built: tuple[tuple[int, ...], Any] | None = None
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds `stage`."""
        return stage_rank(self.schedule, self._size, stage)

    # Training

    def forward_backward(self, batch: Microbatches) -> None:
        """Runs forward and backward of every microbatch in the order of the schedule.

        Shapes may differ from call to call, not within one. Gradients are not complete before `finish_gradients`.
        """
        inputs = [batch.inputs(k) for k in range(batch.count)]
        for runner in self._runners:
            if not runner.stage.training:  # after an evaluation
                runner.stage.train()
            runner.batch, runner.inputs = batch, inputs
        ids = inputs[0][0]
        runtime = choose_backend(ids.device.type).pipeline_runtime(self.schedule)
        if runtime is not None:
            self._actions(runtime, ids, batch.count).run()
            return
        # Stages look up their microbatch by number: torch sees numbers in place of ids and targets.
        numbers = torch.zeros(batch.count, dtype=torch.int64, device=ids.device)
        first = (numbers,) if self.stages[0].is_first else ()
        target = numbers if self.stages[-1].is_last else None
        self.torch_schedule(batch.count, ids).step(*first, target=target, losses=[], return_outputs=False)

    def _actions(self, runtime: type[PipelineRuntime], ids: Tensor, microbatches: int) -> PipelineRuntime:
        """This rank's actions of the schedule, for microbatches like `ids`, ready to run."""
        count = self.stages[0].count
        return runtime(
            rank_actions(self.schedule, self._size, count // self._size, microbatches, self._rank),
            {runner.stage.index: runner for runner in self._runners},
            count,
            self.rank_of,
            self._group,
            lambda: self._hidden(ids, ids.device),
        )

    def torch_schedule(self, microbatches: int, ids: Tensor) -> Any:
        """torch's schedule for so many microbatches like `ids`.

        A new schedule is made when the number or the shape changes: torch allocates its receive buffers once, by shape.
        """
        key = (microbatches, *ids.shape)
        if self._built is None or self._built[0] != key:
            hidden = self._hidden(ids, torch.device("meta")).requires_grad_()
            wide = torch.float64 if self._dtype == torch.float64 else torch.float32
            number = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=wide, device="meta", requires_grad=True)
            stages = [
                TorchStage(
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
        """An empty tensor for the hidden states of `ids` [B, T] between stages: [B, T, D], or this rank's piece."""
        tp_group = self.stages[0].tp_group
        tokens = ids.shape[1] // (tp_group.size if tp_group is not None else 1)
        return torch.empty(ids.shape[0], tokens, self._width, dtype=self._dtype, device=device)

    def finish_gradients(self) -> None:
        """Completes the reductions of data parallelism, then sums tied parameters over the first and the last stage."""
        for data_parallel in self._data_parallel:
            data_parallel.finish_gradients()
        named = dict(self.module.named_parameters()) if self.ties.names else {}
        for name in self.ties.names:
            self._sum_tied(named[name])

    def _sum_tied(self, p: nn.Parameter) -> None:
        """Adds the other copy's gradient. Both ranks add the same two numbers, so the copies stay bitwise equal."""
        gradient = p.grad
        if gradient is None:  # frozen
            return
        own = local_tensor(gradient)
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        peer = dist.get_global_rank(self._group, self.ties.peer)
        both = [dist.P2POp(dist.isend, sent, peer, self._group), dist.P2POp(dist.irecv, received, peer, self._group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        own.add_(received)

    def close(self) -> None:
        """Frees the memory of weights and gradients. Nothing can run afterwards."""
        for own in self._data_parallel:
            own.close()
        self._built = None

    # Evaluation

    def __call__(self, ids: Tensor, **arguments: Any) -> Any | None:
        """The model's output for `ids` [B, T], forward only, on the rank of the last stage; None on the other ranks.

        A rank returns before later stages have finished, so that its next call overlaps with their work.
        """
        hidden: Any = ids
        for stage in self.stages:
            stage.eval()
            if not stage.is_first and self.rank_of(stage.index - 1) != self._rank:
                hidden = self._hidden(ids, ids.device)
                dist.recv(hidden, self._global(stage.index - 1), group=self._group)
            hidden = stage(hidden, **arguments)
            if not stage.is_last and self.rank_of(stage.index + 1) != self._rank:
                work = dist.isend(hidden, self._global(stage.index + 1), group=self._group)
                assert work is not None, "this rank is part of the pipeline's group"
                self._sends.append((work, hidden))
        while len(self._sends) > 2 * len(self.stages):
            self._sends.popleft()[0].wait()
        return hidden if self.stages[-1].is_last else None

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self.rank_of(stage))

    def release(self) -> None:
        """Ends evaluation: waits until the peers have received everything, and drops gathered parameters."""
        while self._sends:
            self._sends.popleft()[0].wait()
        for data_parallel in self._data_parallel:
            data_parallel.release()
