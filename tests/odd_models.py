"""Small plain modules with what sharding finds hard, for `model_name_or_path: tests.odd_models:function`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MARK_RANK, MARK_FIRST = 3, 4
"""Token ids that switch a branch on for a microbatch (`OddModel`)."""


class OddBlock(nn.Module):
    """A residual block whose gain has one element and whose temperature is 0-dim."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.transposed = nn.Parameter(nn.Linear(width, width + 1, bias=False).weight.t())
        self.gain = nn.Parameter(torch.ones(1))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(x)) * self.temperature
        y = torch.tanh(y @ self.transposed)[..., :-1]
        return x + self.gain * self.dropout(y)


class OddModel(nn.Module):
    """Embedding [V, D], blocks, a Linear shared by two places, three branches, and a head.

    `sometimes` runs in microbatches that hold MARK_RANK, `early` in those that hold MARK_FIRST, `never` in none.
    """

    def __init__(self, vocab: int = 31, width: int = 6, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(OddBlock(width, dropout) for _ in range(layers))
        self.before = nn.Linear(width, width)
        self.after = self.before
        self.sometimes = nn.Linear(width, width)
        self.early = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.three = nn.Parameter(torch.full((1, 3), 0.1))
        self.register_buffer("offset", torch.linspace(0.0, 1.0, width))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.embed(input_ids)) + self.offset.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        if bool((input_ids == MARK_RANK).any()):
            x = x + self.sometimes(x)
        if bool((input_ids == MARK_FIRST).any()):
            x = x + self.early(x)
        return self.head(self.after(x)) * self.scale * (1 + self.three.sum())


def odd_model(**sizes: float) -> OddModel:
    """The model; `sizes` are those of `OddModel`."""
    return OddModel(**sizes)


class Adapted(nn.Module):
    """y = W x + B A x, the adapter A [R, D], B [D, R] in another dtype than W."""

    def __init__(self, width: int, rank: int, base: torch.dtype, adapter: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=base)
        self.lora_a = nn.Parameter(torch.randn(rank, width, dtype=adapter) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(width, rank, dtype=adapter) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b))


class AdaptedModel(nn.Module):
    """Two adapted blocks between an embedding and a head, with one persistent buffer."""

    def __init__(self, vocab: int = 31, width: int = 8, rank: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Adapted(width, rank, torch.bfloat16, torch.float32) for _ in range(2))
        self.register_buffer("seen", torch.arange(width, dtype=torch.float32))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapted_model() -> AdaptedModel:
    """The model with an adapter of rank 2 in each block."""
    return AdaptedModel()


class TableBlock(nn.Module):
    """A Linear after a turn by a table that comes in from outside, as rotary tables do."""

    seen: ClassVar[list[tuple[torch.dtype, torch.dtype]]] = []  # (dtype of the table, of the weight) in each forward

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        TableBlock.seen.append((table.dtype, self.inner.weight.dtype))
        turned = (x.float() * table).to(x.dtype)
        return x + self.inner(turned)


class TableModel(nn.Module):
    """Blocks that get an fp32 table as an argument; `TableBlock.seen` says in what dtype it arrives."""

    def __init__(self, vocab: int = 31, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(TableBlock(width) for _ in range(2))
        self.register_buffer("table", torch.cos(torch.arange(4096.0))[:, None], persistent=False)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.table[4000 : 4000 + input_ids.size(1)])
        return self.head(x)


def table_model() -> TableModel:
    """The model whose blocks take an fp32 table."""
    return TableModel()


class ComputedBuffer(nn.Module):
    """A constructor that computes a buffer on the CPU, out of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)
        self.register_buffer("decay", torch.from_numpy(np.linspace(0.5, 1, 16, dtype=np.float32)), persistent=False)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.head(self.embed(input_ids) * self.decay)


def computed_buffer() -> nn.Module:
    return ComputedBuffer()
