"""Seconds that the kernels of a block, the head and the optimizer take on one device.

Shapes: M tokens of a microbatch on this rank, S tokens of a row, D hidden, F inner width of the MLP, V
vocabulary.

Laws (a device's `Efficiency` holds the constants):
- matrix product M x K times K x N: 2MNK / (peak x matmul x mn x k). mn = MN / (MN + wave) stands for the
last, partly filled wave of output tiles, k = K / (K + depth) for filling and draining the pipeline of each
  tile. Never faster than its operands can be read and its result written.
- flash attention: FLOPs / (peak x fraction x head_dim / (head_dim + 32) x S / (S + ramp)).
- element-wise kernels, norms, softmax, optimizer: bytes / (memory bandwidth x fraction).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.arch.parameters import block_products, counts
from shardwright.arch.shape import Shape
from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.device import Device
from shardwright.planner.problem import SELECTIVE, Attention, Recompute
from shardwright.planner.program import Program

HEAD_RAMP = 32


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block and microbatch on one rank, collectives not included.

    matmul, attention, elementwise: forward. backward_*: backward without recomputation. recompute: what is
    run again. host_forward, host_backward: the time the host needs to issue them.
    """

    matmul: float
    attention: float
    elementwise: float
    backward_matmul: float
    backward_attention: float
    backward_elementwise: float
    recompute: float
    host_forward: float
    host_backward: float

    @property
    def forward(self) -> float:
        return max(self.matmul + self.attention + self.elementwise, self.host_forward)

    @property
    def backward(self) -> float:
        return max(
            self.backward_matmul + self.backward_attention + self.backward_elementwise + self.recompute,
            self.host_backward,
        )


def matmul_seconds(device: Device, m: float, n: float, k: float, dtype: str) -> float:
    """Seconds of one M x K times K x N product."""
    e = device.efficiency
    mn = m * n
    matmul = e.matmul * (e.matmul_16bit if DTYPE_BYTES[dtype] == 2 else 1.0)
    rate = device.peak(dtype) * matmul * (mn / (mn + e.wave)) * (k / (k + e.depth))
    moved = (m * k + n * k + mn) * DTYPE_BYTES[dtype]
    return max(2.0 * mn * k / rate, moved / (device.memory_bandwidth * e.bandwidth))


def _products(device: Device, m: float, fan_in: float, fan_out: float, dtype: str) -> tuple[float, float]:
    """(forward, backward) seconds of a linear layer: the backward pass is the input's and the weight's
    gradient.
    """
    forward = matmul_seconds(device, m, fan_out, fan_in, dtype)
    backward = matmul_seconds(device, m, fan_in, fan_out, dtype) + matmul_seconds(device, fan_out, fan_in, m, dtype)
    return forward, backward


def attention_flops(
    rows: float, queries: float, keys: float, heads: float, head_dim: int, causal: bool = True
) -> float:
    """FLOPs of the two products of attention, forward: 4 B Sq Sk heads head_dim, half of it when causal."""
    return 4.0 * rows * queries * keys * heads * head_dim * (0.5 if causal else 1.0)


def attention_seconds(
    device: Device,
    rows: float,
    queries: float,
    keys: float,
    heads: float,
    head_dim: int,
    dtype: str,
    kind: Attention,
    rate: float = 1.0,
) -> tuple[float, float]:
    """(forward, backward) seconds of attention's core, causal.

    flash: 2.5 times the forward FLOPs in the backward pass, because the scores are computed again. eager: two
    full (not halved) products, and scores, softmax and dropout that pass through memory: 13 bytes per score
    forward and 19 backward with a fused softmax in 16 bits.
    """
    e = device.efficiency
    if kind == "flash":
        flops = attention_flops(rows, queries, keys, heads, head_dim)
        shape = (head_dim / (head_dim + HEAD_RAMP)) * ((128 + HEAD_RAMP) / 128) * (keys / (keys + e.attention_ramp))
        peak = (e.attention_peak or device.peak(dtype)) * shape * rate
        return flops / (peak * e.attention_forward), 2.5 * flops / (peak * e.attention_backward)
    scores = rows * heads * queries * keys
    batch = rows * heads
    forward = batch * (
        matmul_seconds(device, queries, keys, head_dim, dtype) + matmul_seconds(device, queries, head_dim, keys, dtype)
    )
    moved = scores / (device.memory_bandwidth * e.bandwidth)
    return forward + 13 * moved, 2 * forward + 19 * moved


@lru_cache(maxsize=4096)
def block_time(
    device: Device,
    program: Program,
    shape: Shape,
    rows: int,
    length: int,
    tp: int,
    cp: int,
    sequence_parallel: bool,
    recompute: Recompute,
    attention: Attention,
    dtype: str,
    attended: float,
) -> BlockTime:
    """Times of one block for `rows` rows of `length` tokens, in documents of `attended`, split over tp and cp ranks."""
    s, e = shape, device.efficiency
    m = rows * length / cp
    qkv_f, qkv_b = _products(device, m, s.hidden, (s.query_width + 2 * s.kv_width) / tp, dtype)
    out_f, out_b = _products(device, m, s.query_width / tp, s.hidden, dtype)
    up_f, up_b = _products(device, m, s.hidden, (2 if s.gated else 1) * s.ffn / tp, dtype)
    down_f, down_b = _products(device, m, s.ffn / tp, s.hidden, dtype)
    att_f, att_b = attention_seconds(
        device,
        rows,
        length / cp,
        attended,
        s.heads / tp,
        s.head_dim,
        dtype,
        attention,
        program.attention_rate,
    )
    size = DTYPE_BYTES[dtype]
    hidden = m * s.hidden / (tp if sequence_parallel else 1) * program.hidden_passes
    inner = m * s.ffn / tp * program.mlp_passes
    element = (hidden + inner) * max(size, program.element_bytes) / (device.memory_bandwidth * e.bandwidth)
    again = 0.0
    if recompute == "full":
        again = qkv_f + out_f + up_f + down_f + att_f + element
    elif recompute in SELECTIVE:
        # Products are kept; attention's core (when it is not flash) or the element-wise kernels are run
        # again.
        again = att_f if attention == "eager" else element
        if recompute == "alternate":
            products = block_products(s)[1:-1:2]
            again += sum(matmul_seconds(device, m, fan_out / tp, fan_in, dtype) for fan_in, fan_out, _ in products)
    host_tp = program.host_tensor_parallel if tp > 1 else 0.0
    host_f = program.host_forward + host_tp
    return BlockTime(
        qkv_f + out_f + up_f + down_f,
        att_f,
        element,
        qkv_b + out_b + up_b + down_b,
        att_b,
        2 * element,
        again,
        host_f,
        program.host_backward + host_tp + (host_f if recompute == "full" else 0.0),
    )


@lru_cache(maxsize=4096)
def head_time(
    device: Device, program: Program, shape: Shape, rows: int, length: int, tp: int, cp: int, dtype: str
) -> tuple[float, float]:
    """(forward, backward) seconds of final norm, head and loss of one microbatch."""
    m = rows * length / cp
    forward, backward = _products(device, m, shape.hidden, shape.vocab / tp, dtype)
    logits = m * shape.vocab / tp * program.logits_bytes / (device.memory_bandwidth * device.efficiency.bandwidth)
    return max(forward + logits / 2, program.host_forward / 2), max(backward + logits / 2, program.host_backward / 2)


@lru_cache(maxsize=4096)
def embedding_time(
    device: Device, shape: Shape, rows: int, length: int, tp: int, cp: int, dtype: str
) -> tuple[float, float]:
    """(forward, backward) seconds of the token embedding: a gather, and a scatter into a zeroed gradient."""
    m = rows * length / cp
    speed = device.memory_bandwidth * device.efficiency.bandwidth
    size = DTYPE_BYTES[dtype]
    return 2 * m * shape.hidden * size / speed, (3 * m * shape.hidden + counts(shape).embedding / tp) * size / speed
