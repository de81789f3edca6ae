"""From two records that differ to the first thing that differs and the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.layout.axes import Axes
from shardwright.tools.check.compare import Comparison, TensorNumbers, UpdateComparison
from shardwright.tools.check.diagnose import diagnose
from shardwright.tools.check.facts import Diagnosis, Facts
from shardwright.tools.check.hypotheses import collect_fits
from shardwright.tools.check.record import Record
from shardwright.tools.check.tolerance import Tolerance


@dataclass(frozen=True)
class Finding:
    """Where a layout first departs from the reference. `tensor` is the first differing one, if tensors differ."""

    update: int
    kind: str
    tensor: TensorNumbers | None
    diagnosis: Diagnosis


def explain(
    reference: Record,
    candidate: Record,
    comparison: Comparison,
    tolerance: Tolerance,
    axes: Axes,
    layout: str,
) -> Finding:
    """The first difference of a failed comparison, and its diagnosis.

    When the first thing that differs allows no name, what else differs in the same update is tried too.
    """
    failures = list(comparison.failures())
    first_update = failures[0][0]
    findings = []
    for update, stage, kind in failures:
        if update != first_update:
            break
        facts = _facts(reference, candidate, comparison, tolerance, axes, layout, (update, stage, kind))
        tensor = next((t for t in facts.numbers if t.differs), None)
        findings.append(Finding(update, kind, tensor, diagnose(facts)))
        if findings[-1].diagnosis.name != "unknown":
            break
    named = [finding for finding in findings if finding.diagnosis.name != "unknown"]
    if not named:
        return findings[0]
    return Finding(first_update, findings[0].kind, findings[0].tensor or named[0].tensor, named[0].diagnosis)


def _facts(
    reference: Record,
    candidate: Record,
    comparison: Comparison,
    tolerance: Tolerance,
    axes: Axes,
    layout: str,
    failure: tuple[int, str, str],
) -> Facts:
    update, stage, kind = failure
    at: UpdateComparison = comparison.updates[max(update, 1) - 1]
    numbers = comparison.start if update == 0 else at.tensors.get(kind, ())
    differing = tuple(t.name for t in numbers if t.differs)
    notes, fits = reference.notes(), {}
    if update > 0 and stage in ("grad", "state", "param") and differing:
        fits = collect_fits(reference, candidate, update, kind, differing, axes.data_ranks)
    return Facts(
        layout=layout,
        stage=stage,
        kind=kind,
        update=at,
        numbers=numbers,
        fits=fits,
        notes=notes,
        data_ranks=axes.data_ranks,
        dp_replicate=axes.dp_replicate,
        dp_shard=axes.dp_shard,
        microbatches=len(notes.microbatch_targets) // axes.data_ranks,
        fit_tolerance=tolerance.fit,
        unchanged=_unchanged(reference, candidate, update) if update else (),
        cp=axes.cp,
        relative=tolerance.relative,
    )


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
