"""Saving by all ranks together, at once or in the background.

Each rank writes its own file. In the background a thread first copies this rank's parts into one host buffer, then writes them
from there. The thread calls no collective of training: ranks agree in the main thread, in `poll` between updates, so a slow
disk does not hold up training. The copy is taken while the next forward and backward run, which change neither weights nor
optimizer state; `before_step` waits for the copy. The buffer is kept for the next save: its size is this rank's share of the
state.

Each step of a save begins when all ranks have ended the step before. Where ranks share a directory: write, complete (by rank
0). Where each host has its own: write, replicate, publish, remove the surplus, the last two by one rank of each host. So a
checkpoint gets its name when it is whole on all hosts, and nothing older is removed before it has its name on all hosts.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint import directory
from shardwright.checkpoint.directory import Retention
from shardwright.checkpoint.index import TENSORS, file_order, write_parts
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.multi_host.hosts import Hosts
from shardwright.checkpoint.multi_host.transfer import add_hosts, send_copies
from shardwright.checkpoint.parts import RankPart, Value, local_part, rank_parts, writers
from shardwright.checkpoint.resume import current_lineage, read_choice
from shardwright.errors import SaveError
from shardwright.mesh.object_collectives import broadcast_object, gather_objects
from shardwright.units import format_bytes_binary

Step = Literal["complete", "replicate", "publish", "remove surplus"]


def save(output_dir: Path, state: Mapping[str, Value], manifest: Manifest, run_yaml: str, keep: int | None) -> Path:
    """Writes one checkpoint and returns its directory; collective. keep: how many of the newest stay, None for all.

    The checkpoint is on the branch that was chosen last. Raises `SaveError` on all ranks when one could not write;
    nothing older is touched before the new checkpoint is complete.
    """
    saver = Saver(output_dir, Retention(keep))
    lineage = broadcast_object(current_lineage(read_choice(output_dir), directory.lineage_nodes(output_dir)))
    saver.save(state, replace(manifest, lineage=lineage), run_yaml)
    path = saver.finish()
    assert path is not None
    return path


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """(result of `work`, text of the error)."""
    try:
        return work(), ""
    except (OSError, RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}"


@dataclass
class _Save:
    """A save that is under way."""

    manifest: Manifest
    run_yaml: str
    numbers: Mapping[str, int | float]
    steps: list[Step]
    """Those that follow the present one."""
    records: list[dict[str, Any]] | None = None
    """Of all files, once they are written."""
    result: tuple[Any, str] | None = None
    """(value, error) of the step that this rank has last ended."""
    thread: threading.Thread | None = None
    staged: threading.Event = field(default_factory=threading.Event)
    """Set when weights and optimizer have been copied."""


class Saver:
    """Writes checkpoints of one run into `output_dir`. All methods but `before_step` are collective.

    hosts: which ranks share an `output_dir`; all by default. copies: how many other hosts keep a copy of each file.
    background: writing does not hold up training. busy: with a save still under way, wait for it or skip the new one.
    on_complete: called with the directory of each checkpoint when it is complete. say: is told, once, each thing that a file
    system refuses and that does not end a save.
    """

    def __init__(
        self,
        output_dir: Path,
        retention: Retention,
        *,
        hosts: Hosts | None = None,
        copies: int = 0,
        background: bool = False,
        busy: Literal["wait", "skip"] = "wait",
        on_complete: Callable[[Path], None] = lambda path: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.output_dir, self._retention = output_dir, retention
        self._background, self._busy, self._on_complete, self._say = background, busy, on_complete, say
        self._hosts, self._copies = hosts or Hosts.one(), copies
        self._save: _Save | None = None
        self._said: set[str] = set()
        self._mine: list[RankPart] | None = None
        self._signature: list[RankPart] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer that a background save copies into; 0 before the first."""
        return self._buffer.numel()

    @property
    def pending(self) -> bool:
        """Whether a save is under way; equal on all ranks."""
        return self._save is not None

    def save(
        self, state: Mapping[str, Value], manifest: Manifest, run_yaml: str, volatile: Collection[str] = ()
    ) -> bool:
        """Starts a checkpoint of `state`; False where it was skipped because one is still being written.

        `finish` ends it, or in the background `poll`. volatile: keys that forward may change (buffers), copied at once.
        Raises `SaveError` on all ranks alike where an earlier save, or this one, could not be written.
        """
        if self._save is not None:
            if self._busy == "skip" and self.poll() is None and self._save is not None:
                return False
            self.finish()
        mine, numbers = self._agree_on_parts(state, manifest.update)
        steps: list[Step] = ["complete"]
        if self._hosts.count > 1:
            steps = ["replicate", "publish", "remove surplus"]
            manifest, run_yaml = broadcast_object((replace(manifest, hosts=self._hosts.names), run_yaml))
        self._save = save = _Save(manifest, run_yaml, numbers, steps)
        parts = [(held, tensor) for held in file_order(mine) if isinstance(tensor := state[held.key], Tensor)]
        if not self._background:
            save.result = _attempt(lambda: self._write(save, parts))
            save.staged.set()
            return True
        staged = self._staging(parts)
        copies = [(local_part(tensor), copy) for (_, tensor), (_, copy) in zip(parts, staged)]
        for (held, _), (local, copy) in zip(parts, copies):
            if held.key in volatile:
                copy.copy_(local)
        later = [pair for (held, _), pair in zip(parts, copies) if held.key not in volatile]
        queued = _queued_work(later)

        def copy_and_write() -> dict[str, Any] | None:
            try:
                _copy_to_host(later, queued)
            finally:
                save.staged.set()
            return self._write(save, staged)

        self._start(save, copy_and_write)
        return True

    def _agree_on_parts(self, state: Mapping[str, Value], update: int) -> tuple[list[RankPart], dict[str, int | float]]:
        """(the parts that this rank writes, the numbers of all ranks), with the directory made.

        Which parts ranks hold is exchanged only when that has changed on one of them.
        """
        own = rank_parts(state)
        numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        prepare = lambda: directory.prepare(self.output_dir, update) if self._hosts.leads else []  # noqa: E731
        notes, problem = _attempt(prepare)
        known = self._mine is not None and own == self._signature
        found = gather_objects((problem, known, numbers, notes))
        _raise_any([text for text, *_ in found])
        self.tell([notes for *_, notes in found])
        if not all(known for _, known, *_ in found):
            self._mine = writers(gather_objects(own))[dist.get_rank()]
            self._signature = own
        assert self._mine is not None
        return self._mine, {k: v for _, _, part, _ in reversed(found) for k, v in part.items()}

    def tell(self, notes: Sequence[Sequence[str] | None]) -> None:
        """Prints each refusal of a file system that has not been printed yet. notes: of each rank."""
        for rank, lines in enumerate(notes):
            for line in lines or ():
                where = f"On {self._hosts.names[self._hosts.of_rank[rank]]}: " if self._hosts.count > 1 else ""
                if where + line not in self._said:
                    self._said.add(where + line)
                    self._say(where + line)

    def _staging(self, parts: list[tuple[RankPart, Tensor]]) -> list[tuple[RankPart, Tensor]]:
        """Each part with its place in the staging buffer."""
        size = sum(held.part_bytes for held, _ in parts)
        if self._buffer.numel() < size:
            on_device = any(tensor.device.type == "cuda" for _, tensor in parts)
            self._buffer, refusal = _host_buffer(size, self._buffer, on_device)
            if refusal:
                self._say(refusal)
        copies = self._buffer[:size].split([held.part_bytes for held, _ in parts]) if parts else ()
        return [(held, copy.view(held.dtype).view(held.box.shape)) for (held, _), copy in zip(parts, copies)]

    def _write(self, save: _Save, parts: list[tuple[RankPart, Tensor]]) -> dict[str, Any] | None:
        if not parts:
            return None
        tensors = directory.incomplete_of(self.output_dir, save.manifest.update) / TENSORS
        return write_parts(tensors / f"rank-{dist.get_rank():05d}.safetensors", parts)

    def _start(self, save: _Save, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                save.result = _attempt(work)
            except BaseException as error:  # raised again on all ranks, in the main thread
                save.result = (None, f"{type(error).__name__}: {error}")

        save.result = None
        save.thread = threading.Thread(target=run, name=f"save-{save.manifest.update}", daemon=True)
        save.thread.start()

    def before_step(self) -> None:
        """Waits until a save under way has copied weights and optimizer. Not collective."""
        if self._save is not None:
            self._save.staged.wait()

    def poll(self) -> Path | None:
        """Moves a save under way on, without waiting; its directory when that has completed it. Between updates.

        Raises `SaveError` on all ranks alike where a rank could not write.
        """
        save = self._save
        if save is None:
            return None
        running = torch.tensor(int(save.result is None))
        dist.all_reduce(running, dist.ReduceOp.MAX)
        return None if running.item() else self._advance(save)

    def finish(self) -> Path | None:
        """Waits for a save under way; its directory, or None where there is none. Raises as `poll`."""
        while (save := self._save) is not None:
            if save.thread is not None:
                save.thread.join()
            if (path := self._advance(save)) is not None:
                return path
        return None

    def _advance(self, save: _Save) -> Path | None:
        """The next step of a save whose present one has ended on all ranks."""
        assert save.result is not None
        if save.thread is not None:
            save.thread.join()
        found = gather_objects(save.result)
        problems = [text for _, text in found]
        if any(problems):
            self._save = None
            if self._hosts.leads:
                shutil.rmtree(directory.incomplete_of(self.output_dir, save.manifest.update), ignore_errors=True)
            _raise_any(problems)
        if save.records is None:
            save.records = add_hosts(self._hosts, self._copies, [record for record, _ in found])
        else:
            self.tell([notes for notes, _ in found])
        if not save.steps:
            self._save = None
            path = directory.checkpoint_of(self.output_dir, save.manifest.update)
            self._on_complete(path)
            return path
        work = self._work(save, save.steps.pop(0), save.records)
        save.result, save.thread = (None, ""), None
        if work is not None and self._background:
            self._start(save, work)
        elif work is not None:
            save.result = _attempt(work)
        return None

    def _work(self, save: _Save, step: Step, records: list[dict[str, Any]]) -> Callable[[], Any] | None:
        """The work of this rank in a step; None where it has none."""
        output_dir, manifest, retention = self.output_dir, save.manifest, self._retention
        contents = (records, save.numbers, manifest, save.run_yaml)

        def replicate() -> None:
            send_copies(self._hosts, records, directory.incomplete_of(output_dir, manifest.update) / TENSORS)
            if self._hosts.leads:
                directory.write_manifest(output_dir, *contents)

        if step == "replicate":
            return replicate
        works: dict[Step, Callable[[], Any]] = {
            "complete": lambda: directory.complete(output_dir, *contents, retention),
            "publish": lambda: directory.publish(output_dir, manifest),
            "remove surplus": lambda: directory.remove_surplus(output_dir, manifest, retention),
        }
        return works[step] if self._hosts.leads else None


def _raise_any(problems: list[str]) -> None:
    """Raises `SaveError` where a rank has a problem."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise SaveError(
            f"The checkpoint was not written: {'; '.join(found)}.",
            "Older checkpoints are untouched.",
            "Free or repair the disk. With checkpoint.on_save_error warn the run continues without this checkpoint.",
        )


def _host_buffer(size: int, old: Tensor, pinned: bool) -> tuple[Tensor, str]:
    """(`size` bytes on the host, registered with CUDA where `pinned`; CUDA's refusal, or nothing). `old` is given up.

    torch's allocator of pinned memory would round one block up to a power of two.
    """
    if pinned and old.numel() and old.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(old.data_ptr())
    buffer, refusal = torch.empty(size, dtype=torch.uint8), ""
    if pinned and size:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        if code:
            refusal = (
                f"CUDA does not lock {format_bytes_binary(size)} of host memory for saving (cudaHostRegister: error {code}). "
                "Checkpoints are right, but their copies hold up training for longer. Look at `ulimit -l`."
            )
    return buffer, refusal


def _queued_work(copies: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """The end of the work that this thread has queued on the GPU of the tensors that are copied; None without a GPU."""
    device = next((t.device for t, _ in copies if t.device.type == "cuda"), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def _copy_to_host(copies: list[tuple[Tensor, Tensor]], queued: torch.cuda.Event | None) -> None:
    """Copies each tensor to its place on the host; from a GPU on a stream of its own, after the work `queued`.

    Called in a thread, which begins with device 0: unless it takes the device of the tensors, CUDA makes a context on GPU 0.
    """
    if queued is None:
        with torch.no_grad():
            for tensor, copy in copies:
                copy.copy_(tensor)
        return
    device = next(t.device for t, _ in copies if t.device.type == "cuda")
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(queued)
    with torch.no_grad(), torch.cuda.stream(stream):
        for tensor, copy in copies:
            copy.copy_(tensor, non_blocking=True)
    stream.synchronize()
