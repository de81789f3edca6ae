"""Any layout beside its peers over a link of a chosen rate: python benchmarks/two_hosts.py --rate 1gbit [--layouts ddp,zero2]

Two hosts are two network namespaces joined by a veth pair, each end shaped by `tc tbf` (root and iproute2), and a job is
`torchrun --nnodes 2`. With --shared both directions share the rate.

All loops of a layout live in the same processes and take turns, update by update, after their
first losses were found equal. The bound is max(compute, bytes / rate): compute is measured alone in the same turns, bytes
are what the loop's collectives send by their rule, compared with what the link counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_parallel import spread
from loops import LENGTH, MODEL, ROWS

WORKER = Path(__file__).with_name("two_hosts_worker.py")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PEERS = ("ddp", "fully_shard", "deepspeed", "stock")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_SHARED = ("10.77.0.1", "10.78.0.1")
LIMIT_SECONDS = 1800


def bytes_per_second(rate: str) -> float:
    """Of `1gbit`, `100mbit`."""
    for unit, bits in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits / 8
    raise SystemExit(f"--rate {rate}: give a number and one of {', '.join(UNITS)}, like 1gbit.")


def missing() -> str:
    """Why two hosts cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if lacking := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} (iproute2) not found"
    return ""


@dataclass(frozen=True)
class Hosts:
    """Two namespaces and the ends of the link between them."""

    names: tuple[str, str]
    links: tuple[str, str]

    def start(
        self, worker: Path, task: dict[str, Any], ranks_per_host: int, port: int
    ) -> list[subprocess.Popen[bytes]]:
        """torchrun on both: `worker` with the task as JSON."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(ranks_per_host), "--master-addr", ADDRESSES[0]]
        started = []
        for number, (name, link) in enumerate(zip(self.names, self.links)):
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": link,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": str(2**32),
                "MALLOC_TRIM_THRESHOLD_": str(2**34),
            }
            here = ["--node-rank", str(number), "--master-port", str(port)]
            inside = ["ip", "netns", "exec", name, *command, *here, str(worker), json.dumps(task)]
            started.append(subprocess.Popen(inside, env=environment, start_new_session=True))
        return started


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(rate: str, shared: bool = False) -> Iterator[Hosts]:
    """Hosts joined by a link of `rate` in each direction; gone afterwards, whatever happened.

    shared: both directions share `rate`, as on a half-duplex link or a busy switch. Then both hosts send through a third
    one that passes everything on by its only port, which is shaped.
    """
    own = os.getpid()
    hosts = Hosts((f"sw-a-{own}", f"sw-b-{own}"), (f"va{own}", f"vb{own}"))
    # what a timer tick of 10 ms lets through
    burst = str(max(256_000, int(bytes_per_second(rate) / 100)))
    shape = ["root", "tbf", "rate", rate, "burst", burst, "latency", "5ms"]
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if shared:
            _through_a_router(hosts, own, shape)
        else:
            _ip("link", "add", hosts.links[0], "type", "veth", "peer", "name", hosts.links[1])
            for name, link, address in zip(hosts.names, hosts.links, ADDRESSES):
                _ip("link", "set", link, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", link, *shape)
        yield hosts
    finally:
        for name in (*hosts.names, f"sw-r-{own}"):
            end_processes(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for link in (hosts.links[0], f"br{own}"):
            subprocess.run(["ip", "link", "del", link], capture_output=True)


def _through_a_router(hosts: Hosts, own: int, shape: list[str]) -> None:
    """Both hosts and a router on one bridge. The hosts' networks differ, so what they send goes to the router and back."""
    router, bridge, port = f"sw-r-{own}", f"br{own}", f"vr{own}"
    _ip("netns", "add", router)
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    networks = [address.rpartition(".")[0] for address in ADDRESSES_SHARED]
    for name, link in zip((*hosts.names, router), (*hosts.links, port)):
        _ip("link", "add", link, "type", "veth", "peer", "name", f"{link}p")
        _ip("link", "set", f"{link}p", "master", bridge, "up")
        _ip("link", "set", link, "netns", name)
        _ip("-n", name, "link", "set", link, "up")
    for name, link, address, network in zip(hosts.names, hosts.links, ADDRESSES_SHARED, networks):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        _ip("-n", router, "addr", "add", f"{network}.254/24", "dev", port)
        _ip("-n", name, "route", "add", "default", "via", f"{network}.254")
    for setting in (
        "net.ipv4.ip_forward=1",
        "net.ipv4.conf.all.send_redirects=0",
        f"net.ipv4.conf.{port}.send_redirects=0",
    ):
        path = "/proc/sys/" + setting.partition("=")[0].replace(".", "/")
        subprocess.run(["ip", "netns", "exec", router, "sh", "-c", f"echo {setting[-1]} > {path}"], check=True)
    _ip("netns", "exec", router, "tc", "qdisc", "add", "dev", port, *shape)


def end_processes(host: str) -> None:
    """Ends every process in a namespace: torchrun's ranks have sessions of their own."""
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def run(hosts: Hosts, task: dict[str, Any], ranks_per_host: int, port: int, worker: Path = WORKER) -> dict[str, Any]:
    """Rank 0's result of one job. No process is left."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        started = hosts.start(worker, {**task, "result": str(result)}, ranks_per_host, port)
        try:
            codes = [process.wait(LIMIT_SECONDS) for process in started]
        finally:
            for name, process in zip(hosts.names, started):
                end_processes(name)
                process.wait()
        if any(codes) or not result.exists():
            raise SystemExit(f"{worker.name} {task}: torchrun ended with {codes}")
        return json.loads(result.read_text())


def table(
    found: dict[str, Any], job: dict[str, Any], rate: float, ranks_per_host: int, directions: int
) -> list[dict[str, Any]]:
    """One row for each loop of a job. directions: how many share `rate`; both hosts send the same."""
    compute = statistics.median(found["seconds"]["alone"])
    tokens = ROWS * LENGTH * job["microbatches"] * 2 * ranks_per_host
    made = []
    for name, seconds in found["seconds"].items():
        if name == "alone":
            continue
        # bytes of the host of rank 0, whose ranks share the link
        sent = found["link_rule_bytes"].get(name)
        bound = max(compute, sent * directions / rate) if sent is not None else None
        step = statistics.median(seconds)
        turns = zip(found["seconds"]["ours"], seconds)
        made.append(
            {
                "layout": job["layout"],
                "loop": name,
                "tokens_per_s": tokens / step,
                "step_seconds": step,
                "spread": spread(seconds),
                "compute_seconds": compute,
                "rule_bytes": sent,
                "link_bytes": found["link_bytes"][name],
                "bound_seconds": bound,
                "over_bound": step / bound if bound else None,
                # of neighbouring turns: what disturbs one disturbs the other
                "ours_is_faster_by": statistics.median(theirs / mine for mine, theirs in turns),
                "n": len(seconds),
                "losses": found["losses"][name],
            }
        )
    return made


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        bound = "n/a" if row["bound_seconds"] is None else f"{row['bound_seconds']:.2f}"
        over = "n/a" if row["over_bound"] is None else f"{row['over_bound']:.2f}"
        rule = "n/a" if row["rule_bytes"] is None else f"{row['rule_bytes'] / 1e6:.1f}"
        print(
            f"| {row['layout']} | {row['loop']} | {row['tokens_per_s']:.0f} | {row['step_seconds']:.2f} {row['spread']} "
            f"| {row['compute_seconds']:.2f} | {rule} | {row['link_bytes'] / 1e6:.1f} | {bound} | {over} "
            f"| {row['ours_is_faster_by']:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link in each direction: 100mbit, 1gbit, 10gbit")
    parser.add_argument("--shared", action="store_true", help="both directions share the rate")
    parser.add_argument("--layouts", default="ddp,zero1,zero2,zero3")
    parser.add_argument(
        "--peers",
        default="ddp,fully_shard",
        help="ddp, fully_shard, deepspeed (not in hybrids), stock (ours without the package backends/gloo)",
    )
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches of an update")
    parser.add_argument(
        "--hsdp", action="store_true", help="two ranks a host: shards in a host, replicas over the link"
    )
    parser.add_argument("--bf16", action="store_true", help="compute and reduce in bf16 (bare ddp: autocast)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the run file, for ours")
    parser.add_argument("-n", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    arguments = parser.parse_args()
    rate, peers = bytes_per_second(arguments.rate), []
    if reason := missing():
        print(f"Not measured: {reason}.")
        return
    for peer in arguments.peers.split(","):
        if peer not in PEERS:
            raise SystemExit(f"--peers {peer}: there is no loop for it here; there is for {', '.join(PEERS)}.")
        if peer == "deepspeed" and importlib.util.find_spec(peer) is None:
            print(f"{peer}: left out, not installed.")
        else:
            peers.append(peer)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ranks_per_host = 2 if arguments.hsdp else 1
    both = " for both directions" if arguments.shared else ""
    print(
        f"2 hosts of {ranks_per_host} rank(s), {arguments.rate}{both}, {arguments.accumulation} microbatch(es) of {ROWS} x "
        f"{LENGTH} tokens a rank, {'bf16' if arguments.bf16 else 'fp32'}, n={arguments.n}"
    )
    print(
        "| layout | loop | tokens/s | s/update | compute alone, s | rule, MB sent | link, MB sent | bound, s | step / bound "
        "| ours is faster by |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with two_hosts(arguments.rate, arguments.shared) as hosts, tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for number, layout in enumerate(arguments.layouts.split(",")):
            if layout == "ddp" and arguments.hsdp:
                print("ddp: left out, it has no hybrid.", flush=True)
                continue
            job = {
                "directory": directory,
                "layout": layout,
                "microbatches": arguments.accumulation,
                "bf16": arguments.bf16,
                "replicas": 2 if arguments.hsdp else 1,
                "settings": arguments.set,
            }
            left_out = {"fully_shard", "deepspeed"} if layout == "ddp" else {"deepspeed"} if arguments.hsdp else set()
            loops = [peer for peer in peers if peer not in left_out]
            task = {"job": job, "peers": loops, "n": arguments.n, "warmup": arguments.warmup}
            found = run(hosts, task, ranks_per_host, 29511 + number)
            made = table(found, job, rate, ranks_per_host, 1 + arguments.shared)
            show(made)
            if arguments.record:
                with Path(__file__).with_name("results.jsonl").open("a") as file:
                    for row in made:
                        settings = {
                            "rate": arguments.rate,
                            "shared": arguments.shared,
                            **{k: v for k, v in job.items() if k != "directory"},
                        }
                        file.write(json.dumps({"benchmark": "two_hosts", **settings, **row}) + "\n")


if __name__ == "__main__":
    main()
