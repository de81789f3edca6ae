"""One rank of a bench: `python -m shardwright.tools.bench.rank SPEC.json`. Every loop is alive in it; they take turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.launch import finish, worker_main
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.measure.record import versions
from shardwright.mesh.process_group import Connection, connect
from shardwright.models.build import quiet_transformers
from shardwright.tools.bench.overhead import measuring_seconds
from shardwright.tools.bench.own import Own
from shardwright.tools.bench.peers import Peer, make_peer
from shardwright.tools.bench.spec import Spec
from shardwright.tools.bench.turns import Turn, take_turns


@dataclass(frozen=True)
class OfRank:
    """What one rank knows of one loop."""

    memory: dict[str, Any]
    traffic: list[dict[str, Any]]
    turns: list[Turn]
    flops: list[tuple[float, float]]
    window: dict[str, Any]


def bench(spec: Spec, connection: Connection) -> dict[str, Any]:
    """Builds every loop, measures memory and traffic, lets them take turns, and records traces; rank 0's result."""
    device, layouts = connection.device, spec.loaded()
    owns = {name: Own(name, loaded, device, spec.hardware) for name, loaded in layouts.items()}
    memory = {name: own.measure_memory() for name, own in owns.items()}
    traffic = {name: own.measure_traffic() for name, own in owns.items()}
    run = next(iter(layouts.values())).run
    peers = {name: make_peer(name, run, device) for name in spec.peers}
    loops: dict[str, Callable[[], float]] = {name: own.update for name, own in owns.items()}
    loops |= {name: peer.turn for name, peer in peers.items()}
    warm = take_turns(loops, spec.warmup, device)
    every: dict[str, Own | Peer] = {**owns, **peers}
    for loop in every.values():
        loop.counted.clear()
    turns = take_turns(loops, spec.updates, device)
    counts = {name: loop.counted.figures() for name, loop in every.items()}
    flops = {name: _flops(loop, next(iter(owns.values()))) for name, loop in every.items()}
    losses = {name: loop.loss for name, loop in every.items()}
    overhead = measuring_seconds(next(iter(owns.values())))
    directory = Path(spec.trace) if spec.trace else None
    windows = {name: own.measure_communication(directory) for name, own in owns.items()}
    own_part = {
        name: asdict(
            OfRank(
                memory.get(name, {}),
                traffic.get(name, []),
                turns[name],
                flops[name],
                asdict(windows[name]) if name in windows else {},
            )
        )
        for name in loops
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {"loops": own_part, "host_bytes": peak_host_bytes()})
    on_device = peak_device_bytes(device)
    utilisation = next(iter(owns.values())).utilisation
    peak = asdict(utilisation.peak) if utilisation else None
    return {
        "loops": {
            name: {
                "kind": "layout" if name in owns else "peer",
                "counted": counts[name],
                "first_seconds": [turn.seconds for turn in warm[name]],
                "loss": losses[name],
                "ranks": [rank["loops"][name] for rank in ranks],
                "peak": peak,
                **_about(owns.get(name)),
            }
            for name in loops
        },
        "host_bytes": [rank["host_bytes"] for rank in ranks],
        "device_bytes": on_device,
        "measuring_seconds": overhead,
        "peak": peak,
        "environment": {**versions(), **connection.configuration()},
    }


def _flops(loop: Own | Peer, first: Own) -> list[tuple[float, float]]:
    """Of a layout as it recomputes; of a peer, which computes the first layout's rows and recomputes nothing, without that."""
    if isinstance(loop, Own):
        return loop.counted.flops(loop.utilisation)
    return [(useful, 0.0) for useful, _ in loop.counted.flops(first.utilisation)]


def _about(own: Own | None) -> dict[str, Any]:
    if own is None:
        return {}
    planned = asdict(own.planned) if own.planned is not None else None
    return {"axes": asdict(own.axes), "build_seconds": own.build_seconds, "planned": planned}


def main() -> int:
    spec = Spec.read(Path(sys.argv[1]))
    hardware = next(iter(spec.loaded().values())).run.hardware
    quiet_transformers()
    torch.manual_seed(0)
    with connect(hardware.device, hardware.timeout_seconds, hardware.threads_per_rank) as connection:
        result = bench(spec, connection)
        if connection.rank_info.rank == 0:
            Path(spec.result).write_text(json.dumps(result), encoding="utf-8")
        dist.barrier()
    return 0


if __name__ == "__main__":
    finish(worker_main(main))
