"""How long training takes in days, and what interruptions cost.

Training FLOPs: C = 6 P D (Kaplan et al. 2020, arXiv:2001.08361). Failures: Llama 3's 419 unexpected
interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, section 3.3.4 and table 5) give the default rate
per device. Checkpoint interval: Young 1974 (doi:10.1145/361147.361115) and Daly 2006
(doi:10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

DAY = 86400.0
FAILURES_PER_DEVICE_SECOND = 419 / (54 * DAY * 16384)
FAILURES_SOURCE = "419 unexpected interruptions in 54 days on 16,384 devices: Llama 3 (arXiv:2407.21783), table 5"
RESTART_SECONDS = 600.0
"""Notice the failure, replace the node, start processes, load the checkpoint: an assumption, to be replaced
by `drill`.
"""
STORAGE_BANDWIDTH = 1e9
"""Bytes/s that one node writes to shared storage: an assumption."""


def training_flops(parameters: float, tokens: float) -> float:
    """C = 6 P D."""
    return 6.0 * parameters * tokens


def training_seconds(parameters: float, tokens: float, flops_per_second: float) -> float:
    """Seconds of a training of `tokens` tokens at a sustained rate of all devices together."""
    return training_flops(parameters, tokens) / flops_per_second


def mean_time_between_failures(devices: int, rate: float = FAILURES_PER_DEVICE_SECOND) -> float:
    """Seconds between unexpected interruptions of a job on so many devices."""
    return 1.0 / (rate * devices)


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 x save x MTBF): Young's first-order optimum of training time between two saves."""
    return sqrt(2.0 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Daly's higher-order optimum; MTBF when a save takes more than twice the MTBF (equation 37)."""
    if save_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2.0 * mtbf_seconds)
    return young_interval(save_seconds, mtbf_seconds) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - save_seconds


def effective_fraction(interval: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Training time over wall time with exponential failures: Daly's equation 20 for a long job, inverted."""
    m = mtbf_seconds
    return interval / (m * exp(restart_seconds / m) * (exp((interval + save_seconds) / m) - 1.0))


@dataclass(frozen=True)
class Interruptions:
    """What failures cost a job. Seconds, except effective (a fraction) and failures_per_day."""

    mtbf_seconds: float
    failures_per_day: float
    save_seconds: float
    restart_seconds: float
    interval_seconds: float
    effective: float


def interruptions(
    devices: int,
    checkpoint_bytes: float,
    nodes: int,
    *,
    rate: float = FAILURES_PER_DEVICE_SECOND,
    storage_bandwidth: float = STORAGE_BANDWIDTH,
    restart_seconds: float = RESTART_SECONDS,
) -> Interruptions:
    """Failures, the checkpoint interval that loses least, and the effective training time of a job.

    checkpoint_bytes: of the whole job. Every node writes its share at storage_bandwidth; training waits for
    the save.
    """
    mtbf = mean_time_between_failures(devices, rate)
    save = checkpoint_bytes / (nodes * storage_bandwidth)
    interval = daly_interval(save, mtbf)
    return Interruptions(
        mtbf, DAY / mtbf, save, restart_seconds, interval, effective_fraction(interval, save, restart_seconds, mtbf)
    )
