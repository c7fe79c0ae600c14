import torch
from torch import nn


class SparseExperts(nn.Module):
    """Top-1 routing; only experts with tokens are evaluated."""

    def __init__(self, dim, n_experts, expansion=2):
        super().__init__()
        self.router = nn.Linear(dim, n_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, expansion * dim), nn.GELU(), nn.Linear(expansion * dim, dim))
            for _ in range(n_experts)
        )

    def forward(self, x):
        gates = self.router(x).softmax(dim=-1)
        weight, chosen = gates.max(dim=-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():  # <- here
            rows = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, self.experts[index](x[rows]) * weight[rows, None])
        load = torch.stack([(chosen == i).float().mean() for i in range(len(self.experts))])
        return x + out, (load * gates.mean(0)).sum() * len(self.experts)
