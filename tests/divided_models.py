"""A plain module with what tensor parallelism finds hard, for `model_name_or_path: tests.divided_models:divided_model`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.scale": "replicated_with_grad_allreduce",
    "blocks.*.mlp.down": "rowwise",
    "blocks.*.wide": "colwise_rep",
    "blocks.*.narrow": "rowwise_split_input",
    "head": "vocabulary",
}


class HeadScale(nn.Module):
    """Multiplies each group of H features by the same weight [H], as a norm of queries does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, self.weight.numel())) * self.weight).flatten(-2)


class Mlp(nn.Module):
    """Column-wise, a whole weight inside the divided work, row-wise with a large bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.scale = HeadScale(width)
        self.down = nn.Linear(4 * width, width)
        nn.init.xavier_normal_(self.down.weight)
        nn.init.constant_(self.down.bias, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.scale(self.up(x))))


class DividedBlock(nn.Module):
    """An MLP of its own, and two divided layers that stand beside the norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.wide = nn.Linear(width, 2 * width, bias=False)
        self.narrow = nn.Linear(2 * width, width)
        nn.init.normal_(self.narrow.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.before(x))
        return x + self.narrow(torch.sigmoid(self.wide(self.behind(x))))


class DividedModel(nn.Module):
    """Embedding with a padding row, learned positions, blocks, a norm, and a head with bias over an odd vocabulary."""

    def __init__(self, vocab: int = 31, width: int = 8, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(DividedBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.embed(input_ids) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divided_model(**sizes: Any) -> DividedModel:
    """The model; `sizes` are those of `DividedModel`."""
    return DividedModel(**sizes)
