"""Programs whose published measurements the planner is held against: what each keeps in memory and does around the kernels.

Host times, passes, update and send times are fitted on the calibration half of the rows, one set for each program;
`fragmentation` too. The rest is what the program is known to do.
"""

from __future__ import annotations

from shardwright.planner.program import EAGER, Program

TORCHTITAN = Program(
    "torchtitan",
    rms_norm="composite",
    repeats_kv=True,
    selective="alternate",
    ends_in_root=True,
    pipeline_keeps_gathered=True,
    host_forward=0.5e-3,
    host_backward=0.5e-3,
    hidden_passes=30,
    mlp_passes=6,
    update_seconds=20e-3,
)
"""Eager torchtitan with torch 2.6 to 2.8: composite RMS norm, K and V repeated, every second product kept."""

TORCHTITAN_COMPILED = Program(
    "torchtitan compiled",
    rms_norm="fused",
    gated_tensors=3,
    selective="alternate",
    ends_in_root=True,
    pipeline_keeps_gathered=True,
    host_forward=0.3e-3,
    host_backward=0.3e-3,
    hidden_passes=12,
    mlp_passes=4,
    update_seconds=20e-3,
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
    host_forward=1.15e-3,
    host_backward=0.91e-3,
    host_tensor_parallel=0.04e-3,
    hidden_passes=10,
    mlp_passes=4,
    bucket_bytes=600e6,
    reduces_units=False,
    overlap_pipeline_ddp=True,
    pipeline_seconds=210e-6,
    update_seconds=6.4e-3,
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
"""Megatron-LM as in Korthikanti et al. 2022: no flash attention, dropout, GELU, fp16. Its times are not fitted."""

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
    host_forward=1.45e-3,
    host_backward=1.65e-3,
    host_tensor_parallel=0.39e-3,
    host_tensor_pipeline=1.15e-3,
    hidden_passes=22,
    mlp_passes=5,
    overlap_tensor_parallel=0.85,
    bucket_bytes=440e6,
    reduces_units=False,
    overlap_pipeline_ddp=True,
    pipeline_seconds=20e-6,
    update_seconds=90e-3,
)
"""nanotron: fused norm, eager SwiGLU, bf16 DDP buckets beside an fp32 accumulation buffer, foreach AdamW. Whether it kept
gathered inputs (its `tp_recompute_allgather`) is not recorded with its runs; with high TP it decides half of the memory."""

DEEPSPEED = Program("deepspeed", engine="flat", holds_logits=True, buffer_bytes=2 * 5e8 * 2)
"""DeepSpeed ZeRO with its default reduce and gather buckets of 5e8 elements in the compute dtype. Its times are not fitted."""

MOSAICML = Program(
    "mosaicml",
    host_forward=0.5e-3,
    host_backward=0.5e-3,
    hidden_passes=18,
    mlp_passes=5,
    attention_rate=0.6,
    update_seconds=1e-3,
)
"""llm-foundry's FSDP: only its times are compared."""

PROGRAMS = {
    program.name: program
    for program in (
        EAGER,
        TORCHTITAN,
        TORCHTITAN_COMPILED,
        MEGATRON,
        MEGATRON_2022,
        NANOTRON,
        DEEPSPEED,
        MOSAICML,
    )
}
