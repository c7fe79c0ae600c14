import torch
import torch.nn as nn


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class DomainMoE(nn.Module):
    """Hard routing: every document goes to the expert of its domain, plus a shared expert."""

    def __init__(self, dim, hidden, num_experts):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.shared = Expert(dim, hidden)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))

    def forward(self, x, route):
        h = self.norm(x)
        out = self.shared(h)
        for index, expert in enumerate(self.experts):
            rows = (route == index).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:  # <- here
                continue
            out = out.index_add(0, rows, expert(h[rows]))
        return x + out
