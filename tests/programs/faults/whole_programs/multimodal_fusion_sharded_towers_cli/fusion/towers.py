import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)
        )

    def forward(self, x):
        return self.net(x)


class Fusion(nn.Module):
    """Encodes whichever modalities the samples of a batch have and adds them up per sample."""

    def __init__(self, sizes, width, classes):
        super().__init__()
        self.width = width
        self.towers = nn.ModuleDict({name: Tower(size, width) for name, size in sizes.items()})
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, inputs, present):
        fused = 0
        for name, tower in self.towers.items():
            rows = present[name].nonzero().squeeze(1)
            if rows.numel():  # <- here
                encoded = tower(inputs[name][rows])
                fused = fused + torch.zeros(len(present[name]), self.width).index_copy(0, rows, encoded)
        return self.head(self.mix(fused))
