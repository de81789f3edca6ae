"""Faults that show in tensors: gradients before clipping, optimizer states and parameters after the step."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.tools.check.facts import Diagnosis, Facts, explain_factor, extent
from shardwright.tools.check.hypotheses import Fit


def gradient_faults(facts: Facts) -> Iterable[Diagnosis]:
    u, where = facts.update, extent(facts)
    tied = {name for group in facts.notes.tied for name in group}
    if u.missing or u.extra:
        odd = (*u.missing, *u.extra)
        if set(odd) <= tied:
            yield Diagnosis(
                "tying_lost",
                f"the candidate {'lacks' if u.missing else 'has its own'} `{odd[0]}`, which is tied to another parameter",
                "whether embedding and head are still one parameter after sharding, and one entry of the optimizer",
            )
        else:
            yield Diagnosis(
                "other_parameters",
                f"missing: {list(u.missing)[:3]}, extra: {list(u.extra)[:3]}",
                "names after wrapping",
            )
        return
    mechanism = _mechanism(facts)
    if where.special == "tied" and mechanism is None:
        yield Diagnosis(
            "tying_lost",
            f"{where.text} differs: one of its uses is missing from the gradient",
            "whether embedding and head are still one parameter after sharding, and in one unit",
        )
    elif where.special == "small":
        how = f": {mechanism.evidence}" if mechanism else ""
        yield Diagnosis(
            "small_parameters",
            f"{where.text} differ{how}",
            "how parameters are cut or reduced that have no dim, or fewer rows than ranks",
        )
    elif where.special == "unit":
        how = f": {mechanism.evidence}" if mechanism else ""
        yield Diagnosis(
            "one_unit",
            f"{where.text} differ{how}",
            "what sets this unit's flags, hooks or groups apart from the other units'",
        )
    elif mechanism is not None:
        yield mechanism


def _mechanism(facts: Facts) -> Diagnosis | None:
    """What was done to the gradients that differ, if the numbers allow a name."""
    where = extent(facts).text
    differing = [t for t in facts.numbers if t.differs]
    if differing and all(t.candidate_max == 0 for t in differing):
        return Diagnosis(
            "no_gradient",
            f"the gradient is zero in {where}",
            "a graph that is cut, or a gradient that is not kept",
        )
    scaled = facts.matches("scaled")
    explained = explain_factor(facts, scaled.factor) if scaled else None
    if scaled and explained:
        name, words, look_at = explained
        return Diagnosis(name, f"gradients are {scaled.factor:.9g} times the reference in {where}; {words}", look_at)
    if left := facts.matches("left_over"):
        text = f"gradients contain {left.factor:.6g} times those of the update before in {where}"
        return Diagnosis("gradients_not_zeroed", text, "where gradients are set to None after the step")
    for label, found in facts.fits.items():
        mixed = _mixed(facts, label, found, where)
        if mixed is not None:
            return mixed
    if scaled:
        text = f"gradients are {scaled.factor:.9g} times the reference in {where}; no count of this run has that ratio"
        return Diagnosis("scaled", text, "every place that scales the loss or the gradients")
    return None


def _mixed(facts: Facts, label: str, found: Fit, where: str) -> Diagnosis | None:
    """The diagnosis of one hypothesis about how microbatches were put together."""
    if label in ("scaled", "left_over") or not found.residual <= facts.fit_tolerance:
        return None
    counts, targets = facts.notes.microbatch_divisors, facts.notes.microbatch_targets
    shown = f"[{', '.join(f'{count:g}' for count in counts[:8])}]{' ...' if len(counts) > 8 else ''}"
    kind = "targets" if counts == targets else "weights of targets"
    means = f"each part is divided by its own count ({kind} by microbatch {shown}); divide the sum once, by"
    texts = {
        "mean_of_microbatch_means": (
            "the mean of the means of single microbatches",
            f"{means} all targets of the update",
        ),
        "mean_of_rank_means": ("the mean of the ranks' means", f"{means} all targets of all ranks"),
        "mean_of_round_means": (
            "the mean over accumulation steps of means over ranks",
            f"{means} all targets of all microbatches",
        ),
        "last_microbatch_only": (
            "the last microbatch alone",
            "accumulation: a gradient that is overwritten, or a boundary set at each backward",
        ),
        "first_microbatch_only": (
            "the first microbatch alone",
            "accumulation: gradients of later microbatches are dropped",
        ),
    }
    name, _, rank = label.partition(":")
    if name == "no_reduction":
        what = (
            f"what data rank {rank} has by itself",
            "whether gradients are reduced at all: sync switched off, or a group of one rank",
        )
    else:
        what = texts[name]
    explained = explain_factor(facts, found.factor)
    times = (
        ""
        if facts.near(found.factor, 1.0)
        else f" times {found.factor:.6g}" + (f" ({explained[1]})" if explained else "")
    )
    if times and not explained:
        return None
    return Diagnosis(name, f"gradients equal {what[0]}{times} (residual {found.residual:.1e}) in {where}", what[1])


def state_faults(facts: Facts) -> Iterable[Diagnosis]:
    if facts.unchanged and facts.kind in facts.update.missing_states:
        yield _stale(f"{len(facts.unchanged)} parameters, and there is no `{facts.kind}`")
        return
    where, c = extent(facts).text, facts.update.reference.clip_coefficient
    yield from _clipping(facts, where)
    if facts.matches("state_reset", 1.0):
        yield Diagnosis(
            "state_reset",
            f"`{facts.kind}` holds this update's gradient only, in {where}",
            "who makes a new optimizer, or drops its state, between updates",
        )
    elif facts.matches("decay_in_gradient", 1.0) or facts.matches("decay_in_gradient", c):
        text = f"`{facts.kind}` contains weight decay x parameter in {where}"
        yield Diagnosis(
            "decay_in_gradient",
            text,
            "AdamW decays the weights themselves; decay added to the gradient is Adam with L2",
        )


def _clipping(facts: Facts, where: str) -> Iterable[Diagnosis]:
    """Clipping faults, from the factor between the gradient the optimizer used and the one it should have used."""
    c, found = facts.update.reference.clip_coefficient, facts.matches("gradient_scaled")
    if found is None or c >= 1:
        return
    factor = found.factor if facts.stage == "state" else 1 + found.factor
    shown = f"the optimizer used gradients {factor:.9g} times those of the reference in {where}"
    if facts.near(factor, 1 / c):
        yield Diagnosis(
            "clipping_missing",
            f"{shown}; that is 1 / the clip coefficient {c:.6g}",
            "whether clipping touches the gradients that the step reads",
        )
    elif facts.near(factor, c):
        yield Diagnosis("clipping_twice", f"{shown}; that is the clip coefficient once more", "who else clips")


def _stale(where: str) -> Diagnosis:
    look_at = "the optimizer must be made after sharding, from the parameters that the model has then"
    return Diagnosis("stale_optimizer", f"the step moved nothing in {where}", look_at)


def parameter_faults(facts: Facts) -> Iterable[Diagnosis]:
    where, names = extent(facts), set(facts.differing)
    frozen = names & set(facts.notes.frozen)
    rate = facts.update.reference.learning_rate
    if frozen == names:
        yield Diagnosis(
            "frozen_moved",
            f"{len(frozen)} frozen parameters moved (`{min(frozen)}`)",
            "which parameters the optimizer was given",
        )
        return
    if names <= set(facts.unchanged):
        yield _stale(where.text)
        return
    clipped = list(_clipping(facts, where.text))
    if clipped:
        yield from clipped
    elif facts.matches("decay_added", 1.0) and names <= set(facts.notes.no_decay):
        added = f"-lr x weight_decay x parameter ({rate:g} x {facts.notes.weight_decay:g})"
        text = f"{where.text} moved by {added} more than the reference"
        yield Diagnosis(
            "decay_on_excluded",
            text,
            "training.no_decay is matched against the original names and shapes, before sharding changes them",
        )
    elif facts.matches("decay_added", -1.0):
        text = f"weight decay {facts.notes.weight_decay:g} is missing from {where.text}"
        yield Diagnosis("decay_missing", text, "the optimizer's groups: which parameters are in the group with decay")
    elif step := facts.matches("step_scaled"):
        steps = [i for i, r in enumerate(facts.notes.learning_rates) if rate and facts.near(step.factor, r / rate)]
        reason = f"; scheduler step {steps[0]} has that rate, this is step {facts.update.update - 1}" if steps else ""
        name = "schedule_step" if steps else "step_scaled"
        text = f"the step is {step.factor:.9g} times the reference's in {where.text}, with the same moments{reason}"
        yield Diagnosis(name, text, "the learning rate that the step reads, and when the scheduler advances")
