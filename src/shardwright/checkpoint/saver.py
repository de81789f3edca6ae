"""Saving by all ranks together, at once or in the background.

Each rank writes its own file. In the background a thread first copies this rank's parts into one buffer, then writes them
from there. It calls no collective of training: ranks agree in the main thread, in `poll` between updates, so that a slow disk
never holds one up. The copy is taken while the next forward and backward run, which change no weight and
no moment; `before_step` waits for it. The buffer is kept for the next save: its size is this rank's share of the state.

One step follows another when all ranks have ended it. Where ranks share a directory: writing, completing (by rank 0). Where
each host has its own: writing, copying to other hosts, publishing, retaining, the last two by one rank of each host. So a
checkpoint has its name nowhere before it is whole everywhere, and nothing older goes before it has its name everywhere.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint import directory
from shardwright.checkpoint.files import TENSORS, file_order, write_parts
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.multi_host.hosts import Hosts, everyone, from_rank
from shardwright.checkpoint.multi_host.replication import hosts_of, send_copies
from shardwright.checkpoint.parts import Held, Value, held_parts, local_part, writers
from shardwright.checkpoint.retention import Retention
from shardwright.errors import SaveError


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """(result of `work`, text of what went wrong)."""
    try:
        return work(), ""
    except (OSError, RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}"


Step = Literal["copying", "completing", "publishing", "retaining"]


@dataclass
class _Save:
    """A save that is under way.

    steps: those that follow the present one. records: of all files, once they are written. result: (value, problem) of the
    step that this rank has last ended.
    """

    update: int
    manifest: Manifest
    run_yaml: str
    numbers: Mapping[str, int | float]
    steps: list[Step]
    records: list[dict[str, Any]] | None = None
    result: tuple[Any, str] | None = None
    thread: threading.Thread | None = None
    staged: threading.Event = field(default_factory=threading.Event)


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
        on_complete: Callable[[Path], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.output_dir, self._retention = output_dir, retention
        self._background, self._busy, self._on_complete, self._say = background, busy, on_complete, say
        self._hosts, self._copies = hosts or Hosts.one(), copies
        self._save: _Save | None = None
        self._said: set[str] = set()
        self._mine: list[Held] | None = None
        self._signature: list[Held] = []
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
        self,
        state: Mapping[str, Value],
        manifest: Manifest,
        run_yaml: str,
        volatile: Collection[str] = (),
    ) -> bool:
        """Starts a checkpoint of `state`; False where it was skipped because one is still being written.

        `finish` ends it, or in the background `poll`. volatile: keys that forward may change (buffers), copied at once.
        Raises `SaveError` on all ranks alike where an earlier save, or this one, could not be written.
        """
        if self._save is not None:
            if self._busy == "skip" and self.poll() is None and self._save is not None:
                return False
            self.finish()
        own = held_parts(state)
        numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        mine, numbers = self._agree_on_parts(own, numbers, manifest.update)
        steps: list[Step] = ["completing"]
        if self._hosts.count > 1:
            steps = ["copying", "publishing", "retaining"]
            manifest, run_yaml = from_rank(0, (replace(manifest, hosts=self._hosts.names), run_yaml))
        self._save = save = _Save(manifest.update, manifest, run_yaml, numbers, steps)
        parts = [(held, state[held.key]) for held in file_order(mine)]
        tensors = [(held, value) for held, value in parts if isinstance(value, Tensor)]
        if not self._background:
            save.result = _attempt(lambda: self._write(save.update, tensors))
            save.staged.set()
            return True
        staged, copies = self._places(tensors)
        for (held, tensor), place in zip(tensors, copies):
            if held.key in volatile:
                place.copy_(local_part(tensor))
        late = [(local_part(t), place) for (held, t), place in zip(tensors, copies) if held.key not in volatile]
        self._start(save, lambda: self._copy_and_write(save, late, staged))
        return True

    def _agree_on_parts(
        self, own: list[Held], numbers: dict[str, int | float], update: int
    ) -> tuple[list[Held], dict[str, int | float]]:
        """(the parts that this rank writes, the numbers of all ranks), with the directory made.

        What ranks hold is exchanged when it has changed on one of them.
        """
        leads = self._hosts.leads
        notes, problem = _attempt(lambda: directory.prepare(self.output_dir, update)) if leads else ([], "")
        known = self._mine is not None and own == self._signature
        found = everyone((problem, known, numbers, notes))
        _raise_any([text for text, *_ in found])
        self.tell([notes for *_, notes in found])
        if not all(known for _, known, *_ in found):
            self._mine = writers(everyone(own))[dist.get_rank()]
            self._signature = own
        assert self._mine is not None
        return self._mine, {k: v for _, _, part, _ in reversed(found) for k, v in part.items()}

    def tell(self, notes: Sequence[Sequence[str] | None]) -> None:
        """Prints each refusal of a file system that has not been printed yet and does not end the save. notes: of each rank."""
        for rank, lines in enumerate(notes):
            for line in lines or ():
                where = f"On {self._hosts.names[self._hosts.of_rank[rank]]}: " if self._hosts.count > 1 else ""
                if where + line not in self._said:
                    self._said.add(where + line)
                    self._say(where + line)

    def _places(self, tensors: list[tuple[Held, Tensor]]) -> tuple[list[tuple[Held, Tensor]], list[Tensor]]:
        """(parts, tensors) of the staging buffer, one for each part."""
        size = sum(held.part_bytes for held, _ in tensors)
        if self._buffer.numel() < size:
            on_device = any(tensor.device.type == "cuda" for _, tensor in tensors)
            self._buffer = _host_buffer(size, self._buffer, on_device)
        places, begin = [], 0
        for held, tensor in tensors:
            end = begin + held.part_bytes
            places.append(self._buffer[begin:end].view(tensor.dtype).view(held.box.shape))
            begin = end
        return [(held, place) for (held, _), place in zip(tensors, places)], places

    def _copy_and_write(
        self, save: _Save, copies: list[tuple[Tensor, Tensor]], staged: list[tuple[Held, Tensor]]
    ) -> Any:
        try:
            _copy(copies)
        finally:
            save.staged.set()
        return self._write(save.update, staged)

    def _write(self, update: int, parts: list[tuple[Held, Tensor]]) -> dict[str, Any] | None:
        if not parts:
            return None
        place = directory.aside_of(self.output_dir, update) / TENSORS
        return write_parts(place / f"rank-{dist.get_rank():05d}.safetensors", parts)

    def _start(self, save: _Save, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                save.result = _attempt(work)
            except BaseException as error:  # raised again on all ranks, in the main thread
                save.result = (None, f"{type(error).__name__}: {error}")

        save.result = None
        save.thread = threading.Thread(target=run, name=f"save-{save.update}", daemon=True)
        save.thread.start()

    def before_step(self) -> None:
        """Waits until nothing of a save under way is read from the weights and the optimizer. Not collective."""
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
        found = everyone(save.result)
        problems = [text for _, text in found]
        if any(problems):
            self._save = None
            if self._hosts.leads:
                shutil.rmtree(directory.aside_of(self.output_dir, save.update), ignore_errors=True)
            _raise_any(problems)
        if save.records is None:
            save.records = hosts_of(self._hosts, self._copies, [record for record, _ in found])
        else:
            self.tell([notes for notes, _ in found])
        if not save.steps:
            self._save = None
            path = directory.checkpoint_of(self.output_dir, save.update)
            if self._on_complete is not None:
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
        """What this rank does in a step; None for nothing."""
        place, what = self.output_dir, (records, save.numbers, save.manifest, save.run_yaml)

        def copying() -> None:
            send_copies(self._hosts, records, directory.aside_of(place, save.update) / TENSORS)
            if self._hosts.leads:
                directory.seal(place, *what)

        if step == "copying":
            return copying
        works: dict[Step, Callable[[], Any]] = {
            "completing": lambda: directory.complete(place, *what, self._retention),
            "publishing": lambda: directory.publish(place, save.manifest),
            "retaining": lambda: directory.retain(place, save.manifest, self._retention),
        }
        return works[step] if self._hosts.leads else None


def _raise_any(problems: list[str]) -> None:
    """Raises `SaveError` where a rank has a problem."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise SaveError(
            f"The checkpoint was not written: {'; '.join(found)}.",
            "Older checkpoints are untouched.",
            "Free the disk or mend it; checkpoint.on_save_error warn goes on without.",
        )


def _host_buffer(size: int, old: Tensor, pinned: bool) -> Tensor:
    """`size` bytes on the host, registered with CUDA where `pinned`; `old` is given up.

    torch's allocator of pinned memory would round one block up to a power of two.
    """
    if pinned and old.numel():
        torch.cuda.cudart().cudaHostUnregister(old.data_ptr())
    buffer = torch.empty(size, dtype=torch.uint8)
    if pinned and size:  # where it is refused, copies are slower and as right
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
    return buffer


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copies each tensor to its place on the host; from a GPU on a stream of its own, behind what is queued now."""
    device = next((t.device for t, _ in copies if t.device.type == "cuda"), None)
    stream = torch.cuda.Stream(device) if device is not None else None
    if stream is not None:
        stream.wait_stream(torch.cuda.default_stream(device))
    with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
        for tensor, place in copies:
            place.copy_(tensor, non_blocking=True)
    if stream is not None:
        stream.synchronize()
