"""One rank of a bench: `python -m shardwright.tools.bench.rank SPEC.json`. All loops live in the rank and take turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from shardwright.config.load import Loaded
from shardwright.launch import finish, worker_main
from shardwright.measure.environment import versions
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.mesh.process_group import Connection, connect
from shardwright.models.build import quiet_transformers
from shardwright.tools.bench.layout_loop import LayoutLoop
from shardwright.tools.bench.peers import PeerLoop, make_peer
from shardwright.tools.bench.timing import take_turns


@dataclass(frozen=True)
class Spec:
    """The task of the ranks of a bench."""

    layouts: dict[str, str]
    """Name -> run, as `Loaded.to_json` writes the run."""
    peers: tuple[str, ...]
    """Names of `bench.peers`."""
    warmup: int
    """Warm-up updates of each loop, beside the updates for memory and traffic."""
    updates: int
    """Timed updates of each loop."""
    hardware: str | None
    """Device or hardware file that predicts step times."""
    trace: str
    """Directory for the traces, or empty."""
    result: str
    """File that rank 0 writes."""

    def write(self, path: Path) -> None:
        path.write_bytes(TypeAdapter(Spec).dump_json(self))


def bench(spec: Spec, layouts: dict[str, Loaded], connection: Connection) -> dict[str, Any]:
    """Builds every loop, measures memory and traffic, lets the loops take turns, and records traces; rank 0's result."""
    device = connection.device
    own = {name: LayoutLoop(name, loaded, device, spec.hardware) for name, loaded in layouts.items()}
    first = next(iter(own.values()))
    memory = {name: loop.measure_memory() for name, loop in own.items()}
    traffic = {name: loop.measure_traffic() for name, loop in own.items()}
    peers = {name: make_peer(name, first.run, device) for name in spec.peers}
    every: dict[str, LayoutLoop | PeerLoop] = {**own, **peers}
    loops: dict[str, Callable[[], float]] = {name: loop.update for name, loop in every.items()}
    warm = take_turns(loops, spec.warmup, device)
    for loop in every.values():
        loop.counted.batches = []
    turns = take_turns(loops, spec.updates, device)
    counts = {name: loop.counted.figures() for name, loop in every.items()}
    flops = {name: _flops(loop, first) for name, loop in every.items()}
    losses = {name: loop.loss for name, loop in every.items()}
    measuring = first.measuring_seconds()
    directory = Path(spec.trace) if spec.trace else None
    traced = {name: asdict(loop.measure_communication(directory)) for name, loop in own.items()}
    of_rank = {
        name: {
            "memory": memory.get(name, {}),
            "traffic": traffic.get(name, []),
            "turns": [asdict(turn) for turn in turns[name]],
            "flops": flops[name],
            "traced": traced.get(name, {}),
        }
        for name in loops
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {"loops": of_rank, "host_bytes": peak_host_bytes()})
    peak = asdict(first.utilisation.peak) if first.utilisation else None
    return {
        "loops": {
            name: {
                "kind": "layout" if name in own else "peer",
                "counted": counts[name],
                "first_seconds": [turn.seconds for turn in warm[name]],
                "loss": losses[name],
                "ranks": [rank["loops"][name] for rank in ranks],
                "peak": peak,
                **(own[name].about() if name in own else {}),
            }
            for name in loops
        },
        "host_bytes": [rank["host_bytes"] for rank in ranks],
        "device_bytes": peak_device_bytes(device),
        "measuring_seconds": measuring,
        "peak": peak,
        "environment": {**versions(), **connection.configuration()},
    }


def _flops(loop: LayoutLoop | PeerLoop, first: LayoutLoop) -> list[tuple[float, float]]:
    """FLOPs of each update; a peer computes the rows of the first layout and recomputes nothing."""
    if isinstance(loop, LayoutLoop):
        return loop.counted.flops(loop.utilisation)
    return [(useful, 0.0) for useful, _ in loop.counted.flops(first.utilisation)]


def main() -> int:
    spec = TypeAdapter(Spec).validate_json(Path(sys.argv[1]).read_bytes())
    layouts = {name: Loaded.from_json(text) for name, text in spec.layouts.items()}
    hardware = next(iter(layouts.values())).run.hardware
    quiet_transformers()
    torch.manual_seed(0)
    with connect(
        hardware.device, hardware.timeout_seconds, hardware.threads_per_rank, numa_binding=hardware.numa_binding
    ) as connection:
        result = bench(spec, layouts, connection)
        if connection.rank_info.rank == 0:
            Path(spec.result).write_text(json.dumps(result), encoding="utf-8")
        dist.barrier()
    return 0


if __name__ == "__main__":
    finish(worker_main(main))
