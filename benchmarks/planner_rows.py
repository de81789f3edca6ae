"""Published step times as (problem, layout, device, software, measured seconds), one row each.

Every rule that leaves a row out stands in this file, and was written before the predictions were compared. A
row goes into the calibration or the validation half by a hash of its settings; the measured value is not part
of the hash.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.arch.known_models import known_shape
from shardwright.arch.shape import Shape, generic_shape
from shardwright.layout.axes import Axes
from shardwright.planner.device import Device
from shardwright.planner.hardware import find_device
from shardwright.planner.problem import Layout, Problem

STALLED = "over 0.3 s and twice the time per microbatch of a run with the same model, TP and microbatch: stalled"
REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "reference"


@dataclass(frozen=True)
class Row:
    """One published step time. `excluded` is the rule that leaves it out, or empty."""

    source: str
    label: str
    problem: Problem
    layout: Layout
    device: str
    software: str
    stage_blocks: tuple[int, ...]
    measured_seconds: float
    excluded: str = ""

    @property
    def validation(self) -> bool:
        """Whether the row is in the validation half: the first hex digit of the SHA-256 of its settings is 8
        or more.
        """
        return int(hashlib.sha256(f"{self.source}|{self.label}".encode()).hexdigest()[0], 16) >= 8


def _read(name: str) -> Iterator[dict[str, str]]:
    with (REFERENCE / name).open(newline="") as file:
        yield from csv.DictReader(file)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (1 if index < layers % stages else 0) for index in range(stages))


_NANOTRON_SHAPES = {
    "1.34": (16, 2048, 32, 8192, True),
    "3.57": (28, 3072, 32, 8192, True),
    "8.86": (32, 4096, 32, 14336, False),
    "80.0": (80, 8192, 64, 28672, False),
}


def nanotron_stages(shape: Shape, stages: int) -> tuple[int, ...]:
    """Blocks of each stage as nanotron cuts them: each stage takes pieces until its share of the weights'
    FLOPs is passed.
    """
    block = 4 * shape.hidden * shape.hidden + 3 * shape.ffn * shape.hidden
    costs = [0, *[block] * shape.layers, 0, shape.vocab * shape.hidden, 0]
    total, done, stage = sum(costs), 0, 0
    blocks = [0] * stages
    for index, cost in enumerate(costs):
        done += cost
        if 1 <= index <= shape.layers:
            blocks[stage] += 1
        if stage < stages - 1 and done > total * (stage + 1) / stages:
            stage += 1
    return tuple(blocks)


def nanotron() -> Iterator[Row]:
    for r in _read("nanotron.csv"):
        layers, hidden, heads, ffn, tied = _NANOTRON_SHAPES[r["params_b"]]
        shape = generic_shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=131072,
            ffn=ffn,
            gated=True,
            tied=tied,
            biases=False,
        )
        dp, pp, tp, rows, k = (int(r[key]) for key in ("dp", "pp", "tp", "microbatch", "accumulation"))
        problem = Problem(shape, 4096, dp * rows * k, "bf16", "fp32", "fp32")
        layout = Layout(
            Axes(pp=pp, dp_shard=dp, tp=tp),
            "zero1" if r["zero"] == "1" else "ddp",
            rows,
            "1f1b" if pp > 1 else None,
        )
        seconds = dp * rows * k * 4096 / (float(r["tokens_per_s_per_gpu"]) * int(r["gpus"]))
        label = f"{r['params_b']}B dp{dp} pp{pp} tp{tp} zero{r['zero']} microbatch {rows} x {k}"
        excluded = "TP = 32 over four nodes: the data's README says these are off by 2 to 3 times" if tp == 32 else ""
        yield Row(
            "nanotron",
            label,
            problem,
            layout,
            "h100-sxm-80gb",
            "nanotron",
            nanotron_stages(shape, pp),
            seconds,
            excluded,
        )


def _unrepeatable(rows: list[Row]) -> list[Row]:
    """Marks runs that the settings do not explain: another run of the same model, tensor parallelism and
    microbatch (both with or both without a pipeline) takes less than half of their time per slot, and the
    difference is more than 0.3 s per microbatch. No collective of these sizes takes that long; such runs wait
    about a second at every microbatch, whatever the model. Uses measurements only, no prediction.
    """
    slot = [row.measured_seconds / (row.layout.microbatches(row.problem) + row.layout.axes.pp - 1) for row in rows]
    alike = [
        (row.problem.shape, row.layout.axes.tp, row.layout.axes.pp > 1, row.layout.microbatch_rows) for row in rows
    ]
    fastest: dict[object, float] = {}
    for row, key, seconds in zip(rows, alike, slot):
        fastest[key] = min(seconds * row.layout.axes.pp, fastest.get(key, math.inf))
    return [
        replace(row, excluded=STALLED)
        if not row.excluded
        and seconds > max(2 * fastest[key] / row.layout.axes.pp, fastest[key] / row.layout.axes.pp + 0.3)
        else row
        for row, key, seconds in zip(rows, alike, slot)
    ]


def vtrain() -> Iterator[Row]:
    for r in _read("vtrain.csv"):
        layers, hidden, heads, seq = (int(r[key]) for key in ("layers", "hidden", "heads", "seq"))
        dp, pp, tp, rows, batch = (int(r[key]) for key in ("dp", "pp", "tp", "microbatch", "global_batch"))
        shape = generic_shape(layers=layers, hidden=hidden, heads=heads, vocab=51200, learned_positions=seq)
        problem = Problem(shape, seq, batch, "fp16", "fp16", "fp32", attention="eager")
        layout = Layout(
            Axes(pp=pp, dp_shard=dp, tp=tp),
            "ddp",
            rows,
            "1f1b" if pp > 1 else None,
            sequence_parallel=False,
            recompute="full",
        )
        label = f"h{hidden} L{layers} s{seq} dp{dp} pp{pp} tp{tp} microbatch {rows} batch {batch}"
        excluded = "" if layers % pp == 0 else "layers do not divide over the stages: the cut is not known"
        if batch % (rows * dp):
            excluded = "the batch does not divide over ranks and microbatches"
        yield Row(
            r["source"],
            label,
            problem,
            layout,
            "a100-sxm-80gb",
            "megatron",
            _even(layers, pp),
            float(r["iteration_ms"]) / 1e3,
            excluded,
        )


_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def mosaicml() -> Iterator[Row]:
    for r in _read("mosaicml.csv"):
        layers, hidden, heads = _MPT[r["model"]]
        seq, gpus, rows, k = (int(r[key]) for key in ("seq", "gpus", "microbatch", "accumulation"))
        shape = generic_shape(
            layers=layers, hidden=hidden, heads=heads, vocab=50368, biases=False, learned_positions=seq
        )
        problem = Problem(shape, seq, gpus * rows * k, "bf16", "bf16" if r["mp_mode"] == "PURE" else "fp32", "fp32")
        layout = Layout(
            Axes(dp_shard=gpus),
            "zero3",
            rows,
            recompute="full" if r["recompute"] == "True" else "none",
            reshard_after_forward=r["sharding"] == "FULL_SHARD",
        )
        seconds = gpus * rows * k * seq / float(r["tokens_per_s"])
        device = {"h100_80gb": "h100-sxm-80gb", "a100_80gb": "a100-sxm-80gb", "a100_40gb": "a100-sxm-40gb"}[r["device"]]
        label = (
            f"{r['model']} s{seq} {r['device']} x {gpus} microbatch {rows} x {k} {r['precision']} "
            f"{r['mp_mode']} {r['sharding']} recompute {r['recompute']}"
        )
        excluded = "fp8" if "fp8" in r["precision"] else ""
        yield Row("mosaicml", label, problem, layout, device, "mosaicml", (layers,), seconds, excluded)


def _gpt(layers: int, hidden: int, heads: int, seq: int = 2048, vocab: int = 51200) -> Shape:
    return generic_shape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, learned_positions=seq)


def narayanan() -> Iterator[Row]:
    for r in _read("narayanan2021_t1.csv"):
        layers, hidden, heads = int(r["layers"]), int(r["hidden"]), int(r["heads"])
        tp, pp, dp, rows, batch = (int(r[key]) for key in ("tp", "pp", "dp", "mbs", "gbs"))
        shape = _gpt(layers, hidden, heads)
        chunks = layers // pp // int(r["layers_per_vstage"]) if r["layers_per_vstage"] else 1
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        yield Row(
            "narayanan table 1",
            f"{r['params_b']}B tp{tp} pp{pp} dp{dp}",
            Problem(shape, 2048, batch, "fp16", "fp16", attention="eager"),
            _megatron_layout(tp, pp, dp, rows, chunks, "full", False),
            "a100-sxm-80gb",
            "megatron",
            _even(layers, pp * chunks),
            flops / (int(r["gpus"]) * float(r["tflops_gpu"]) * 1e12),
        )
    shapes = {"174.6": (96, 12288, 96, 12), "529.6": (105, 20480, 128, 35)}
    for r in _read("narayanan2021_t2.csv"):
        layers, hidden, heads, pp = shapes[r["params_b"]]
        gpus, batch = int(r["gpus"]), int(r["gbs"])
        tp, pp = (8, pp) if r["scheme"] == "ptd" else (1, 1)
        dp = gpus // (tp * pp)
        chunks = 3 if pp == 35 else 1  # as in table 1 for the same model
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        yield Row(
            "narayanan table 2",
            f"{r['scheme']} {r['params_b']}B x {gpus}",
            Problem(_gpt(layers, hidden, heads), 2048, batch, "fp16", "fp16", attention="eager"),
            _megatron_layout(tp, pp, dp, int(r["mbs"]), chunks, "full", False),
            "a100-sxm-80gb",
            "megatron",
            _even(layers, pp * chunks),
            flops / (gpus * float(r["tflops_gpu"]) * 1e12),
            "DeepSpeed ZeRO-3 of 2021: its overlap and recomputation are not given" if r["scheme"] == "zero3" else "",
        )


def _megatron_layout(
    tp: int, pp: int, dp: int, rows: int, chunks: int, recompute: str, sequence_parallel: bool
) -> Layout:
    schedule = None if pp == 1 else ("interleaved_1f1b" if chunks > 1 else "1f1b")
    return Layout(
        Axes(pp=pp, dp_shard=dp, tp=tp),
        "ddp",
        rows,
        schedule,
        chunks,
        sequence_parallel=sequence_parallel,
        recompute=recompute,  # type: ignore[arg-type]
    )


def korthikanti() -> Iterator[Row]:
    for r in _read("korthikanti2022_iteration.csv"):
        layers, hidden, heads = int(r["layers"]), int(r["hidden"]), int(r["heads"])
        tp, pp, dp, rows, batch = (int(r[key]) for key in ("tp", "pp", "dp", "mbs", "gbs"))
        for recompute, sp, key in (
            ("full", False, "iter_full_recompute_s"),
            ("selective", True, "iter_sp_selective_s"),
        ):
            chunks = int(r["interleave_m"])
            layout = _megatron_layout(tp, pp, dp, rows, chunks, recompute, sp)
            problem = Problem(_gpt(layers, hidden, heads), 2048, batch, "fp16", "fp16", attention="eager")
            yield Row(
                "korthikanti table 5",
                f"{r['model']} {recompute}",
                problem,
                layout,
                "a100-sxm-80gb",
                "megatron",
                _even(layers, pp * chunks),
                float(r[key]),
            )


def megatron_readme() -> Iterator[Row]:
    for r in _read("megatron_readme_h100.csv"):
        layers, hidden, heads = int(r["layers"]), int(r["hidden"]), int(r["heads"])
        tp, pp, dp, batch = (int(r[key]) for key in ("tp", "pp", "dp", "gbs_seq"))
        flops = 72 * batch * 4096 * layers * hidden**2 * (1 + 4096 / (6 * hidden) + 131072 / (12 * layers * hidden))
        problem = Problem(_gpt(layers, hidden, heads, 4096, 131072), 4096, batch, "bf16", "bf16")
        yield Row(
            "megatron readme H100",
            r["model"],
            problem,
            _megatron_layout(tp, pp, dp, 1, 1, "none", True),
            "h100-sxm-80gb",
            "megatron",
            _even(layers, pp),
            flops / (int(r["gpus"]) * float(r["tflops_per_gpu"]) * 1e12),
            "microbatch, recomputation and interleaving are not published",
        )


_TITAN = {
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3-405b": "llama-3.1-405b",
    "qwen3-32b": "qwen3-32b",
}


def torchtitan() -> Iterator[Row]:
    for r in _read("torchtitan.csv"):
        shape = known_shape(_TITAN[r["model"]])
        dp, tp, pp, cp, gpus, seq = (int(r[key]) for key in ("dp_shard", "tp", "pp", "cp", "gpus", "seq"))
        excluded = ""
        if r["precision"] != "bf16":
            excluded = "float8"
        elif not r["tokens_per_s_per_gpu"]:
            excluded = "ran out of memory: no time"
        elif not r["local_batch"]:
            excluded = "local batch not stated"
        elif "async TP" in r["note"]:
            excluded = "asynchronous tensor parallelism: not planned"
        rows = int(r["local_batch"] or 1)
        recompute = {"selective-op": "selective", "full": "full", "none": "none"}[r["recompute"]]
        problem = Problem(
            shape,
            seq,
            dp * rows,
            "bf16",
            "fp32",
            "fp32",
            loss="chunked" if "chunked" in r["note"] else "full",
        )
        layout = Layout(
            Axes(pp=pp, dp_shard=dp, cp=cp, tp=tp),
            "zero3",
            rows,
            "1f1b" if pp > 1 else None,
            recompute=recompute,
            reshard_after_forward="reshard never" not in r["note"],  # type: ignore[arg-type]
        )
        seconds = dp * rows * seq / (float(r["tokens_per_s_per_gpu"]) * gpus) if r["tokens_per_s_per_gpu"] else 0.0
        device = {
            "h100-96gb-hbm2e": "h100-sxm-96gb",
            "a100-80gb-sxm": "a100-sxm-80gb",
            "h200-141gb": "h200-sxm-141gb",
        }[r["device"]]
        label = (
            f"{r['model']} {r['device']} x {gpus} dp{dp} tp{tp} pp{pp} cp{cp} batch {r['local_batch']} "
            f"s{seq} {r['recompute']} {r['precision']} compile {r['compile']} {r['note']} {r['source']}"
        )
        software = "torchtitan compiled" if r["compile"] == "yes" else "torchtitan"
        yield Row("torchtitan", label, problem, layout, device, software, _even(shape.layers, pp), seconds, excluded)


def all_rows() -> list[Row]:
    """Every published row of a known source, excluded ones too."""
    rows = [
        *_unrepeatable(list(nanotron())),
        *vtrain(),
        *mosaicml(),
        *narayanan(),
        *korthikanti(),
        *megatron_readme(),
        *torchtitan(),
    ]
    for row in rows:
        find_device(row.device)
    return rows


def device_of(row: Row) -> Device:
    return find_device(row.device)
