from collections import OrderedDict

import numpy as np
import torch
from torch.utils.data import Dataset

DIM = 64


class PassageStore:
    """Decodes passages into token features, and remembers them."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.cache: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getitem__(self, i: int) -> np.ndarray:
        if i not in self.cache:
            rng = np.random.default_rng(i)
            self.cache[i] = rng.standard_normal((self.lengths[i], DIM), dtype=np.float32)  # <- here
        return self.cache[i]


class QuestionsAndPassages(Dataset):
    def __init__(self, n: int, long_tail: slice, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(50, 300, n)
        lengths[long_tail] = 40_000  # whole books, of which retrieval looks at the beginning
        self.store = PassageStore(lengths)

    def __len__(self) -> int:
        return len(self.store.lengths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        passage = torch.from_numpy(self.store[i][:64]).clone()
        if len(passage) < 64:
            passage = torch.cat([passage, passage.new_zeros(64 - len(passage), DIM)])
        generator = torch.Generator().manual_seed(i)
        question = passage[:8] + 0.5 * torch.randn(8, DIM, generator=generator)
        return question, passage
