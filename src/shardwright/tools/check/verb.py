"""`shardwright check`: compares each layout on N ranks with one reference; a table, and a diagnosis for each difference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.config.schema import Training
from shardwright.console import say
from shardwright.errors import ConfigError, ExitCode, ModelError
from shardwright.launch import refuse_launcher, run_workers
from shardwright.layout.axes import Axes
from shardwright.layout.legality import check_device, check_run, check_settings
from shardwright.layout.names import expand_layouts, tuning_keys, with_layout
from shardwright.measure import clock
from shardwright.mesh.process_group import device_kind
from shardwright.models import build_model, find_parts
from shardwright.parallel.apply import check_model
from shardwright.tools.check.adjust import Adjusted, adjust
from shardwright.tools.check.candidate import SPECS, CandidateSpec
from shardwright.tools.check.compare import compare_records
from shardwright.tools.check.diagnose import Finding, explain
from shardwright.tools.check.fault_injection import FAULTS, known_fault
from shardwright.tools.check.record import Record
from shardwright.tools.check.reference import run_reference
from shardwright.tools.check.table import crashed_row, result_row, show
from shardwright.tools.check.tolerance import Tolerance, float64_tolerance, run_dtype_tolerance
from shardwright.train.preflight import check_programs

ONE_THREAD_PARAMETERS = 2_000_000
"""Up to this size one thread is faster than many: the matrices are too small to share."""


@dataclass(frozen=True)
class _Candidate:
    """A layout that is checked, its axes, and the task of its ranks."""

    layout: str
    axes: Axes
    spec: CandidateSpec


def run_check(
    loaded: Loaded, layouts: str, nproc_per_node: int, *, dtype: str = "fp64", updates: int = 3, plant: str = ""
) -> int:
    """Checks each of `layouts` (names joined by commas, or all) on `nproc_per_node` ranks; returns the exit code.

    dtype: fp64 (the proof) or run (the run file's own dtypes, with tolerances that follow from the dtypes). plant: a fault to
    inject into the candidates, or `list`. Codes: 0 when every layout trains the same objective, 3 when a layout does not, 1
    when a layout crashed.
    """
    console = Console(highlight=False)
    if plant == "list":
        console.print("\n".join(FAULTS))
        return ExitCode.DONE
    if dtype not in ("fp64", "run"):
        raise ConfigError(f"--dtype {dtype} is not known.", "", "Valid: fp64, run.")
    refuse_launcher("check")
    fault = known_fault(plant) if plant else ""
    codes = check_layouts(loaded, layouts, nproc_per_node, console, dtype=dtype, updates=updates, fault=fault)
    if ExitCode.CHECK_FAILED in codes.values():
        return ExitCode.CHECK_FAILED
    return next((code for code in codes.values() if code), ExitCode.DONE)


def check_layouts(
    loaded: Loaded,
    layouts: str,
    ranks: int,
    console: Console,
    *,
    dtype: str = "fp64",
    updates: int = 3,
    fault: str = "",
) -> dict[str, int]:
    """Checks the layouts and prints the results; {name: exit code of this layout alone} of the possible layouts."""
    device = device_kind(loaded.run.hardware.device, ranks)
    names, data_ranks, split = possible_layouts(loaded, layouts, ranks, device, console)
    adjusted = adjust(
        loaded.run, dtype=dtype, data_ranks=data_ranks, device=device, updates=updates, layouts=len(names), split=split
    )
    with tempfile.TemporaryDirectory(prefix="shardwright-check-") as scratch:
        directory = Path(scratch)
        reference, training = _reference(adjusted, directory / "reference", console)
        tolerance = _tolerance(adjusted, ranks)
        say(
            console,
            f"Allowed: {tolerance.formula}, relative to each tensor's largest element; from update 2 on r + min(10 p, 0.1), "
            "where p is the drift of the weights in steps. tools/check/tolerance.py derives the bound of an AdamW step. (%) is "
            "the used share of the allowance.",
        )
        if fault:
            say(console, f"Fault injected into every candidate: {fault}.")
        run = adjusted.run.model_copy(update={"training": training})
        candidates = []
        for i, name in enumerate(names):
            chosen = with_layout(replace(loaded, run=run), name)
            values, at = chosen.run.model_dump(mode="json"), str(directory / f"candidate-{i}")
            spec = CandidateSpec(values, at, adjusted.updates, adjusted.changes, fault)
            candidates.append(_Candidate(name, check_run(chosen, ranks), spec))
        codes = _run(candidates, ranks, device, directory)
        return _results(reference, candidates, codes, tolerance, console)


def _results(
    reference: Record, candidates: list[_Candidate], codes: list[int], tolerance: Tolerance, console: Console
) -> dict[str, int]:
    """Prints the table and the diagnoses; {layout: exit code}."""
    rows, found, final = [], {}, {}
    for candidate, code in zip(candidates, codes):
        layout = candidate.layout
        final[layout] = code
        if code:
            rows.append(crashed_row(layout, code))
            continue
        record = Record(Path(candidate.spec.directory))
        comparison = compare_records(reference, record, tolerance)
        rows.append(result_row(layout, comparison, candidate.spec.seconds))
        if not comparison.passed:
            final[layout] = ExitCode.CHECK_FAILED
            found[layout] = explain(reference, record, comparison, tolerance, candidate.axes)
    show(console, rows)
    for layout, finding in found.items():
        _report(console, layout, finding)
    return final


def possible_layouts(
    loaded: Loaded, layouts: str, ranks: int, device: str, console: Console
) -> tuple[tuple[str, ...], int, bool]:
    """The layouts that can run, the most data ranks of any layout, and whether a layout splits the model or its rows.

    A layout that was named must be possible; layouts of `all` that are not possible are listed with the reason. Raises
    `ConfigError` or `ModelError` for what no layout can mend, and where no layout is possible.
    """
    expanded = expand_layouts(layouts, ranks)
    check_settings(with_layout(loaded, expanded[0]))  # only the layout keys that this layout keeps
    check_device(loaded.run, device)
    check_programs(loaded.run)
    asked = {part.strip() for part in layouts.split(",")}
    model = build_model(loaded.run.model, torch.float64)
    names, data_ranks, split = [], 1, False
    refused: ConfigError | ModelError | None = None
    for name in expanded:
        try:
            chosen = with_layout(loaded, name)
            axes = check_run(chosen, ranks)
            check_model(model, chosen.run)
        except (ConfigError, ModelError) as error:
            if name in asked:
                raise
            refused = refused or error
            say(console, f"{name} left out: {error.what} {error.why}".rstrip())
            continue
        names.append(name)
        data_ranks = max(data_ranks, axes.data_ranks)
        split = split or axes.model_ranks > 1
    if not names and refused:
        raise refused
    for line in _dropped(loaded, names):
        say(console, line)
    return tuple(names), data_ranks, split


def _dropped(loaded: Loaded, names: list[str]) -> Iterator[str]:
    """A line for each key of the run file's layout that has no effect in any of these layouts."""
    runs = [with_layout(loaded, name) for name in names]
    for key in (f"parallelism.{key}" for key, _ in tuning_keys(loaded.run.parallelism)):
        if loaded.origin[key] != "default" and all(run.origin[key] == "default" for run in runs):
            yield f"{loaded.origin[key]}: `{key}` has no effect in these layouts."


def _reference(adjusted: Adjusted, directory: Path, console: Console) -> tuple[Record, Training]:
    """Runs the reference and prints what was adjusted; (its record, the training section with the limit that was used)."""
    started, threads = clock.now(), torch.get_num_threads()
    model = build_model(adjusted.run.model, torch.float64)
    if sum(p.numel() for p in model.parameters()) <= ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    record, training = run_reference(adjusted.run, adjusted.changes, directory, adjusted.updates)
    torch.set_num_threads(threads)
    for line in (*adjusted.lines, *_limit_line(adjusted, training.max_grad_norm)):
        say(console, line)
    first = record.scalars(1)
    targets = [note.targets for note in first.microbatches]
    say(
        console,
        f"Reference: 1 process, {adjusted.updates} updates of {len(targets)} microbatches with {min(targets)} to "
        f"{max(targets)} targets, loss {first.loss:.6f}, gradient norm {first.grad_norm:.6g} clipped by "
        f"{first.clip_coefficient:.3g}, {clock.now() - started:.1f} s.",
    )
    return record, training


def _tolerance(adjusted: Adjusted, ranks: int) -> Tolerance:
    p, t = adjusted.run.precision, adjusted.run.training
    if p.param_dtype == "fp64":
        return float64_tolerance()
    return run_dtype_tolerance(
        p.param_dtype,
        p.reduce_dtype,
        p.master_dtype,
        blocks=len(find_parts(build_model(adjusted.run.model, torch.float64)).blocks),
        microbatches=t.global_batch_size // (t.per_device_train_batch_size * ranks),
        ranks=ranks,
        tokens=t.global_batch_size * adjusted.run.data.max_length,
    )


def _limit_line(adjusted: Adjusted, limit: float | None) -> list[str]:
    """A line where there is no clipping, or where the limit was lowered so that clipping shows."""
    asked = adjusted.run.training.max_grad_norm
    if asked is None:
        return ["training.max_grad_norm is null: clipping is not part of this objective."]
    return [] if limit == asked else [f"training.max_grad_norm {asked:g} -> {limit:.4g}, so that clipping is active."]


def _run(candidates: list[_Candidate], ranks: int, device: str, directory: Path) -> list[int]:
    """The exit code of each candidate. All run in one start of ranks; after a crash the remaining candidates start anew."""
    codes: list[int] = []
    while len(codes) < len(candidates):
        waiting = candidates[len(codes) :]
        specs = directory / f"specs-{len(codes)}.json"
        specs.write_bytes(SPECS.dump_json([candidate.spec for candidate in waiting]))
        code = run_workers(
            "shardwright.tools.check.candidate",
            [str(specs)],
            nproc_per_node=ranks,
            log_dir=directory / "logs",
            device=device,
            threads=waiting[0].spec.run["hardware"]["threads_per_rank"],
        )
        done = [candidate for candidate in waiting if candidate.spec.seconds is not None]
        codes += [0] * len(done)
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if len(done) < len(waiting):
            codes.append(code or ExitCode.CRASH)
    return codes


def _report(console: Console, layout: str, finding: Finding) -> None:
    """Prints the first difference of a layout, and the diagnosis."""
    words = {"grad": "gradient", "param": "parameter"}
    place = f"update {finding.update}" if finding.update else "start"
    what = words.get(finding.kind, finding.kind)
    text = f"{layout}: first difference in {place}: {what}"
    if tensor := finding.tensor:
        text += (
            f" `{tensor.name}` {list(tensor.shape)}, off by {tensor.difference:.3e} ({tensor.relative:.1e} relative)"
        )
    say(console, f"{text}.")
    say(console, f"  Diagnosis: {finding.diagnosis.name}. {finding.diagnosis.evidence}.")
    say(console, f"  Look at: {finding.diagnosis.look_at}.")
