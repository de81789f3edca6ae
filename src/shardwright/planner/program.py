"""What a training program keeps in memory and does around the kernels, apart from the layout.

The same layout of the same model needs other memory and other time in other programs. Each preset states facts of one program;
only `fragmentation`, host times, passes and fixed seconds are fitted, on calibration rows (`benchmarks/planner_validation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwright.backends.facts import GLOO_FACTS, TORCH_FACTS
from shardwright.planner.device import DeviceKind
from shardwright.units import GIB


@dataclass(frozen=True, eq=False)
class Program:
    """One training program: first what decides its memory, then what decides its time."""

    name: str
    own: bool = False
    """Ours: traffic stands in `layout/traffic.py`, the loss is chunked as `layout/loss.py` says."""
    engine: Literal["torch", "flat"] = "torch"
    """`torch`: DDP over stored weights, or `fully_shard`. `flat`: whole weights in the compute dtype on each rank, gradients
    added up in one fp32 buffer, master weights and optimizer states sharded from zero1 on."""
    flat_gradient_copies: float = 0.0
    """Bytes per parameter of gradients beside the flat engine's buffer: buckets in the compute dtype."""
    rms_norm: Literal["fused", "transformers", "composite"] = "transformers"
    """`fused` keeps its input; `transformers` an fp32 copy and the normalised product; `composite` (torch before 2.9) two
    fp32 copies."""
    gated_tensors: int = 4
    """Kept tensors of a gated MLP's inner width: 3 fused (gate, up, product), 4 with silu(gate) too."""
    repeats_kv: bool = False
    """K and V are copied to every query head before attention."""
    attention_matrix_bytes: float = 6.0
    """Per head, query and key without flash attention. 5: softmax, dropout mask, dropped out (Korthikanti et al. 2022);
    6: an fp32 softmax and its 16-bit copy (Transformers' eager attention)."""
    dropout: bool = False
    """A one-byte mask is kept after attention and after the MLP."""
    keeps_gathered: bool = True
    """With sequence parallel, the gathered inputs of column-parallel products are kept for backward (DTensor); else they are
    gathered again (Megatron-LM)."""
    selective: Literal["matmuls", "alternate", "attention"] = "matmuls"
    """What selective recomputation keeps: every matrix product and attention; every second product and attention
    (torchtitan); all but attention's core (Megatron-LM)."""
    loss_copies: tuple[tuple[str, float], ...] = (
        ("log-probabilities", 4.0),
        ("gradient of the log-probabilities", 4.0),
        ("gradient of the fp32 logits", 4.0),
    )
    """(name, bytes per logit) alive together in the loss's backward, beside the logits; the first is kept from forward on."""
    split_loss_copies: tuple[tuple[str, float], ...] = (
        ("log-probabilities", 4.0),
        ("one-hot targets", 4.0),
        ("probabilities minus targets", 4.0),
        ("gradient of the fp32 logits", 4.0),
    )
    """The same with a vocabulary-parallel loss."""
    holds_logits: bool = False
    """The logits in the compute dtype live until the loss's backward is done. torch's pipeline stages always hold them."""
    ends_in_root: bool = False
    """Embedding, final norm and head are in the root unit, which stays gathered until backward is done. A tied head
    always is."""
    gathers_kv: bool = True
    """Context parallel keeps K and V of the whole row on each rank; else of the rank's part (a ring)."""
    pipeline_keeps_gathered: bool = False
    """Under a pipeline, parameters stay gathered and gradients unreduced until the last microbatch, whatever the stage.
    torch.distributed.pipelining does so to `fully_shard` unless it is hidden from it, as ours is."""
    optimizer_temporary_bytes: float = 0.0
    """Per local element in the optimizer step: 0 fused, 4 foreach."""
    buffer_bytes: float = 0.0
    """Fixed communication buffers (DeepSpeed: two buckets of 5e8 elements)."""
    fragmentation: float = 0.05
    """What the caching allocator reserves on top of everything but model states. Blocks that gradients at rest leave are not
    used for logits again, so reserved memory always has them."""
    context_bytes: float = 1.2 * GIB
    """CUDA context, cuBLAS and NCCL buffers, outside of the allocator."""

    host_forward: float = 1.0e-3
    """Seconds the host needs to issue one block's kernels, the floor of a block's time; half of it for the head."""
    host_backward: float = 1.0e-3
    host_tensor_parallel: float = 0.4e-3
    """Host seconds added for each block and direction under tensor parallelism."""
    host_tensor_pipeline: float = 0.0
    """Host seconds added for each block, direction and tensor-parallel rank where a pipeline crosses nodes."""
    hidden_passes: float = 30.0
    """Reads and writes of a [tokens, hidden] tensor by norms, residuals, dropout and rotary of one block, forward; fused about
    10, eager 30. Backward has twice as many."""
    mlp_passes: float = 6.0
    """The same for [tokens, MLP width]."""
    element_bytes: float = 0.0
    """Bytes that an element costs at least, however few its dtype has."""
    attention_rate: float = 1.0
    """Speed of its flash kernels relative to FlashAttention-2; the first generation: about half."""
    logits_bytes: float = 30.0
    """Bytes per logit moved by the loss and its gradient."""
    accumulate_bytes: float = 10.0
    """Bytes per parameter and microbatch moved by adding the gradient into its buffer."""
    overlap_data_parallel: bool = True
    """Gradients travel while the backward pass of the last microbatch runs."""
    overlap_tensor_parallel: float = 0.0
    """Fraction of the backward tensor-parallel collectives hidden under weight gradients."""
    overlap_slowdown: float = 0.2
    """Seconds that compute loses for each second a collective runs beside it."""
    bucket_bytes: float | None = TORCH_FACTS.bucket_bytes
    """Gradients are reduced in pieces of so many bytes; None: all at once."""
    reduces_units: bool = True
    """zero1 and zero2 reduce each unit instead (`fully_shard`)."""
    units_in_order: bool = False
    """zero1 and zero2 gather unit by unit under the forward pass, and the embedding, whose gradient is complete last, is
    reduced beside nothing; else all parameters are gathered before forward."""
    tensor_passes: float = 0.0
    """Reads and writes of memory by the computing core for each byte that a tensor-parallel collective gathers or sums. A GPU's
    copies cost next to nothing."""
    gather_passes: float = 0.0
    """The same for each byte of a unit that is gathered."""
    reduce_passes: float = 0.0
    """The same for each byte of a unit that is reduced."""
    overlap_pipeline: bool = False
    """Sends between stages run beside compute."""
    pipeline_seconds: float = 200e-6
    """Fixed seconds of one send and receive."""
    overlap_pipeline_ddp: bool = False
    """Under a pipeline, ddp's gradients travel while the last microbatch's backward runs; ours are reduced after it."""
    update_seconds: float = 10e-3
    """Fixed seconds of an update: data, logging, gradient norm, host synchronisation."""


EAGER = Program("shardwright", own=True, units_in_order=True)
"""Our engines on Transformers' modules as they are, on a GPU."""

COMPILED = replace(
    EAGER,
    name="shardwright-compiled",
    rms_norm="fused",
    gated_tensors=3,
    hidden_passes=12.0,
    mlp_passes=4.0,
    host_forward=0.3e-3,
    host_backward=0.3e-3,
)
"""memory.compile: norms and SwiGLU are fused, and their intermediates made again in backward."""

ON_CPU = replace(
    EAGER,
    name="shardwright-cpu",
    host_forward=0.5e-3,
    host_backward=0.5e-3,
    # Two norms (square, mean, two products: 8 each), rotary of queries and keys (11 each), two residual sums (3 each),
    # attention's output made contiguous (2); the rest are copies.
    hidden_passes=50.0,
    mlp_passes=5.0,  # SiLU and a product
    element_bytes=4.0,  # bf16 is widened on the way, which takes what its fewer bytes save
    logits_bytes=70.0,  # two exponentials of the loss take a core as long as about 40 bytes do
    bucket_bytes=GLOO_FACTS.bucket_bytes,
    tensor_passes=GLOO_FACTS.tensor_passes,
    gather_passes=GLOO_FACTS.gather_passes,
    reduce_passes=GLOO_FACTS.reduce_passes,
    update_seconds=5e-3,
)
ON_CPU_COMPILED = replace(
    ON_CPU,
    name="shardwright-cpu-compiled",
    rms_norm="fused",
    gated_tensors=3,
    hidden_passes=20.0,
    mlp_passes=3.0,
)


def own_program(kind: DeviceKind, compiled: bool) -> Program:
    """Our program on this kind of device."""
    if kind == "cpu":
        return ON_CPU_COMPILED if compiled else ON_CPU
    return COMPILED if compiled else EAGER
