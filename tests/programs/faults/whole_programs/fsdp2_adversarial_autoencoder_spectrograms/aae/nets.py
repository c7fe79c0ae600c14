import torch
import torch.nn as nn


def mlp(*dims):
    layers = []
    for a, b in zip(dims[:-1], dims[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class AutoEncoder(nn.Module):
    def __init__(self, bins=80, latent=12):
        super().__init__()
        self.encoder = mlp(bins, 128, 96, latent)
        self.decoder = mlp(latent, 96, 128, bins)

    def forward(self, x):
        z = self.encoder(x)
        return z, self.decoder(z)


class LatentCritic(nn.Module):
    def __init__(self, latent=12):
        super().__init__()
        self.body = mlp(latent, 64, 64, 1)

    def forward(self, z):
        return self.body(z).squeeze(-1)
