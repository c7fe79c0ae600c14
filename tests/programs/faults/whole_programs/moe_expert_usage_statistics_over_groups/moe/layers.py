import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return self.net(x)


class SoftMoE(nn.Module):
    """Every expert sees every token, weighted by the router: small, and dense for DDP."""

    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.last_load = None

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        self.last_load = weights.detach().mean(tuple(range(weights.dim() - 1)))
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
