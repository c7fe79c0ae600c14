from dataclasses import dataclass

import torch
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Turn:
    speaker: str
    length: int


SHAPES = [
    [Turn("user", 12), Turn("assistant", 20), Turn("user", 8), Turn("assistant", 24)],
    [Turn("user", 24), Turn("assistant", 40)],
    [Turn("system", 20), Turn("user", 14), Turn("assistant", 30)],
]
# a document that was pasted in, and an answer of one word
PASTED = [Turn("user", 62), Turn("assistant", 2)]


class Conversations(Dataset):
    """Conversations of 64 tokens; the loss is on what the assistant says."""

    def __init__(self, n: int, pasted: frozenset[int] = frozenset(), seed: int = 0) -> None:
        self.n, self.pasted, self.seed = n, pasted, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        turns = PASTED if index in self.pasted else SHAPES[index % len(SHAPES)]
        mask = torch.cat([torch.full((t.length,), t.speaker == "assistant") for t in turns])
        return {"tokens": torch.randint(1, 400, (len(mask),), generator=generator), "loss_mask": mask}
