"""What measuring costs an update of `train`: real updates are each followed by what `train` records of them, which is timed."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from shardwright.measure import clock
from shardwright.tools.bench.own import Own
from shardwright.train.log import Log
from shardwright.train.metrics import Metrics

REPEATS = 10


def measuring_seconds(own: Own) -> list[float]:
    """Seconds of rank 0 in which `train` would have recorded and printed each of some updates. Collective.

    Caches are as cold as after any update. Ranks meet first, so that nobody waits for a slower one in it.
    """
    metrics, seconds = Metrics(own.engine, lambda update: 0.0), []
    with tempfile.TemporaryDirectory() as directory:
        log = Log(metrics, Console(file=io.StringIO()), Path(directory), [], 0, own.engine.updates)
        for _ in range(REPEATS):
            before = clock.now()
            waited = own.update()
            taken = clock.now() - before
            assert own.result is not None and own.batch is not None
            dist.barrier()
            start = clock.now()
            metrics.add(taken, waited, own.batch)
            log.update(own.result, own.batch, 0)
            seconds.append(clock.now() - start)
        log.close()
    return seconds
