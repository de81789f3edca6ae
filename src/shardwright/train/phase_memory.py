"""What tensors take in the phases of an update, in an evaluation and in a save, on CPU and GPU alike."""

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
    """Watches one rank's tensors for a while, now and then; it costs some time only then.

    seen: the phases that were watched so far.
    """

    def __init__(self, engine: UpdateEngine) -> None:
        self._engine = engine
        self.seen: set[str] = set()

    @contextmanager
    def watch(self, phase: str) -> Iterator[dict[str, int]]:
        """A context that begins in `phase`; the dict that it gives holds each phase's peak bytes afterwards.

        What is alive on entering counts too. Within `forward`, the backward passes and the update are told apart.
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
        """`peaks` as metrics, the most of any rank; nothing where nothing was watched. Collective where something was."""
        if not peaks:
            return {}
        most = torch.tensor(list(peaks.values()), dtype=torch.int64, device=self._engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return {PHASE_PEAK[phase]: size for phase, size in zip(peaks, most.tolist())}
