"""What each way of batching makes of the same documents: slots, padding, and targets of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from shardwright.config.schema import RunFile
from shardwright.data.arrays import FILLER, Int64
from shardwright.data.mixture import Mixture
from shardwright.data.order import RowOrder
from shardwright.data.packing import make_rows
from shardwright.data.prepare import Prepared, order_over, packing_of
from shardwright.units import counted

MODES = ("pad", "bucket", "pack")
_UPDATES = 1000  # updates that are counted at most


@dataclass(frozen=True)
class Spread:
    """The spread of a number over updates."""

    least: int
    median: float
    mean: float
    most: int
    variation: float  # standard deviation divided by the mean

    @classmethod
    def of(cls, values: Int64) -> Spread:
        """The spread of `values`, of which there is at least one."""
        mean = float(values.mean())
        variation = float(values.std() / mean) if mean else 0.0
        return cls(int(values.min()), float(np.median(values)), mean, int(values.max()), variation)


@dataclass(frozen=True)
class Batching:
    """One way of batching over the first epoch, or over evenly spaced updates of the epoch."""

    batching: str
    rows: int
    updates_of_an_epoch: int
    updates_seen: int  # over which slots, real and targets are summed
    slots: int  # positions that are computed
    real: int  # positions that hold a token
    targets: int  # tokens that enter the loss
    targets_of_an_update: Spread
    truncated_documents: int
    truncated_tokens: int
    dropped: int  # pieces of documents without a target, which are in no row

    @property
    def padding(self) -> float:
        """The fraction of slots that hold no token."""
        return 1 - self.real / self.slots

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self) | {"padding": self.padding, "targets_of_slots": self.targets / self.slots}


def measure(run: RunFile, prepared: Prepared, batching: str) -> Batching:
    """`batching` for the run's documents. The widths of bucket are not rounded up as a layout may do."""
    data = run.data.model_copy(update={"batching": batching} | ({} if batching == "bucket" else {"bucket_updates": 1}))
    run = run.model_copy(update={"data": data})
    documents = prepared.table.documents
    packing, seed = packing_of(run, prepared.split)
    rules = replace(prepared.table.rules, packing=packing, seed=seed)
    found = make_rows(np.asarray(documents.ends[:, 0]), rules, documents.weights)
    mixture = prepared.mixture
    if mixture is not None:
        mixture = Mixture(found.bounds, mixture.weights, mixture.seed)
    tokens, targets = found.rows[:, 1], found.rows[:, 2]
    order = order_over(run, len(tokens), tokens.__getitem__, mixture)
    of_an_epoch = -(-order.rows // order.global_batch_size)
    epoch = min(of_an_epoch, order.total_updates)
    seen = np.unique(np.linspace(0, epoch - 1, min(epoch, _UPDATES)).astype(np.int64))
    return Batching(
        batching=batching,
        rows=order.rows,
        updates_of_an_epoch=of_an_epoch,
        updates_seen=len(seen),
        truncated_documents=found.counts["truncated_documents"],
        truncated_tokens=found.counts["truncated_tokens"],
        dropped=found.counts["targetless_rows"],
        **_over(order, seen, tokens, targets, None if batching == "bucket" else rules.max_length, run),
    )


def _over(
    order: RowOrder, seen: Int64, tokens: Int64, targets: Int64, width: int | None, run: RunFile
) -> dict[str, Any]:
    """The sums over the updates `seen`. width: of every microbatch; None: as wide as its longest row."""
    size = run.training.per_device_train_batch_size
    slots, real, per_update = 0, 0, []
    for update in seen.tolist():
        ids = order.update_rows(update)
        present = ids[ids != FILLER]
        lengths = -np.sort(-tokens[present])
        real += int(lengths.sum())
        per_update.append(int(targets[present].sum()))
        if width is not None:
            slots += len(ids) * width
        else:
            widths = np.ones(len(ids) // size, np.int64)  # a microbatch of filler rows only is one position wide
            widths[: -(-len(lengths) // size)] = lengths[::size]
            slots += size * int(widths.sum())
    return {
        "slots": slots,
        "real": real,
        "targets": sum(per_update),
        "targets_of_an_update": Spread.of(np.array(per_update)),
    }


def batching_lines(found: Sequence[Batching], chosen: str) -> Iterator[str]:
    """One line for each way of batching; `>` marks that of the run file."""
    yield (
        f"  {'batching':<9}{'rows':>10}{'updates':>9}{'slots':>14}{'padding':>9}{'targets/slots':>15}"
        f"{'targets of an update: least, median, most':>44}{'spread':>8}"
    )
    for b in found:
        t = b.targets_of_an_update
        spread = f"{t.least:,}  {t.median:,.0f}  {t.most:,}"
        yield (
            f"{'>' if b.batching == chosen else ' '} {b.batching:<9}{b.rows:>10,}{b.updates_of_an_epoch:>9,}{b.slots:>14,}"
            f"{b.padding:>9.1%}{b.targets / b.slots:>15.1%}{spread:>44}{t.variation:>8.2f}"
        )
    seen = counted(found[0].updates_seen, "update")
    yield f"  Slots, padding and targets are counted over {seen} of an epoch."
    yield "  Spread is the standard deviation of the targets of an update, divided by their mean."
    yield "  Bucket: widths are those of microbatches of per_device_train_batch_size rows, before a layout rounds them up."
