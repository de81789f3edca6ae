"""The loop on two ranks that are asked to stop, go on for others, spike, or differ in speed. Rows A102 and A103."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.gloo.engine import ODD, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks

from shardwright.errors import SpikeError
from shardwright.launch import Heartbeat
from shardwright.mesh.cluster_environment import Job
from shardwright.train.anomaly import LEAST
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
SPIKE_AT = LEAST + 2


class Order:
    def epoch(self, update: int) -> float:
        return 0.0


@dataclass
class Data:
    """Rows of tests/gloo/engine.py; `before` runs on this rank before each update."""

    engine: Any
    updates: int
    before: Any = None
    order: Any = Order()  # noqa: RUF009
    fingerprint: str = "rows"
    eval_fingerprint: str = ""
    validation: Any = None

    def resume_rows(self, former: Any) -> list[str]:
        """Any update can be begun with."""
        return []

    def updates_from(self, first: int, device: torch.device, ready: Any) -> Iterator[Any]:
        for update in range(first, self.updates):
            if self.before is not None:
                self.before(update)
            yield batches_for(self.engine, update)


@dataclass
class Flag:
    requested: bool = False


def trainer(directory: Path, updates: int, before: Any = None, **options: Any) -> tuple[Trainer, StringIO]:
    values = {"checkpoint__output_dir": str(directory), "training__max_steps": updates, **options}
    engine, said = make_engine(run_file(ODD, **values)), StringIO()
    console = Console(file=said, width=200)
    data = Data(engine, updates, before)
    return Trainer(run_file(ODD, **values), engine, data, console, Heartbeat()), said  # type: ignore[arg-type]


def _asked_before(directory: Path) -> list[Any]:
    made, _ = trainer(directory / "asked", 3)
    code = made.train(Flag(dist.get_rank() == 1))  # type: ignore[arg-type]
    return [code, made.at.update, (directory / "asked" / "latest").exists()]


def _for_others(directory: Path) -> list[Any]:
    """A start after a failure goes on from the newest checkpoint, whatever the run file said of the first start."""
    constant = {"training__lr_scheduler_type": "constant"}
    made, _ = trainer(directory / "others", 2, checkpoint__resume="never", **constant)
    made.train(Flag(), Job("job"))  # type: ignore[arg-type]
    again, _ = trainer(directory / "others", 4, checkpoint__resume="never", **constant)
    path = again.resume(Job("job", again=True))
    fresh, _ = trainer(directory / "fresh", 2, checkpoint__resume="never")
    return [path and path.name, again.at.update, fresh.resume(Job("job", again=True))]


def _spike(directory: Path) -> list[Any]:
    """The head is made 30 times as large before one update, on both ranks."""

    def before(update: int) -> None:
        if update == SPIKE_AT:
            with torch.no_grad():
                for local in made.engine.params:
                    local.tensor.mul_(30)

    made, _ = trainer(
        directory / "spike", SPIKE_AT + 3, before, training__on_spike="stop", checkpoint__save_steps=SPIKE_AT
    )
    try:
        made.train(Flag())  # type: ignore[arg-type]
    except SpikeError as error:
        return [str(error).split(":")[0], sorted(p.name for p in (directory / "spike").glob("checkpoint-*"))]
    return ["no spike", []]


def _slow(directory: Path) -> list[Any]:
    """Rank 1 computes for 150 ms of processor time before each update; rank 0 waits for it meanwhile."""

    def before(update: int) -> None:
        end = time.thread_time() + 0.15
        while dist.get_rank() == 1 and time.thread_time() < end:
            pass

    made, _ = trainer(directory / "slow", 9, before)
    made.train(Flag())  # type: ignore[arg-type]
    return []


def everything(directory: Path) -> dict[str, list[Any]]:
    return {work.__name__: work(directory) for work in (_asked_before, _for_others, _spike, _slow)}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[Any]]]]:
    directory = tmp_path_factory.mktemp("alive")
    return directory, run_ranks(everything, 2, directory)


def test_a_stop_before_the_first_update_trains_and_saves_nothing(done: Any) -> None:
    """A102: one rank is asked, both leave, with the code that says: start me again."""
    assert [rank["_asked_before"] for rank in done[1]] == [[75, 0, False]] * 2


def test_a_start_for_failed_ranks_resumes_the_newest(done: Any) -> None:
    """A103: the choice is rank 0's and the same on both."""
    assert [rank["_for_others"] for rank in done[1]] == [["checkpoint-2", 2, None]] * 2


def test_a_spike_stops_all_ranks_before_a_checkpoint_holds_it(done: Any) -> None:
    assert [rank["_spike"] for rank in done[1]] == [[f"Update {SPIKE_AT}", [f"checkpoint-{SPIKE_AT}"]]] * 2


def test_the_slow_rank_is_named_and_not_the_one_that_waits(done: Any) -> None:
    lines = (done[0] / "slow" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines][1:]
    slow = [entry["perf/slowest_rank_factor"] for entry in entries if entry["perf/slowest_rank"] == 1]
    assert len(slow) >= 6 and max(slow) > 2  # of 8; other work on this machine may delay either rank
