import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent=16, side=16):
        super().__init__()
        self.side = side
        self.net = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, side * side), nn.Sigmoid())

    def forward(self, z):
        return self.net(z).view(-1, 1, self.side, self.side)


class Critic(nn.Module):
    def __init__(self, side=16):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(side * side, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)
