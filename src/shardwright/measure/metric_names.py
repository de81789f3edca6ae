"""Every metric of `metrics.jsonl`: name, unit, meaning, and how the numbers of the ranks are combined. No torch.

A constant holds the name. `METRICS` holds the rest; `docs/metrics.md` is made from it.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.layout.axes import AXES

PHASES = ("forward", "backward", "update", "evaluate", "save")
"""The phases whose peak memory is measured; forward, backward and update are those of an update."""
GROUPS = (*AXES, "all ranks")
"""The process groups whose communication is reported separately: a group for each mesh axis, and the group of all ranks."""

SAME, SUM, MAX, FIRST = "the same on every rank", "sum", "maximum", "of rank 0"


class Metric(NamedTuple):
    """A metric without its name; `ranks` says how the numbers of the ranks are combined."""

    unit: str
    ranks: str
    meaning: str


METRICS: dict[str, Metric] = {}


def _metric(name: str, unit: str, ranks: str, meaning: str) -> str:
    METRICS[name] = Metric(unit, ranks, meaning)
    return name


LOSS = _metric("train/loss", "nats", SAME, "loss of the update: the mean over its target tokens")
GRAD_NORM = _metric("train/grad_norm", "", SAME, "2-norm of the gradient of the whole model, before clipping")
CLIP_COEFFICIENT = _metric("train/clip_coefficient", "", SAME, "factor that clipping multiplies the gradient by")
LEARNING_RATE = _metric("train/lr", "", SAME, "learning rate of the update")
SKIPPED = _metric("train/skipped", "0 or 1", SAME, "1 where loss or gradient was not finite and the step was left out")
EPOCH = _metric("train/epoch", "epochs", SAME, "epoch in which the rows of the update end; null for a stream")
TARGETS_SO_FAR = _metric("train/target_tokens", "tokens", SAME, "target tokens of the run up to this update")

TARGETS_PER_SECOND = _metric("perf/target_tokens_per_s", "tokens/s", SUM, "target tokens of the update / its seconds")
TARGETS_PER_SECOND_PER_DEVICE = _metric(
    "perf/target_tokens_per_s_per_device", "tokens/s", "mean", "the same, divided by the number of ranks"
)
STEP_SECONDS = _metric(
    "perf/step_seconds", "s", MAX, "time of the update, from data to optimizer step; on a GPU, between two results"
)
STEP_P50 = _metric("perf/step_seconds_p50", "s", FIRST, "median time of the newest 1,000 updates after the warm-up")
STEP_P95 = _metric("perf/step_seconds_p95", "s", FIRST, "95th percentile of the same times")
STEP_MAX = _metric("perf/step_seconds_max", "s", FIRST, "the longest of the same times")
SLOWEST_RANK = _metric("perf/slowest_rank", "rank", "compared", "the rank with the largest own time among its stage")
SLOWEST_FACTOR = _metric(
    "perf/slowest_rank_factor", "", "compared", "own time of that rank / the median of its stage's other ranks"
)
MFU = _metric("perf/mfu", "fraction", SUM, "model FLOPs utilisation; null where the device's peak is not known")
HFU = _metric("perf/hfu", "fraction", SUM, "the same, with the FLOPs of recomputation")
TRAINING_SECONDS = _metric("perf/training_seconds", "s", FIRST, "time of all updates since the start of the processes")

EXPOSED = _metric("comm/exposed_seconds", "s", MAX, "communication that no compute covers, in a profiled update")
EXPOSED_OF = {
    group: _metric(f"{EXPOSED}/{group.replace(' ', '_')}", "s", MAX, f"the same, over {group} alone")
    for group in GROUPS
}

PEAK_ALLOCATED = _metric("mem/peak_allocated_bytes", "bytes", MAX, "peak of torch's allocator; null on the CPU")
PEAK_RESERVED = _metric(
    "mem/peak_reserved_bytes", "bytes", MAX, "peak of the bytes that torch's allocator reserves; null on the CPU"
)
PEAK_HOST = _metric("mem/peak_host_bytes", "bytes", MAX, "largest resident set of a process so far")
PHASE_PEAK = {
    phase: _metric(
        f"mem/{phase}_peak_bytes", "bytes", MAX, f"peak of the tensors in the phase `{phase}`, where measured"
    )
    for phase in PHASES
}

DATA_WAIT = _metric("data/wait_seconds", "s", MAX, "time that the update waited for rows")
PADDING = _metric("data/padding_fraction", "fraction", SAME, "share of the positions that are padding")
REAL_TOKENS = _metric("data/real_tokens", "tokens", SUM, "tokens of the update that are not padding")
SLOTS = _metric("data/slots", "positions", SUM, "positions that the update computes: rows x length")
TARGET_TOKENS = _metric("data/target_tokens", "tokens", SUM, "tokens of the update that enter the loss")

EVAL_LOSS = _metric("eval/loss", "nats", SAME, "mean loss over the target tokens of the validation rows")
PERPLEXITY = _metric("eval/perplexity", "", SAME, "exp(eval/loss)")
EVAL_TARGETS = _metric("eval/target_tokens", "tokens", SUM, "target tokens of the validation rows")
