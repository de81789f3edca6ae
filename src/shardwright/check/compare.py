"""Reference against candidate: every scalar and tensor of every update, against the allowances of tolerance.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwright.check.record import Notes, Record, Scalars
from shardwright.check.tolerance import FLOOR, Tolerance

Stage = Literal[
    "start", "rows", "target_tokens", "loss", "grad", "grad_norm", "learning_rate", "state", "param"
]


@dataclass(frozen=True)
class TensorNumbers:
    """One tensor compared.

    difference: max|candidate - reference|; scale: what `relative` = difference / scale refers to; used: the largest
    share of the allowance (1 or less passes; not a number fails). ratio: the factor s that brings s x reference
    nearest to the candidate (0 where the reference is zero); residual: max|candidate - s x reference| / max|candidate|.
    """

    name: str
    shape: tuple[int, ...]
    difference: float
    scale: float
    used: float
    ratio: float
    residual: float
    reference_max: float
    candidate_max: float

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else 0.0

    @property
    def differs(self) -> bool:
        return not self.used <= 1.0


@dataclass(frozen=True)
class ScalarNumbers:
    """One scalar compared; `used` as for tensors."""

    name: str
    reference: float
    candidate: float
    used: float

    @property
    def relative(self) -> float:
        return (
            abs(self.candidate - self.reference) / abs(self.reference)
            if self.reference
            else abs(self.candidate)
        )

    @property
    def differs(self) -> bool:
        return not self.used <= 1.0


@dataclass(frozen=True)
class UpdateComparison:
    """One update compared. `missing` and `extra` are names that only the reference or only the candidate has."""

    update: int
    reference: Scalars
    candidate: Scalars
    rows_differ: bool
    scalars: dict[str, ScalarNumbers]
    tensors: dict[str, tuple[TensorNumbers, ...]]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def failed_stages(self) -> Iterator[tuple[Stage, str]]:
        """(stage, kind) of everything that differs, in the order in which an update is computed."""
        if self.rows_differ:
            yield "rows", "rows"
        for stage in ("target_tokens", "loss"):
            if self.scalars[stage].differs:
                yield stage, stage  # type: ignore[misc]
        if any(t.differs for t in self.tensors.get("grad", ())) or self.missing or self.extra:
            yield "grad", "grad"
        for stage in ("grad_norm", "learning_rate"):
            if self.scalars[stage].differs:
                yield stage, stage  # type: ignore[misc]
        for kind, numbers in self.tensors.items():
            if kind not in ("grad", "param") and any(t.differs for t in numbers):
                yield "state", kind
        if any(t.differs for t in self.tensors.get("param", ())):
            yield "param", "param"


@dataclass(frozen=True)
class Comparison:
    """All updates of one layout against the reference."""

    start: tuple[TensorNumbers, ...]
    updates: tuple[UpdateComparison, ...]

    def failures(self) -> Iterator[tuple[int, Stage, str]]:
        """(update, stage, kind) of everything that differs, earliest first; update 0 is the start."""
        if any(t.differs for t in self.start):
            yield 0, "start", "param"
        for update in self.updates:
            for stage, kind in update.failed_stages():
                yield update.update, stage, kind

    @property
    def passed(self) -> bool:
        return next(self.failures(), None) is None

    def worst(self, kinds: Callable[[str], bool]) -> TensorNumbers | None:
        """The tensor with the largest share of its allowance among the kinds that `kinds` accepts."""
        found = [
            t for u in self.updates for kind, numbers in u.tensors.items() if kinds(kind) for t in numbers
        ]
        return max(found, key=lambda t: t.used if t.used == t.used else float("inf"), default=None)

    def worst_scalar(self, name: str) -> ScalarNumbers:
        """The update in which a scalar is furthest off."""
        return max(
            (u.scalars[name] for u in self.updates),
            key=lambda s: s.used if s.used == s.used else float("inf"),
        )


def compare_tensor(
    name: str, reference: Tensor, candidate: Tensor, allowed: Tensor | float, scale: float
) -> TensorNumbers:
    """The numbers of one tensor; `allowed` is one bound or one for each element. A shape that differs uses infinitely much."""
    shape = tuple(reference.shape)
    r, c = reference.double().flatten(), candidate.double().flatten()
    if shape != tuple(candidate.shape) or not r.numel():
        wrong = shape != tuple(candidate.shape)
        return TensorNumbers(
            name,
            shape,
            float("inf") if wrong else 0.0,
            scale,
            float("inf") if wrong else 0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        )
    gap = (c - r).abs()
    bound = allowed.double().flatten() if isinstance(allowed, Tensor) else torch.full_like(gap, allowed)
    used = torch.where(gap == 0, 0.0, gap / bound).max().item()
    square = torch.dot(r, r).item()
    ratio = torch.dot(r, c).item() / square if square else 0.0
    c_max = c.abs().max().item()
    residual = (c - ratio * r).abs().max().item() / c_max if c_max else 0.0
    return TensorNumbers(
        name, shape, gap.max().item(), scale, used, ratio, residual, r.abs().max().item(), c_max
    )


def _compare_scalar(name: str, reference: float, candidate: float, relative: float) -> ScalarNumbers:
    gap = abs(candidate - reference)
    used = (
        gap / (relative * abs(reference)) if relative and reference else (0.0 if gap == 0 else float("inf"))
    )
    return ScalarNumbers(name, reference, candidate, used)


class _ParameterAllowance:
    """The allowed difference of each parameter, grown from update to update as tolerance.py derives it."""

    def __init__(self, notes: Notes, tolerance: Tolerance) -> None:
        self.notes, self.tolerance = notes, tolerance
        self.grown: dict[str, Tensor] = {}
        self.gradient: dict[str, float] = {}

    def grow(self, record: Record, update: int, scalars: Scalars, gradient_scales: dict[str, float]) -> None:
        """Adds what update `update` may contribute; `gradient_scales` are those the gradients were compared with."""
        states = {
            kind: record.tensors(update, kind)
            for kind in record.kinds(update)
            if kind not in ("grad", "param")
        }
        for name, scale in gradient_scales.items():
            clipped = 2 * self.tolerance.relative * scale * scalars.clip_coefficient
            self.gradient[name] = max(self.gradient.get(name, 0.0), clipped)
            held = {kind: file[name] for kind, file in states.items() if name in file.names}
            step = scalars.learning_rate * self._step(self.gradient[name], held, update)
            self.grown[name] = self.grown.get(name, 0.0) + step  # type: ignore[assignment]

    def _step(self, gradient: float, state: dict[str, Tensor], update: int) -> Tensor:
        if "exp_avg" not in state:
            # 10 for optimizers that are neither: an orthogonalised or normalised step magnifies by its own scale.
            return torch.tensor(
                gradient / (1 - self.notes.momentum) * (1 if self.notes.optimizer == "sgd" else 10),
                dtype=torch.float64,
            )
        beta1, beta2, epsilon = (self.notes.adam[key] for key in ("beta1", "beta2", "epsilon"))
        m = state["exp_avg"].double() / (1 - beta1**update)
        root = (state["exp_avg_sq"].double() / (1 - beta2**update)).sqrt() + epsilon
        u = (m / root).abs()
        sensitive = torch.minimum(gradient * (1 + u) / root, 2 * u.clamp(min=1.0))
        return sensitive + self.tolerance.relative * u

    def allowed(self, name: str, reference: Tensor, update: int) -> Tensor:
        rounding = 8 * update * self.tolerance.master_eps * reference.abs().max().double()
        return (rounding + self.grown.get(name, torch.zeros((), dtype=torch.float64))).expand(reference.shape)


def _largest(record: Record, update: int, kind: str) -> dict[str, float]:
    file = record.tensors(update, kind)
    return {name: file[name].abs().max().item() if file[name].numel() else 0.0 for name in file.names}


def _compare_kind(
    reference: Record, candidate: Record, update: int, kind: str, tolerance: Tolerance
) -> tuple[tuple[TensorNumbers, ...], dict[str, float]]:
    """Tensors of a kind whose allowance is one number each, and the scale of each."""
    largest = _largest(reference, update, kind)
    overall = max(largest.values(), default=0.0)
    floor = FLOOR**2 if kind == "exp_avg_sq" else FLOOR
    scales = {name: max(value, floor * overall) for name, value in largest.items()}
    ours, theirs = reference.tensors(update, kind), candidate.tensors(update, kind)
    share = 0.0 if kind == "step" else tolerance.share(kind)
    both = (name for name in ours.names if name in theirs.names)
    return tuple(
        compare_tensor(name, ours[name], theirs[name], share * scales[name], scales[name]) for name in both
    ), scales


def _rows(scalars: Scalars) -> list[tuple[int, tuple[int, ...], int]]:
    return sorted((note.index, note.rows, note.targets) for note in scalars.microbatches)


def _compare_update(
    reference: Record, candidate: Record, update: int, tolerance: Tolerance, allowance: _ParameterAllowance
) -> UpdateComparison:
    ours, theirs = reference.scalars(update), candidate.scalars(update)
    r = tolerance.relative
    scalars = {
        "target_tokens": _compare_scalar("target_tokens", ours.target_tokens, theirs.target_tokens, 0.0),
        "loss": _compare_scalar("loss", ours.loss, theirs.loss, r),
        "grad_norm": _compare_scalar("grad_norm", ours.grad_norm, theirs.grad_norm, r),
        "learning_rate": _compare_scalar("learning_rate", ours.learning_rate, theirs.learning_rate, 1e-12),
    }
    tensors: dict[str, tuple[TensorNumbers, ...]] = {}
    names = set(reference.tensors(update, "param").names), set(candidate.tensors(update, "param").names)
    kinds = [kind for kind in reference.kinds(update) if kind != "param"]
    tensors["grad"], gradient_scales = _compare_kind(reference, candidate, update, "grad", tolerance)
    lacking = {kind for kind in kinds if kind not in candidate.kinds(update)}
    for kind in kinds:
        if kind != "grad" and kind not in lacking:
            tensors[kind], _ = _compare_kind(reference, candidate, update, kind, tolerance)
    allowance.grow(reference, update, ours, gradient_scales)
    after, own = reference.tensors(update, "param"), candidate.tensors(update, "param")
    compared = []
    for name in (name for name in after.names if name in own.names):
        value = after[name]
        scale = value.abs().max().item() if value.numel() else 0.0
        compared.append(compare_tensor(name, value, own[name], allowance.allowed(name, value, update), scale))
    tensors["param"] = tuple(compared)
    missing, extra = sorted(names[0] - names[1]) + sorted(lacking), sorted(names[1] - names[0])
    return UpdateComparison(
        update, ours, theirs, _rows(ours) != _rows(theirs), scalars, tensors, tuple(missing), tuple(extra)
    )


def compare_records(reference: Record, candidate: Record, tolerance: Tolerance) -> Comparison:
    """All updates that the reference has, compared with the candidate's; the start is compared exactly."""
    ours, theirs = reference.tensors(0, "param"), candidate.tensors(0, "param")
    start = tuple(
        compare_tensor(name, ours[name], theirs[name], 0.0, 1.0)
        for name in ours.names
        if name in theirs.names
    )
    allowance = _ParameterAllowance(reference.notes(), tolerance)
    updates = tuple(
        _compare_update(reference, candidate, update, tolerance, allowance) for update in reference.updates()
    )
    return Comparison(start, updates)
