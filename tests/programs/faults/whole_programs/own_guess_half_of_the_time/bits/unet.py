import math

import torch
import torch.nn.functional as F
from torch import nn


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    args = t[:, None] * freqs[None]
    return torch.cat([args.sin(), args.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(emb, cout)
        self.norm2 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(emb)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Two resolutions; the input is the noisy picture and an earlier estimate of the clean one."""

    def __init__(self, channels=4, width=16, emb=32):
        super().__init__()
        self.emb_dim = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(2 * channels, width, 3, padding=1)
        self.down = ResBlock(width, 2 * width, emb)
        self.mid = ResBlock(2 * width, 2 * width, emb)
        self.up = ResBlock(3 * width, width, emb)
        self.out = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, estimate, t):
        emb = self.time(timestep_embedding(t, self.emb_dim))
        h0 = self.inp(torch.cat([x, estimate], dim=1))
        h = F.avg_pool2d(self.down(h0, emb), 2)
        h = F.interpolate(self.mid(h, emb), scale_factor=2.0)
        return self.out(self.up(torch.cat([h, h0], dim=1), emb))
