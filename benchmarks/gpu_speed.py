"""Loops on GPUs, one after another in the same ranks: `make gpu` starts it with torchrun, a line of JSON for each case.

Models: a Llama of about 1B parameters, and one of the width and vocabulary of an 8B, with as many layers as the memory holds.
Cases: this project with zero3 (with and without compile, packed rows, whole logits in place of chunks), bare FSDP2, and
Transformers' Trainer. All have the same rows, float32 master weights, bf16 compute, AdamW and clipping.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.config import load_run_file
from shardwright.layout.axes import Axes
from shardwright.layout.legality import check_run
from shardwright.mesh.process_group import connect
from shardwright.models.build import build_model, quiet_transformers
from shardwright.models.materialise import materialise
from shardwright.models.model_parts import find_parts
from shardwright.planner.estimate import estimate
from shardwright.planner.memory_timeline import Peak
from shardwright.planner.problem import layout_of, problem_of
from shardwright.tools.bench.peers import bare, trainer
from shardwright.train.loop import Trainer
from shardwright.train.planned import shape_of
from shardwright.train.preflight import prepare_run
from shardwright.train.run_data import open_data
from shardwright.train.update import UpdateEngine
from shardwright.train.utilisation import make_utilisation

WARMUP, UPDATES, SAVE_UPDATES = 3, 10, 12
ROOM = 0.85
"""Share of a GPU's memory that the planned reserved memory of a model may take."""


@dataclass(frozen=True)
class Model:
    """config: of a Llama. length, rows: of a microbatch. The rehearsal's sizes fit a slow CPU."""

    config: dict[str, Any]
    length: int
    rows: int


def models(rehearse: bool) -> dict[str, Model]:
    length = 64 if rehearse else 4096
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    one = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    made = {
        "1B": {
            **(small if rehearse else one),
            "num_hidden_layers": 2 if rehearse else 22,
            "vocab_size": 512 if rehearse else 32000,
        },
        "8B-wide": {
            **(small if rehearse else eight),
            "num_hidden_layers": 3 if rehearse else 32,
            "vocab_size": 8192 if rehearse else 128256,
        },
    }
    return {name: Model(scaffold.llama(length, **sizes), length, 2) for name, sizes in made.items()}


@dataclass(frozen=True)
class Case:
    """program: `ours` or a peer. more: keys of the run file. is_save: the stall of a background save is measured."""

    program: str
    compiled: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    is_save: bool = False

    @property
    def name(self) -> str:
        said = [self.program, "compiled" if self.compiled else "eager"]
        said += [f"{key.rpartition('.')[2]} {value}" for key, value in self.more.items()]
        return ", ".join(said + (["async save"] if self.is_save else []))


OURS, PACKED = "shardwright zero3", {"data.batching": "pack"}
CASES = {
    "8B-wide": [
        Case(OURS, True),
        Case("bare FSDP2", True),
        Case(OURS),
        Case(OURS, more=PACKED),
        Case(OURS, more={"memory.loss_chunk_tokens": 0}),
        Case("bare FSDP2"),
    ],
    "1B": [
        Case(OURS, True),
        Case("bare FSDP2", True),
        Case("Trainer ddp", True),
        Case(OURS),
        Case(OURS, more=PACKED),
        Case("bare FSDP2"),
        Case("Trainer ddp"),
        Case(OURS, is_save=True),
    ],
}
"""In the order of worth: a time limit cuts the end off."""
NEEDS = {"Trainer ddp": "accelerate"}


def loaded_of(directory: Path, model: Model, case: Case, ranks: int) -> Any:
    """The run of a case; model and rows are in `directory`."""
    packed = case.more.get("data.batching") == "pack"
    values = {
        "model.model_name_or_path": str(directory / "model"),
        "model.init": "random",
        "data.train": [str(directory / ("mixed.jsonl" if packed else "full.jsonl"))],
        "data.max_length": model.length,
        "training.max_steps": 1000,
        "training.global_batch_size": model.rows * ranks,
        "training.per_device_train_batch_size": model.rows,
        "training.lr_scheduler_type": "constant",
        "training.learning_rate": 1e-4,
        "parallelism.data_parallel": "zero3",
        "precision.param_dtype": "bf16",
        "memory.compile": case.compiled,
        "hardware.device": "cuda",
        "checkpoint.output_dir": str(directory / "run"),
        "checkpoint.export_hf": "none",
        "checkpoint.async_save": case.is_save,
        **case.more,
    }
    return load_run_file(None, values)


def write_rows(directory: Path, model: Model, ranks: int) -> None:
    """Documents of the whole length, and as many tokens in documents of mixed lengths."""
    draw, vocabulary = random.Random(0), model.config["vocab_size"]
    count = model.rows * ranks * (WARMUP + UPDATES + 4)
    with (directory / "full.jsonl").open("w") as full, (directory / "mixed.jsonl").open("w") as mixed:
        for _ in range(count):
            full.write(json.dumps({"input_ids": [draw.randrange(vocabulary) for _ in range(model.length)]}) + "\n")
            left = model.length
            while left > 1:
                size = min(left, max(2, int(draw.lognormvariate(0, 1) * model.length / 8)))
                mixed.write(json.dumps({"input_ids": [draw.randrange(vocabulary) for _ in range(size)]}) + "\n")
                left -= size


def planned(loaded: Any, axes: Axes, chunked: bool | None) -> Peak:
    """What the planner says of a run on GPUs. chunked: as the engine does; None: as the planner decides."""
    shape = shape_of(loaded.run)
    assert shape is not None
    problem = problem_of(loaded.run, shape, "cuda")
    if chunked is not None:
        problem = replace(problem, loss="chunked" if chunked else "full")
    return estimate(problem, layout_of(loaded.run, axes, "cuda")).peak


def fitted(directory: Path, model: Model, ranks: int, memory: int) -> Model:
    """`model` with as many of its layers as fit with whole logits, which a bare loop makes; its config.json is written."""
    for layers in range(model.config["num_hidden_layers"], 0, -1):
        model = replace(model, config={**model.config, "num_hidden_layers": layers})
        (directory / "model").mkdir(exist_ok=True)
        (directory / "model" / "config.json").write_text(json.dumps(model.config))
        loaded = loaded_of(directory, model, Case(OURS, more={"memory.loss_chunk_tokens": 0}), ranks)
        if planned(loaded, check_run(loaded, ranks), False).reserved <= ROOM * memory:
            break
    return model


@dataclass
class Loop:
    """One program: `update` does an update and returns (batch, loss); `close` frees its memory."""

    update: Callable[[], tuple[Any, float]]
    close: Callable[[], None]
    planned: Peak | None = None
    saved: Callable[[int], Any] = lambda number: None


def ours(loaded: Any, device: torch.device) -> Loop:
    axes = check_run(loaded, dist.get_world_size())
    data = open_data(loaded.run, axes, dist.get_rank())
    engine = UpdateEngine(loaded.run, axes, device, data.updates)
    batches = data.updates_from(0, device)
    saves = Trainer(loaded, engine, data, Console(quiet=True)) if loaded.run.checkpoint.async_save else None

    def update() -> tuple[Any, float]:
        batch = next(batches)
        engine.forward_backward(batch)
        if saves is not None:
            saves.checkpoints.saver.before_step()
        result = engine.step()
        if saves is not None:
            saves.at.update, saves.at.cursor = saves.at.update + 1, batch.cursor
        return batch, result.loss

    def saved(number: int) -> Any:
        if saves is not None:
            saves.checkpoints.between_updates(due=number == SAVE_UPDATES // 3, last=False)

    def close() -> None:
        if saves is not None:
            saves.checkpoints.saver.finish()
        engine.close()

    return Loop(update, close, planned(loaded, axes, bool(engine.loss_chunks.tokens)), saved)


def peer(case: Case, loaded: Any, device: torch.device) -> Loop:
    """Another program on the same rows, blocks compiled in the same way."""
    run = loaded.run
    model = build_model(run.model, torch.float32)
    materialise(model, run.model, seed=run.training.seed, device=device)
    model.train()
    if case.compiled:
        for name in find_parts(model).blocks:
            model.get_submodule(name).compile()
    module, kind = {"bare FSDP2": (bare, "zero3"), "Trainer ddp": (trainer, "ddp")}[case.program]
    train = module.make(run, kind, model, device)
    data = open_data(run, Axes(dp_replicate=dist.get_world_size()), dist.get_rank())
    batches = data.updates_from(0, device)

    def update() -> tuple[Any, float]:
        batch = next(batches)
        return batch, train(batch)

    return Loop(update, lambda: None)


def measure(case: Case, loaded: Any, device: torch.device) -> dict[str, Any]:
    """The figures of one case, equal on all ranks: seconds of the slowest rank of each update, memory of the fullest."""
    started = time.perf_counter()
    loop = ours(loaded, device) if case.program == OURS else peer(case, loaded, device)
    losses = [loop.update()[1] for _ in range(WARMUP)]
    torch.accelerator.synchronize(device)
    ready = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats(device)
    utilisation = make_utilisation(loaded.run, check_run(loaded, dist.get_world_size()), device, None)
    seconds, rates, useful = [], [], []
    for number in range(SAVE_UPDATES if case.is_save else UPDATES):
        dist.barrier()
        start = time.perf_counter()
        batch, _ = loop.update()
        torch.accelerator.synchronize(device)
        loop.saved(number)
        seconds.append(time.perf_counter() - start)
        rates.append(batch.real_tokens)
        useful.append(utilisation.flops(batch)[0] if utilisation else 0.0)
    own = (seconds, useful, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    loop.close()
    slowest = [max(at) for at in zip(*(rank[0] for rank in ranks))]
    peak = utilisation.peak.flops * len(ranks) if utilisation else None
    return {
        "case": case.name,
        "seconds": slowest,
        "tokens_per_s": [count / s for count, s in zip(rates, slowest)],
        "mfu": [sum(flops) / s / peak for s, *flops in zip(slowest, *(r[1] for r in ranks))] if peak else None,
        "allocated": max(rank[2] for rank in ranks),
        "reserved": max(rank[3] for rank in ranks),
        "planned_allocated": loop.planned.allocated if loop.planned else None,
        "planned_reserved": loop.planned.reserved if loop.planned else None,
        "first_loss": losses[0],
        "warmup_seconds": ready,
        "save_at": SAVE_UPDATES // 3 if case.is_save else None,
    }


def why_left_out(case: Case, rehearse: bool) -> str:
    if rehearse and case.compiled:
        return "torch.compile has no kernels for the pretend device"
    if (needed := NEEDS.get(case.program)) and find_spec(needed) is None:
        return f"{needed} is not installed"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("directory", type=Path, help="for the model's configuration and the rows")
    parser.add_argument("output", type=Path, help="a line of JSON for each case")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    quiet_transformers()
    with connect("cuda") as connection:
        place, device = connection.rank_info, connection.device
        whole = models(given.rehearse)[given.model]
        directory = given.directory / given.model
        if place.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            fitted(directory, whole, place.world_size, torch.cuda.get_device_properties(device).total_memory)
            write_rows(directory, whole, place.world_size)
        dist.barrier()
        model = replace(whole, config=json.loads((directory / "model" / "config.json").read_text()))
        for case in CASES[given.model]:
            about = {"model": given.model, "case": case.name, "layers": model.config["num_hidden_layers"], "rows": model.rows,
                     "length": model.length, "ranks": place.world_size}  # fmt: skip
            if why := why_left_out(case, given.rehearse):
                result: dict[str, Any] = {"left_out": why}
            else:
                loaded = loaded_of(directory, model, case, place.world_size)
                if place.rank == 0:
                    prepare_run(loaded, Console(quiet=True))
                dist.barrier()
                try:
                    result = measure(case, loaded, device)
                except (
                    Exception
                ) as error:  # the next case may fit; other ranks may wait in a collective, so it ends them all
                    result = {
                        "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
                    }
            if place.rank == 0 or "failed" in result:
                with given.output.open("a") as file:
                    file.write(json.dumps({**about, **result}) + "\n")
            if "failed" in result and place.world_size > 1:
                raise SystemExit(result["failed"])
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
