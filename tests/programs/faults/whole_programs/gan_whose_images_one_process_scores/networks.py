from torch import nn


class Generator(nn.Module):
    def __init__(self, latent: int, width: int = 16):
        super().__init__()
        self.project = nn.Linear(latent, width * 2 * 4 * 4)
        self.body = nn.Sequential(
            nn.Unflatten(1, (width * 2, 4, 4)),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.body(self.project(z))


class Discriminator(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, width * 2, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Flatten(),
            nn.Linear(width * 2 * 4 * 4, 1),
        )

    def forward(self, x):
        return self.body(x)
