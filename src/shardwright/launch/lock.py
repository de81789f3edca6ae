"""One run at a time in a directory: a lock file names the owner, and shows that the owner is alive.

Where the file system can, the file is locked with flock; the kernel releases this lock when the process ends. The rule does not
need flock: an owner on the same machine is looked for among the processes; an owner on another machine touches the file every
two seconds (its heartbeat).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from shardwright.errors import ConfigError
from shardwright.launch.rank import current_job
from shardwright.measure import clock

BEAT_SECONDS, POLL_SECONDS = 2.0, 0.5
PATIENCE_SECONDS = 15 * BEAT_SECONDS
"""How long to wait for a heartbeat of an owner on another machine: after so many missed heartbeats the owner is dead."""
OLD_SECONDS = 600.0
"""An owner whose last heartbeat is older is dead without a wait; clocks of hosts that touch files themselves differ by less."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a directory."""

    what: str
    """The verb."""
    pid: int
    host: str
    machine: str
    """Distinguishes hosts of one name, boots and containers."""
    started: str
    """Distinguishes two processes that had the same number."""
    job: str
    since: str
    """Date."""

    @classmethod
    def this_process(cls, what: str) -> Owner:
        started = _started(os.getpid())
        return cls(what, os.getpid(), platform.node(), _machine(), started, current_job().name, clock.date())

    def __str__(self) -> str:
        job = f" (job {self.job})" if self.job else ""
        return f"`{self.what}`, process {self.pid} on {self.host}{job}, since {self.since}"


def _machine() -> str:
    """Host, boot and process namespace: processes of one machine in this sense see each other's numbers."""
    boot, container = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        container = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {boot} {container}"


def _started(pid: int) -> str:
    """When a process was started, in ticks of its machine; empty where there is none, or it has ended and is not reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@contextmanager
def owned(directory: Path, what: str, say: Callable[[str], None], patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """`directory` belongs to this process while the context lasts; it is made where it is missing.

    what: the verb that works there; verbs do not keep each other out. patience: see `PATIENCE_SECONDS`. Raises
    `ConfigError` where another process works in the directory, and where nothing can be written there.
    """
    path, this, made = lock_of(directory, what), Owner.this_process(what), not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _claim(path, this, say, patience)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}.",
            "",
            "Make the directory writable, or set another checkpoint.output_dir.",
        ) from None
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(descriptor, ended), name="lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join(timeout=BEAT_SECONDS)
        with suppress(OSError):
            if read_owner(path) == this:
                path.unlink()
        os.close(descriptor)
        if made:
            with suppress(OSError):  # a refused run leaves no directory
                directory.rmdir()


def lock_of(directory: Path, what: str) -> Path:
    return directory / f"{what}.lock"


def read_owner(path: Path) -> Owner | None:
    """The owner that the lock at `path` names; None where it names none."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _claim(path: Path, this: Owner, say: Callable[[str], None], patience: float) -> int:
    """Makes `this` the owner; returns the descriptor of the file, which stays open."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked, owner = _flock(descriptor), read_owner(path)
            gone = owner is not None and _gone(owner, path, say, patience)
            if not gone and (owner is not None or locked is False):
                _refuse(path, owner)
            if read_owner(path) not in (owner, None):  # another start has taken the directory over meanwhile
                os.close(descriptor)
                continue
            if not _same_file(descriptor, path):  # the owner has ended and removed the file meanwhile
                os.close(descriptor)
                continue
            if owner is not None:
                say(
                    f"{path.parent} was held by {owner}, which ended without releasing it: this run takes the directory over."
                )
            text = (json.dumps(asdict(this), indent=1) + "\n").encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))
            # another start may have written at the same moment: the last writer is the owner
            if not locked or owner is not None:
                clock.sleep(POLL_SECONDS)
                if (owner := read_owner(path)) != this:
                    _refuse(path, owner)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        return descriptor


def _refuse(path: Path, owner: Owner | None) -> NoReturn:
    raise ConfigError(
        f"{path.parent} is in use by {owner or 'another process'}.",
        "Two runs in one directory overwrite each other's checkpoints and metrics.",
        f"Wait until that process ends, or set another checkpoint.output_dir. If no such process runs, remove {path}.",
    )


def _flock(descriptor: int) -> bool | None:
    """Whether the file was locked: False where another process holds it, None where the file system cannot lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _gone(owner: Owner, path: Path, say: Callable[[str], None], patience: float) -> bool:
    """Whether the owner has ended: its process is not there; on another machine, no heartbeat comes."""
    if owner.machine == _machine():
        return _started(owner.pid) != owner.started
    with tempfile.TemporaryFile(dir=path.parent) as new:  # the clock of the heartbeat, on most file systems
        now = os.fstat(new.fileno()).st_mtime
    last = _touched(path)
    if now - last > OLD_SECONDS:
        return True
    say(f"{path.parent} is in use by {owner}: waiting up to {patience:g} s for its heartbeat.")
    for _ in range(round(patience / POLL_SECONDS)):
        clock.sleep(POLL_SECONDS)
        if _touched(path) != last:
            return read_owner(path) != owner
    return True


def _touched(path: Path) -> float:
    try:
        with path.open("rb") as file:  # opened again, so that a network file system asks its server
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):
            os.utime(descriptor)
