import torch
from torch.utils.data import Dataset

RATE = 8000


def amplifier(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(4.0 * x + 0.3)
    return 0.7 * y + 0.3 * torch.roll(y, 5)


class Recording(Dataset):
    """Segments of the dry signal and, for each, of the amplifier's output."""

    def __init__(self, seconds: int, seed: int, segment: int = 64, context: int = 64):
        gen = torch.Generator().manual_seed(seed)
        t = torch.arange(seconds * RATE) / RATE
        pitch = 80 * 2 ** (torch.randint(0, 24, (seconds * 4,), generator=gen) / 12)
        phase = torch.cumsum(pitch.repeat_interleave(RATE // 4) / RATE, 0)
        self.x = 0.5 * torch.sin(2 * torch.pi * phase) * torch.exp(-2 * (t % 0.25)) + 0.01 * torch.randn(
            len(t), generator=gen
        )
        self.y = amplifier(self.x)
        self.segment, self.context = segment, context

    def __len__(self):
        return (len(self.x) - self.context) // self.segment

    def __getitem__(self, i):
        end = self.context + (i + 1) * self.segment
        return self.x[end - self.segment - self.context : end], self.y[end - self.segment : end]
