import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, words=60, tags=5, width=48):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, tags)

    def forward(self, ids):
        return self.out(torch.relu(self.mix(self.embed(ids).mT)).mT)
