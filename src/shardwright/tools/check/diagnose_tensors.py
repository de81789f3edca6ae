"""Faults that show in tensors: gradients before clipping, optimizer states and parameters after the step."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.tools.check.facts import Diagnosis, Facts, diagnosis, explain_factor, extent
from shardwright.tools.check.hypotheses import Fit

_MIXED = {
    "mean_of_microbatch_means": "the mean of the means of single microbatches",
    "mean_of_rank_means": "the mean of the ranks' means",
    "mean_of_round_means": "the mean over accumulation steps of means over ranks",
    "last_microbatch_only": "the last microbatch alone",
    "first_microbatch_only": "the first microbatch alone",
    "no_reduction": "the gradient of one data rank alone",
}
"""Hypothesis about how microbatches were combined -> the gradients under this hypothesis."""


def gradient_faults(facts: Facts) -> Iterator[Diagnosis]:
    u, where = facts.update, extent(facts)
    tied = {name for group in facts.notes.tied for name in group}
    if odd := (*u.missing, *u.extra):
        if set(odd) <= tied:
            has = "lacks" if u.missing else "has its own"
            yield diagnosis("tying_lost", f"the candidate {has} `{odd[0]}`, which is tied to another parameter")
        else:
            yield diagnosis("other_parameters", f"missing: {list(u.missing)[:3]}, extra: {list(u.extra)[:3]}")
        return
    mechanism = _mechanism(facts, where.text)
    how = f": {mechanism.evidence}" if mechanism else ""
    if where.special == "tied" and mechanism is None:
        yield diagnosis("tying_lost", f"{where.text} differs: one of its uses is missing from the gradient")
    elif where.special == "small":
        yield diagnosis("small_parameters", f"{where.text} differ{how}")
    elif where.special == "unit":
        yield diagnosis("one_unit", f"{where.text} differ{how}")
    elif mechanism is not None:
        yield mechanism


def _mechanism(facts: Facts, where: str) -> Diagnosis | None:
    """The fault in the gradients that differ, if the numbers allow a name."""
    differing = [t for t in facts.numbers if t.differs]
    if differing and all(t.candidate_max == 0 for t in differing):
        return diagnosis("no_gradient", f"the gradient is zero in {where}")
    scaled = facts.matches("scaled")
    explained = explain_factor(facts, scaled.factor) if scaled else None
    if scaled and explained:
        return diagnosis(
            explained[0], f"gradients are {scaled.factor:.9g} times the reference in {where}; {explained[1]}"
        )
    if left := facts.matches("left_over"):
        text = f"gradients contain {left.factor:.6g} times those of the update before in {where}"
        return diagnosis("gradients_not_zeroed", text)
    for label, found in facts.fits.items():
        if (mixed := _mixed(facts, label, found, where)) is not None:
            return mixed
    if scaled:
        text = f"gradients are {scaled.factor:.9g} times the reference in {where}; no count of this run has that ratio"
        return diagnosis("scaled", text)
    return None


def _mixed(facts: Facts, label: str, found: Fit, where: str) -> Diagnosis | None:
    """The diagnosis of one hypothesis about how microbatches were combined."""
    name, _, rank = label.partition(":")
    if name not in _MIXED or not found.residual <= facts.fit_tolerance:
        return None
    counts, targets = facts.notes.microbatch_divisors, facts.notes.microbatch_targets
    kind = "targets" if counts == targets else "weights of targets"
    shown = f"[{', '.join(f'{count:g}' for count in counts[:8])}]{' ...' if len(counts) > 8 else ''}"
    what = f"the gradient of data rank {rank} alone" if rank else _MIXED[name]
    parts = f"; {kind} by microbatch: {shown}" if name.startswith("mean_of") else ""
    times = ""
    if not facts.near(found.factor, 1.0):
        explained = explain_factor(facts, found.factor)
        if not explained:
            return None
        times = f" times {found.factor:.6g} ({explained[1]})"
    return diagnosis(name, f"gradients equal {what}{times} (residual {found.residual:.1e}) in {where}{parts}")


def state_faults(facts: Facts) -> Iterator[Diagnosis]:
    if facts.unchanged and facts.kind in facts.update.missing_states:
        yield _stale(f"{len(facts.unchanged)} parameters, and there is no `{facts.kind}`")
        return
    where, c = extent(facts).text, facts.update.reference.clip_coefficient
    yield from _clipping(facts, where)
    if facts.matches("state_reset", 1.0):
        yield diagnosis("state_reset", f"`{facts.kind}` holds this update's gradient only, in {where}")
    elif facts.matches("decay_in_gradient", 1.0) or facts.matches("decay_in_gradient", c):
        yield diagnosis("decay_in_gradient", f"`{facts.kind}` contains weight decay x parameter in {where}")


def _clipping(facts: Facts, where: str) -> Iterator[Diagnosis]:
    """Clipping faults, from the factor between the gradient that the optimizer used and the right one."""
    c, found = facts.update.reference.clip_coefficient, facts.matches("gradient_scaled")
    if found is None or c >= 1:
        return
    factor = found.factor if facts.stage == "state" else 1 + found.factor
    shown = f"the optimizer used gradients {factor:.9g} times those of the reference in {where}"
    if facts.near(factor, 1 / c):
        yield diagnosis("clipping_missing", f"{shown}; that is 1 / the clip coefficient {c:.6g}")
    elif facts.near(factor, c):
        yield diagnosis("clipping_twice", f"{shown}; that is the clip coefficient once more")


def _stale(where: str) -> Diagnosis:
    return diagnosis("stale_optimizer", f"the step moved nothing in {where}")


def parameter_faults(facts: Facts) -> Iterator[Diagnosis]:
    where, names = extent(facts).text, set(facts.differing)
    frozen = names & set(facts.notes.frozen)
    rate, decay = facts.update.reference.learning_rate, facts.notes.weight_decay
    if frozen == names:
        yield diagnosis("frozen_moved", f"{len(frozen)} frozen parameters moved (`{min(frozen)}`)")
    elif names <= set(facts.unchanged):
        yield _stale(where)
    elif clipped := list(_clipping(facts, where)):
        yield from clipped
    elif facts.matches("decay_added", 1.0) and names <= set(facts.notes.no_decay):
        added = f"-lr x weight_decay x parameter ({rate:g} x {decay:g})"
        yield diagnosis("decay_on_excluded", f"{where} moved by {added} more than the reference")
    elif facts.matches("decay_added", -1.0):
        yield diagnosis("decay_missing", f"weight decay {decay:g} is missing from {where}")
    elif step := facts.matches("step_scaled"):
        steps = [i for i, r in enumerate(facts.notes.learning_rates) if rate and facts.near(step.factor, r / rate)]
        reason = f"; scheduler step {steps[0]} has that rate, this is step {facts.update.update - 1}" if steps else ""
        text = f"the step is {step.factor:.9g} times the reference's in {where}, with the same moments{reason}"
        yield diagnosis("schedule_step" if steps else "step_scaled", text)
