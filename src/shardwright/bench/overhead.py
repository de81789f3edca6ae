"""What measuring costs an update of `train`: the metrics of an update are made and written many times, and timed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import torch.distributed as dist

from shardwright.bench.own import Own
from shardwright.measure import clock
from shardwright.measure.record import Record
from shardwright.train.metrics import Metrics

REPEATS = 20


def measuring_seconds(own: Own) -> float:
    """Seconds in which `train` makes, agrees on and writes the metrics of one update, the median of many. Collective."""
    assert own.batch is not None and own.result is not None
    metrics, seconds = Metrics(own.engine, lambda update: 0.0), []
    with tempfile.TemporaryDirectory() as directory:
        record = Record(Path(directory), [], 0) if dist.get_rank() == 0 else None
        for _ in range(REPEATS):
            dist.barrier()
            start = clock.now()
            metrics.add(1.0, 0.0, own.batch)
            values = metrics.values(own.result, own.batch, 0)
            if record is not None:
                record.log(own.result.update, values)
            seconds.append(clock.now() - start)
        if record is not None:
            record.close()
    return median(seconds)
