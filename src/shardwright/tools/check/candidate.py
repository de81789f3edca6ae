"""The candidate: the engine of `train` on N ranks, one layout after another; rank 0 gathers and writes the numbers.

Started as `python -m shardwright.tools.check.candidate specs.json` on every rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwright.checkpoint.state import STATE_OPTIMIZER, optimizer_state
from shardwright.config.schema import RunFile
from shardwright.data.loader import UpdateBatch
from shardwright.launch import finish, worker_main
from shardwright.layout.axes import AXES, resolve_axes
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.measure import clock
from shardwright.mesh.device_mesh import FLATTENED
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.models.dropout import silence_dropout
from shardwright.models.model_parts import canonical_name
from shardwright.tools.check.batch_invariance import batch_invariance
from shardwright.tools.check.fault_injection import plant
from shardwright.tools.check.force_float64 import force_float64
from shardwright.tools.check.gather import whole_on_first_rank
from shardwright.tools.check.record import MicrobatchNote, Record, Scalars
from shardwright.tools.check.rows import Changes, CheckedRows
from shardwright.train.decision import UpdateResult
from shardwright.train.update import UpdateEngine

DONE = "done"
"""File of a record's directory that is written at the end: the seconds that the candidate took."""

REDUCED_BYTES = 16 * 2**20
"""Bytes of weights that are compared between ranks at once, at most."""


@dataclass(frozen=True)
class CandidateSpec:
    """The task of the ranks for one candidate."""

    run: dict[str, Any]
    """Resolved sections of the run file."""
    directory: str
    """Of the record."""
    updates: int
    changes: Changes
    fault: str = ""
    """Fault to inject, or empty."""

    @property
    def seconds(self) -> float | None:
        """The time that the candidate took, None where it did not finish."""
        path = Path(self.directory) / DONE
        return float(path.read_text()) if path.exists() else None


SPECS = TypeAdapter(list[CandidateSpec])
"""Reads and writes the file that ranks are started with: the candidates in the order in which they run."""


class Recorder:
    """Writes an engine's updates to a record. Collective: each rank has a recorder; rank 0 gathers and writes whole tensors."""

    def __init__(self, engine: UpdateEngine, record: Record | None) -> None:
        self.engine, self.record = engine, record

    def start(self) -> None:
        self._write(0, "param", self._parameters())

    def before_step(self, number: int) -> None:
        """Writes gradients before clipping; zeros for a parameter without a gradient, as in the reference."""
        own = {local.name: gradient for local, gradient in self.engine.gradients()}
        self.local_norm = sum(
            own[local.name].double().square().sum().item()
            for local in self.engine.params
            if local.counts and local.name in own
        )
        gradients = {
            local.name: local.wrap(own.get(local.name, torch.zeros_like(local.tensor))) for local in self.engine.params
        }
        self._write(number, "grad", gradients)

    def after_step(self, number: int, batch: UpdateBatch, result: UpdateResult) -> None:
        """Parameters, states and scalars."""
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer_state(self.engine.optimizer, list(self.engine.params)).items():
            name, _, kind = key.removeprefix(STATE_OPTIMIZER).rpartition(".")
            states.setdefault(kind, {})[name] = value
        for kind in self._all_kinds(states):
            self._write(number, kind, states.get(kind, {}))
        gap, name = self._replica_gap()
        self._write(number, "param", self._parameters())
        place = self.engine.axes.data_rank(self.engine.rank)
        notes = [(place, m.index, m.row_ids, int((m.labels != IGNORE_INDEX).sum())) for m in batch.microbatches]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (notes, result.loss, result.grad_norm, self.local_norm**0.5))
        if self.record is None:
            return
        unique = {note for rank_notes, *_ in gathered for note in rank_notes}
        scalars = Scalars(
            target_tokens=result.target_tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            clip_coefficient=result.clip_coefficient,
            learning_rate=result.learning_rate,
            microbatches=tuple(MicrobatchNote(*note) for note in sorted(unique)),
            local_norms=tuple(norm for *_, norm in gathered),
            losses=tuple(loss for _, loss, _, _ in gathered),
            grad_norms=tuple(norm for _, _, norm, _ in gathered),
            replica_gap=gap,
            replica_name=name,
        )
        self.record.write_scalars(number, scalars)

    def _parameters(self) -> dict[str, Tensor]:
        return {canonical_name(name): p.detach() for name, p in self.engine.module.named_parameters()}

    def _all_kinds(self, states: dict[str, dict[str, Tensor]]) -> list[str]:
        """Kinds of optimizer state that any rank has."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sorted(states))
        return sorted({kind for kinds in everyone for kind in kinds})

    def _write(self, update: int, kind: str, tensors: dict[str, Tensor]) -> None:
        whole = whole_on_first_rank(tensors)
        if self.record is not None:
            self.record.write_tensors(update, kind, whole)

    def _replica_gap(self) -> tuple[float, str]:
        """(largest difference between ranks that should hold equal weights / largest weight, name of the parameter)."""
        alike: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
        groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
        for name, p in self.engine.module.named_parameters():
            own = self._replica_groups(p)
            key = tuple(str(group.group_name) for group in own)
            groups[key] = own
            local = (p.to_local() if isinstance(p, DTensor) else p).detach()
            alike.setdefault(key, []).append((canonical_name(name), local))
        worst: list[tuple[float, str]] = [(0.0, "")]
        for key, named in alike.items():
            for some in _batches(named):
                worst += _gaps(some, groups[key])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, max(worst, key=_severity))
        return max(everyone, key=_severity)

    def _replica_groups(self, p: Tensor) -> list[dist.ProcessGroup]:
        if not isinstance(p, DTensor):
            return [self.engine.mesh.get_group(axis) for axis in AXES if axis != "pp"]
        mesh = p.device_mesh
        groups = [mesh.get_group(dim) for dim, how in enumerate(p.placements) if isinstance(how, Replicate)]
        covered = {axis for name in mesh.mesh_dim_names or () for axis in FLATTENED.get(name, (name,))}
        others = [axis for axis in AXES if axis != "pp" and axis not in covered]  # whole there, on no mesh
        return [*groups, *(self.engine.mesh.get_group(axis) for axis in others)]


def _batches(named: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """`named` in runs of tensors of one dtype that are reduced together, of up to `REDUCED_BYTES` each."""
    some: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        full = sum(own.nbytes for _, own in some) + tensor.nbytes > REDUCED_BYTES
        if some and (full or tensor.dtype != some[0][1].dtype):
            yield some
            some = []
        some.append((name, tensor))
    if some:
        yield some


def _gaps(named: list[tuple[str, Tensor]], groups: list[dist.ProcessGroup]) -> list[tuple[float, str]]:
    """Of each tensor: the largest difference between the ranks of `groups` / its largest value, and its name; collective."""
    low = torch.cat([tensor.flatten() for _, tensor in named])
    high = low.clone()
    for group in groups:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    sizes = [tensor.numel() for _, tensor in named]
    found = []
    for (name, _), least, most in zip(named, low.split(sizes), high.split(sizes)):
        if least.numel():
            found.append(((most - least).max().item() / max(most.abs().max().item(), 1e-300), name))
    return found


def _severity(found: tuple[float, str]) -> tuple[bool, float]:
    """Orders gaps; NaN is the worst."""
    return found[0] != found[0], found[0]


def record_updates(spec: CandidateSpec, device: torch.device) -> None:
    """Runs the updates that `spec` asks for and writes them down. Needs a default process group; collective."""
    started, run = clock.now(), RunFile.model_validate_json(json.dumps(spec.run))
    axes = resolve_axes(run.parallelism, dist.get_world_size())
    place = 0 if spec.fault == "same_rows" else axes.data_rank(dist.get_rank())
    rows = CheckedRows(run, spec.changes, data_rank=place, data_ranks=axes.data_ranks, axes=axes)
    engine = UpdateEngine(run, axes, device, rows.order.total_updates)
    if spec.changes.no_dropout:
        silence_dropout(engine.module)
    recorder = Recorder(engine, Record(Path(spec.directory)) if dist.get_rank() == 0 else None)
    if spec.fault:
        plant(spec.fault, engine)
    recorder.start()
    for number in range(1, spec.updates + 1):
        batch = rows.update(number - 1)
        with force_float64(run):
            engine.forward_backward(batch)
        recorder.before_step(number)
        result = engine.step()
        recorder.after_step(number, batch, result)
    with force_float64(run):
        sums = batch_invariance(engine, rows.update(0))
    if recorder.record is not None:
        recorder.record.write_batch_invariance(sums)
    engine.close()
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(spec.directory) / DONE).write_text(str(clock.now() - started))


def main() -> int:
    """Runs every spec of the file that the command line names."""
    specs = SPECS.validate_json(Path(sys.argv[1]).read_bytes())
    hardware = RunFile.model_validate_json(json.dumps(specs[0].run)).hardware
    quiet_transformers()
    with connect(
        hardware.device, hardware.timeout_seconds, hardware.threads_per_rank, numa_binding=hardware.numa_binding
    ) as connection:
        for spec in specs:
            record_updates(spec, connection.device)
    return 0


if __name__ == "__main__":
    finish(worker_main(main))
