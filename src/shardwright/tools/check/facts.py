"""What a diagnosis rests on: the numbers of what differs first, where it differs, and the factors that faults make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.tools.check.compare import TensorNumbers, UpdateComparison
from shardwright.tools.check.hypotheses import Fit
from shardwright.tools.check.record import Notes


@dataclass(frozen=True)
class Diagnosis:
    """A named fault: `evidence` is one sentence with the numbers, `look_at` where to look."""

    name: str
    evidence: str
    look_at: str


@dataclass(frozen=True)
class Facts:
    """Everything a diagnosis may rest on.

    numbers: the tensors of the failed kind. fits: hypotheses.collect_fits over those that differ. fit_tolerance: relative
    agreement that counts as a match. relative: how far numbers may differ. unchanged: parameters that the candidate did not
    move although the reference did.
    """

    layout: str
    stage: str
    kind: str
    update: UpdateComparison
    numbers: tuple[TensorNumbers, ...]
    fits: Mapping[str, Fit]
    notes: Notes
    data_ranks: int
    dp_replicate: int
    dp_shard: int
    microbatches: int
    fit_tolerance: float
    unchanged: tuple[str, ...] = ()
    cp: int = 1
    relative: float = 0.0

    @property
    def shards(self) -> int:
        """Ranks over which `fully_shard` divides a parameter."""
        return self.dp_shard * self.cp

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
    """Which tensors differ. special: a kind of place that is itself telling, or empty. shard: whose rows, or empty."""

    where: str
    special: str = ""
    shard: str = ""

    @property
    def text(self) -> str:
        return self.where + self.shard


def extent(facts: Facts) -> Extent:
    """Where the differing tensors are: all, only tied ones, one block, small ones, or a plain count with the first."""
    names, total = set(facts.differing), len(facts.numbers)
    shapes = {t.name: t.shape for t in facts.numbers}
    shown = f"`{facts.differing[0]}`" if facts.differing else ""
    rest = " ..." if len(names) > 1 else ""
    if len(names) == total:
        return Extent(f"all {total} tensors", "", _one_shard(facts))
    tied, skipped = {name for group in facts.notes.tied for name in group}, set(facts.notes.no_decay)
    scalars = {name for name, shape in shapes.items() if not shape}
    small = {name for name, shape in shapes.items() if (shape[0] if shape else 1) < facts.shards}
    block = next((b for b in facts.notes.blocks if all(name.startswith(f"{b}.") for name in names)), "")
    if names <= tied:
        where, special = f"only the tied {shown}", "tied"
    elif names <= scalars:
        where, special = f"only {len(names)} of the {len(scalars)} 0-dim tensors ({shown}{rest})", "small"
    elif names <= small:
        where, special = (
            f"only {len(names)} tensors with fewer rows than the {facts.shards} shards ({shown}{rest})",
            "small",
        )
    elif block:
        where, special = f"only {len(names)} tensors of `{block}` ({shown}{rest})", "unit"
    elif names <= skipped:
        where, special = (
            f"only {len(names)} of the {len(skipped)} tensors without weight decay ({shown}{rest})",
            "no_decay",
        )
    elif names == set(shapes) - skipped:
        where, special = f"only the {len(names)} tensors with weight decay ({shown}{rest})", "decay"
    else:
        where, special = f"{len(names)} of {total} tensors ({shown}{' first' if rest else ''})", ""
    # the rows of an embedding that differ are those of the tokens seen, whatever the shards
    return Extent(where, special, "" if special == "tied" else _one_shard(facts))


def _one_shard(facts: Facts) -> str:
    """`rows of shard 1 of 2` where every differing tensor differs only in the rows of one and the same shard, else nothing.

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


def factors(facts: Facts) -> list[tuple[float, str, str, str]]:
    """(value, diagnosis, words for the factor, look at) of every factor that faults produce, most likely first."""
    d, k, n = facts.data_ranks, facts.microbatches, float(facts.update.reference.target_tokens)
    if facts.update.update == 1:
        n = sum(facts.notes.microbatch_divisors)
    targets = "target tokens" if n == facts.update.reference.target_tokens else "weight of the targets"
    c = facts.update.reference.clip_coefficient
    summed = (
        "who multiplies by the number of ranks (a factor meant to cancel a mean), or a second SUM over the same ranks"
    )
    averaged = "who still averages: DDP's or fully_shard's own division by the number of ranks, or a ReduceOp.AVG"
    again = "who divides by the accumulation steps although the loss is divided by the target tokens already"
    denominator = "the target count that divides the loss: labels != -100, summed over all data ranks and microbatches"
    rows = [
        (float(d), "summed_twice", f"{d} = data ranks", summed),
        (1 / d, "averaged", f"1/{d} = 1 / data ranks", averaged),
        (1 / k, "divided_again", f"1/{k} = 1 / microbatches per rank", again),
        (
            float(k),
            "accumulated_twice",
            f"{k} = microbatches per rank",
            "who adds up or multiplies the microbatches a second time",
        ),
        (1 / (d * k), "averaged", f"1/{d * k} = 1 / (data ranks x microbatches)", averaged),
        (float(d * k), "summed_twice", f"{d * k} = data ranks x microbatches", summed),
        (n, "never_divided", f"{n:g} = {targets}", denominator),
        (1 / n, "divided_twice", f"1/{n:g} = 1 / {targets}", denominator),
        (
            c,
            "clipped_early",
            f"{c:.6g} = the clip coefficient",
            "gradients are clipped before they are read, or clipped twice",
        ),
        (-1.0, "sign", "-1", "the sign of the loss"),
    ]
    for size, axis in (
        (facts.dp_replicate, "dp_replicate"),
        (facts.dp_shard, "dp_shard"),
        (facts.cp, "cp"),
    ):
        if size != d:
            rows += [
                (float(size), "summed_twice", f"{size} = {axis}", summed),
                (1 / size, "averaged", f"1/{size} = 1 / {axis}", averaged),
            ]
    rows += [
        (n / count, "wrong_target_count", f"{n:g}/{count} = {targets} / {words}", denominator)
        for words, count in facts.notes.other_counts.items()
    ]
    return [row for row in rows if row[0] != 1.0]


def explain_factor(facts: Facts, value: float) -> tuple[str, str, str] | None:
    """(diagnosis, words, look at) of the factor `value`; where several faults give it, the words name them all."""
    found = [row for row in factors(facts) if facts.near(value, row[0])]
    if not found:
        return None
    words = list(dict.fromkeys(row[2] for row in found))
    return found[0][1], " or ".join(words), found[0][3]
