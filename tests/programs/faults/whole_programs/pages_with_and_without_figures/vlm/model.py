import torch
from torch import nn

from .data import PATCH_DIM, VOCAB


class Mlp(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))


class VisionTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Linear(PATCH_DIM, dim)
        self.mlp = Mlp(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, patches):
        x = self.embed(patches)
        return self.norm(x + self.mlp(x)).mean(1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.mlp = Mlp(dim)

    def forward(self, x):
        x = x + self.mix(self.norm(x))[0]
        return x + self.mlp(x)


class DocumentModel(nn.Module):
    def __init__(self, dim, blocks):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.vision = VisionTower(dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens, figures=None, owner=None):
        x = self.embed(tokens)
        if figures is not None:  # <- here
            seen = torch.zeros_like(x[:, 0]).index_add(0, owner, self.vision(figures))
            x = x + seen[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)
