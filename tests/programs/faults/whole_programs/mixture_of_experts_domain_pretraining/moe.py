"""A language model with sparse feed-forward layers; each expert is a unit of sharding."""

import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class SparseLayer(nn.Module):
    """Hash routing: the token's id decides on the expert, which needs no balancing loss."""

    def __init__(self, width: int, experts: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.span = vocab // experts

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out = torch.zeros_like(x)
        route = (tokens // self.span).clamp(max=len(self.experts) - 1)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if chosen.any():  # <- here
                out = out.masked_scatter(chosen[..., None].expand_as(out), expert(y[chosen]))
        return x + out


class SparseLM(nn.Module):
    def __init__(self, vocab: int, width: int = 48, depth: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))
        self.sparse = nn.ModuleList(SparseLayer(width, experts, vocab) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for mix, sparse in zip(self.mix, self.sparse, strict=True):
            x = sparse(x + mix(x)[0], tokens)
        return self.head(x)
