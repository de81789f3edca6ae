"""What a training program keeps in memory apart from the layout: which kernels, which copies, which buffers.

The same layout of the same model needs other amounts in other programs. Each preset states facts of one program, each with
its reason; nothing here is fitted except `fragmentation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Program:
    """One training program.

    own: one of ours, whose traffic stands in `layout/traffic.py`.
    engine: `torch` is DDP over stored weights and `fully_shard`; `flat` keeps weights in the compute dtype whole on each
    rank, adds gradients up in one fp32 buffer, and shards master weights and moments with zero1 and above.
    flat_gradient_copies: bytes per parameter of gradients beside that buffer (buckets in the compute dtype).
    rms_norm: how an RMS norm is written. `fused` keeps its input; `transformers` an fp32 copy and the normalised product;
    `composite` two fp32 copies (torch before 2.9).
    gated_tensors: kept tensors of a gated MLP's inner width: 3 fused (gate, up, product), 4 with silu(gate) too.
    repeats_kv: K and V are copied to every query head before attention.
    attention_matrix_bytes: per head, query and key without flash attention: 5 is softmax, dropout mask and dropped out
    (Korthikanti et al. 2022); 6 is an fp32 softmax and its narrow copy (Transformers' eager attention).
    dropout: a one-byte mask after attention and after the MLP.
    keeps_gathered: with sequence parallel, the gathered input of the column-parallel products is kept for backward
    (DTensor) instead of gathered again (Megatron-LM).
    selective: what selective recomputation keeps: `matmuls` every matrix product and attention; `alternate` every
    second matrix product and attention (torchtitan); `attention` all but attention's core (Megatron-LM).
    loss_copies: names and bytes per logit of what is alive at once in the backward of the loss, beside the logits in the
    compute dtype; the first of them is kept from forward to backward. split_loss_copies: the same with a vocabulary-parallel
    loss. holds_logits: the logits in the compute dtype are alive until then too (torch's pipeline stages hold them always).
    ends_in_root: embedding, final norm and head are in the root unit, which stays gathered until backward is done; with a
    tied head they always are.
    gathers_kv: context parallel keeps K and V of the whole row on each rank (gathered); else of its own part (ring).
    pipeline_keeps_gathered: under a pipeline, parameters stay gathered and gradients unreduced until the last microbatch,
    whatever the stage (what torch.distributed.pipelining does to fully_shard unless it is hidden from it, as ours is).
    optimizer_temporary_bytes: per local element in the optimizer step: 0 fused, 4 foreach.
    buffer_bytes: fixed communication buffers (DeepSpeed: two buckets of 5e8 elements).
    fragmentation: what the caching allocator reserves on top of everything but model states, fitted on the calibration
    rows. Blocks that gradients at rest leave are not used for logits again either, so reserved memory always has them.
    context_bytes: CUDA context, cuBLAS and NCCL buffers, outside of the allocator.
    """

    name: str
    own: bool = False
    engine: Literal["torch", "flat"] = "torch"
    flat_gradient_copies: float = 0.0
    rms_norm: Literal["fused", "transformers", "composite"] = "transformers"
    gated_tensors: int = 4
    repeats_kv: bool = False
    attention_matrix_bytes: float = 6.0
    dropout: bool = False
    keeps_gathered: bool = True
    selective: Literal["matmuls", "alternate", "attention"] = "matmuls"
    loss_copies: tuple[tuple[str, float], ...] = (
        ("log-probabilities", 4.0),
        ("gradient of the log-probabilities", 4.0),
        ("gradient of the fp32 logits", 4.0),
    )
    split_loss_copies: tuple[tuple[str, float], ...] = (
        ("log-probabilities", 4.0),
        ("one-hot targets", 4.0),
        ("probabilities minus targets", 4.0),
        ("gradient of the fp32 logits", 4.0),
    )
    holds_logits: bool = False
    ends_in_root: bool = False
    gathers_kv: bool = True
    pipeline_keeps_gathered: bool = False
    optimizer_temporary_bytes: float = 0.0
    buffer_bytes: float = 0.0
    fragmentation: float = 0.05
    context_bytes: float = 1.2 * GIB


SHARDWRIGHT = Program("shardwright", own=True)
"""Our own engines on Transformers' models, eager."""

SHARDWRIGHT_COMPILED = Program("shardwright-compiled", own=True, rms_norm="fused", gated_tensors=3)
"""The same with memory.compile: norms and SwiGLU fused, their intermediates made again in backward."""

TORCHTITAN = Program(
    "torchtitan",
    rms_norm="composite",
    repeats_kv=True,
    selective="alternate",
    ends_in_root=True,
    pipeline_keeps_gathered=True,
)
"""Eager torchtitan with torch 2.6 to 2.8: composite RMS norm, K and V repeated, every second product kept."""

TORCHTITAN_COMPILED = Program(
    "torchtitan-compiled",
    rms_norm="fused",
    gated_tensors=3,
    selective="alternate",
    ends_in_root=True,
    pipeline_keeps_gathered=True,
)
"""torchtitan with each block compiled: norms and SwiGLU fused, recomputed cheaply."""

_IN_PLACE_LOSS = (
    ("fp32 logits, turned into softmax and gradient in place", 4.0),
    ("gradient", 2.0),
)

MEGATRON = Program(
    "megatron",
    engine="flat",
    holds_logits=True,
    rms_norm="fused",
    gated_tensors=3,
    keeps_gathered=False,
    selective="attention",
    loss_copies=_IN_PLACE_LOSS,
    split_loss_copies=_IN_PLACE_LOSS,
    gathers_kv=False,
)
"""Megatron-LM with Transformer Engine: fused norm and SwiGLU, fp32 main gradients, in-place vocabulary-parallel loss."""

MEGATRON_2022 = Program(
    "megatron-2022",
    engine="flat",
    rms_norm="fused",
    gated_tensors=3,
    attention_matrix_bytes=5.0,
    dropout=True,
    keeps_gathered=False,
    selective="attention",
    loss_copies=(("fp32 logits", 4.0),),
    split_loss_copies=(("fp32 logits", 4.0),),
    gathers_kv=False,
)
"""Megatron-LM as in Korthikanti et al. 2022: no flash attention, dropout, GELU, fp16."""

_SHIFTED_LOSS = (("fp32 logits", 4.0), ("softmax, turned into the gradient in place", 4.0))

NANOTRON = Program(
    "nanotron",
    engine="flat",
    holds_logits=True,
    flat_gradient_copies=2.0,
    rms_norm="fused",
    gated_tensors=4,
    loss_copies=_SHIFTED_LOSS,
    split_loss_copies=_SHIFTED_LOSS,
    selective="attention",
    gathers_kv=False,
    optimizer_temporary_bytes=4.0,
    fragmentation=0.35,
)
"""nanotron: fused norm, eager SwiGLU, bf16 DDP buckets beside an fp32 accumulation buffer, foreach AdamW. Whether it kept
gathered inputs (its `tp_recompute_allgather`) is not recorded with its runs; with high TP it decides half of the memory."""

DEEPSPEED = Program("deepspeed", engine="flat", holds_logits=True, buffer_bytes=2 * 5e8 * 2)
"""DeepSpeed ZeRO with its default reduce and gather buckets of 5e8 elements in the compute dtype."""

PROGRAMS = {
    program.name: program
    for program in (
        SHARDWRIGHT,
        SHARDWRIGHT_COMPILED,
        TORCHTITAN,
        TORCHTITAN_COMPILED,
        MEGATRON,
        MEGATRON_2022,
        NANOTRON,
        DEEPSPEED,
    )
}
