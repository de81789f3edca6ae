"""From the numbers of a failed comparison to the name of the fault.

Pure: it sees names, counts, ratios and fits, no tensors. The first thing that differs, in the order in which an update is
computed, decides which faults are looked for; what follows from it is not reported again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from shardwright.tools.check.diagnose_tensors import gradient_faults, parameter_faults, state_faults
from shardwright.tools.check.facts import Diagnosis, Facts, explain_factor, extent


def _rows(facts: Facts) -> Iterable[Diagnosis]:
    ours, theirs = facts.update.reference.microbatches, facts.update.candidate.microbatches
    wanted, taken = (Counter(row for note in notes for row in note.rows if row >= 0) for notes in (ours, theirs))
    doubled, lost = sorted(set(taken - wanted) & set(wanted)), sorted(wanted - taken)
    others = sorted(set(taken) - set(wanted))
    if doubled:
        text = f"{len(doubled)} rows are read more than once (row {doubled[0]}) and {len(lost)} not at all"
        yield Diagnosis(
            "same_rows",
            text,
            "which slice of the update's rows each data rank takes: its coordinate on the data axes, not its rank",
        )
    elif lost or others:
        text = f"{len(lost)} rows of the update are not read and {len(others)} others are ({(lost + others)[0]} first)"
        yield Diagnosis("other_rows", text, "the order of the rows: it may depend on seed, epoch and position only")
    else:
        yield Diagnosis(
            "other_microbatches",
            "the same rows with other microbatches or other target counts",
            "how rows are cut, padded and masked",
        )


def _target_tokens(facts: Facts) -> Iterable[Diagnosis]:
    numbers = facts.update.scalars["target_tokens"]
    n, own = numbers.reference, numbers.candidate
    look_at = "where targets are counted: labels != -100, after the shift, summed once over data ranks and microbatches"
    other = [words for words, count in facts.notes.other_counts.items() if count == own]
    per_rank: dict[int, int] = {}
    for note in facts.update.candidate.microbatches:
        per_rank[note.rank] = per_rank.get(note.rank, 0) + note.targets
    local = [rank for rank, count in per_rank.items() if count == own]
    if other:
        reason = f"that is the number of {' or '.join(other)}"
    elif local:
        reason = f"that is what rank {local[0]} counts by itself"
    elif explained := explain_factor(facts, own / n):
        reason = f"{own / n:.6g} times as many; {explained[1]}"
    else:
        reason = "no count of this run is that number"
    yield Diagnosis(
        "wrong_target_count",
        f"the update is divided by {own:.0f} where {n:.0f} targets are; {reason}",
        look_at,
    )


_MISTAKES = {
    "shifted again": ("labels_shifted_twice", "with labels"),
    "not shifted": ("labels_not_shifted", "with labels"),
    "targets across": ("target_across_boundary", "with"),
    "documents that see": ("documents_see_each_other", "with"),
    "positions that run on": ("positions_run_on", "with"),
}
"""How a note of a mistaken loss begins -> (diagnosis, what is said before the note)."""

_LOOK_AT = {
    "labels_shifted_twice": "labels are shifted once, by the loader: neither the model nor the loss may shift them again",
    "labels_not_shifted": "labels are shifted once, by the loader: neither the model nor the loss may shift them again",
    "target_across_boundary": "the last token of a document has no target: its label is -100, before rows are packed",
    "documents_see_each_other": "whether `documents` reaches the core attention of every block, in recomputation too",
    "positions_run_on": "position_ids start at 0 in each document, on every rank and stage",
}


def _mistaken_losses(facts: Facts) -> Iterable[tuple[str, str, float]]:
    """(diagnosis, words, value) of the losses of update 1 under wrong labels, wrong means and missing reductions."""
    for words, value in facts.notes.other_losses.items():
        name, before = next(found for start, found in _MISTAKES.items() if words.startswith(start))
        yield name, f"{before} {words}", value
    counts, sums, d = facts.notes.microbatch_divisors, facts.notes.microbatch_loss_sums, facts.data_ranks
    total = sum(counts)
    means = [s / (c or 1.0) for s, c in zip(sums, counts)]
    yield "mean_of_microbatch_means", "as the mean of the microbatches' means", sum(means) / len(means)
    if d > 1:
        rank_counts, rank_sums = [sum(counts[r::d]) for r in range(d)], [sum(sums[r::d]) for r in range(d)]
        yield (
            "mean_of_rank_means",
            "as the mean of the ranks' means",
            sum(s / (c or 1.0) for s, c in zip(rank_sums, rank_counts)) / d,
        )
        for rank, (s, c) in enumerate(zip(rank_sums, rank_counts)):
            yield "loss_not_reduced", f"as rank {rank}'s part of the sum", s / total
            yield "loss_not_reduced", f"as rank {rank}'s own mean", s / (c or 1.0)
    if len(counts) > d:
        yield "last_microbatch_only", "in the last microbatch alone", sum(sums[-d:]) / total
        yield (
            "last_microbatch_only",
            "as the mean of the last microbatch alone",
            sum(sums[-d:]) / (sum(counts[-d:]) or 1.0),
        )


def _loss(facts: Facts) -> Iterable[Diagnosis]:
    numbers = facts.update.scalars["loss"]
    gradients_right = not any(t.differs for t in facts.update.tensors.get("grad", ()))
    shown = f"loss {numbers.candidate:.9g} where the reference has {numbers.reference:.9g}"
    report = "; only the report is wrong: the gradients are right" if gradients_right else ""
    if facts.update.update == 1:
        for name, words, value in _mistaken_losses(facts):
            apart = abs(numbers.candidate - value)
            # some faults move the loss by less than what counts as near: then the nearer of the two says which it is
            if facts.near(numbers.candidate, value) and apart < abs(numbers.candidate - numbers.reference) / 2:
                look_at = _LOOK_AT.get(
                    name,
                    "the loss: one sum over all targets, divided once by the targets of the whole update",
                )
                yield Diagnosis(name, f"{shown}; {words} it is {value:.9g}{report}", look_at)
                return
    ratio = numbers.candidate / numbers.reference if numbers.reference else 0.0
    explained = explain_factor(facts, ratio)
    if explained:
        name = "loss_report" if gradients_right else explained[0]
        yield Diagnosis(name, f"{shown}, {ratio:.9g} times; {explained[1]}{report}", explained[2])


def _norm(facts: Facts) -> Iterable[Diagnosis]:
    if any(t.differs for t in facts.update.tensors["grad"]):
        return  # it follows from them
    numbers, theirs = facts.update.scalars["grad_norm"], facts.update.candidate
    shown = f"norm {numbers.candidate:.9g} where the reference has {numbers.reference:.9g}; every gradient is right"
    ratio = numbers.candidate / numbers.reference if numbers.reference else 0.0
    local = [rank for rank, norm in enumerate(theirs.local_norms) if facts.near(numbers.candidate, norm)]
    counts = {
        facts.data_ranks: "data ranks",
        facts.dp_shard: "dp_shard",
        facts.dp_replicate: "dp_replicate",
        facts.cp: "cp",
    }
    rooted = [f"sqrt({size} {words})" for size, words in counts.items() if size > 1 and facts.near(ratio, size**0.5)]
    shrunk = [
        f"1 / sqrt({size} {words})" for size, words in counts.items() if size > 1 and facts.near(ratio, size**-0.5)
    ]
    largest = max((t.candidate_max for t in facts.update.tensors["grad"]), default=0.0)
    look_at = (
        "the squares of the local shards are summed over the ranks that hold different shards, once, before the root"
    )
    if facts.near(ratio, facts.update.reference.clip_coefficient) and facts.update.reference.clip_coefficient < 1:
        yield Diagnosis(
            "norm_after_clipping",
            f"{shown}; it is the norm after clipping",
            "report the norm from before clipping",
        )
    elif rooted:
        yield Diagnosis(
            "norm_counted_twice",
            f"{shown}; the ratio is {' = '.join(rooted)}: whole gradients are counted on each rank",
            look_at,
        )
    elif local:
        yield Diagnosis("norm_not_reduced", f"{shown}; it is what rank {local[0]} has in its own shard", look_at)
    elif facts.near(numbers.candidate, largest):
        yield Diagnosis(
            "norm_is_maximum",
            f"{shown}; it is the largest element",
            "the norm is the 2-norm over all parameters",
        )
    elif shrunk:
        yield Diagnosis("norm_not_reduced", f"{shown}; the ratio is {' = '.join(shrunk)}", look_at)
    else:
        gap = numbers.candidate**2 - numbers.reference**2
        yield Diagnosis(
            "norm_only",
            f"{shown}; the squares differ by {gap:.6g}",
            f"parameters that are left out or counted twice; {look_at}",
        )


def _learning_rate(facts: Facts) -> Iterable[Diagnosis]:
    numbers = facts.update.scalars["learning_rate"]
    steps = [step for step, rate in enumerate(facts.notes.learning_rates) if facts.near(numbers.candidate, rate)]
    own = facts.update.update - 1
    reason = (
        f"that is the rate of scheduler step {min(steps, key=lambda s: abs(s - own))}, this is step {own}"
        if steps
        else "no step of the schedule has it"
    )
    look_at = "the scheduler advances once per update, after it: not per microbatch, not per process"
    yield Diagnosis(
        "schedule_step",
        f"learning rate {numbers.candidate:.9g} where the reference has {numbers.reference:.9g}; {reason}",
        look_at,
    )


def _start(facts: Facts) -> Iterable[Diagnosis]:
    where = extent(facts)
    look_at = "initial values follow from (seed, name), loaded ones from the same file; sharding broadcasts nothing"
    name = "tying_lost" if where.special == "tied" else "different_start"
    yield Diagnosis(name, f"{where.text} differ before the first update", look_at)


def _replicas(facts: Facts) -> Iterable[Diagnosis]:
    theirs = facts.update.candidate
    text = (
        f"ranks that should hold equal weights differ by {theirs.replica_gap:.3g} relative in `{theirs.replica_name}`"
    )
    yield Diagnosis(
        "diverged_replicas",
        text,
        "what differs by rank between reduction and step: norms, clipping, random numbers",
    )


def _company(facts: Facts) -> Iterable[Diagnosis]:
    company = facts.update.company
    if company is None:
        return
    if company.matters(facts.relative) == "neighbours":
        yield Diagnosis(
            "depends_on_neighbours",
            f"a microbatch of {company.rows} rows has the loss sum {company.together:.9g}, the same rows one by one "
            f"{company.one_by_one:.9g}",
            "what the model computes over the rows of a batch (statistics, experts that are full, routing): "
            "per_device_train_batch_size and the layout change its objective",
        )
    else:
        yield Diagnosis(
            "depends_on_width",
            f"whole rows have the loss sum {company.one_by_one:.9g}, their documents each alone {company.alone:.9g}",
            "what the model computes over padding or other documents of a row (attention to them, positions counted over them, "
            "tables chosen by the longest row): data.batching and the layout change its objective",
        )


_STAGES: dict[str, Callable[[Facts], Iterable[Diagnosis]]] = {
    "start": _start,
    "rows": _rows,
    "target_tokens": _target_tokens,
    "loss": _loss,
    "grad": gradient_faults,
    "grad_norm": _norm,
    "learning_rate": _learning_rate,
    "state": state_faults,
    "param": parameter_faults,
    "replicas": _replicas,
    "company": _company,
}


def diagnose(facts: Facts) -> Diagnosis:
    """The fault that the numbers point to; `unknown` with what is known where they allow no name."""
    found = next(iter(_STAGES[facts.stage](facts)), None)
    if found is not None:
        return found
    if facts.stage == "loss":
        return Diagnosis(
            "unknown",
            "the loss differs and no mistaken labels or counts give it",
            "the forward pass and the labels",
        )
    where = extent(facts)
    ratios = sorted(t.ratio for t in facts.numbers if t.differs)
    spread = f"ratios to the reference from {ratios[0]:.6g} to {ratios[-1]:.6g}" if ratios else "no ratios"
    return Diagnosis(
        "unknown",
        f"{where.text} differ in update {facts.update.update}, {spread}",
        f"what changes `{facts.kind}` in this layout",
    )
