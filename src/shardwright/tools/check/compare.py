"""Reference against candidate: every scalar and tensor of every update, against the allowances of tolerance.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.tools.check.record import BatchInvariance, Record, Scalars
from shardwright.tools.check.tolerance import FLOOR, ParameterAllowance, Tolerance


@dataclass(frozen=True)
class TensorNumbers:
    """One tensor compared; its `relative` difference is difference / scale."""

    name: str
    shape: tuple[int, ...]
    difference: float
    """max|candidate - reference|"""
    scale: float
    used: float
    """Largest share of the allowance; more than 1 fails, and so does NaN."""
    ratio: float
    """Factor s that brings s x reference nearest to the candidate; 0 where the reference is zero."""
    residual: float
    """max|candidate - s x reference| / max|candidate|"""
    candidate_max: float
    """max|candidate|"""
    rows: tuple[int, int] | None = None
    """First and last row (index of dim 0) beyond the allowance."""

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
        return abs(self.candidate - self.reference) / abs(self.reference) if self.reference else abs(self.candidate)

    @property
    def differs(self) -> bool:
        return not self.used <= 1.0


@dataclass(frozen=True)
class UpdateComparison:
    """One update compared."""

    update: int
    reference: Scalars
    candidate: Scalars
    rows_differ: bool
    scalars: dict[str, ScalarNumbers]
    tensors: dict[str, tuple[TensorNumbers, ...]]
    missing: tuple[str, ...] = ()
    """Parameters that the candidate lacks."""
    extra: tuple[str, ...] = ()
    """Parameters that only the candidate has."""
    missing_states: tuple[str, ...] = ()
    """Kinds of state that the candidate's optimizer lacks."""
    batch_invariance: BatchInvariance | None = None
    """Update 1 only, where a row's loss depends on other rows or on padding."""

    def failures(self) -> Iterator[tuple[str, str]]:
        """(what, kind) of everything that differs, in the order in which an update computes; see `diagnose.diagnose`."""
        states = [kind for kind in self.tensors if kind not in ("grad", "param")]
        order: list[tuple[str, str, bool]] = [
            ("rows", "rows", self.rows_differ),
            *((name, name, self.scalars[name].differs) for name in ("target_tokens", "loss")),
            ("batch_invariance", "loss", self.batch_invariance is not None),
            ("grad", "grad", self._differ("grad") or bool(self.missing or self.extra)),
            *((name, name, self.scalars[name].differs) for name in ("grad_norm", "learning_rate")),
            *(("state", kind, self._differ(kind)) for kind in states),
            *(("state", kind, True) for kind in self.missing_states),
            ("param", "param", self._differ("param")),
            ("replicas", "replicas", self.scalars["replicas"].differs),
        ]
        return ((what, kind) for what, kind, differs in order if differs)

    def _differ(self, kind: str) -> bool:
        return any(t.differs for t in self.tensors.get(kind, ()))


@dataclass(frozen=True)
class Comparison:
    """All updates of one layout against the reference."""

    start: tuple[TensorNumbers, ...]
    updates: tuple[UpdateComparison, ...]

    def failures(self) -> Iterator[tuple[int, str, str]]:
        """(update, what, kind) of everything that differs, earliest first; update 0 is the start."""
        if any(t.differs for t in self.start):
            yield 0, "start", "param"
        for update in self.updates:
            for what, kind in update.failures():
                yield update.update, what, kind

    @property
    def passed(self) -> bool:
        return next(self.failures(), None) is None

    def worst(self, kinds: Callable[[str], bool]) -> TensorNumbers | None:
        """The tensor with the largest share of its allowance among the kinds that `kinds` accepts."""
        found = [t for u in self.updates for kind, numbers in u.tensors.items() if kinds(kind) for t in numbers]
        return max(found, key=_severity, default=None)

    def worst_scalar(self, name: str) -> ScalarNumbers:
        """The update in which a scalar is furthest off."""
        return max((u.scalars[name] for u in self.updates), key=_severity)


def _severity(numbers: TensorNumbers | ScalarNumbers) -> float:
    """The used share of the allowance; NaN is the worst."""
    return numbers.used if numbers.used == numbers.used else float("inf")


def compare_tensor(
    name: str, reference: Tensor, candidate: Tensor, allowed: Tensor | float, scale: float
) -> TensorNumbers:
    """The numbers of one tensor; `allowed`: one bound, or one for each element. Another shape uses an infinite share."""
    shape = tuple(reference.shape)
    if shape != tuple(candidate.shape):
        return TensorNumbers(name, shape, float("inf"), scale, float("inf"), 0.0, float("inf"), 0.0)
    if not reference.numel():
        return TensorNumbers(name, shape, 0.0, scale, 0.0, 0.0, 0.0, 0.0)
    r, c = reference.double().flatten(), candidate.double().flatten()
    gap = (c - r).abs()
    bound = allowed.double().flatten() if isinstance(allowed, Tensor) else torch.full_like(gap, allowed)
    square = torch.dot(r, r).item()
    ratio = torch.dot(r, c).item() / square if square else 0.0
    largest = c.abs().max().item()
    wrong = (~(gap <= bound)).reshape(shape[0] if shape else 1, -1).any(dim=1).nonzero().flatten()
    return TensorNumbers(
        name=name,
        shape=shape,
        difference=gap.max().item(),
        scale=scale,
        used=torch.where(gap == 0, 0.0, gap / bound).max().item(),
        ratio=ratio,
        residual=(c - ratio * r).abs().max().item() / largest if largest else 0.0,
        candidate_max=largest,
        rows=(int(wrong[0]), int(wrong[-1])) if len(wrong) else None,
    )


def _compare_scalar(name: str, reference: float, candidate: float, relative: float) -> ScalarNumbers:
    gap = abs(candidate - reference)
    used = gap / (relative * abs(reference)) if relative and reference else (0.0 if gap == 0 else float("inf"))
    return ScalarNumbers(name, reference, candidate, used)


def _furthest(reference: float, values: Sequence[float]) -> float:
    """The value of the rank that is furthest from the reference; not a number counts as furthest."""
    return max(values, key=lambda value: gap if (gap := abs(value - reference)) == gap else float("inf"))


def _rows(scalars: Scalars) -> list[tuple[int, tuple[int, ...], int]]:
    return sorted((note.index, note.rows, note.targets) for note in scalars.microbatches)


class _Comparer:
    """Compares update after update; the allowance grows by what was allowed before."""

    def __init__(self, reference: Record, candidate: Record, tolerance: Tolerance) -> None:
        self.reference, self.candidate, self.tolerance = reference, candidate, tolerance
        notes = reference.notes()
        self.place = {name: index for index, name in enumerate(notes.names)}
        self.allowance = ParameterAllowance(notes, tolerance)
        self.drift = 0.0

    def in_order(self, numbers: Iterable[TensorNumbers]) -> tuple[TensorNumbers, ...]:
        """`numbers` in the order of the model."""
        return tuple(sorted(numbers, key=lambda t: self.place.get(t.name, len(self.place))))

    def start(self) -> tuple[TensorNumbers, ...]:
        """The parameters before the first update, compared exactly."""
        ours, theirs = self.reference.tensors(0, "param"), self.candidate.tensors(0, "param")
        both = (name for name in ours.names if name in theirs.names)
        return self.in_order(compare_tensor(name, ours[name], theirs[name], 0.0, 1.0) for name in both)

    def update(self, number: int) -> UpdateComparison:
        """Update `number`, compared."""
        ours, theirs = self.reference.scalars(number), self.candidate.scalars(number)
        relative = self.tolerance.relative + min(10 * self.drift, 0.1)
        scalars = self._scalars(number, ours, theirs, relative)
        kinds = [kind for kind in self.reference.kinds(number) if kind != "param"]
        held = self.candidate.kinds(number)
        tensors: dict[str, tuple[TensorNumbers, ...]] = {}
        scales: dict[str, dict[str, float]] = {}
        for kind in kinds:
            if kind in held:
                tensors[kind], scales[kind] = self._tensors(number, kind, relative)
        self.allowance.grow(self.reference, number, ours, scales["grad"], relative)
        tensors["param"] = self._parameters(number)
        names, own = (set(record.tensors(number, "param").names) for record in (self.reference, self.candidate))
        sums = self.candidate.batch_invariance() if number == 1 else None
        return UpdateComparison(
            number,
            ours,
            theirs,
            _rows(ours) != _rows(theirs),
            scalars,
            tensors,
            missing=tuple(sorted(names - own)),
            extra=tuple(sorted(own - names)),
            missing_states=tuple(kind for kind in kinds if kind not in held),
            batch_invariance=sums if sums and sums.broken_by(self.tolerance.relative) else None,
        )

    def _scalars(self, number: int, ours: Scalars, theirs: Scalars, relative: float) -> dict[str, ScalarNumbers]:
        loss = _furthest(ours.loss, theirs.losses or (theirs.loss,))
        norm = _furthest(ours.grad_norm, theirs.grad_norms or (theirs.grad_norm,))
        gap, equal = theirs.replica_gap, 8 * number * self.tolerance.master_eps
        return {
            "target_tokens": _compare_scalar("target_tokens", ours.target_tokens, theirs.target_tokens, 0.0),
            "loss": _compare_scalar("loss", ours.loss, loss, self.tolerance.loss),
            "grad_norm": _compare_scalar("grad_norm", ours.grad_norm, norm, relative),
            "learning_rate": _compare_scalar("learning_rate", ours.learning_rate, theirs.learning_rate, 1e-12),
            "replicas": ScalarNumbers("replicas", 0.0, gap, gap / equal),
        }

    def _tensors(self, number: int, kind: str, relative: float) -> tuple[tuple[TensorNumbers, ...], dict[str, float]]:
        """Tensors of a kind whose allowance is one number each, and the scale of each."""
        ours, theirs = self.reference.tensors(number, kind), self.candidate.tensors(number, kind)
        largest = {name: _largest(ours[name]) for name in ours.names}
        overall = max(largest.values(), default=0.0)
        floor = FLOOR**2 if kind == "exp_avg_sq" else FLOOR
        scales = {name: max(value, floor * overall) for name, value in largest.items()}
        share = 0.0 if kind == "step" else self.tolerance.factor(kind) * relative
        both = (name for name in ours.names if name in theirs.names)
        return self.in_order(
            compare_tensor(name, ours[name], theirs[name], share * scales[name], scales[name]) for name in both
        ), scales

    def _parameters(self, number: int) -> tuple[TensorNumbers, ...]:
        """The parameters after the step; sets `drift`, the distance of the two sides / the length of the step."""
        before, after = self.reference.tensors(number - 1, "param"), self.reference.tensors(number, "param")
        own, compared, apart, moved = self.candidate.tensors(number, "param"), [], 0.0, 0.0
        for name in (name for name in after.names if name in own.names):
            value, theirs = after[name], own[name]
            allowed = self.allowance.allowed(name, value, number)
            compared.append(compare_tensor(name, value, theirs, allowed, _largest(value)))
            if value.shape == theirs.shape:
                apart += (theirs.double() - value.double()).square().sum().item()
                moved += (value.double() - before[name].double()).square().sum().item()
        self.drift = (apart / moved) ** 0.5 if moved else 0.0
        return self.in_order(compared)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def compare_records(
    reference: Record, candidate: Record, tolerance: Tolerance, updates: int | None = None
) -> Comparison:
    """All updates of the reference, or its first `updates`, against the candidate's."""
    comparer = _Comparer(reference, candidate, tolerance)
    numbers = reference.updates()[:updates]
    return Comparison(comparer.start(), tuple(comparer.update(number) for number in numbers))
