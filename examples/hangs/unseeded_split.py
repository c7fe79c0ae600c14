"""Every rank draws its own split, and packing makes unequal numbers of batches of it (llama-cookbook#567).

The data set has the same length on every rank, and so has the split: only its members differ, because
`np.random.default_rng()` takes its entropy from the system, where `seed_everything` cannot reach it. Packed to a
fixed budget, one rank has 216 batches and another 219. The first leaves the epoch, the second waits for it.

Stock, on one rank:  RuntimeError: Application timeout caused pair closure
       on the other: RuntimeError: ... Connection closed by peer ... GLHF!
SafeDDP:             uneven-batches: which rank ran out of batches, and where the others are
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from _run import DigitsClassifier, DigitsData, parse_options, run
from torch import Tensor
from torch.utils.data import DataLoader

BUDGET = 128  # dark pixels in a batch: about four digits


def pack(order: Iterable[int], lengths: Tensor) -> list[list[int]]:
    """Fill batches up to the budget, in the order given."""
    packs: list[list[int]] = []
    room = 0
    for index in order:
        if not packs or lengths[index] > room:
            packs.append([])
            room = BUDGET
        packs[-1].append(index)
        room -= int(lengths[index])
    return packs


class UnseededSplit(DigitsData):
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        images = self.digits.tensors[0]
        drawn = np.random.default_rng().permutation(len(images))[len(self.val) :]  # unseeded: differs per rank
        mine = drawn[self.trainer.global_rank :: self.trainer.world_size].tolist()
        return DataLoader(self.digits, batch_sampler=pack(mine, lengths=(images > 0).sum((1, 2, 3))))


if __name__ == "__main__":
    options = parse_options(__doc__)
    # Drawn anew every epoch: where chance gives all ranks equally many batches, the next epoch will not.
    run(
        DigitsClassifier(lr=1e-3),
        UnseededSplit(),
        options,
        max_epochs=20,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
