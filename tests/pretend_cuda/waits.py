"""How often the host waits for the device in one update, by configuration: the budget, and what is found.

`python -m tests.pretend_cuda.waits` prints the table, with the stack of each wait. `--source` takes another tree's source.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.pretend_cuda.running import HOLDS_UP, pretend_ranks, unavailable
from tests.started import PATIENCE

STEADY = 1
"""The update that is counted, of three: the first makes the optimizer's state, and the run ends after the last."""
Found = list[tuple[str, str, str, int]]
"""(kind, what, stack, how often) of what was noted in an update."""


@dataclass(frozen=True)
class Budget:
    """A configuration as in `tests/pretend_cuda/sweep.py`, and how often the host may wait for the device in one update."""

    case: dict[str, Any]
    waits: int = 0


BUDGETS = {
    "ddp": Budget({}),
    "zero1": Budget({"layout": "zero1"}),
    "zero2": Budget({"layout": "zero2"}),
    "zero3": Budget({"layout": "zero3"}),
    "ddp + tp2": Budget({"tp": 2}),
    "zero3 + tp2": Budget({"layout": "zero3", "tp": 2}),
    "ddp + cp2": Budget({"cp": 2}),
    "ddp + cp2 ring": Budget({"cp": 2, "ring": "ring"}),
    "zero3 + cp2": Budget({"layout": "zero3", "cp": 2}),
    "ddp + pp2": Budget({"pp": 2}),
    "zero3 + pp2": Budget({"layout": "zero3", "pp": 2}),
    "zero3, bf16, packed": Budget({"layout": "zero3", "param": "bf16", "batching": "pack"}),
    "ddp + cp2 ring, bf16, packed": Budget({"cp": 2, "ring": "ring", "param": "bf16", "batching": "pack"}),
    "ddp + tp2, bucketed, loss in chunks": Budget({"tp": 2, "batching": "bucket", "chunk": 32}),
    "zero3, selective recompute": Budget({"layout": "zero3", "recompute": "selective"}),
    "ddp, full recompute, muon": Budget({"recompute": "full", "optimizer": "muon"}),
    # the host needs the gradients at the end of each of four backwards, and decides
    "zero3, shards on the host": Budget({"layout": "zero3", "offload": "params"}, 4 + 1),
    "zero3, saved beside training": Budget({"layout": "zero3", "save": 1, "beside": True}),
}
"""Where the host waits in an update, it cannot launch the next one meanwhile. A higher number needs a reason beside it."""


@contextmanager
def noted_updates() -> Iterator[dict[int, Found]]:
    """What is noted in each update of the training inside, up to the begin of the next one."""
    from tests.pretend_cuda import installed  # imported before torch, in ranks alone

    from shardwright.train.loop import Trainer

    found: dict[int, Found] = {}
    update = Trainer._update

    def noted_update(self: Trainer, *arguments: Any, **options: Any) -> Any:
        if self.at.update:
            found[self.at.update - 1] = [(*note, count) for note, count in Counter(installed.notes).items()]
        installed.notes.clear()
        return update(self, *arguments, **options)

    with patch.object(Trainer, "_update", noted_update), installed.logging():
        yield found


def rank_main() -> None:
    """One rank: all configurations one after the other in one process group. Rank 0 prints what each rank found, as JSON."""
    import torch
    from tests.pretend_cuda.sweep import losses_of

    from shardwright.mesh.object_collectives import broadcast_object, gather_objects
    from shardwright.mesh.process_group import connect
    from shardwright.models.build import quiet_transformers

    quiet_transformers()
    told: dict[str, list[Found]] = {}
    with connect("cuda") as connection, tempfile.TemporaryDirectory() as own:
        directory, ranks = Path(broadcast_object(own)), connection.rank_info.world_size
        for number, (name, budget) in enumerate(BUDGETS.items()):
            with noted_updates() as found:
                losses_of(budget.case, connection.device, str(directory / str(number)), ranks)
            told[name] = gather_objects(found[STEADY])
        if connection.rank_info.rank == 0:
            print(f"WAITS {json.dumps(told)}", flush=True)
        torch.distributed.barrier()


def waits(found: Found) -> int:
    """How often the host waits until the device has nothing to do."""
    return sum(count for kind, _, _, count in found if kind in HOLDS_UP)


def stacks(found: Found) -> str:
    return "\n".join(
        f"    {count} x {kind}: {what}\n        {stack}" for kind, what, stack, count in found if kind in HOLDS_UP
    )


def found_waits(source: Path | None = None) -> dict[str, Found]:
    """What was noted in one update, of the rank that waits most, by configuration."""
    ran = pretend_ranks("tests.pretend_cuda.waits", "--rank", source=source, timeout=100 * PATIENCE)
    assert ran.code == 0, ran.output[-4000:]
    assert not ran.violations, "\n".join(ran.violations[:5])
    told: dict[str, list[Found]] = json.loads(ran.output.partition("WAITS ")[2].splitlines()[0])
    return {name: max(ranks, key=waits) for name, ranks in told.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help="run as one rank of these that torchrun has started")
    parser.add_argument("--source", type=Path)
    given = parser.parse_args()
    if given.rank:
        rank_main()
        return 0
    if reason := unavailable():
        print(reason)
        return 2
    for name, found in found_waits(given.source).items():
        print(f"{name:36s} {waits(found):3d} waits in one update, {BUDGETS[name].waits} allowed", flush=True)
        if told := stacks(found):
            print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
