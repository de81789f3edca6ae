"""Faults planted into the real engine on 2 ranks are found and named; the engine itself passes.

Known faults: A01, A03, A07, A11, A13, A29, A34, A37, A38, A42, A47.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from tests.gloo.ranks import run_ranks
from tests.places import ROOT
from tests.started import LIMIT

from shardwright.config import load_run_file
from shardwright.layout.axes import resolve_axes
from shardwright.layout.names import apply_layout
from shardwright.tools.check.adjust import adjust
from shardwright.tools.check.candidate import CandidateSpec, record_updates
from shardwright.tools.check.compare import compare_records
from shardwright.tools.check.diagnose import explain
from shardwright.tools.check.record import Record
from shardwright.tools.check.reference import run_reference
from shardwright.tools.check.tolerance import float64_tolerance

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

SECOND_UPDATE = ("", "gradients_not_zeroed", "schedule_step", "state_reset")
"""Faults that show in the second update; the others are run for one, which is faster."""
SMALL = {"data.max_length": 48, "model.config_overrides": {"num_hidden_layers": 2}}

# (example and batching, layout, fault): each named as its diagnosis; no fault must pass
PLANTS = [
    *(("tiny", layout, "") for layout in ("ddp", "zero1", "zero2", "zero3", "hsdp2")),
    ("tiny", "ddp", "summed_twice"),
    ("tiny", "zero3", "averaged"),
    ("tiny", "zero2", "divided_again"),
    ("tiny", "zero1", "mean_of_microbatch_means"),
    ("tiny", "zero3", "mean_of_rank_means"),
    ("tiny", "ddp", "last_microbatch_only"),
    ("tiny", "ddp", "no_reduction"),
    ("tiny", "zero3", "labels_shifted_twice"),
    ("tiny", "zero3", "wrong_target_count"),
    ("tiny", "zero2", "norm_not_reduced"),
    ("tiny", "hsdp2", "norm_counted_twice"),
    ("tiny", "zero3", "clipping_missing"),
    ("tiny", "ddp", "decay_on_excluded"),
    ("tiny", "zero3", "decay_in_gradient"),
    ("tiny", "zero3", "stale_optimizer"),
    ("tiny", "ddp", "gradients_not_zeroed"),
    ("tiny", "zero3", "schedule_step"),
    ("tiny", "zero1", "state_reset"),
    ("tiny", "zero3", "one_unit"),
    ("tiny", "ddp", "same_rows"),
    ("tiny", "hsdp2", "diverged_replicas"),
    ("tiny", "zero3", "depends_on_neighbours"),
    ("tiny", "ddp+pp2", "depends_on_width"),
    *(
        ("tiny weighted", "ddp", fault)
        for fault in (
            "",
            "never_divided",
            "mean_of_microbatch_means",
            "mean_of_rank_means",
            "last_microbatch_only",
        )
    ),
    ("tiny weighted", "zero3", "labels_shifted_twice"),
    ("gpt2-tiny", "ddp", ""),
    ("gpt2-tiny", "zero3", "tying_lost"),
    ("gpt2-tiny", "zero3+tp2", "tying_lost"),
    ("gpt2-tiny", "ddp+pp2", "tying_lost"),
]


def _updates(fault: str) -> int:
    return 2 if fault in SECOND_UPDATE else 1


def _record_all(specs: list[CandidateSpec]) -> None:
    for spec in specs:
        record_updates(spec, torch.device("cpu"))
        dist.barrier()


def _weighted_rows(directory: Path) -> Path:
    """40 documents of token ids with a weight for each, some of them 0."""
    draw, path = Random(0), directory / "weighted.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for _ in range(40):
            length = draw.randint(5, 60)
            ids, weights = draw.choices(range(250), k=length), draw.choices([0.0, 0.3, 1.0, 2.0], k=length)
            out.write(json.dumps({"input_ids": ids, "loss_weights": weights}) + "\n")
    return path


def judged(plants: list[tuple[str, str, str]], directory: Path) -> dict[tuple[str, str, str], str]:
    """The diagnosis of every plant, "" for a pass: one reference per example, one start of ranks for all.

    An example is a name of examples/, then how its rows are batched, then `weighted` for targets of unequal weights.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    references, specs, places = {}, [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for example in sorted({example for example, _, _ in plants}):
            name, *words = example.split()
            batching = next((word for word in words if word != "weighted"), "pad")
            options = {"data.cache_dir": str(directory), "data.batching": batching, **SMALL}
            if "weighted" in words:
                options |= {"data.train": [str(_weighted_rows(directory))], "data.validation": []}
            run = load_run_file(f"examples/{name}.yaml", options).run
            adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=2)
            record, training = run_reference(adjusted.run, adjusted.changes, directory / example, 2)
            references[example] = record, adjusted, training
        for index, (example, layout, fault) in enumerate(plants):
            _, adjusted, training = references[example]
            parallelism = apply_layout(layout, adjusted.run.parallelism)
            run = adjusted.run.model_copy(update={"parallelism": parallelism, "training": training})
            path = str(directory / f"candidate-{index}")
            specs.append(CandidateSpec(run.model_dump(mode="json"), path, _updates(fault), adjusted.changes, fault))
            places[example, layout, fault] = path, resolve_axes(parallelism, 2)
        run_ranks(_record_all, 2, specs)
    found = {}
    for (example, layout, fault), (path, axes) in places.items():
        reference, candidate = references[example][0], Record(Path(path))
        comparison = compare_records(reference, candidate, float64_tolerance(), _updates(fault))
        if comparison.passed:
            found[example, layout, fault] = ""
        else:
            finding = explain(reference, candidate, comparison, float64_tolerance(), axes)
            found[example, layout, fault] = finding.diagnosis.name
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], str]:
    return judged(PLANTS, tmp_path_factory.mktemp("plants"))


@pytest.mark.parametrize("plant", PLANTS, ids="-".join)
def test_plant_is_named(plant: tuple[str, str, str], outcomes: dict[tuple[str, str, str], str]) -> None:
    """A01 A03 A07 A11 A13 A29 A34 A37 A38 A42 A47: the real engine passes, and each fault in it gets its name."""
    assert outcomes[plant] == plant[2]


def test_verb_prints_the_diagnosis_and_exits_with_3(tmp_path: Path) -> None:
    """The command line: a table row for each layout, the first difference, the diagnosis, exit code 3."""
    command = [sys.executable, "-m", "shardwright", "check", "examples/tiny.yaml", "--layouts", "zero3"]
    command += [
        "--nproc-per-node",
        "2",
        "--updates",
        "1",
        "--plant",
        "averaged",
        f"--data.cache_dir={tmp_path}",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 3, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if "DIFFERS" in line]
    assert [(row[0], row[1]) for row in rows] == [("zero3", "380")]
    assert "zero3: first difference in update 1: gradient `model.embed_tokens.weight` [257, 64]" in result.stdout
    assert "Diagnosis: averaged. gradients are 0.5 times the reference in all 39 tensors" in result.stdout
