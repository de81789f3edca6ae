"""From two records that differ to the first thing that differs and the name of the fault.

The diagnosis sees names, counts, ratios and fits, no tensors. The first thing that differs, in the order in which an update
computes, decides which faults are looked for; its consequences are not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shardwright.layout.axes import Axes
from shardwright.tools.check.compare import Comparison, TensorNumbers
from shardwright.tools.check.diagnose_tensors import gradient_faults, parameter_faults, state_faults
from shardwright.tools.check.facts import Diagnosis, Facts, diagnosis, explain_factor, extent
from shardwright.tools.check.hypotheses import collect_fits
from shardwright.tools.check.record import Record
from shardwright.tools.check.tolerance import Tolerance

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """Where a layout first departs from the reference. `tensor`: the first tensor that differs, None where none does."""

    update: int
    kind: str
    tensor: TensorNumbers | None
    diagnosis: Diagnosis


def explain(reference: Record, candidate: Record, comparison: Comparison, tolerance: Tolerance, axes: Axes) -> Finding:
    """The first difference of a failed comparison, and its diagnosis.

    When the first thing that differs allows no name, the other differences of the same update are tried too.
    """
    failures = list(comparison.failures())
    findings: list[Finding] = []
    for update, stage, kind in failures:
        if update != failures[0][0]:
            break
        facts = _facts(reference, candidate, comparison, tolerance, axes, update, stage, kind)
        tensor = next((t for t in facts.numbers if t.differs), None)
        findings.append(Finding(update, kind, tensor, diagnose(facts)))
        if findings[-1].diagnosis.name != UNKNOWN:
            break
    first, last = findings[0], findings[-1]
    if last.diagnosis.name == UNKNOWN:
        return first
    return Finding(first.update, first.kind, first.tensor or last.tensor, last.diagnosis)


def _facts(
    reference: Record,
    candidate: Record,
    comparison: Comparison,
    tolerance: Tolerance,
    axes: Axes,
    update: int,
    stage: str,
    kind: str,
) -> Facts:
    at = comparison.updates[max(update, 1) - 1]
    numbers = comparison.start if update == 0 else at.tensors.get(kind, ())
    differing, fits = tuple(t.name for t in numbers if t.differs), {}
    if update > 0 and stage in ("grad", "state", "param") and differing:
        fits = collect_fits(reference, candidate, update, kind, differing, axes.data_ranks)
    unchanged = _unchanged(reference, candidate, update) if update else ()
    notes, r = reference.notes(), tolerance.relative
    return Facts(stage, kind, at, numbers, fits, notes, axes, tolerance.fit, unchanged, r)


def _unchanged(reference: Record, candidate: Record, update: int) -> tuple[str, ...]:
    """Parameters that the candidate left bit-identical in `update` although the reference moved them."""
    before, after = candidate.tensors(update - 1, "param"), candidate.tensors(update, "param")
    ours_before, ours = reference.tensors(update - 1, "param"), reference.tensors(update, "param")
    both = [name for name in ours.names if name in after.names and name in before.names]
    return tuple(
        name
        for name in both
        if torch.equal(before[name], after[name]) and not torch.equal(ours_before[name], ours[name])
    )


def diagnose(facts: Facts) -> Diagnosis:
    """The fault that the numbers point to; `unknown` with what is known where the numbers allow no name."""
    found = next(_STAGES[facts.stage](facts), None)
    if found is not None:
        return found
    if facts.stage == "loss":
        text = "the loss differs and no mistaken labels or counts give it"
        return Diagnosis(UNKNOWN, text, "the forward pass and the labels")
    ratios = sorted(t.ratio for t in facts.numbers if t.differs)
    spread = f"ratios to the reference from {ratios[0]:.6g} to {ratios[-1]:.6g}" if ratios else "no ratios"
    text = f"{extent(facts).text} differ in update {facts.update.update}, {spread}"
    return Diagnosis(UNKNOWN, text, f"what changes `{facts.kind}` in this layout")


def _start(facts: Facts) -> Iterator[Diagnosis]:
    where = extent(facts)
    name = "tying_lost" if where.special == "tied" else "different_start"
    yield diagnosis(name, f"{where.text} differ before the first update")


def _rows(facts: Facts) -> Iterator[Diagnosis]:
    ours, theirs = facts.update.reference.microbatches, facts.update.candidate.microbatches
    wanted, taken = (Counter(row for note in notes for row in note.rows if row >= 0) for notes in (ours, theirs))
    doubled, lost = sorted(set(taken - wanted) & set(wanted)), sorted(wanted - taken)
    others = sorted(set(taken) - set(wanted))
    if doubled:
        text = f"{len(doubled)} rows are read more than once (row {doubled[0]}) and {len(lost)} not at all"
        yield diagnosis("same_rows", text)
    elif lost or others:
        text = f"{len(lost)} rows of the update are not read and {len(others)} others are ({(lost + others)[0]} first)"
        yield diagnosis("other_rows", text)
    else:
        yield diagnosis("other_microbatches", "the same rows with other microbatches or other target counts")


def _target_tokens(facts: Facts) -> Iterator[Diagnosis]:
    numbers = facts.update.scalars["target_tokens"]
    n, own = numbers.reference, numbers.candidate
    other = [words for words, count in facts.notes.other_counts.items() if count == own]
    per_rank: Counter[int] = Counter()
    for note in facts.update.candidate.microbatches:
        per_rank[note.rank] += note.targets
    local = [rank for rank, count in per_rank.items() if count == own]
    if other:
        reason = f"that is the number of {' or '.join(other)}"
    elif local:
        reason = f"that is what rank {local[0]} counts by itself"
    elif explained := explain_factor(facts, own / n):
        reason = f"{own / n:.6g} times as many; {explained[1]}"
    else:
        reason = "no count of this run is that number"
    text = f"the update is divided by {own:.0f} where {n:.0f} targets are; {reason}"
    yield diagnosis("wrong_target_count", text)


_MISTAKES = {
    "shifted again": ("labels_shifted_twice", "with labels"),
    "not shifted": ("labels_not_shifted", "with labels"),
    "targets across": ("target_across_boundary", "with"),
    "documents that see": ("documents_see_each_other", "with"),
    "positions that run on": ("positions_run_on", "with"),
}
"""How a note of a mistaken loss begins -> (diagnosis, words before the note)."""


def _mistaken_losses(facts: Facts) -> Iterator[tuple[str, str, float]]:
    """(diagnosis, words, value) of the losses of update 1 under wrong labels, wrong means and missing reductions."""
    for words, value in facts.notes.other_losses.items():
        name, before = next(found for start, found in _MISTAKES.items() if words.startswith(start))
        yield name, f"{before} {words}", value
    counts, sums, d = facts.notes.microbatch_divisors, facts.notes.microbatch_loss_sums, facts.axes.data_ranks
    total = sum(counts)

    def mean_of_means(parts: list[slice]) -> float:
        return sum(sum(sums[part]) / (sum(counts[part]) or 1.0) for part in parts) / len(parts)

    single = [slice(i, i + 1) for i in range(len(counts))]
    yield "mean_of_microbatch_means", "as the mean of the microbatches' means", mean_of_means(single)
    if d > 1:
        ranks = [slice(rank, None, d) for rank in range(d)]
        yield "mean_of_rank_means", "as the mean of the ranks' means", mean_of_means(ranks)
        for rank, part in enumerate(ranks):
            yield "loss_not_reduced", f"as rank {rank}'s part of the sum", sum(sums[part]) / total
            yield "loss_not_reduced", f"as rank {rank}'s own mean", mean_of_means([part])
    if len(counts) > d:
        last = slice(-d, None)
        yield "last_microbatch_only", "in the last microbatch alone", sum(sums[last]) / total
        yield "last_microbatch_only", "as the mean of the last microbatch alone", mean_of_means([last])


def _loss(facts: Facts) -> Iterator[Diagnosis]:
    numbers = facts.update.scalars["loss"]
    ours, theirs = numbers.reference, numbers.candidate
    gradients_right = not any(t.differs for t in facts.update.tensors.get("grad", ()))
    shown = f"loss {theirs:.9g} where the reference has {ours:.9g}"
    report = "; only the report is wrong: the gradients are right" if gradients_right else ""
    if facts.update.update == 1:
        for name, words, value in _mistaken_losses(facts):
            # some faults move the loss by less than `near` allows: then the fault's loss must be the nearer of the two
            if facts.near(theirs, value) and abs(theirs - value) < abs(theirs - ours) / 2:
                yield diagnosis(name, f"{shown}; {words} the loss is {value:.9g}{report}")
                return
    ratio = theirs / ours if ours else 0.0
    if explained := explain_factor(facts, ratio):
        name = "loss_report" if gradients_right else explained[0]
        yield diagnosis(name, f"{shown}, {ratio:.9g} times; {explained[1]}{report}")


def _norm(facts: Facts) -> Iterator[Diagnosis]:
    if any(t.differs for t in facts.update.tensors["grad"]):
        return  # the norm follows from the gradients
    numbers, theirs = facts.update.scalars["grad_norm"], facts.update.candidate
    own, right, coefficient = numbers.candidate, numbers.reference, facts.update.reference.clip_coefficient
    shown = f"norm {own:.9g} where the reference has {right:.9g}; every gradient is right"
    ratio = own / right if right else 0.0
    local = [rank for rank, norm in enumerate(theirs.local_norms) if facts.near(own, norm)]
    axes = facts.axes
    sizes = {axes.data_ranks: "data ranks", axes.dp_shard: "dp_shard", axes.dp_replicate: "dp_replicate", axes.cp: "cp"}
    several = [(size, words) for size, words in sizes.items() if size > 1]
    rooted = [f"sqrt({size} {words})" for size, words in several if facts.near(ratio, size**0.5)]
    shrunk = [f"1 / sqrt({size} {words})" for size, words in several if facts.near(ratio, size**-0.5)]
    largest = max((t.candidate_max for t in facts.update.tensors["grad"]), default=0.0)
    if facts.near(ratio, coefficient) and coefficient < 1:
        yield diagnosis("norm_after_clipping", f"{shown}; the number is the norm after clipping")
    elif rooted:
        text = f"{shown}; the ratio is {' = '.join(rooted)}: whole gradients are counted on each rank"
        yield diagnosis("norm_counted_twice", text)
    elif local:
        yield diagnosis("norm_not_reduced", f"{shown}; the number is what rank {local[0]} has in its own shard")
    elif facts.near(own, largest):
        yield diagnosis("norm_is_maximum", f"{shown}; the number is the largest element")
    elif shrunk:
        yield diagnosis("norm_not_reduced", f"{shown}; the ratio is {' = '.join(shrunk)}")
    else:
        yield diagnosis("norm_only", f"{shown}; the squares differ by {own**2 - right**2:.6g}")


def _learning_rate(facts: Facts) -> Iterator[Diagnosis]:
    numbers, own = facts.update.scalars["learning_rate"], facts.update.update - 1
    steps = [step for step, rate in enumerate(facts.notes.learning_rates) if facts.near(numbers.candidate, rate)]
    reason = "no step of the schedule has this rate"
    if steps:
        nearest = min(steps, key=lambda step: abs(step - own))
        reason = f"that is the rate of scheduler step {nearest}, this is step {own}"
    text = f"learning rate {numbers.candidate:.9g} where the reference has {numbers.reference:.9g}; {reason}"
    yield diagnosis("schedule_step", text)


def _replicas(facts: Facts) -> Iterator[Diagnosis]:
    gap, name = facts.update.candidate.replica_gap, facts.update.candidate.replica_name
    yield diagnosis(
        "diverged_replicas", f"ranks that should hold equal weights differ by {gap:.3g} relative in `{name}`"
    )


def _batch_invariance(facts: Facts) -> Iterator[Diagnosis]:
    sums = facts.update.batch_invariance
    if sums is None:
        return
    broken = sums.broken_by(facts.relative)
    if broken == "neighbours":
        text = (
            f"a microbatch of {sums.rows} rows has the loss sum {sums.together:.9g}, the same rows one by one "
            f"{sums.one_by_one:.9g}"
        )
    else:
        text = f"whole rows have the loss sum {sums.one_by_one:.9g}, their documents each alone {sums.alone:.9g}"
    yield diagnosis(f"depends_on_{broken}", text)


_STAGES: dict[str, Callable[[Facts], Iterator[Diagnosis]]] = {
    "start": _start,
    "rows": _rows,
    "target_tokens": _target_tokens,
    "loss": _loss,
    "batch_invariance": _batch_invariance,
    "grad": gradient_faults,
    "grad_norm": _norm,
    "learning_rate": _learning_rate,
    "state": state_faults,
    "param": parameter_faults,
    "replicas": _replicas,
}
"""Compared quantity -> its faults, in the order in which an update computes."""
