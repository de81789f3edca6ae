"""Output that cannot be written: to a closed terminal, to a reader that has ended, to a full disk, in a narrow locale."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.launch.output import LossyStream

PRINTS = """
import logging, sys, warnings
from shardwright.launch.output import tolerate_lost_output
{install}
from rich.console import Console
from rich.live import Live
sys.stdin.read()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
    console = Console(file=None if stream is sys.stdout else stream)
    console.print("[bold]bold")
    with Live("live", console=console, refresh_per_second=50) as live:
        live.update("more")
    stream.writelines(["a", "b"])
warnings.warn("a warning")
logging.basicConfig()
logging.warning("a line of the log")
print(chr(0x2192))
sys.exit(7)
"""


def _ends(how: str, install: str = "tolerate_lost_output()") -> tuple[int, str]:
    """(exit code, standard error where that can be read) of a process that prints when its output is gone."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", PRINTS.format(install=install)]
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "text": True, "env": os.environ | paths}
    if how == "terminal":
        master, terminal = pty.openpty()
        process = subprocess.Popen(command, stdout=terminal, stderr=terminal, **given)
        os.close(terminal)
        os.close(master)
    elif how == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, **given)
    elif how == "full":
        with Path("/dev/full").open("w") as full:
            process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, **given)
    else:
        reader, writer = os.pipe()
        process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, **given)
        os.close(reader)
        os.close(writer)
    errors = process.communicate("", timeout=60)[1]
    return process.returncode, errors or ""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("terminal", ""),
        ("closed", ""),
        ("full", "No space left on device"),
        ("pipe", "Broken pipe"),
    ],
)
def test_no_print_ends_a_process(how: str, reason: str) -> None:
    """The process ends with its own code, and says once what is lost. Without our streams it ends with another."""
    code, errors = _ends(how)
    assert code == 7, errors
    said = f"shardwright: standard output cannot be written ({reason}): its lines are lost."
    assert errors.count("cannot be written") == (1 if reason else 0) and (said in errors) is bool(reason)
    assert "a line of the log" in errors or how == "terminal"
    if how == "pipe":
        assert _ends(how, install="")[0] != 7


def test_the_command_itself_prints_so(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "shardwright", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and "standard output cannot be written" in done.stderr


def test_a_reader_that_does_not_read_holds_nothing_up() -> None:
    """A pipe that is full, as under a pager: a line is dropped, said once, and lines go on when it is read again."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    said = io.StringIO()
    with os.fdopen(writer, "w", buffering=1) as below:
        stream, stream.other = LossyStream(below, "standard output"), LossyStream(said, "standard error")
        stream.patience = 0.01
        for _ in range(3):
            assert stream.write("lost\n") == 5
        assert said.getvalue().count("(nobody has read for 0.01 s)") == 1
        os.read(reader, 65536)
        stream.write("kept\n")
    assert os.read(reader, 65536) == b"kept\n"
    os.close(reader)


class Full(io.StringIO):
    """A disk without room, then with some."""

    full = True

    def write(self, text: str, /) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_what_can_be_written_again_is() -> None:
    """A full disk may have room later: only what was lost meanwhile is lost."""
    below, said = Full(), io.StringIO()
    stream, stream_of_errors = LossyStream(below, "standard output"), LossyStream(said, "standard error")
    stream.other = stream_of_errors
    assert stream.write("lost") == 4 and stream.write("lost too") == 8
    below.full = False
    stream.write("kept")
    assert below.getvalue() == "kept" and said.getvalue().count("cannot be written") == 1


def test_a_long_text_waits_no_longer_than_a_line_for_a_reader() -> None:
    """A pipe holds some pieces of it; then nobody reads, and the rest is dropped."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading, "rb") as reader:
        lossy = LossyStream(stream, "standard output")
        lossy.patience = 0.01
        assert lossy.write("\u00e9" * 1_000_000) == 1_000_000
        os.set_blocking(reader.fileno(), False)
        assert 0 < len(reader.read()) < 1_000_000


def test_what_else_a_program_asks_of_its_output_is_answered() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    lossy = LossyStream(stream, "standard output")
    lossy.reconfigure(line_buffering=True)
    assert stream.line_buffering and lossy.line_buffering
    with pytest.raises(AttributeError):
        lossy.nothing  # noqa: B018
