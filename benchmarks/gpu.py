"""`make gpu`: what this project does on the GPUs of this machine, in ten minutes: one table, and one JSON for `docs/LOG.md`.

Runs with the machine's own Python and torch, installs nothing, and first names every wheel that is missing. Each part has a
time limit; a part that fails or takes too long is reported, and the next part runs. Parts are in the order of their worth.
`--rehearse` shrinks all sizes: the program then runs on a pretend device (`tests/pretend_cuda`), whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL_PATIENCE = 8
"""How many times longer a part may take in a rehearsal, on few CPU cores."""
PROBE = """
import json, torch
cuda = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [[g.name, g.total_memory] for g in gpus]}))
"""


@dataclass
class Figure:
    """One number of the table. n: values behind the median; spread: half the distance of the quartiles / the median."""

    part: str
    case: str
    name: str
    unit: str
    median: float | None
    n: int = 1
    spread: float | None = None
    beside: float | None = None
    """What the planner says of the same number."""


@dataclass
class Ran:
    """What a part came to. state: ok, failed, out of time, left out."""

    part: str
    state: str
    seconds: float
    limit: float
    why: str = ""
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """One command, with a time limit in seconds and a reader of what it has left: (output, its files) -> figures."""

    name: str
    limit: float
    command: Sequence[str]
    read: Callable[[str, Path], list[Figure]]
    needs: int = 1
    """GPUs."""


def middle(part: str, case: str, name: str, unit: str, values: Sequence[float], beside: float | None = None) -> Figure:
    spread = None
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4)
        spread = (high - low) / 2 / statistics.median(values)
    return Figure(part, case, name, unit, statistics.median(values), len(values), spread, beside)


# The parts


def parts(gpus: int, files: Path, rehearse: bool) -> list[Part]:
    """In the order of worth; the limits sum to ten minutes."""
    module, small = [sys.executable, "-m", "shardwright"], ["--rehearse"] if rehearse else []
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    every, device = ["--nproc-per-node", str(gpus)], ["--hardware.device", "cuda"]
    output = ["--checkpoint.output_dir", str(files / "drill"), "--checkpoint.save_steps", "4"]
    kill = [*module, "drill", "examples/tiny.yaml", "--soak", "1", "--updates", "16", *every, *device, *output]
    speed = [*ranks, str(ROOT / "benchmarks" / "gpu_speed.py")]

    measured = (
        "cpu" if rehearse else "cuda"
    )  # its products are of a GPU's size: on a pretend device they take many minutes

    def loops(model: str) -> Part:
        result = files / f"speed-{model}.jsonl"
        command = [*speed, model, str(files / "speed"), str(result), *small]
        return Part(f"training {model}", 170 if model != "1B" else 110, command, lambda _, f: speeds(model, result))

    return [
        Part(
            "device tests", 100, [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"], tests
        ),
        Part("check", 80, [*module, "check", "examples/tiny.yaml", "--layouts", "all", *every, *device], checks),
        loops("8B-wide"),
        Part(
            "doctor",
            60,
            [*module, "doctor", *every, "--device", measured, "--output", str(files / "hardware.yaml")],
            links,
        ),
        loops("1B"),
        Part("killed rank", 80, kill, drill, 2),
    ]


def tests(output: str, files: Path) -> list[Figure]:
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    return [Figure("device tests", "tests/cuda", word, "", count) for word, count in counts.items()]


def checks(output: str, files: Path) -> list[Figure]:
    equal = len(re.findall(r"equal, \d+ updates", output))
    wrong = re.findall(r"^\s*(\S+).*(?:DIFFERS|FAILED, exit)", output, re.MULTILINE)
    found = [
        Figure("check", "all layouts", "equal", "", equal),
        Figure("check", "all layouts", "not equal", "", len(wrong)),
    ]
    return found + [Figure("check", name, "not equal", "", 1) for name in wrong]


def links(output: str, files: Path) -> list[Figure]:
    found = []
    for name, rate, unit in re.findall(r"(all-\w+|reduce-scatter|send)[^\n:]*?:? *([\d.]+) ([kMGT]?B)/s sent", output):
        found.append(Figure("doctor", name, "bandwidth", f"{unit}/s", float(rate)))
    seconds = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    for name, value, unit in re.findall(r"(\S[^:\n]*): [^\n]*step takes ([\d.]+) (us|ms|s) \+", output):
        found.append(
            Figure(
                "doctor", name.split("  ")[-1].strip(), "latency of a step", "us", float(value) * seconds[unit] * 1e6
            )
        )
    path = files / "hardware.yaml"
    if path.exists():
        text = path.read_text(encoding="utf-8")
        for key in ("link_bandwidth", "link_latency", "network_bandwidth", "memory_bandwidth", "step_latency"):
            if hit := re.search(rf"^\s*{key}: *([\d.e+-]+)", text, re.MULTILINE):
                found.append(Figure("doctor", "hardware file", key, "", float(hit[1])))
    return found


def speeds(model: str, result: Path) -> list[Figure]:
    part, found = f"training {model}", list[Figure]()
    for line in result.read_text().splitlines() if result.exists() else []:
        row = json.loads(line)
        case = f"{row['case']} ({row['layers']} layers, {row['rows']} x {row['length']} a GPU)"
        if why := row.get("left_out") or row.get("failed"):
            found.append(Figure(part, case, f"{'left out' if 'left_out' in row else 'FAILED'}: {why}", "", None, 0))
            continue
        if row["save_at"] is not None:
            at, seconds = row["save_at"], row["seconds"]
            usual = statistics.median(seconds[:at])
            stall = sum(max(0.0, s - usual) for s in seconds[at:])
            found.append(Figure(part, case, "stall of one save, all updates together", "s", stall))
            found.append(
                Figure(part, case, "longest update while it is written / usual", "", max(seconds[at:]) / usual)
            )
            continue
        found.append(middle(part, case, "tokens", "tokens/s", row["tokens_per_s"]))
        if row["mfu"]:
            found.append(middle(part, case, "MFU", "", row["mfu"]))
        found.append(
            Figure(part, case, "allocated", "GiB", row["allocated"] / 2**30, beside=_gib(row["planned_allocated"]))
        )
        found.append(
            Figure(part, case, "reserved", "GiB", row["reserved"] / 2**30, beside=_gib(row["planned_reserved"]))
        )
        found.append(Figure(part, case, "first loss", "nats", row["first_loss"]))
        found.append(Figure(part, case, "build and first updates", "s", row["warmup_seconds"]))
    return found


def _gib(size: float | None) -> float | None:
    return None if size is None else size / 2**30


def drill(output: str, files: Path) -> list[Figure]:
    identical = len(re.findall(r"identical", output))
    return [Figure("killed rank", "one random kill", "continues bit for bit", "", float(identical > 0))]


# Running


def run(part: Part, patience: float, files: Path) -> Ran:
    """Runs the command of a part in a process group of its own, and ends the group at the limit."""
    limit, started = part.limit * patience, time.perf_counter()
    path = files / f"{part.name.replace(' ', '-')}.log"
    with path.open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        for number in (signal.SIGTERM, signal.SIGKILL):  # ranks that outlive their launcher too
            with _nobody_left():
                os.killpg(process.pid, number)
            if number == signal.SIGTERM and code is None:
                with _nobody_left():
                    process.wait(timeout=10)
        process.wait()
        seconds = time.perf_counter() - started
    text = path.read_text(encoding="utf-8", errors="replace")
    state = "out of time" if code is None else "failed" if code else "ok"
    why = "" if state == "ok" else f"{'' if code is None else f'exit {code}: '}{_last_line(text)} ({path})"
    try:
        figures = part.read(text, files)
    except (ValueError, KeyError, OSError) as error:  # half-written files of a part that was ended
        figures, why = [], f"{why} {type(error).__name__}: {error}".strip()
    return Ran(part.name, state, seconds, limit, why, figures)


class _nobody_left:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is not None and issubclass(kind, (ProcessLookupError, PermissionError, subprocess.TimeoutExpired))


def _environment() -> dict[str, str]:
    path = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT / "benchmarks")])
    )
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = r"(\[rank\d+\]: )?(\w+\.)*\w*(Error|Exception)\b|shardwright:|E  "
    errors = [line for line in lines if re.match(said, line) and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][:200]


def probed() -> dict[str, Any]:
    """torch and the GPUs of this machine, seen by a process that ends: this one keeps no memory on a GPU."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise SystemExit(f"torch cannot be used: {_last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


# Showing


def table(about: dict[str, Any], done: Sequence[Ran]) -> str:
    """The parts and the figures, as Markdown: a row for each case, its figures in one cell."""
    gpus = about["gpus"]
    lines = [
        f"{len(gpus)} x {gpus[0][0]} ({gpus[0][1] / 2**30:.1f} GiB), torch {about['torch']}, CUDA {about['cuda']}, "
        f"{about['date']}" + (", REHEARSAL: no number means anything" if about["rehearsal"] else ""),
        "",
        "| part | result | seconds / limit | |",
        "|---|---|---|---|",
        *(
            f"| {one.part} | {one.state} | {one.seconds:.0f} / {one.limit:.0f} | {one.why.replace('|', '/')} |"
            for one in done
        ),
        "",
        "| part | case | figures: median (n, spread) |",
        "|---|---|---|",
    ]
    cases: dict[tuple[str, str], list[str]] = {}
    for figure in (figure for one in done for figure in one.figures):
        cases.setdefault((figure.part, figure.case), []).append(_said(figure))
    lines += [f"| {part} | {case} | {'; '.join(said)} |" for (part, case), said in cases.items()]
    return "\n".join([*lines, "", "MFU: full attention (not halved for causality), head in, embedding lookup out."])


def _said(figure: Figure) -> str:
    """`tokens 12,345 tokens/s (n=10, ±0.3%)`, `allocated 40.1 GiB (planned 39.8)`."""
    beside = [f"n={figure.n}"] if figure.n > 1 else []
    beside += [f"±{figure.spread:.1%}"] if figure.spread is not None else []
    beside += [f"planned {_number(figure.beside, figure.name)}"] if figure.beside is not None else []
    said = f"{figure.name} {_number(figure.median, figure.name)} {figure.unit}".strip()
    return said + (f" ({', '.join(beside)})" if beside else "")


def _number(value: float | None, name: str) -> str:
    if value is None:
        return ""
    if name == "MFU":
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="small sizes, for a pretend device")
    parser.add_argument("--parts", default="", help="only these parts, separated by commas")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "gpu.json", help="the JSON; the table goes beside it as .md"
    )
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from wheels import missing

    lacking, wrong = missing()
    if lacking or wrong:
        print("Bring wheels of:", " ".join(lacking) or "-", *(f"Wrong version: {one}" for one in wrong), sep="\n")
        return 2
    about = {
        **probed(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": given.rehearse,
    }
    if not about["gpus"]:
        print("torch finds no CUDA device.")
        return 2
    with tempfile.TemporaryDirectory(prefix="shardwright-gpu-") as scratch:
        files = given.output.with_suffix("") if given.output.parent.exists() else Path(scratch)
        files.mkdir(exist_ok=True)
        done: list[Ran] = []
        wanted = [name.strip() for name in given.parts.split(",") if name.strip()]
        for part in parts(len(about["gpus"]), files, given.rehearse):
            if wanted and part.name not in wanted:
                continue
            if part.needs > len(about["gpus"]):
                done.append(Ran(part.name, "left out", 0, part.limit, f"needs {part.needs} GPUs"))
            else:
                print(
                    f"== {part.name} (at most {part.limit * (REHEARSAL_PATIENCE if given.rehearse else 1):.0f} s)",
                    flush=True,
                )
                done.append(run(part, REHEARSAL_PATIENCE if given.rehearse else 1, files))
            given.output.write_text(json.dumps({**about, "parts": [asdict(one) for one in done]}, indent=1) + "\n")
        text = table(about, done)
    given.output.with_suffix(".md").write_text(text + "\n")
    print(text)
    print(f"Wrote {given.output} and {given.output.with_suffix('.md')}.")
    return int(any(one.state in ("failed", "out of time") for one in done))


if __name__ == "__main__":
    sys.exit(main())
