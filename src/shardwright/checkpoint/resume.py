"""Which checkpoint a start resumes from, and the branch of the run that begins there.

`lineage.json` beside the checkpoints says which branch was chosen last, from the moment that training begins on it. So a run
that is killed before its first save resumes from the checkpoint that was chosen.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.checkpoint.directory import (
    BEST,
    LATEST,
    complete_checkpoints,
    is_checkpoint_name,
    lineage_nodes,
    link_best,
    retry_removals,
    update_of,
)
from shardwright.checkpoint.filesystem import set_link, write_text
from shardwright.checkpoint.manifest import (
    MANIFEST,
    Branch,
    Lineage,
    LineageNode,
    Manifest,
    parse_lineage,
    problems_of,
    read_node,
    verify,
)
from shardwright.errors import CheckpointError, ConfigError, DamagedCheckpointError, SaveError, did_you_mean

LINEAGE = "lineage.json"


@dataclass(frozen=True)
class Choice:
    """The branch that was chosen last."""

    lineage: Lineage
    origin: str | None
    """The checkpoint from which the branch began: its name where it lies in `output_dir`, which may be moved or copied, else
    its path; None where the branch began from nothing."""
    job: str
    """The job that chose; the same job does not choose again when its ranks are started again."""

    @property
    def origin_elsewhere(self) -> Path | None:
        """The checkpoint from which the branch began, where that lies in another directory."""
        return Path(self.origin) if self.origin is not None and os.path.isabs(self.origin) else None


def origin_text(output_dir: Path, path: Path | None) -> str | None:
    """`Choice.origin` of the checkpoint at `path`."""
    if path is None:
        return None
    return path.name if path.resolve().parent == output_dir.resolve() else os.fspath(path.absolute())


def read_choice(output_dir: Path) -> Choice | None:
    """The last choice that `output_dir` records; None where it records none, or one that cannot be read."""
    try:
        found = json.loads((output_dir / LINEAGE).read_bytes())
        origin = found["origin"]
        return Choice(parse_lineage(found["lineage"]), str(origin) if origin else None, str(found["job"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_choice(output_dir: Path, choice: Choice) -> None:
    new = output_dir / f".{LINEAGE}.new"
    write_text(new, json.dumps(asdict(choice), indent=1) + "\n")
    shutil.move(new, output_dir / LINEAGE)  # copies where a share cannot rename over a file


def number_of(lineage: Lineage) -> int:
    return lineage[-1].number if lineage else 0


def current_lineage(choice: Choice | None, nodes: Iterable[LineageNode]) -> Lineage:
    """The lineage that was chosen last, as far as the choice or the checkpoints tell."""
    if choice is not None:
        return choice.lineage
    return max((node.lineage for node in nodes), key=number_of, default=())


# Which checkpoint


def resume_setting(resume: str, choice: Choice | None, job: str) -> str:
    """What `checkpoint.resume` means to a job that is started again: the branch that the job has chosen itself.

    job: its name; empty for a job that is started for the first time, which chooses for itself.
    """
    return "auto" if job and choice is not None and choice.job == job else resume


def find_checkpoint(output_dir: Path, resume: str, bad: Collection[Path] = ()) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: `auto`, `never` or a directory.

    `auto` is the newest on the branch that was chosen last whose names and sizes are right, and that is not in `bad`.
    Raises `ConfigError` for `never` where an earlier run has left checkpoints. Raises `CheckpointError` where checkpoints are
    there and none of them can be resumed from.
    """
    if resume == "never":
        refuse_earlier(output_dir, [p.name for p in complete_checkpoints(output_dir)])
        return None
    if resume == "auto":
        choice, nodes = read_choice(output_dir), lineage_nodes(output_dir)
        found = _newest_first(current_lineage(choice, nodes), [*nodes, *_elsewhere(choice)])
        good = next((n.path for n in found if n.path not in bad and not problems_of(n.path)), None)
        if good is None:
            _refuse_nothing_good(output_dir, choice, nodes, found)
        return good
    path = resolve_link(resume)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} holds no complete checkpoint.",
            f"The directory has no {MANIFEST}.",
            did_you_mean(str(path), [str(p) for p in complete_checkpoints(path.parent)]),
        )
    if path in bad or problems_of(path):
        raise DamagedCheckpointError(
            f"{path} is damaged. {_first_problem(path)}", "", "Name another checkpoint with checkpoint.resume."
        )
    return path


def resolve_link(resume: str) -> Path:
    """The directory that `checkpoint.resume` names; `latest` and `best` stand for the checkpoints that they link to."""
    path = Path(resume)
    return path.parent / os.readlink(path) if path.is_symlink() else path


def _newest_first(lineage: Lineage, nodes: Iterable[LineageNode]) -> list[LineageNode]:
    """The checkpoints that a run on `lineage` has passed through."""
    return sorted((node for node in nodes if node.is_on(lineage)), key=lambda node: -node.update)


def _elsewhere(choice: Choice | None) -> list[LineageNode]:
    """The checkpoint of another directory from which the branch that was chosen last began, as far as it can be read."""
    if choice is None or choice.origin_elsewhere is None:
        return []
    try:
        return [read_node(choice.origin_elsewhere)]
    except CheckpointError:
        return []


def _refuse_nothing_good(
    output_dir: Path, choice: Choice | None, nodes: Sequence[LineageNode], found: Sequence[LineageNode]
) -> None:
    """Raises `CheckpointError` where there are checkpoints to resume from, but none of them is good."""
    there = complete_checkpoints(output_dir)
    if there and nodes and not found:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(n.path.name for n in nodes)} of a branch that was left, and no good checkpoint "
            "of the branch that was chosen last.",
            "The run would resume from a branch that nobody chose.",
            "Name one of these checkpoints with checkpoint.resume, or set another checkpoint.output_dir.",
        )
    if there:
        raise CheckpointError(
            f"{output_dir} holds {len(there)} checkpoint(s), and none of them is good. "
            f"{_first_problem(found[0].path if found else there[-1])}",
            "The run would start from nothing.",
            "Restore one of these checkpoints, or set another checkpoint.output_dir.",
        )
    if choice is not None and choice.origin_elsewhere is not None:
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


def _first_problem(path: Path) -> str:
    return next(iter(problems_of(path) or verify(path)), "")


# Which branch


def choose_branch(
    choice: Choice | None,
    nodes: Sequence[LineageNode],
    chosen: LineageNode | None,
    origin: str | None,
    job: str,
    skipped: Collection[str] = (),
) -> Choice:
    """The branch of a run that resumes from `chosen`, or from nothing: the current branch, or a new one.

    choice: the one before. nodes: what the directory holds. origin: of `chosen`, see `Choice`. skipped: names of checkpoints
    that are there but not good. A new branch begins where a newer checkpoint of the branch is left behind, and where `chosen`
    lies in another directory.
    """
    lineage = current_lineage(choice, nodes)
    before = choice.origin if choice is not None else None
    own = origin is not None and (origin == before or not os.path.isabs(origin))
    newer = chosen is not None and any(
        update_of(Path(name)) > chosen.update for name in skipped if is_checkpoint_name(name)
    )
    if own and not newer and stays_on_branch(lineage, chosen, nodes):
        return Choice(lineage, before, job)
    known = [lineage, *(node.lineage for node in nodes), chosen.lineage if chosen else ()]
    return Choice(new_branch(chosen, 1 + max(map(number_of, known)), secrets.token_hex(4)), origin, job)


def stays_on_branch(lineage: Lineage, chosen: LineageNode | None, nodes: Iterable[LineageNode]) -> bool:
    """Whether a run that resumes from `chosen` stays on `lineage`: it leaves nothing newer of that lineage behind."""
    if chosen is None or not chosen.lineage or not chosen.is_on(lineage) or chosen.update < lineage[-1].begin:
        return False
    return not any(other.is_on(lineage) and other.update > chosen.update for other in nodes)


def new_branch(chosen: LineageNode | None, number: int, name: str) -> Lineage:
    """The lineage of a new branch from `chosen`, or from nothing."""
    before, begin = (chosen.lineage, chosen.update) if chosen else ((), 0)
    return (*before, Branch(number, name, begin))


def begin_branch(output_dir: Path, choice: Choice, manifest: Manifest | None) -> list[str]:
    """Records that training resumes on the branch of `choice`, from the checkpoint of `manifest`, and turns the links to it.

    What earlier saves could not remove is tried again. Returns lines about what the file system refused. Raises `SaveError`
    where the choice cannot be recorded.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if read_choice(output_dir) != choice:
            write_choice(output_dir, choice)
    except OSError as error:
        raise SaveError(
            f"{output_dir / LINEAGE} cannot be written: {error}.",
            "A later start would not know which checkpoint this run resumed from.",
            "Free or repair the disk, or set another checkpoint.output_dir.",
        ) from None
    own = [node.path for node in _newest_first(choice.lineage, lineage_nodes(output_dir))]
    notes = retry_removals(output_dir)
    notes += set_link(output_dir / LATEST, own[0].name) if own else []
    if manifest is not None and (output_dir / BEST).is_symlink():
        notes += link_best(output_dir, own, manifest)
    on_branch = {path.resolve() for path in own}
    for link in (output_dir / LATEST, output_dir / BEST):
        if link.is_symlink() and link.resolve() not in on_branch:
            try:
                link.unlink()
            except OSError as error:
                notes.append(f"{link} points to a branch that was left, and the link cannot be removed: {error}.")
    return notes
