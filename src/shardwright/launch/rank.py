"""How a rank ends, and the outcome that it leaves for the launcher to print."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from shardwright.errors import ConfigError, ExitCode, ShardwrightError
from shardwright.launch.hang_analysis import own_frame
from shardwright.launch.output import bounded_writes
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE, Job, job_of, started_by

OUTCOME = "outcome.json"

_TIMED_OUT = ("Timed out waiting", "Application timeout caused pair closure")
_LOST_PEER = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    *_TIMED_OUT,
)


def inside_a_launcher() -> bool:
    """Whether this process is already a rank (of torchrun, Slurm or `run_workers`) and must not spawn any."""
    return started_by(os.environ) != "single"


def refuse_launcher(verb: str) -> None:
    """Raises `ConfigError` inside of a launcher: `verb` starts its own ranks."""
    if inside_a_launcher():
        raise ConfigError(
            f"`{verb}` was started under a launcher.",
            f"`{verb}` starts its own ranks.",
            f"Call `{verb}` once, without torchrun or srun.",
        )


def current_job() -> Job:
    """The job that this process belongs to."""
    return job_of(os.environ)


def worker_main(function: Callable[[], int]) -> int:
    """The exit code of `function()`; an exception is reported to the launcher and becomes an exit code.

    A `ShardwrightError` is one message and its own code; anything else is a traceback and 1.
    """
    message, trace, place, lost_peer, timed_out = "", "", "", False, False
    try:
        with bounded_writes():
            return int(function())
    except ShardwrightError as error:
        code, message = int(error.exit_code), str(error)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        message = error.code if isinstance(error.code, str) else ""
    except BaseException as error:  # torch's CheckpointException derives from BaseException (torch 2.11 to 2.14)
        code, message, trace = int(ExitCode.CRASH), f"{type(error).__name__}: {error}", traceback.format_exc()
        place = own_frame(
            [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)][::-1]
        )
        lost_peer = _is_lost_peer(error)
        timed_out = lost_peer and any(mark in message for mark in _TIMED_OUT)
    report_outcome(
        {
            "code": code,
            "message": message,
            "traceback": trace,
            "place": place,
            "lost_peer": lost_peer,
            "timed_out": timed_out,
        }
    )
    return code


def finish(code: int) -> NoReturn:
    """Ends this rank at once with `code`, after everything is written.

    Interpreter teardown is skipped: with torch's threads alive it raises SIGABRT now and then, after all is done.
    """
    if STARTED_HERE in os.environ and not (Path(os.environ[STARTED_HERE]) / OUTCOME).exists():
        report_outcome({"code": code})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error only reports that another rank is gone."""
    while error is not None:
        named = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
        if named or any(mark in str(error) for mark in _LOST_PEER):
            return True
        error = error.__cause__
    return False


def report_outcome(outcome: dict[str, Any]) -> None:
    """Writes the outcome to the file that the launcher reads; without our launcher, to stderr and torchrun's error file."""
    if directory := os.environ.get(STARTED_HERE):
        path = Path(directory) / OUTCOME
        path.with_suffix(".part").write_text(json.dumps({**outcome, "at": clock.now()}), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return
    text = outcome.get("traceback") or outcome.get("message")
    if not text:
        return
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if outcome.get("lost_peer"):
        text += (
            f"\nshardwright: rank {rank} has lost the other ranks: {outcome['message'].splitlines()[0]}\nAnother rank or its "
            "host has ended, or the network between them is cut; the output there says which. Start all ranks again to resume "
            "from the newest checkpoint."
        )
    print(f"shardwright: rank {rank}: {text}", file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        seconds = int(datetime.fromisoformat(clock.date()).timestamp())
        extra = {"py_callstack": text, "timestamp": str(seconds)}
        error = {"message": {"message": outcome["message"], "extraInfo": extra}}
        Path(file).write_text(json.dumps(error), encoding="utf-8")
