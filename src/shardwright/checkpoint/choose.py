"""Which checkpoint a start goes on from, and the branch of the run that begins there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from shardwright.checkpoint.directory import (
    BEST,
    LATEST,
    complete_checkpoints,
    finish_removals,
    is_named,
    members_of,
    point_best,
    update_of,
)
from shardwright.checkpoint.files import MANIFEST
from shardwright.checkpoint.lineage import (
    LINEAGE,
    Choice,
    Lineage,
    Member,
    branched,
    continued,
    follows,
    line_of,
    number_of,
    read_choice,
    write_choice,
)
from shardwright.checkpoint.manifest import Manifest, member_of, problems_of, verify
from shardwright.checkpoint.refused import point
from shardwright.errors import CheckpointError, ConfigError, DamagedCheckpointError, SaveError, did_you_mean


def asked(resume: str, choice: Choice | None, job: str) -> str:
    """What `checkpoint.resume` means to a job that is started again: the branch that the job has chosen itself.

    job: its name; empty for a job that is started for the first time, which chooses anew.
    """
    return "auto" if job and choice is not None and choice.job == job else resume


def find(output_dir: Path, resume: str, bad: Collection[Path] = ()) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: `auto`, `never` or a directory.

    `auto` is the newest on the branch that was chosen last whose names and sizes are right, and that is not in `bad`.
    Raises `ConfigError` for `never` where an earlier run has left checkpoints: theirs and the new ones would be taken for
    one run's. Raises `CheckpointError` where checkpoints are there and none of them can be gone on from.
    """
    if resume == "never":
        refuse_earlier(output_dir, [p.name for p in complete_checkpoints(output_dir)])
        return None
    if resume == "auto":
        choice, members = read_choice(output_dir), members_of(output_dir)
        found = on_line(line_of(choice, members), [*members, *_elsewhere(output_dir, choice)])
        good = next((m.path for m in found if m.path not in bad and not problems_of(m.path)), None)
        if good is None:
            _refuse_nothing_good(output_dir, choice, members, found)
        return good
    path = named(resume)
    if not (path / MANIFEST).is_file():
        others = [str(p) for p in complete_checkpoints(path.parent)]
        raise CheckpointError(
            f"{path} holds no complete checkpoint.",
            f"The directory has no {MANIFEST}.",
            did_you_mean(str(path), others),
        )
    if path in bad or problems_of(path):
        raise DamagedCheckpointError(
            f"{path} is damaged. {_reason(path)}", "", "Name another checkpoint with checkpoint.resume."
        )
    return path


def named(resume: str) -> Path:
    """The directory that `checkpoint.resume` names; `latest` and `best` stand for what they link to."""
    path = Path(resume)
    return path.parent / os.readlink(path) if path.is_symlink() else path


def on_line(line: Lineage, members: Iterable[Member]) -> list[Member]:
    """The members that a run on `line` has gone through, newest first."""
    return sorted((m for m in members if follows(line, m)), key=lambda m: -m.update)


def _elsewhere(output_dir: Path, choice: Choice | None) -> list[Member]:
    """The checkpoint of another directory from which the branch that was chosen last began, as far as it can be read."""
    if choice is None or choice.origin is None or not os.path.isabs(choice.origin):
        return []
    try:
        return [member_of(output_dir / choice.origin)]
    except CheckpointError:
        return []


def _refuse_nothing_good(
    output_dir: Path, choice: Choice | None, members: Sequence[Member], found: Sequence[Member]
) -> None:
    """Raises `CheckpointError` where there are checkpoints to go on from, but none of them is good."""
    there = complete_checkpoints(output_dir)
    if there and members and not found:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(m.path.name for m in members)} of a branch that was left, and no good checkpoint "
            "of the branch that was chosen last.",
            "The run would go on from a branch that nobody chose.",
            "Name one of these checkpoints with checkpoint.resume, or set another checkpoint.output_dir.",
        )
    if there:
        raise CheckpointError(
            f"{output_dir} holds {len(there)} checkpoint(s), and none of them is good. "
            f"{_reason(found[0].path if found else there[-1])}",
            "The run would start from nothing.",
            "Restore one of them, or set another checkpoint.output_dir.",
        )
    if choice is not None and choice.origin is not None and os.path.isabs(choice.origin):
        raise CheckpointError(
            f"The run in {output_dir} began from {choice.origin}, which is gone or changed, and has saved nothing since.",
            "The run would start from nothing.",
            f"Restore that checkpoint, name another with checkpoint.resume, or remove {output_dir / LINEAGE}.",
        )


def refuse_earlier(output_dir: Path, names: Sequence[str]) -> None:
    """Raises `ConfigError` where there are checkpoints of an earlier run, which this run must not resume."""
    if names:
        raise ConfigError(
            f"checkpoint.resume is never, but {output_dir} holds {names[-1]} of an earlier run.",
            "Checkpoints of two runs in one directory cannot be told apart.",
            "Set another checkpoint.output_dir, or resume with checkpoint.resume auto.",
        )


def _reason(path: Path) -> str:
    return next(iter(problems_of(path) or verify(path)), "")


def follow(
    choice: Choice | None,
    members: Sequence[Member],
    chosen: Member | None,
    origin: str | None,
    job: str,
    passed: Collection[str] = (),
) -> Choice:
    """The branch of a run that goes on from `chosen`, or from nothing: the branch that is followed, or a new branch.

    choice: the one before. members: what the directory holds. origin: of `chosen`, see `Choice`. passed: names of
    checkpoints that are there but not good. A new branch begins where a newer checkpoint of the
    branch is left behind, and where `chosen` lies in another directory.
    """
    line = line_of(choice, members)
    before = choice.origin if choice is not None else None
    own = origin is not None and (origin == before or not os.path.isabs(origin))
    newer = chosen is not None and any(update_of(Path(name)) > chosen.update for name in passed if is_named(name))
    if own and not newer and continued(line, chosen, members):
        return Choice(line, before, job)
    known = [line, *(m.lineage for m in members), chosen.lineage if chosen else ()]
    return Choice(branched(chosen, 1 + max(map(number_of, known)), secrets.token_hex(4)), origin, job)


def begin(output_dir: Path, choice: Choice, manifest: Manifest | None) -> list[str]:
    """Notes that training goes on as `choice` says, from the checkpoint of `manifest`, and turns the links to that branch.

    What earlier saves could not remove is tried again. Returns what was refused. Raises `SaveError` where the choice cannot
    be noted.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if read_choice(output_dir) != choice:
            write_choice(output_dir, choice)
    except OSError as error:
        raise SaveError(
            f"{output_dir / LINEAGE} cannot be written: {error}.",
            "A later start would not know which checkpoint this run goes on from.",
            "Free or repair the disk, or set another checkpoint.output_dir.",
        ) from None
    line = [m.path for m in on_line(choice.lineage, members_of(output_dir))]
    notes = finish_removals(output_dir)
    notes += point(output_dir / LATEST, line[0].name) if line else []
    if manifest is not None and (output_dir / BEST).is_symlink():
        notes += point_best(output_dir, line, manifest)
    followed = {path.resolve() for path in line}
    for link in (output_dir / LATEST, output_dir / BEST):
        if link.is_symlink() and link.resolve() not in followed:
            try:
                link.unlink()
            except OSError as error:
                notes.append(f"{link} points to a branch that was left, and the link cannot be removed: {error}.")
    return notes
