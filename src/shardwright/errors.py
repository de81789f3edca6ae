"""Errors that say what is wrong, why it matters and how to fix it, and the exit codes of every verb."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line, the same for every verb."""

    DONE = 0
    CRASH = 1
    USAGE = 2
    CHECK_FAILED = 3
    NOTHING_FITS = 4
    STOPPED_AND_SAVED = 75
    INTERRUPTED = 130


class ShardwrightError(Exception):
    """An error for a person: `what` is wrong, `why` it cannot go on, and the `fix`.

    `str(error)` is the three sentences in that order; empty parts are left out.
    """

    exit_code = ExitCode.CRASH

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.fix) if part)


class ConfigError(ShardwrightError):
    """A run file, an override or a layout that is refused before any process starts."""

    exit_code = ExitCode.USAGE


class DataError(ShardwrightError):
    """Data that cannot be read or that would train nothing."""

    exit_code = ExitCode.USAGE


class ModelError(ShardwrightError):
    """A model that cannot be built, loaded or split as asked."""

    exit_code = ExitCode.USAGE


class CheckFailed(ShardwrightError):
    """A layout that does not train the same objective as the reference."""

    exit_code = ExitCode.CHECK_FAILED


class StoppedEarly(ShardwrightError):
    """A rank that was asked to stop before there was anything to save."""

    exit_code = ExitCode.STOPPED_AND_SAVED


class CheckpointError(ShardwrightError):
    """A checkpoint that cannot be written, or that must not be used."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written, to a full disk for example. Older ones are untouched."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not what was written."""


class MemoryExhausted(ShardwrightError):
    """A rank that ran out of memory, with what was alive and what was planned."""


class NonFiniteError(ShardwrightError):
    """A loss or gradient that is not finite, with the update and the rank where it arose."""


class SpikeError(ShardwrightError):
    """A loss or gradient norm far above those before it, where training.on_spike is stop."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names of `known` that are closest to `name`, best first; empty when none is close."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean X?`, or the whole list when nothing is close and the list is short."""
    names = sorted(known)
    close = nearest(name, names, count=1)
    if close:
        return f"Did you mean `{close[0]}`?"
    return f"Valid: {', '.join(names)}." if len(names) <= 20 else ""
