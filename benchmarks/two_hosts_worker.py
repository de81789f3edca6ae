"""One rank of `two_hosts.py`: checks that all loops make the same losses, records what they send, times them in turns."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import Job, Update, alone, bare, deepspeed_zero, ours, stock

from shardwright.measure.communication import CommunicationRecorder
from shardwright.mesh.device_mesh import axis_of_groups
from shardwright.mesh.shard_geometry import full_tensor

SAME = {False: 2e-5, True: 2e-2}
"""Relative difference of the first losses that is accepted, by bf16."""


def link_bytes() -> int:
    """Bytes that this host has sent over its link."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def over_hosts(recorder: CommunicationRecorder, job: Job) -> float:
    """Bytes that one rank sends between hosts: all of them with a rank a host, those of replicas in a hybrid."""
    return sum(
        one.sent_bytes
        for one in recorder.traffic()
        if one.payload_bytes > 4096 and (job.replicas == 1 or one.axis == "dp_replicate")
    )


def main() -> None:
    task = json.loads(sys.argv[1])
    job = Job(**task["job"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first, engine = ours(job)
    start = {name: full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    updates: dict[str, Update] = {"ours": first}
    for peer in task["peers"]:
        if peer == "stock":
            updates[peer] = stock(job)
        elif peer == "deepspeed":
            updates[peer] = deepspeed_zero(job, start)
        else:
            updates[peer] = bare(job, peer, start)
    losses = {name: [update(number) for number in range(2)] for name, update in updates.items()}
    for name, found in losses.items():
        for mine, theirs in zip(losses["ours"], found):
            if abs(mine - theirs) > SAME[job.bf16] * abs(mine):
                raise SystemExit(f"{name} does not train what ours trains: losses {found} and {losses['ours']}")
    ranks_per_host = dist.get_world_size() // 2
    axes, rule, counted = axis_of_groups(engine.mesh), {}, {}
    for name, update in updates.items():
        update(2)  # DDP arranges its buckets in the second update
        dist.barrier()
        before, recorder = link_bytes(), CommunicationRecorder(axes)
        with recorder:
            update(3)
        dist.barrier()
        counted[name] = link_bytes() - before
        if name == "ours" or job.replicas == 1:
            rule[name] = over_hosts(recorder, job) * ranks_per_host
    updates["alone"] = alone(job, start)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(task["warmup"] + task["n"]):
        names = list(updates)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            dist.barrier()
            begin = time.perf_counter()
            updates[name](4 + number)
            dist.barrier()
            if number >= task["warmup"]:
                seconds[name].append(time.perf_counter() - begin)
    result: dict[str, Any] = {
        "seconds": seconds,
        "losses": losses,
        "link_rule_bytes": rule,
        "link_bytes": counted,
    }
    if dist.get_rank() == 0:
        Path(task["result"]).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
