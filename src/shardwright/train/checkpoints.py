"""Checkpoints of a run: when they are written, which one the run resumes from, and what may have changed since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint import resume
from shardwright.checkpoint.directory import Retention, lineage_nodes, restore_replaced, skipped
from shardwright.checkpoint.manifest import Lineage, LineageNode, Manifest
from shardwright.checkpoint.multi_host.hosts import Hosts, find_hosts
from shardwright.checkpoint.multi_host.source import MultiHostCheckpoint, find_on_hosts, latest_choice
from shardwright.checkpoint.parts import Value
from shardwright.checkpoint.reader import CheckpointSource, SharedCheckpoint
from shardwright.checkpoint.restore import current_state, restore
from shardwright.checkpoint.resume import Choice
from shardwright.checkpoint.saver import Saver
from shardwright.checkpoint.settings import changes, refuse_unaccepted
from shardwright.checkpoint.state import buffer_keys, check_buffers
from shardwright.config.load import Loaded
from shardwright.data.order import Cursor
from shardwright.errors import CheckpointError, DamagedCheckpointError, SaveError, ShardwrightError
from shardwright.mesh.cluster_environment import Job
from shardwright.mesh.object_collectives import broadcast_object, gather_objects
from shardwright.mesh.process_group import transfer_group
from shardwright.train.optimizer import optimizer_change
from shardwright.train.rows_done import SavedPosition, accepts_other_data
from shardwright.train.update import UpdateEngine

ORDER = {"training.global_batch_size", "training.seed", "data.shuffle", "data.bucket_updates"}
"""Keys that say which rows an update holds, beside the data."""


@dataclass
class Progression:
    """How far the run is: what a checkpoint restores beside tensors. Its fields are those of `Manifest`."""

    update: int = 0
    target_tokens: int = 0
    eval_loss: float | None = None
    best: tuple[int, float] | None = None
    cursor: Cursor | None = None

    def evaluated(self, loss: float) -> None:
        """Records an evaluation of the weights as they are."""
        self.eval_loss = loss
        if self.best is None or loss < self.best[1]:
            self.best = (self.update, loss)


class Checkpoints:
    """Writes and reads the checkpoints of one run, of which `at` says how far it is. Collective."""

    def __init__(
        self,
        loaded: Loaded,
        engine: UpdateEngine,
        fingerprint: str,
        at: Progression,
        say: Callable[[str], None],
        eval_data: str = "",
    ) -> None:
        self._loaded, self._engine, self._at, self._say = loaded, engine, at, say
        self._fingerprint, self._eval_data = fingerprint, eval_data
        self._lineage: Lineage = ()
        self._branch_at_next_save: tuple[Choice, Manifest | None] | None = None
        self.unsaved: SaveError | None = None
        """Why the newest save has failed, where the run continued (`checkpoint.on_save_error` warn); None since one is good."""
        self._settings = c = loaded.run.checkpoint
        self.output_dir = Path(c.output_dir)
        self.saved_position: SavedPosition | None = None
        """Where the checkpoint that the run resumed from stands in the data."""
        self.hosts = self._hosts()
        self.saver = Saver(
            self.output_dir,
            Retention(c.save_total_limit, c.keep_every, c.keep_best),
            hosts=self.hosts,
            copies=c.copies,
            background=c.async_save,
            busy=c.async_when_busy,
            on_complete=self._completed,
            say=say,
        )

    def _completed(self, path: Path) -> None:
        self.unsaved = None
        self._say(f"Saved {path}.")

    def _hosts(self) -> Hosts:
        """Which ranks share a directory: all, unless each host has its own disk; then ranks try which files they see."""
        if self._settings.storage == "shared":
            return Hosts.one()
        group = transfer_group(self._loaded.run.hardware.timeout_seconds)
        hosts, copies = find_hosts(self.output_dir, group), self._settings.copies
        kept = min(copies, hosts.count - 1)
        several = f"s ({', '.join(hosts.names)}), each with its own disk" if hosts.count > 1 else ""
        more = "" if kept == copies else f"; {copies} would need {copies + 1} hosts"
        self._say(f"checkpoint.storage per_host: {hosts.count} host{several}, copies of each file: {kept}{more}.")
        return hosts

    def state(self) -> dict[str, Value]:
        """Weights and optimizer as they are."""
        return current_state(self._engine.module, self._engine.optimizer, self._engine.params)

    def _row_order(self) -> str:
        t, data = self._loaded.run.training, self._loaded.run.data
        order = f"global_batch_size {t.global_batch_size}, seed {t.seed}, shuffle {str(data.shuffle).lower()}"
        return order if data.bucket_updates == 1 else f"{order}, bucket_updates {data.bucket_updates}"

    # Saving

    def save(self) -> Path:
        """Writes a checkpoint of the state between updates and waits for it; returns its directory."""
        self.saver.finish()
        self.start()
        path = self.saver.finish()
        assert path is not None
        return path

    def start(self) -> None:
        """Starts a checkpoint; `saver` ends it."""
        check_buffers(self._engine.module)
        if self._branch_at_next_save is not None:
            self._begin(*self._branch_at_next_save)
            self._branch_at_next_save = None
        manifest = Manifest(
            **vars(self._at),
            data_fingerprint=self._fingerprint,
            row_order=self._row_order(),
            world_size=dist.get_world_size(),
            layout=f"{self._loaded.run.parallelism.data_parallel} {self._engine.axes}",
            torch_version=torch.__version__,
            lineage=self._lineage,
            eval_data=self._eval_data,
        )
        volatile = buffer_keys(self._engine.module)
        if not self.saver.save(self.state(), manifest, self._loaded.to_yaml(), volatile):
            self._say(f"Not saved after update {self._at.update}: the previous checkpoint is still being written.")

    def between_updates(self, *, due: bool, last: bool) -> None:
        """Moves a save on and starts one where `due`; handles a failed save as on_save_error says.

        last: the run ends here, so a checkpoint is written whatever is under way, and waited for.
        """
        self._attempt(self.saver.finish if last else self.saver.poll)
        if due or last:
            self._attempt(self.start)
        if last or not self._settings.async_save:
            self._attempt(self.saver.finish)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except SaveError as error:
            if self._settings.on_save_error == "stop":
                raise
            self.unsaved = error
            self._say(f"{error.what} {error.why} The run continues (checkpoint.on_save_error is warn).")

    def refuse_unsaved(self) -> None:
        """Raises `SaveError` where the last checkpoint of the run could not be written: exit code 0 would hide that."""
        if self.unsaved is not None:
            raise SaveError(
                f"The run has ended without its last checkpoint. {self.unsaved.what}",
                "A later start resumes from an older checkpoint.",
                "Free or repair the disk, and start again.",
            )

    # Resuming

    def resume(self, job: Job | None = None) -> Path | None:
        """Restores the checkpoint that `checkpoint.resume` names, if there is one; returns its directory.

        With `auto`, a checkpoint whose content turns out to be damaged is named and skipped for the next older one.
        job: of these ranks; where it was started before and chose a branch, they resume from the newest checkpoint of that.
        """
        unused = gather_objects(self._unused() if self.hosts.leads else [])
        bad, skipped_names = set[Path](), {path.name for lines in unused for path, _ in lines}
        for _, line in (line for lines in unused for line in lines):
            self._say(line)
        job, choice = job or Job(), latest_choice(self.hosts, self.output_dir)
        setting = resume.resume_setting(self._settings.resume, choice, job.name if job.again else "")
        path = chosen = manifest = None
        while (source := self._find(setting, bad)) is not None:
            try:
                manifest = self._restore(source)
            except DamagedCheckpointError as error:
                bad.add(source.path)
                self._say(f"{source.path} is not used. {error.what}")
            else:
                path, chosen = source.path, LineageNode(source.path, manifest.update, manifest.lineage)
                break
        nodes = [n for own in gather_objects(lineage_nodes(self.output_dir) if self.hosts.leads else []) for n in own]
        skipped_names |= {path.name for path in bad}
        origin = broadcast_object(resume.origin_text(self.output_dir, path))
        branch = broadcast_object(resume.choose_branch(choice, nodes, chosen, origin, job.name, skipped_names))
        self._lineage = branch.lineage
        if setting == "auto" and chosen is not None and branch.lineage != resume.current_lineage(choice, nodes):
            # nobody chose this branch, damage did: a repair before the next save brings the newer checkpoint back
            self._branch_at_next_save = (branch, manifest)
        else:
            self._begin(branch, manifest)
        self._say_left([node for node in nodes if node.path.name not in skipped_names])
        return path

    def _unused(self) -> list[tuple[Path, str]]:
        """What this host's directory has that is not used, and a line about each."""
        restore_replaced(self.output_dir)
        alone = self.hosts.count == 1
        where = "" if alone else f"on {self.hosts.names[self.hosts.own]} "
        found = skipped(self.output_dir, whole=alone)
        return [(path, f"{path} {where}is not used: {reason}.") for path, reason in found]

    def _begin(self, branch: Choice, manifest: Manifest | None) -> None:
        """Records on each host that the run resumes on `branch`, from the checkpoint of `manifest` or from nothing."""
        notes, problem = [], None
        if self.hosts.leads:
            try:
                notes = resume.begin_branch(self.output_dir, branch, manifest)
            except SaveError as error:
                problem = error
        found = gather_objects((notes, problem))
        for _, problem in found:
            if problem is not None:
                raise problem
        self.saver.tell([notes for notes, _ in found])

    def _say_left(self, nodes: Sequence[LineageNode]) -> None:
        """Names the checkpoints of other branches that are ahead of this run."""
        at = self._at.update
        left = {(node.update, node.path.name) for node in nodes if node.update > at and not node.is_on(self._lineage)}
        if left:
            names = ", ".join(name for _, name in sorted(left))
            self._say(
                f"{names} in {self.output_dir} {'is' if len(left) == 1 else 'are'} not on the branch that this run follows "
                f"from update {at}: checkpoint.resume auto skips checkpoints of other branches."
            )

    def _find(self, setting: str, bad: set[Path]) -> CheckpointSource | None:
        """What rank 0 finds, or all hosts together: ranks may see a shared directory at different moments."""
        if self.hosts.count > 1:
            return find_on_hosts(self.hosts, self.output_dir, setting, bad)
        found: Any = None
        if dist.get_rank() == 0:
            try:
                found = resume.find_checkpoint(self.output_dir, setting, bad)
            except ShardwrightError as error:
                found = error
        found = broadcast_object(found)
        if isinstance(found, ShardwrightError):
            raise found
        return SharedCheckpoint(found) if found is not None else None

    def _restore(self, source: CheckpointSource) -> Manifest:
        path, manifest, accepted = source.path, source.manifest(), self._settings.accept_changes
        if manifest.data_fingerprint != self._fingerprint and not accepts_other_data(self._loaded.run):
            raise CheckpointError(
                f"{path} was trained on other data, tokenizer or data settings than this run file names.",
                "The position of the checkpoint in the data would mean other rows.",
                "Restore the data, start a new run in another output_dir, or confirm with checkpoint.accept_changes.",
            )
        if manifest.row_order != self._row_order() and not ORDER & set(accepted):
            raise CheckpointError(
                f"{path} was trained with {manifest.row_order}; this run has {self._row_order()}.",
                f"Update {manifest.update} would have other rows than in the run that was saved.",
                "Restore these values, or confirm with checkpoint.accept_changes.",
            )
        config = source.config()
        changed = changes(config, self._loaded)
        refuse_unaccepted(str(path), changed, accepted)
        engine, at = self._engine, self._at
        left, optimizer_match = restore(
            source,
            engine.module,
            engine.optimizer,
            engine.params,
            self._settings.partial,
            optimizer_change(changed, engine.run.training.optimizer),
        )
        self.saved_position = SavedPosition.of(manifest, config)
        for name in vars(at):
            setattr(at, name, getattr(manifest, name))
        lines = list(source.notes) if isinstance(source, MultiHostCheckpoint) else []
        if changed:
            lines.append(f"Changed since {path.name}: {'; '.join(map(str, changed))}.")
        lines += optimizer_match.lines(path.name)
        if left:
            more = " ..." if len(left) > 5 else ""
            lines.append(f"Not read from {path.name} (checkpoint.partial): {', '.join(left[:5])}{more}.")
        for line in lines:
            self._say(line)
        self._compare_eval_data(manifest)
        return manifest

    def _compare_eval_data(self, manifest: Manifest) -> None:
        """Drops evaluation losses of other rows. Checkpoints that do not name their rows are trusted."""
        now, before = self._eval_data, manifest.eval_data
        if now and before and now != before:
            self._at.eval_loss = self._at.best = None
            if manifest.best is not None:
                self._say("data.validation holds other rows than before: earlier evaluation losses no longer count.")
        self._eval_data = now or before
