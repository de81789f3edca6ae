"""What a diagnosis rests on: the first numbers that differ, which tensors differ, and the factors that faults make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.layout.axes import Axes
from shardwright.tools.check.compare import TensorNumbers, UpdateComparison
from shardwright.tools.check.hypotheses import Fit
from shardwright.tools.check.record import Notes

_SHIFT = "labels are shifted once, by the loader: neither the model nor the loss may shift them again"
_MEANS = "each part is divided by its own target count; divide the sum once, by all targets of the update"
_LOSS = "the loss: one sum over all targets, divided once by the targets of the whole update"
_NORM = "the squares of the local shards are summed over the ranks that hold different shards, once, before the root"
_TARGETS = "where targets are counted: labels != -100, after the shift, summed once over data ranks and microbatches"
_TIED = "whether embedding and head are still one parameter after sharding, in one unit, and one entry of the optimizer"

LOOK_AT = {
    "accumulated_twice": "what adds up or multiplies the microbatches a second time",
    "averaged": "what still averages: DDP's or fully_shard's own division by the number of ranks, or a ReduceOp.AVG",
    "clipped_early": "gradients are clipped before they are read, or clipped twice",
    "clipping_missing": "whether clipping touches the gradients that the step reads",
    "clipping_twice": "what else clips",
    "decay_in_gradient": "AdamW decays the weights themselves; decay added to the gradient is Adam with L2",
    "decay_missing": "the optimizer's groups: which parameters are in the group with decay",
    "decay_on_excluded": "training.no_decay is matched against the original names and shapes, before sharding changes them",
    "depends_on_neighbours": "what the model computes over the rows of a batch (statistics, experts that are full, routing): "
    "per_device_train_batch_size and the layout change its objective",
    "depends_on_width": "what the model computes over padding or other documents of a row (attention to them, positions "
    "counted over them, tables chosen by the longest row): data.batching and the layout change its objective",
    "different_start": "initial values follow from (seed, name), loaded values from the same file; sharding broadcasts nothing",
    "diverged_replicas": "what differs by rank between reduction and step: norms, clipping, random numbers",
    "divided_again": "what divides by the accumulation steps although the loss is divided by the target tokens already",
    "divided_twice": _TARGETS,
    "documents_see_each_other": "whether `documents` reaches the core attention of every block, in recomputation too",
    "first_microbatch_only": "accumulation: gradients of later microbatches are dropped",
    "frozen_moved": "which parameters the optimizer was given",
    "gradients_not_zeroed": "where gradients are set to None after the step",
    "labels_not_shifted": _SHIFT,
    "labels_shifted_twice": _SHIFT,
    "last_microbatch_only": "accumulation: a gradient that is overwritten, or a boundary set at each backward",
    "loss_not_reduced": _LOSS,
    "loss_report": _LOSS,
    "mean_of_microbatch_means": _MEANS,
    "mean_of_rank_means": _MEANS,
    "mean_of_round_means": _MEANS,
    "never_divided": _TARGETS,
    "no_gradient": "a graph that is cut, or a gradient that is not kept",
    "no_reduction": "whether gradients are reduced at all: sync switched off, or a group of one rank",
    "norm_after_clipping": "report the norm from before clipping",
    "norm_counted_twice": _NORM,
    "norm_is_maximum": "the norm is the 2-norm over all parameters",
    "norm_not_reduced": _NORM,
    "norm_only": f"parameters that are left out or counted twice; {_NORM}",
    "one_unit": "what sets this unit's flags, hooks or groups apart from the other units'",
    "other_microbatches": "how rows are cut, padded and masked",
    "other_parameters": "names after wrapping",
    "other_rows": "the order of the rows, which may depend on seed, epoch and position only",
    "positions_run_on": "position_ids start at 0 in each document, on every rank and stage",
    "same_rows": "which slice of the update's rows each data rank takes: its coordinate on the data axes, not its rank",
    "scaled": "every place that scales the loss or the gradients",
    "schedule_step": "the scheduler advances once per update, after the step: not per microbatch, not per process",
    "sign": "the sign of the loss",
    "small_parameters": "how parameters are cut or reduced that have no dim, or fewer rows than ranks",
    "stale_optimizer": "the optimizer must be made after sharding, from the parameters that the model has then",
    "state_reset": "what makes a new optimizer, or drops its state, between updates",
    "step_scaled": "the learning rate that the step reads, and when the scheduler advances",
    "summed_twice": "what multiplies by the number of ranks (a factor meant to cancel a mean), or a second SUM over the same "
    "ranks",
    "target_across_boundary": "the last token of a document has no target: its label is -100, before rows are packed",
    "tying_lost": _TIED,
    "wrong_target_count": _TARGETS,
}
"""Name of a diagnosis -> where in the code to look."""


@dataclass(frozen=True)
class Diagnosis:
    """A named fault: `evidence` is one sentence with the numbers, `look_at` says where to look."""

    name: str
    evidence: str
    look_at: str


def diagnosis(name: str, evidence: str) -> Diagnosis:
    """A diagnosis of the table."""
    return Diagnosis(name, evidence, LOOK_AT[name])


@dataclass(frozen=True)
class Facts:
    """Everything that a diagnosis may rest on."""

    stage: str
    """What differs first, a key of `diagnose._STAGES`."""
    kind: str
    """Which kind of tensor or scalar."""
    update: UpdateComparison
    numbers: tuple[TensorNumbers, ...]
    """The tensors of the kind that differs."""
    fits: Mapping[str, Fit]
    """`hypotheses.collect_fits` over the tensors that differ."""
    notes: Notes
    axes: Axes
    fit_tolerance: float
    """Relative difference up to which a number matches a hypothesis."""
    unchanged: tuple[str, ...] = ()
    """Parameters that the candidate did not move although the reference did."""
    relative: float = 0.0
    """Relative difference that is allowed."""

    @property
    def microbatches(self) -> int:
        """Microbatches of a data rank in an update."""
        return len(self.notes.microbatch_targets) // self.axes.data_ranks

    @property
    def shards(self) -> int:
        """Ranks over which `fully_shard` divides a parameter."""
        return self.axes.dp_shard * self.axes.cp

    @property
    def differing(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.numbers if t.differs)

    def near(self, value: float, target: float) -> bool:
        return abs(value - target) <= self.fit_tolerance * abs(target)

    def matches(self, label: str, factor: float | None = None) -> Fit | None:
        """The fit of a hypothesis if its residual is small and, where given, its factor is `factor`."""
        found = self.fits.get(label)
        if found is None or not found.residual <= self.fit_tolerance:
            return None
        return found if factor is None or self.near(found.factor, factor) else None


@dataclass(frozen=True)
class Extent:
    """Which tensors differ. special: `tied`, `small`, `unit`, `no_decay` or `decay` where the place is a hint, else empty."""

    text: str
    special: str = ""


def extent(facts: Facts) -> Extent:
    """Which tensors differ: all, the tied ones, one block, small ones, or their number and the first name."""
    names, total = set(facts.differing), len(facts.numbers)
    shapes = {t.name: t.shape for t in facts.numbers}
    shown = f"`{facts.differing[0]}`" if facts.differing else ""
    rest = " ..." if len(names) > 1 else ""
    shard = _one_shard(facts)
    if len(names) == total:
        return Extent(f"all {total} tensors{shard}")
    tied, skipped = {name for group in facts.notes.tied for name in group}, set(facts.notes.no_decay)
    scalars = {name for name, shape in shapes.items() if not shape}
    small = {name for name, shape in shapes.items() if (shape[0] if shape else 1) < facts.shards}
    block = next((b for b in facts.notes.blocks if all(name.startswith(f"{b}.") for name in names)), "")
    if names <= tied:
        # the rows of an embedding that differ are those of the tokens seen, whatever the shards
        return Extent(f"only the tied {shown}", "tied")
    if names <= scalars:
        where, special = f"only {len(names)} of the {len(scalars)} 0-dim tensors ({shown}{rest})", "small"
    elif names <= small:
        fewer = f"fewer rows than the {facts.shards} shards"
        where, special = f"only {len(names)} tensors with {fewer} ({shown}{rest})", "small"
    elif block:
        where, special = f"only {len(names)} tensors of `{block}` ({shown}{rest})", "unit"
    elif names <= skipped:
        of = f"of the {len(skipped)} tensors without weight decay"
        where, special = f"only {len(names)} {of} ({shown}{rest})", "no_decay"
    elif names == set(shapes) - skipped:
        where, special = f"only the {len(names)} tensors with weight decay ({shown}{rest})", "decay"
    else:
        where, special = f"{len(names)} of {total} tensors ({shown}{' first' if rest else ''})", ""
    return Extent(where + shard, special)


def _one_shard(facts: Facts) -> str:
    """`rows of shard 1 of 2` where every differing tensor differs only in the rows of one and the same shard, else empty.

    `fully_shard` gives shard s the rows from s x ceil(rows / shards).
    """
    owners: set[int] = set()
    for t in facts.numbers:
        if t.differs and t.rows is not None and t.shape:
            size = -(-t.shape[0] // facts.shards)
            owners |= {t.rows[0] // size, t.rows[1] // size}
    if facts.shards < 2 or len(owners) != 1:
        return ""
    return f", only in the rows of shard {owners.pop()} of {facts.shards}"


def factors(facts: Facts) -> list[tuple[float, str, str]]:
    """(value, diagnosis, words for the value) of every factor that faults produce, most likely first."""
    d, k, n = facts.axes.data_ranks, facts.microbatches, float(facts.update.reference.target_tokens)
    if facts.update.update == 1:
        n = sum(facts.notes.microbatch_divisors)
    targets = "target tokens" if n == facts.update.reference.target_tokens else "weight of the targets"
    c = facts.update.reference.clip_coefficient
    sizes = {axis: getattr(facts.axes, axis) for axis in ("dp_replicate", "dp_shard", "cp")}
    rows = [
        (float(d), "summed_twice", f"{d} = data ranks"),
        (1 / d, "averaged", f"1/{d} = 1 / data ranks"),
        (1 / k, "divided_again", f"1/{k} = 1 / microbatches per rank"),
        (float(k), "accumulated_twice", f"{k} = microbatches per rank"),
        (1 / (d * k), "averaged", f"1/{d * k} = 1 / (data ranks x microbatches)"),
        (float(d * k), "summed_twice", f"{d * k} = data ranks x microbatches"),
        (n, "never_divided", f"{n:g} = {targets}"),
        (1 / n, "divided_twice", f"1/{n:g} = 1 / {targets}"),
        (c, "clipped_early", f"{c:.6g} = the clip coefficient"),
        (-1.0, "sign", "-1"),
        *((float(size), "summed_twice", f"{size} = {axis}") for axis, size in sizes.items() if size != d),
        *((1 / size, "averaged", f"1/{size} = 1 / {axis}") for axis, size in sizes.items() if size != d),
    ]
    for words, count in facts.notes.other_counts.items():
        rows.append((n / count, "wrong_target_count", f"{n:g}/{count} = {targets} / {words}"))
    return [row for row in rows if row[0] != 1.0]


def explain_factor(facts: Facts, value: float) -> tuple[str, str] | None:
    """(diagnosis, words) of the factor `value`; where several faults give this value, the words name all of them."""
    found = [row for row in factors(facts) if facts.near(value, row[0])]
    return (found[0][1], " or ".join(dict.fromkeys(row[2] for row in found))) if found else None
