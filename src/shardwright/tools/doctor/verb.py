"""`shardwright doctor`: a graded line for each item, and the hardware file of the machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from shardwright.config.output_paths import check_writable_file
from shardwright.console import say
from shardwright.errors import ExitCode
from shardwright.launch import refuse_launcher, run_workers
from shardwright.measure import clock
from shardwright.mesh.process_group import device_kind
from shardwright.tools.doctor.fit import Link, Measured
from shardwright.tools.doctor.hardware_file import Constants, fitted, hardware, kept_in_steps, to_yaml
from shardwright.tools.doctor.machine import Finding, machine_findings
from shardwright.units import format_bytes, format_flops, format_seconds

FIT_FACTOR = 1.5
"""A fit whose worst ratio is larger gets a warning."""


def run_doctor(ranks: int, device: str, output: Path) -> int:
    """Prints the findings and writes the hardware file to `output`; 1 when something has failed, else 0."""
    console, started = Console(highlight=False), clock.now()
    refuse_launcher("doctor")
    check_writable_file(output, "--output")
    kind = device_kind(device, ranks)
    findings: list[Finding] = []

    def tell(found: Iterator[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            say(console, str(finding))

    tell(machine_findings(ranks, output.absolute().parent))
    with tempfile.TemporaryDirectory(prefix="shardwright-doctor-") as scratch:
        result = Path(scratch) / "result.json"
        code = run_workers(
            "shardwright.tools.doctor.rank",
            [str(result), kind],
            nproc_per_node=ranks,
            log_dir=Path(scratch) / "logs",
            device=kind,
        )
        if code:
            tell(iter([Finding("ranks", "FAIL", f"{ranks} {kind} ranks ended with {code}; see above")]))
            return ExitCode.CRASH
        measured = TypeAdapter(Measured).validate_json(result.read_bytes())
    constants = fitted(measured)
    tell(measured_findings(measured, constants))
    output.write_text(to_yaml(hardware(measured, constants, clock.date())), encoding="utf-8")
    failed = [finding.item for finding in findings if finding.grade == "FAIL"]
    verdict = f"Failed: {', '.join(failed)}." if failed else "Nothing has failed."
    say(
        console,
        f"{verdict} {format_seconds(clock.now() - started)}. Wrote {output}: plan --device {output}, bench --device {output}.",
    )
    return ExitCode.CRASH if failed else ExitCode.DONE


def measured_findings(measured: Measured, constants: Constants) -> Iterator[Finding]:
    """A line for each measurement of the ranks."""
    together = f"{measured.ranks} ranks at once" if measured.ranks > 1 else "1 rank"
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    yield Finding(
        "device",
        "ok",
        f"{measured.name}, {format_bytes(measured.memory_bytes)} a rank; ranks have {threads} and talk over {measured.backend}",
    )
    yield Finding(
        "sums", "ok", f"all-reduce and reduce-scatter with SUM over {together} give the sum ({measured.backend})"
    )
    for dtype, found in measured.products.items():
        fit = constants.products[dtype]
        sizes = ", ".join(f"{p.m}x{p.n}x{p.k} {format_flops(p.rate)}/s" for p in found)
        best = max(p.rate for p in found)
        off = f"; the fit is off by {fit.off:.1f} times at worst" if fit.off > FIT_FACTOR else ""
        yield Finding(
            f"products in {dtype}", "warn" if off else "ok", f"{format_flops(best)}/s a rank, {together} ({sizes}){off}"
        )
    kept = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in kept_in_steps(measured, constants).items())
    yield Finding("products in a training step", "ok", f"{kept} of that speed")
    yield Finding("memory", "ok", f"{format_bytes(measured.copy_bandwidth)}/s a rank, {together}")
    forward, backward = measured.attention_seconds
    rate = measured.attention_flops
    yield Finding(
        "attention",
        "ok",
        f"forward {format_flops(rate / forward)}/s, backward {format_flops(2.5 * rate / backward)}/s a rank",
    )
    if constants.link is not None:
        yield from _transfers(measured, constants.link)


def _transfers(measured: Measured, link: Link) -> Iterator[Finding]:
    for name in dict.fromkeys(t.collective for t in measured.transfers):
        own = [t for t in measured.transfers if t.collective == name]
        sizes = ", ".join(f"{format_bytes(t.payload_bytes, 0)} {format_seconds(t.seconds)}" for t in own)
        rate = max(t.sent_bytes / t.seconds for t in own)
        yield Finding(f"{name} over {measured.backend}", "ok", f"{format_bytes(rate)}/s sent by a rank ({sizes})")
    worst = max(max(link.seconds(t) / t.seconds, t.seconds / link.seconds(t)) for t in measured.transfers)
    yield Finding(
        "link",
        "ok" if worst < 2 * FIT_FACTOR else "warn",
        f"a step takes {format_seconds(link.alpha)} + bytes at {format_bytes(link.bandwidth)}/s, within {worst:.1f} times of "
        "each" + (f"; compute beside a transfer loses {measured.load:.2f} s a second" if measured.load else ""),
    )
