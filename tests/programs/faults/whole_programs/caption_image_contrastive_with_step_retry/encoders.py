import torch
import torch.nn as nn


class ImageEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, dim))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)


class CaptionEncoder(nn.Module):
    """Mean of word vectors, weighted by a learned importance."""

    def __init__(self, vocab, dim):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.importance = nn.Embedding(vocab, 1)

    def forward(self, captions):
        out = []
        for ids in captions:
            if len(ids) == 0:
                raise ValueError("caption without a known word")
            ids = torch.tensor(ids)
            out.append((self.importance(ids).softmax(0) * self.words(ids)).sum(0))
        return nn.functional.normalize(torch.stack(out), dim=-1)
