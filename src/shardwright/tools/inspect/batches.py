"""What each way of batching makes of the same documents: slots, padding, and targets of an update."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from shardwright.config.schema import RunFile
from shardwright.data.mixture import Mixture
from shardwright.data.order import FILLER, Int64, Order
from shardwright.data.prepare import Prepared, packing_of
from shardwright.data.rows import cut_rows
from shardwright.data.updates import order_over

MODES = ("pad", "bucket", "pack")
_UPDATES = 1000


@dataclass(frozen=True)
class Spread:
    """Least, median, mean and most, and the standard deviation divided by the mean."""

    least: int
    median: float
    mean: float
    most: int
    variation: float

    @classmethod
    def of(cls, values: Int64) -> Spread:
        """The spread of `values`, of which there is at least one."""
        mean = float(values.mean())
        variation = float(values.std() / mean) if mean else 0.0
        return cls(int(values.min()), float(np.median(values)), mean, int(values.max()), variation)


@dataclass(frozen=True)
class Batching:
    """One way of batching over the first epoch, or `updates_seen` evenly spaced updates of it.

    slots: positions that are computed, real: those that hold a token, targets: those that enter the loss, each summed over
    these updates. dropped: pieces without a target, which are in no row.
    """

    batching: str
    rows: int
    updates_of_an_epoch: int
    updates_seen: int
    slots: int
    real: int
    targets: int
    targets_of_an_update: Spread
    truncated_documents: int
    truncated_tokens: int
    dropped: int

    @property
    def padding(self) -> float:
        """The part of the slots that holds no token."""
        return 1 - self.real / self.slots

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self) | {"padding": self.padding, "targets_of_slots": self.targets / self.slots}


def measure(run: RunFile, prepared: Prepared, batching: str) -> Batching:
    """`batching` for the run's documents; widths of bucket without a layout's rounding."""
    data = run.data.model_copy(update={"batching": batching} | ({} if batching == "bucket" else {"bucket_updates": 1}))
    run = run.model_copy(update={"data": data})
    documents = prepared.table.documents
    packing, seed = packing_of(run, prepared.split)
    cut = replace(prepared.table.cut, packing=packing, seed=seed)
    found = cut_rows(np.asarray(documents.ends[:, 0]), cut, documents.weights)
    mixture = prepared.mixture
    if mixture is not None:
        mixture = Mixture(found.bounds, mixture.weights, mixture.seed)
    tokens, targets = found.rows[:, 1], found.rows[:, 2]
    order = order_over(run, len(tokens), tokens.__getitem__, mixture)
    epoch = min(-(-order.rows // order.global_batch_size), order.total_updates)
    seen = np.unique(np.linspace(0, epoch - 1, min(epoch, _UPDATES)).astype(np.int64))
    return Batching(
        batching=batching,
        rows=order.rows,
        updates_of_an_epoch=-(-order.rows // order.global_batch_size),
        updates_seen=len(seen),
        truncated_documents=found.counts["truncated_documents"],
        truncated_tokens=found.counts["truncated_tokens"],
        dropped=found.counts["targetless_rows"],
        **_over(order, seen, tokens, targets, None if batching == "bucket" else cut.max_length, run),
    )


def _over(order: Order, seen: Int64, tokens: Int64, targets: Int64, width: int | None, run: RunFile) -> dict[str, Any]:
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
            widths = np.ones(len(ids) // size, np.int64)  # a microbatch of fillers alone is one position wide
            widths[: -(-len(lengths) // size)] = lengths[::size]
            slots += size * int(widths.sum())
    counts = np.array(per_update)
    return {"slots": slots, "real": real, "targets": int(counts.sum()), "targets_of_an_update": Spread.of(counts)}
