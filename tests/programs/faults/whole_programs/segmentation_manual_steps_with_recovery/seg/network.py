import torch
from torch import nn


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, classes=3, width=8):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Sequential(block(2 * width, width), nn.Conv2d(width, classes, 1))
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        top = self.down1(x)
        low = self.up(self.down2(self.pool(top)))
        return self.last(torch.cat((top, low), 1))
