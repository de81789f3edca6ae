"""What our own runs do around the kernels, by kind of device."""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.device import DeviceKind
from shardwright.planner.kernels import Software

EAGER = Software(units_in_order=True)
"""On a GPU, Transformers' modules as they are."""

COMPILED = replace(EAGER, hidden_passes=12.0, mlp_passes=4.0, host_forward=0.3e-3, host_backward=0.3e-3)
"""memory.compile: fused element-wise kernels, fewer launches."""

ON_CPU = replace(
    EAGER,
    name="shardwright-cpu",
    host_forward=0.5e-3,
    host_backward=0.5e-3,
    hidden_passes=50.0,
    mlp_passes=5.0,
    element_bytes=4.0,
    logits_bytes=70.0,
    bucket_bytes=4 * 2**20,
    tensor_passes=3.0,
    gather_passes=2.5,
    reduce_passes=3.5,
    update_seconds=5e-3,
)
"""On CPU cores. hidden_passes: two norms (square, mean, two products: 8 each), rotary of queries and keys (11 each), two
residual sums (3 each), attention's output made contiguous (2), the rest of it copies. mlp_passes: SiLU and a product.
element_bytes: bf16 is widened on the way, which takes what its fewer bytes save. logits_bytes: two exponentials of the loss
take a core as long as about 40 bytes do. tensor_passes: pieces put in order (2) or sums made of them. gather_passes: a
gathered unit is copied to its place (2), its shard into the buffer that is sent; reduce_passes: gradients into the buffer
that is sent (2), and the sum of what came."""

ON_CPU_COMPILED = replace(ON_CPU, hidden_passes=20.0, mlp_passes=3.0)


def own_software(kind: DeviceKind, compiled: bool) -> Software:
    """Of a run of ours on this kind of device."""
    if kind == "cpu":
        return ON_CPU_COMPILED if compiled else ON_CPU
    return COMPILED if compiled else EAGER
