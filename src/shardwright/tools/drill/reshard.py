"""One checkpoint read by other numbers of ranks and in other layouts: the same tensors, rows, and losses up to rounding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.checkpoint.manifest import read_manifest
from shardwright.config.load import Loaded
from shardwright.errors import ConfigError, ExitCode, ModelError
from shardwright.launch import run_workers
from shardwright.layout.legality import check_run
from shardwright.layout.names import every_layout, with_layout
from shardwright.measure import metric_names as names
from shardwright.models.build import build_model
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import check_model
from shardwright.tools.drill.compare import ROWS, entries, first_difference, stored_state

ROUNDINGS = 16
"""Losses may differ by this many roundings of the compute dtype, relative, for each update since the checkpoint.

A layout adds the terms of losses and gradients in another order, which costs roundings of random sign; each update carries
those of the ones before. On the tiny example the 18 layouts of 1 and 2 ranks differ by half a rounding after 8 updates. What
is not rounding is far above: without its moments AdamW's first step alone moves the loss by thousands of them.
"""


@dataclass
class ReshardResult:
    """A checkpoint read by one number of ranks in one layout. difference, allowed: of the losses, relative."""

    ranks: int
    layout: str
    updates: int = 0
    difference: float = 0.0
    allowed: float = 0.0
    problem: str = ""

    @property
    def cells(self) -> dict[str, str]:
        """Column -> text of the table of resharded starts."""
        return {
            "read by": f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.layout}",
            "tensors": "FAILED" if self.problem else "identical",
            "rows": "FAILED" if self.problem else "the same",
            "loss off by": f"{self.difference:.1e}",
            "allowed": f"{self.allowed:.1e}",
            "updates": str(self.updates),
        }


def possible_layouts(loaded: Loaded, ranks: int) -> list[str]:
    """Layouts of `ranks` ranks that this run's sizes and model allow."""
    model = build_model(loaded.run.model, TORCH_DTYPES[loaded.run.precision.master_dtype])
    found = []
    for name in every_layout(ranks):
        try:
            chosen = with_layout(loaded, name)
            check_run(chosen, ranks)
            check_model(model, chosen.run)
        except (ConfigError, ModelError):
            continue
        found.append(name)
    return found


def run_reshard(
    loaded: Loaded, checkpoint: Path, reference: Path, worlds: dict[int, list[str]], directory: Path
) -> list[ReshardResult]:
    """Reads `checkpoint` of the run in `reference` under each layout of each number of ranks, in one start for each number."""
    results = []
    for ranks, layouts in worlds.items():
        jobs = []
        for number, name in enumerate(layouts):
            values = {
                "checkpoint.output_dir": str(directory / f"{ranks}-{number}"),
                "checkpoint.resume": str(checkpoint),
                "checkpoint.save_steps": None,
            }
            jobs.append(with_layout(loaded, name).replaced(values, "drill"))
        directory.mkdir(parents=True, exist_ok=True)
        jobs_file = directory / f"jobs-{ranks}.json"
        jobs_file.write_text(json.dumps([job.to_json() for job in jobs]), encoding="utf-8")
        code = run_workers(
            "shardwright.tools.drill.reshard_rank",
            [str(jobs_file)],
            nproc_per_node=ranks,
            log_dir=directory / "logs",
            device=loaded.run.hardware.device,
            threads=loaded.run.hardware.threads_per_rank,
        )
        if code in (ExitCode.INTERRUPTED, ExitCode.STOPPED_AND_SAVED):
            raise KeyboardInterrupt
        for name, job in zip(layouts, jobs):
            results.append(_judge(ReshardResult(ranks, name), job, checkpoint, reference))
    return results


def _judge(result: ReshardResult, job: Loaded, checkpoint: Path, reference: Path) -> ReshardResult:
    directory, first = Path(job.run.checkpoint.output_dir), read_manifest(checkpoint).update
    metrics = [e for e in entries(reference) if e["update"] >= first and names.LOSS in e]
    own = directory / "metrics.jsonl"
    got = [e for e in entries(directory) if names.LOSS in e] if own.exists() else []
    if [e["update"] for e in got] != [e["update"] for e in metrics]:
        result.problem = f"the run trained {len(got)} of {len(metrics)} updates"
        return result
    result.updates = len(got)
    eps = torch.finfo(TORCH_DTYPES[job.run.precision.param_dtype]).eps
    over = [
        (
            abs(one[names.LOSS] - other[names.LOSS]) / abs(other[names.LOSS]),
            ROUNDINGS * eps * (number + 1),
        )
        for number, (one, other) in enumerate(zip(got, metrics))
    ]
    result.difference, result.allowed = max(difference for difference, _ in over), over[-1][1]
    excess = next((number for number, (difference, allowed) in enumerate(over) if difference > allowed), None)
    difference = first_difference(stored_state(directory / checkpoint.name), stored_state(checkpoint))
    if difference:
        result.problem = f"after reading, {difference}"
    elif any(one[key] != other[key] for one, other in zip(got, metrics) for key in ROWS):
        result.problem = "the run trained on other targets"
    elif excess is not None:
        result.problem = (
            f"the loss of update {first + excess} differs by {over[excess][0]:.1e}, {over[excess][1]:.1e} is allowed"
        )
    return result


def rows_of(directory: Path, ranks: int) -> list[list[int]]:
    """The rows of each update, sorted, from what the ranks wrote; peers of one data rank must agree."""
    parts: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        data_rank, rows = json.loads((directory / f"rows-{rank}.json").read_text(encoding="utf-8"))
        if parts.setdefault(data_rank, rows) != rows:
            return []
    return [sorted(row for part in parts.values() for row in part[number]) for number in range(len(parts[0]))]
