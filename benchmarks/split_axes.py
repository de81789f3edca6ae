"""Pipeline and context parallelism beside loops written by hand: python benchmarks/split_axes.py [--ranks 4] [--layouts pp]

A Llama in float32 on gloo ranks; both sides start from the same file and their first losses must be equal. `pp`: 1F1B, stages
cut by hand with the same blocks, under torch.distributed.pipelining. `all_gather`: head and tail chunks, keys and values
gathered, each chunk attending to what lies before it. `ring`: torch's own ring attention fed with the CPU flash kernel.
Loops take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from scaffold import (
    Update,
    finish,
    llama,
    make_engine,
    ours,
    random_rows,
    rank_of_task,
    ratio,
    record,
    spread,
    start,
    take_turns,
    update_batch,
)

ROWS, MICROBATCHES, LENGTH, VOCABULARY = 2, 4, 256, 1024
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}


def finish_update(model: Any, optimizer: Any, loss: Any, summed: bool) -> float:
    """Clips, steps, and gives the loss of the update. `summed`: ranks hold other gradients of the same parameters."""
    import torch
    import torch.distributed as dist

    gradients = [p.grad for p in model.parameters()]
    if summed:
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))
    square = torch.nn.utils.get_total_norm(gradients).square()
    if not summed:
        dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return float(loss)


def bare_pipeline(directory: str, counts: list[int]) -> Update:
    """1F1B by hand; `counts`: blocks of each stage."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from transformers import AutoModelForCausalLM

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    begin = sum(counts[:rank])

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = whole.model.embed_tokens if rank == 0 else None
            self.layers = nn.ModuleList(whole.model.layers[begin : begin + counts[rank]])
            self.rotary = whole.model.rotary_emb
            self.norm = whole.model.norm if rank == ranks - 1 else None
            self.head = whole.lm_head if rank == ranks - 1 else None
            self.positions = torch.arange(LENGTH)[None]

        def forward(self, x: Any) -> Any:
            x = x if self.embed is None else self.embed(x)
            rotary = self.rotary(x, self.positions)
            for layer in self.layers:
                x = layer(x, position_embeddings=rotary, position_ids=self.positions)
            return x if self.norm is None or self.head is None else self.head(self.norm(x))

    part = Part()
    targets = ROWS * MICROBATCHES * (LENGTH - 1)

    def loss_of(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets

    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(part.parameters(), lr=5e-5, weight_decay=0.0, fused=True)

    def update(number: int) -> float:
        rows = [random_rows(number * MICROBATCHES + k, ROWS, LENGTH, VOCABULARY) for k in range(MICROBATCHES)]
        losses: list[Any] = []
        inputs = (torch.cat([ids for ids, _ in rows]),) if rank == 0 else ()
        labels = torch.cat([labels for _, labels in rows]) if rank == ranks - 1 else None
        schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        loss = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        return finish_update(part, optimizer, loss, summed=False)

    return update


def _gathered_attention() -> Any:
    """Attention over head and tail chunks with keys and values of all ranks, as an attention function of Transformers."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    rank, ranks = dist.get_rank(), dist.get_world_size()
    half = LENGTH // (2 * ranks)
    order = [c for r in range(ranks) for c in (r, 2 * ranks - 1 - r)]  # chunks as they arrive
    back = torch.tensor([order.index(c) for c in range(2 * ranks)])
    mine = (rank, 2 * ranks - 1 - rank)
    masks = [torch.arange(half * c, half * (c + 1))[:, None] >= torch.arange(half * (c + 1))[None] for c in mine]

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:  # [B, H, T, D] -> [B, H, S, D]
            found = x.new_empty(ranks, *x.shape)
            dist.all_gather_into_tensor(found.flatten(0, 1), x.contiguous())
            chunks = found.unflatten(3, (2, half)).movedim(3, 1).flatten(0, 1)
            return chunks[back].movedim(0, 2).flatten(2, 3)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            chunks = gradients[0].unflatten(2, (2 * ranks, half)).movedim(2, 0)[torch.tensor(order)]
            sent = chunks.unflatten(0, (ranks, 2)).movedim(1, 3).flatten(3, 4).contiguous()
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            return received.sum(0)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        key, value = Gather.apply(torch.cat([key, value], -1)).split(key.shape[-1], -1)
        outs = [
            F.scaled_dot_product_attention(
                q, key[:, :, : m.shape[1]], value[:, :, : m.shape[1]], attn_mask=m, scale=scaling
            )
            for q, m in zip(query.chunk(2, 2), masks)
        ]
        return torch.cat(outs, 2).transpose(1, 2).contiguous(), None

    return attention


def _ring_attention() -> Any:
    """torch's ring attention with head and tail chunks, as an attention function of Transformers."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward_op(query: Any, key: Any, value: Any, is_causal: bool = False, scale: float | None = None) -> Any:
        return flash(query, key, value, 0.0, is_causal, scale=scale)

    def backward_op(is_causal: bool, scale: float, **tensors: Any) -> Any:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        return flash_backward(*(tensors[name] for name in names), 0.0, is_causal, scale=scale)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, scale: float) -> Any:
            out, lse, *_ = torchs._templated_ring_attention(
                dist.group.WORLD, 2, forward_op, query, key, value, is_causal=True, scale=scale
            )
            ctx.save_for_backward(query, key, value, out, lse)
            ctx.scale = scale
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            query, key, value, out, lse = ctx.saved_tensors
            found = torchs._templated_ring_attention_backward(
                dist.group.WORLD, 2, backward_op, gradients[0].contiguous(), "grad_out", query, key, value, out, lse,
                is_causal=True, scale=ctx.scale,
            )  # fmt: skip
            return (*found[:3], None)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        return Ring.apply(query, key, value, scaling).transpose(1, 2).contiguous(), None

    return attention


def bare_context(directory: str, kind: str) -> Update:
    """Context parallelism by hand: `kind` is `all_gather` or `ring`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AttentionInterface, AutoModelForCausalLM

    rank, ranks = dist.get_rank(), dist.get_world_size()
    AttentionInterface.register("by_hand", _gathered_attention() if kind == "all_gather" else _ring_attention())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="by_hand")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    half = LENGTH // (2 * ranks)
    own = torch.cat([torch.arange(half * c, half * (c + 1)) for c in (rank, 2 * ranks - 1 - rank)])
    targets = ROWS * MICROBATCHES * (LENGTH - 1)

    def update(number: int) -> float:
        total = torch.zeros(())
        for k in range(MICROBATCHES):
            ids, labels = random_rows(number * MICROBATCHES + k, ROWS, LENGTH, VOCABULARY)
            logits = model(input_ids=ids[:, own], position_ids=own[None], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, own].flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
        return finish_update(model, optimizer, total, summed=True)

    return update


def worker(task: dict[str, Any]) -> None:
    """One rank: both loops of one layout in turn."""
    rank_of_task(task)
    layout, ranks = task["layout"], task["ranks"]
    options = (
        {"parallelism__pp_size": ranks}
        if layout == "pp"
        else {"parallelism__cp_size": ranks, "parallelism__cp_attention": layout}
    )
    engine = make_engine(
        task["model"],
        LENGTH,
        ROWS * MICROBATCHES,
        ROWS,
        model__init="pretrained",
        training__learning_rate=5e-5,
        parallelism__data_parallel="ddp",
        **options,
    )
    if layout == "pp":
        import torch.distributed as dist

        counts: list[Any] = [None] * ranks
        dist.all_gather_object(counts, len(engine.strategy.stages[0].blocks))
        bare = bare_pipeline(task["model"], counts)
    else:
        bare = bare_context(task["model"], layout)
    assert update_batch(engine, 0, VOCABULARY).target_tokens == ROWS * MICROBATCHES * (LENGTH - 1)
    finish(task, take_turns({"ours": ours(engine, VOCABULARY), "bare": bare}, task["n"], task["warmup"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default="pp,all_gather,ring")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-n", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
    print(f"{arguments.ranks} gloo ranks, {MICROBATCHES} microbatches of {ROWS} rows of {LENGTH}, n={arguments.n}")
    print(
        "| layout | ours, s/update | by hand | tokens/s ratio | CPU seconds, by hand / ours | first loss, ours | by hand |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        for layout in arguments.layouts.split(","):
            task = {"layout": layout, "model": directory, "n": arguments.n, "warmup": arguments.warmup}
            found = start(__file__, task, arguments.ranks)
            product, bare = found["ours"], found["bare"]
            if abs(product["loss"] - bare["loss"]) > 1e-5 * bare["loss"]:
                raise SystemExit(f"{layout}: other losses: {product['loss']} and {bare['loss']}")
            mine, theirs = product["seconds"], bare["seconds"]
            speed, cpu = ratio(mine, theirs), ratio(product["cpu"], bare["cpu"])
            print(
                f"| {layout}{arguments.ranks} | {statistics.median(mine):.3f} {spread(mine)} "
                f"| {statistics.median(theirs):.3f} {spread(theirs)} | {speed:.3f} | {cpu:.3f} "
                f"| {product['loss']:.6f} | {bare['loss']:.6f} |",
                flush=True,
            )
            if arguments.record:
                row = {
                    "layout": layout,
                    "ranks": arguments.ranks,
                    "n": arguments.n,
                    "ratio": speed,
                    "cpu": cpu,
                }
                record("split_axes", row | {"ours_seconds": statistics.median(mine)})


def write_model(directory: str) -> None:
    """A Llama with random weights, saved as Transformers does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (Path(directory) / "config.json").write_text(json.dumps(llama(LENGTH, **SIZES)))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)


if __name__ == "__main__":
    main()
