"""Two hosts on one machine: network namespaces, a link of 200 Mbit/s between them, `torchrun --nnodes 2`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.places import ROOT
from tests.started import LIMIT, environment

from shardwright.checkpoint.manifest import read_manifest, verify
from shardwright.tools.drill.compare import compare_checkpoints

UPDATES = 40
TIMEOUT_SECONDS = 20
CUT_SECONDS = 2


def _missing() -> str:
    """Why two hosts cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if lacking := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} (iproute2) not found"
    probe = f"sw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"ip netns add: {made.stderr.strip()}" if made.returncode else ""


pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "-"),
]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Hosts 0 and 1 and the link between them."""

    directory: Path
    names: tuple[str, str] = (f"sw-a-{os.getpid()}", f"sw-b-{os.getpid()}")
    links: tuple[str, str] = (f"va{os.getpid()}", f"vb{os.getpid()}")
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 29511

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for number, (name, link) in enumerate(zip(self.names, self.links)):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            shape = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
            _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", *shape)

    def delete(self) -> None:
        for number in (0, 1):
            self.kill(number)
        for process in self.started:
            process.communicate()
        for other in self.others:
            other.terminate()
            other.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def kill(self, host: int) -> None:
        """SIGKILL to every process of a host."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def cut(self) -> None:
        """From now on what one host sends reaches nobody, and neither host is told."""
        for number, (name, link) in enumerate(zip(self.names, self.links)):
            peer = f"10.77.0.{2 - number}"
            _ip(
                "-n",
                name,
                "neigh",
                "replace",
                peer,
                "lladdr",
                "02:00:00:00:00:99",
                "dev",
                link,
                "nud",
                "permanent",
            )

    def mend(self) -> None:
        for number, (name, link) in enumerate(zip(self.names, self.links)):
            _ip("-n", name, "neigh", "del", f"10.77.0.{2 - number}", "dev", link)

    def start(self, *outputs: Path) -> list[subprocess.Popen[str]]:
        """torchrun on both, one rank each, on a port that no earlier start has used, with these directories to write to."""
        self.port += 1
        storage = ("--checkpoint.storage", "per_host") if len(set(outputs)) == 2 else ()
        self.started += (both := [self._start(number, path, *storage) for number, path in enumerate(outputs)])
        return both

    def _start(self, number: int, output: Path, *storage: str) -> subprocess.Popen[str]:
        command = [
            "ip", "netns", "exec", self.names[number], sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
            "--master-addr", "10.77.0.1", "--master-port", str(self.port),
            "-m", "shardwright", *arguments(output), *storage,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**environment(), "GLOO_SOCKET_IFNAME": self.links[number], "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def arguments(output: Path) -> list[str]:
    return [
        "train", "examples/tiny.yaml", "--training.max_steps", str(UPDATES), "--checkpoint.save_steps", "2",
        "--data.cache_dir", str(output.parent / "cache"), "--checkpoint.output_dir", str(output),
        "--hardware.timeout_seconds", str(TIMEOUT_SECONDS), "--hardware.threads_per_rank", "1",
    ]  # fmt: skip


def losses(output: Path) -> list[float]:
    path = output / "metrics.jsonl"
    return [json.loads(line)["train/loss"] for line in path.read_text().splitlines()] if path.exists() else []


def ended(both: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What both wrote to stderr, once both have ended."""
    deadline = time.monotonic() + seconds
    return [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for process in both]


def wait(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.delete()


def test_a_cut_link_a_dead_host_and_a_lost_disk(hosts: Hosts, tmp_path: Path) -> None:
    """A cut of seconds is waited out; a lasting one and a dead host end both sides with a reason; all goes on bit for bit.

    Both hosts write to one shared directory. Then each has a disk of its own: host 0 that directory, host 1 an empty one; it
    reads over the link. Host 1 dies and its disk is gone: what host 0 has of it is what both go on from.
    """
    whole, disks = tmp_path / "whole", (tmp_path / "run", tmp_path / "own")
    command = [sys.executable, "-m", "shardwright", *arguments(whole), "--nproc-per-node", "2"]
    reference = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    hosts.others.append(reference)

    both = hosts.start(disks[0], disks[0])
    wait(lambda: len(losses(disks[0])) >= 4)
    hosts.cut()
    time.sleep(CUT_SECONDS)
    before = len(losses(disks[0]))
    hosts.mend()
    wait(lambda: len(losses(disks[0])) >= before + 2)  # went on
    assert [process.poll() for process in both] == [None, None]

    hosts.cut()
    said = ended(both, seconds=TIMEOUT_SECONDS + LIMIT)
    assert all(process.returncode for process in both)
    for rank, text in enumerate(said):
        assert f"shardwright: rank {rank} has lost the other ranks" in text, text
    hosts.mend()
    cut_at = len(losses(disks[0]))

    both = hosts.start(*disks)
    wait(lambda: cut_at + 2 <= len(losses(disks[0])) < UPDATES and (disks[1] / "latest").exists())
    hosts.kill(1)
    shutil.rmtree(disks[1])
    said = ended(both, seconds=60)
    assert both[0].returncode
    assert "shardwright: rank 0 has lost the other ranks" in said[0], said[0]

    both = hosts.start(*disks)  # the host is back, with another disk
    ended(both, seconds=150)
    assert [process.returncode for process in both] == [0, 0]
    assert reference.wait(60) == 0 and losses(disks[0]) == losses(whole)
    last = f"checkpoint-{UPDATES}"
    assert [verify(disk / last) for disk in disks] == [[], []]
    assert [compare_checkpoints(disk / last, whole / last) for disk in disks] == ["", ""]
    assert read_manifest(disks[1] / last) == read_manifest(disks[0] / last)
    assert len(read_manifest(disks[1] / last).hosts) == 2
