"""Peak memory of tensors in each phase of an update, in an evaluation and in a save, on CPUs and GPUs alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.measure.live_memory import LiveMemory
from shardwright.measure.metric_names import PHASE_PEAK
from shardwright.train.update import UpdateEngine


class PhaseMemory:
    """Records the tensors of one rank while `watch` is entered; training is slower then, and not otherwise.

    seen: the phases watched so far.
    """

    def __init__(self, engine: UpdateEngine) -> None:
        self._engine = engine
        self.seen: set[str] = set()

    @contextmanager
    def watch(self, phase: str) -> Iterator[dict[str, int]]:
        """A context that begins in `phase`; afterwards the dict that it gives holds {phase: peak bytes}.

        Tensors that are alive at its begin count too. After `forward` follow the phases `backward` and `update`.
        """
        engine, memory = self._engine, LiveMemory(device=self._engine.device.type)
        found = {phase: 0}
        states = [v for state in engine.optimizer.state.values() for v in state.values()]
        memory.hold("parameters", engine.module.parameters())
        memory.hold("parameters", engine.module.buffers())
        memory.hold("parameters", (local.tensor for local in engine.params))
        memory.hold("optimizer states", (value for value in states if isinstance(value, Tensor)))
        memory.clear()
        memory.enter(phase)
        before = engine.hooks.on_phase

        def enter(step: str) -> None:
            before(step)
            if phase == "forward":
                memory.enter("update")

        engine.hooks.on_phase = enter
        try:
            with memory:
                yield found
        finally:
            engine.hooks.on_phase = before
        found.update(memory.peak_by_phase)
        self.seen.update(found)

    def agreed(self, peaks: Mapping[str, int] | None) -> dict[str, float | int | None]:
        """`peaks` as metrics, each the maximum over ranks; empty without peaks. Collective where there are peaks."""
        if not peaks:
            return {}
        most = torch.tensor(list(peaks.values()), dtype=torch.int64, device=self._engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return {PHASE_PEAK[phase]: size for phase, size in zip(peaks, most.tolist())}
