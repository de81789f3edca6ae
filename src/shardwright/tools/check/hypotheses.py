"""The tensors that a fault would produce, computed from the reference, and how well the candidate agrees with them.

Each hypothesis is a set of tensors. `fit` finds the factor that brings the tensors nearest to the candidate's; a small residual
means that the candidate computed them, up to the factor. diagnose.py reads the fits and decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.tools.check.record import Notes, Record

Tensors = Mapping[str, Tensor]
Beyond = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]
"""{hypothesis: (what is subtracted from the candidate, what the rest should be)}"""


@dataclass(frozen=True)
class Fit:
    """factor s with candidate = s x hypothesis as nearly as possible; residual: max|difference| / max|candidate|."""

    factor: float
    residual: float


def fit(candidate: Tensors, hypothesis: Tensors, names: Iterable[str]) -> Fit | None:
    """How well `hypothesis` explains `candidate` over the tensors of `names`; None where there is nothing to compare."""
    pairs = [
        (candidate[n].double().flatten(), hypothesis[n].double().flatten())
        for n in names
        if n in candidate and n in hypothesis
    ]
    if not pairs:
        return None
    c, h = torch.cat([c for c, _ in pairs]), torch.cat([h for _, h in pairs])
    square, largest = torch.dot(h, h).item(), c.abs().max().item()
    if not square or not largest:
        return None
    factor = torch.dot(h, c).item() / square
    return Fit(factor, (c - factor * h).abs().max().item() / largest)


def gradient_hypotheses(
    probe: Mapping[int, Tensors], divisors: tuple[float, ...], data_ranks: int
) -> dict[str, dict[str, Tensor]]:
    """Gradients of update 1 under the faults that mix microbatches wrongly: {hypothesis: {parameter: gradient}}.

    `probe` holds the sum-gradient of each microbatch by its index and `divisors` what it counts; microbatch k of data
    rank d has index k x data_ranks + d.
    """
    count = len(divisors)
    rounds = count // data_ranks
    of_rank = [[k * data_ranks + d for k in range(rounds)] for d in range(data_ranks)]
    of_round = [[k * data_ranks + d for d in range(data_ranks)] for k in range(rounds)]

    def weighted(weights: Mapping[int, float]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for i, weight in weights.items():
            for name, tensor in probe[i].items():
                total[name] = total.get(name, 0.0) + weight * tensor.double()
        return total

    def mean_of_means(groups: list[list[int]]) -> dict[str, Tensor]:
        counts = [(group, sum(divisors[i] for i in group) or 1.0) for group in groups]
        return weighted({i: 1 / own / len(groups) for group, own in counts for i in group})

    def only(indices: list[int]) -> dict[str, Tensor]:
        return weighted(dict.fromkeys(indices, 1 / sum(divisors)))

    result = {"mean_of_microbatch_means": mean_of_means([[i] for i in range(count)])}
    if rounds > 1:
        result["last_microbatch_only"] = only(of_round[-1])
        result["first_microbatch_only"] = only(of_round[0])
    if rounds > 1 and data_ranks > 1:
        result["mean_of_rank_means"] = mean_of_means(of_rank)
        result["mean_of_round_means"] = mean_of_means(of_round)
    if data_ranks > 1:
        result |= {f"no_reduction:{d}": only(indices) for d, indices in enumerate(of_rank)}
    return result


def state_hypotheses(reference: Record, update: int, notes: Notes, kind: str) -> Beyond:
    """Hypotheses about a first moment; none about other states.

    With m = b m_before + w g: the rest after b m_before is w g times a factor when the clip coefficient is wrong; the
    state itself is w g when it was reset; what is there beyond the reference is w x decay x parameter when decay goes
    through the gradient.
    """
    if kind not in ("exp_avg", "momentum_buffer"):
        return {}
    keep = notes.adam["beta1"] if kind == "exp_avg" else notes.momentum
    new = 1 - keep if kind == "exp_avg" else 1.0
    now = reference.tensors(update, kind).read()
    zero = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    before = zero
    if update > 1:
        before = {name: keep * tensor for name, tensor in reference.tensors(update - 1, kind).read().items()}
    step = {name: tensor - before[name] for name, tensor in now.items()}
    weights = reference.tensors(update - 1, "param").read()
    decay = {name: new * notes.weight_decay * weights[name] for name in now}
    result = {"gradient_scaled": (before, step), "decay_in_gradient": (now, decay)}
    if update > 1:
        result["state_reset"] = (zero, step)
    return result


def parameter_hypotheses(reference: Record, update: int, notes: Notes) -> Beyond:
    """Hypotheses about the parameters after a step.

    step_scaled: the whole movement times a factor. decay_added: -lr x decay x parameter beyond the reference.
    gradient_scaled: -lr x clipped gradient beyond the reference (SGD), the factor being (wrong - right) / right.
    """
    after, before = reference.tensors(update, "param").read(), reference.tensors(update - 1, "param").read()
    scalars = reference.scalars(update)
    rate = scalars.learning_rate
    step = {name: after[name] - before[name] for name in after}
    decay = {name: -rate * notes.weight_decay * before[name] for name in after}
    result = {"step_scaled": (before, step), "decay_added": (after, decay)}
    if notes.optimizer == "sgd":
        clipped, gradients = rate * scalars.clip_coefficient, reference.tensors(update, "grad").read()
        result["gradient_scaled"] = (after, {n: -clipped * g for n, g in gradients.items()})
    return result


def _fit_beyond(candidate: Tensors, hypotheses: Beyond, names: tuple[str, ...]) -> Iterator[tuple[str, Fit | None]]:
    for label, (taken, rest) in hypotheses.items():
        own = {n: candidate[n].double() - taken[n].double() for n in names if n in candidate and n in taken}
        yield label, fit(own, rest, names)


def collect_fits(
    reference: Record, candidate: Record, update: int, kind: str, names: tuple[str, ...], data_ranks: int
) -> dict[str, Fit]:
    """Every hypothesis about tensors of `kind` in `update`, fitted over the tensors `names` that differ."""
    notes = reference.notes()
    own = candidate.tensors(update, kind).read()
    fits: dict[str, Fit | None]
    if kind == "param":
        fits = dict(_fit_beyond(own, parameter_hypotheses(reference, update, notes), names))
    elif kind != "grad":
        fits = dict(_fit_beyond(own, state_hypotheses(reference, update, notes, kind), names))
    else:
        right = reference.tensors(update, "grad").read()
        fits = {"scaled": fit(own, right, names)}
        if update == 1:
            mixed = gradient_hypotheses(reference.probe(), notes.microbatch_divisors, data_ranks)
            fits |= {label: fit(own, tensors, names) for label, tensors in mixed.items()}
        else:
            last = reference.tensors(update - 1, "grad").read()
            fits |= dict(_fit_beyond(own, {"left_over": (right, last)}, names))
    return {label: found for label, found in fits.items() if found is not None}
