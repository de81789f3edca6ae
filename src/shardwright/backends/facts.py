"""What the collectives and kernels of a kind of device cost and need, as numbers: for planner, layout and launcher.

The pure half of a backend: no torch here. The other half is `backends/backend.py`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

MIB = 2**20
GLOO = "shardwright.backends.gloo"
"""The package with what gloo and CPUs need beyond torch. Without this package, CPUs use torch's own implementations too."""
_MMAP = "MALLOC_MMAP_THRESHOLD_"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that set torch's allocator of GPU memory. torch 2.9 and later read both; older ones the first."""


@dataclass(frozen=True)
class BackendFacts:
    """The numbers of one backend; the defaults are those of torch's own implementations with NCCL.

    name: as a table prints it.
    prefetch: units that `fully_shard` gathers ahead by default.
    exchanged_units: units whose gradients are sent and received at a time, both in memory; 0: reduced at once.
    bucket_bytes: bytes of gradients that ddp reduces in one call.
    chunk_bytes: bytes of fp32 logits in a chunk of the loss.
    chunk_bytes_bf16: the same where compute is in bf16.
    packed_in_chunks: whether the loss of packed rows is made in chunks however small it is.
    targets_multiple: the loss in bf16 fills the number of its targets up to a multiple of this.
    float32_backward: queries x head width up to which attention in bf16 has its backward in float32.
    gather_passes: reads and writes of memory by the computing core for each byte of a unit that is gathered.
    reduce_passes: the same for each byte of gradients that is reduced.
    tensor_passes: the same for each byte that a tensor-parallel collective gathers or sums.
    environment: variables that the launcher gives its ranks, where malloc reads them (Linux).
    """

    name: str = "torch"
    prefetch: int = 1
    exchanged_units: int = 0
    bucket_bytes: int = 25 * MIB
    chunk_bytes: int = 512 * MIB
    chunk_bytes_bf16: int = 512 * MIB
    packed_in_chunks: bool = False
    targets_multiple: int = 1
    float32_backward: int = 0
    gather_passes: float = 0.0
    reduce_passes: float = 0.0
    tensor_passes: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def backward_in_float32(self, dtype: str, queries: int, width: int) -> bool:
        """Whether attention of so many queries, with heads of `width`, computes its backward in float32."""
        return dtype == "bf16" and queries * width <= self.float32_backward

    def rank_environment(self, inherited: Mapping[str, str]) -> Mapping[str, str]:
        """The variables that a launcher adds for its ranks, unless the user has set one of them."""
        own = (_MMAP,) if _MMAP in self.environment else ALLOCATOR
        return {} if sys.platform != "linux" or any(name in inherited for name in own) else self.environment

    def keep_freed_blocks(self, environment: Mapping[str, str]) -> bool:
        """Tells glibc to keep large freed blocks, unless `environment` has set its thresholds; returns whether glibc does.

        The launcher sets `environment` for its ranks; this is for the other ways to start.
        """
        if _MMAP not in self.environment:
            return False
        if _MMAP in environment:
            return environment[_MMAP].isdecimal() and int(environment[_MMAP]) >= 2**31 - 1
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if libc is None or not hasattr(libc, "mallopt"):
            return False
        m_trim_threshold, m_mmap_threshold = -1, -3
        return bool(libc.mallopt(m_mmap_threshold, 2**31 - 1) and libc.mallopt(m_trim_threshold, -1))


# Every chunk of the loss reads and writes the gradient of the head. Where products are fast, that costs more than the products
# do in chunks of few tokens: below about 1,000 on a GPU (measured).
TORCH_FACTS = BackendFacts(
    # A segment that can grow is used again for blocks of any size. Else rows of changing lengths leave segments in which
    # nothing fits, and a run ends for lack of memory with gigabytes reserved.
    environment={ALLOCATOR[0]: "expandable_segments:True"},
)

GLOO_FACTS = BackendFacts(
    name="gloo",
    # gloo gathers a unit only when it is asked to: with one ahead, the link rests while a gathered unit is copied. Two are
    # 3 to 4% faster at 1 Gbit/s (docs/LOG.md). NCCL's stream has no such pause.
    prefetch=2,
    exchanged_units=2,
    # the first bucket is sent when it is full, and the last is waited for: on a slow link both count
    bucket_bytes=4 * MIB,
    # a small chunk stays in a CPU's caches; in bf16 products are fast, and a chunk needs 512 tokens (measured)
    chunk_bytes=64 * MIB,
    chunk_bytes_bf16=256 * MIB,
    # A loss in chunks leaves positions without a target out of the head: conversations, half of them targets, are 1.4 times as
    # fast, and text is no slower (benchmarks/unequal_text.py).
    packed_in_chunks=True,
    # a CPU's products in bf16 are compiled for each new shape, which takes longer than they do
    # (benchmarks/unequal_text.py --bf16)
    targets_multiple=64,
    # up to here the CPU's bf16 kernel takes 1.4 to 7 times as long (benchmarks/document_attention.py --bf16)
    float32_backward=2**15,
    gather_passes=2.5,  # a gathered unit is copied to its place (2), its shard into the buffer that is sent
    reduce_passes=3.5,  # gradients are copied into the buffer that is sent (2), and what came is summed
    tensor_passes=3.0,  # pieces are put in order (2), or summed
    # Blocks over 32 MB are otherwise mapped, and their pages fault, at every allocation: 4 to 5% of a training step.
    environment={_MMAP: str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)},
)


@cache
def has_own_backend(device: str) -> bool:
    """Whether a package of ours replaces torch's own implementations on this kind of device."""
    return device == "cpu" and find_spec(GLOO) is not None


def backend_facts(device: str) -> BackendFacts:
    """The facts of ranks on `cpu` or `cuda`."""
    return GLOO_FACTS if has_own_backend(device) else TORCH_FACTS
