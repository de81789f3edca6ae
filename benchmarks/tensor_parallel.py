"""Tensor parallelism beside torch's own styles: python benchmarks/tensor_parallel.py [--ranks 4] [--whole]

Gloo ranks, a Llama of about 10M parameters in float32, one microbatch. The bare loop is `parallelize_module` with
torch's ColwiseParallel, RowwiseParallel and SequenceParallel, `loss_parallel`, and AdamW. Both loops live in the same
processes and take turns. Bytes: the larger of what each functional collective is given and gives back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROWS, LENGTH, VOCABULARY = 4, 256, 8192
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
}


def rows(number: int) -> tuple[Any, Any]:
    """Random rows and shifted labels, equal on all tensor-parallel ranks."""
    import torch

    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    return ids, torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)


def ours(directory: str, sequence: bool) -> Callable[[int], float]:
    """One update of the product; returns the loss."""
    import torch
    import torch.distributed as dist

    from shardwright.config import load_run_file
    from shardwright.data.loader import Microbatch, UpdateBatch
    from shardwright.layout.legality import check_run
    from shardwright.train.update import UpdateEngine

    values = {
        "model.model_name_or_path": directory,
        "model.init": "random",
        "data.train": ["unused"],
        "data.max_length": LENGTH,
        "training.max_steps": 1000,
        "training.global_batch_size": ROWS,
        "training.per_device_train_batch_size": ROWS,
        "training.lr_scheduler_type": "constant",
        "parallelism.data_parallel": "ddp",
        "parallelism.tp_size": dist.get_world_size(),
        "parallelism.sequence_parallel": sequence,
    }
    loaded = load_run_file(None, values)
    engine = UpdateEngine(loaded.run, check_run(loaded, dist.get_world_size()), torch.device("cpu"), 1000)

    def update(number: int) -> float:
        ids, labels = rows(number)
        made = (Microbatch(0, ids, labels, tuple(range(ROWS))),)
        engine.forward_backward(UpdateBatch(number, made, ROWS * (LENGTH - 1), ROWS * LENGTH, ROWS * LENGTH, ()))
        return engine.step().loss

    return update


def torch_plans(sequence: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans of torch's own styles: of a block, and of the rest."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if sequence else Replicate()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    block: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    block |= {name: RowwiseParallel(output_layouts=outside) for name in ("self_attn.o_proj", "mlp.down_proj")}
    rest: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        hidden = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
        block |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        block["self_attn"] = PrepareModuleInput(input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1])
        block["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        rest["model.norm"] = SequenceParallel()
    return block, rest


def bare(directory: str, sequence: bool) -> Callable[[int], float]:
    """The loop that a careful user writes with torch alone."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    block, rest = torch_plans(sequence)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, rest)
    mixed = [[p for p in model.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
    groups = [{"params": kind} for kind in mixed if kind]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.0, fused=True)
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)

    def update(number: int) -> float:
        ids, labels = rows(number)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (ROWS * (LENGTH - 1))
            loss.backward()
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in mixed if kind]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        norm = torch.stack(whole).norm()
        for kind in mixed:
            torch.nn.utils.clip_grads_with_norm_(kind, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item()

    return update


def sent(update: Callable[[int], float]) -> int:
    """Bytes that one update gives to collectives on this rank."""
    from torch.utils._python_dispatch import TorchDispatchMode

    total = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal total
            result = func(*args, **(kwargs or {}))
            name = str(func)
            if name.startswith("_c10d_functional.") and "wait" not in name:
                total += max(args[0].nbytes, result.nbytes)
            return result

    with Count():
        update(0)
    return total


def worker(task: dict[str, Any]) -> None:
    """One rank: both loops in turn."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=task["ranks"])
    updates = {name: loop(task["model"], task["sequence"]) for name, loop in (("ours", ours), ("bare", bare))}
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(task["warmup"] + task["n"]):
        for name in list(updates)[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            updates[name](number)
            dist.barrier()
            if number >= task["warmup"]:
                seconds[name].append(time.perf_counter() - start)
    amounts = {name: sent(update) for name, update in updates.items()}
    if rank == 0:
        Path(task["result"]).write_text(json.dumps({"seconds": seconds, "bytes": amounts}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-n", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="without sequence parallelism")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
        return
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(MODEL))
        task = {"store": f"{scratch}/store", "result": f"{scratch}/result.json", "model": scratch}
        task |= {
            "sequence": not arguments.whole,
            "n": arguments.n,
            "warmup": arguments.warmup,
            "ranks": arguments.ranks,
        }
        command = [sys.executable, str(HERE), "--task", json.dumps(task)]
        ranks = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
            for rank in range(arguments.ranks)
        ]
        if any(process.wait(timeout=900) for process in ranks):
            raise SystemExit("a rank failed")
        found = json.loads(Path(task["result"]).read_text())
    seconds = found["seconds"]
    mine, theirs = (statistics.median(seconds[name]) for name in ("ours", "bare"))
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["bare"]))
    row = {
        "ranks": arguments.ranks,
        "sequence_parallel": not arguments.whole,
        "ours_seconds": mine,
        "bare_seconds": theirs,
        "ratio": ratio,
    }
    print(
        f"tp{arguments.ranks}, sequence_parallel {not arguments.whole}, n={arguments.n}: ours {mine:.3f} s, "
        f"torch's styles {theirs:.3f} s, "
        f"tokens/s ratio {ratio:.3f}; sent {found['bytes']['ours'] / 1e6:.1f} MB against {found['bytes']['bare'] / 1e6:.1f} MB"
    )
    if arguments.record:
        with (HERE.parent / "results.jsonl").open("a") as file:
            file.write(json.dumps({"benchmark": "tensor_parallel", "n": arguments.n, **row}) + "\n")


if __name__ == "__main__":
    main()
