"""How long training takes in days, and what failures cost.

Training FLOPs: C = 6 P D (Kaplan et al. 2020, arXiv:2001.08361). Failures: Llama 3's 419 unexpected interruptions in 54 days on
16,384 H100 (arXiv:2407.21783, section 3.3.4 and table 5) give the default rate per device. Checkpoint interval: Young 1974
(doi:10.1145/361147.361115) and Daly 2006 (doi:10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

DAY = 86400.0
FAILURES_PER_DEVICE_SECOND = 419 / (54 * DAY * 16384)
FAILURES_SOURCE = "419 unexpected interruptions in 54 days on 16,384 devices: Llama 3 (arXiv:2407.21783), table 5"
RESTART_SECONDS = 600.0
"""To notice the failure, replace the node, start processes and load the checkpoint: an assumption; `drill` measures it."""
STORAGE_BANDWIDTH = 1e9
"""Bytes/s that one node writes to shared storage: an assumption."""
CHECKPOINT_BYTES = 12
"""Bytes per parameter of a checkpoint: fp32 weights and two fp32 moments."""


def training_flops(parameters: float, tokens: float) -> float:
    """C = 6 P D."""
    return 6.0 * parameters * tokens


def mean_time_between_failures(devices: int) -> float:
    """Seconds between unexpected interruptions of a run on so many devices."""
    return 1.0 / (FAILURES_PER_DEVICE_SECOND * devices)


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 x save x MTBF): Young's first-order optimum of training time between two saves."""
    return sqrt(2.0 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Daly's higher-order optimum; the MTBF when a save takes more than twice the MTBF (equation 37)."""
    if save_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2.0 * mtbf_seconds)
    return young_interval(save_seconds, mtbf_seconds) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - save_seconds


def effective_fraction(interval: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Training time over wall time with exponential failures: Daly's equation 20 for a long run, inverted."""
    m = mtbf_seconds
    return interval / (m * exp(restart_seconds / m) * (exp((interval + save_seconds) / m) - 1.0))


@dataclass(frozen=True)
class Interruptions:
    """What failures cost a run."""

    mtbf_seconds: float  # mean time between failures
    failures_per_day: float
    save_seconds: float  # training waits for a save
    restart_seconds: float
    interval_seconds: float  # training time between two saves that loses least
    effective: float  # training time over wall time, 0 to 1


def interruptions(devices: int, checkpoint_bytes: float, nodes: int) -> Interruptions:
    """What failures cost a run whose whole checkpoint has `checkpoint_bytes`; every node writes an equal share."""
    mtbf = mean_time_between_failures(devices)
    save = checkpoint_bytes / (nodes * STORAGE_BANDWIDTH)
    interval = daly_interval(save, mtbf)
    effective = effective_fraction(interval, save, RESTART_SECONDS, mtbf)
    return Interruptions(mtbf, DAY / mtbf, save, RESTART_SECONDS, interval, effective)
