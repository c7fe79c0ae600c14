"""Rank 0 is late at the start: it still expands its data set in memory (RecBole#2069).

There, every rank loaded the whole data set, the host ran out of memory, and it swapped to a network disk.
The other ranks have finished their set-up and wait in the first collective. The network is fine, although the
stock error mentions timeouts and makes people suspect it. Here, the memory of rank 0 grows for half a minute,
and then stays the same.

Stock, on rank 1:  RuntimeError: ... Timed out waiting 12000ms for recv operation to complete
SafeDDP:           late-at-init: rank 0 in DataModule.setup, at the line marked below, its memory and how fast it grows
"""

from __future__ import annotations

import time
from collections import deque

import torch
from _run import DigitsClassifier, DigitsData, parse_options, run

COPIES = 750  # of 460 kB each: 345 MB, the oldest of which make room for more
DRAWS = 60  # of noise for each copy, which is what takes the time


class LateRankZero(DigitsData):
    def __init__(self, stall: float) -> None:
        super().__init__()
        self.stall = stall

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.trainer is not None
        # Every rank expands the data; it is rank 0 whose memory is slow.
        self.expand(seconds={0: self.stall}.get(self.trainer.global_rank, 0.5))

    def expand(self, seconds: float) -> None:
        """Make noisy copies of every image, all of them in memory."""
        images = self.digits.tensors[0]
        noise = torch.empty(DRAWS, *images.shape)
        self.expanded: deque[torch.Tensor] = deque(maxlen=COPIES)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.expanded.append(noise.normal_().mean(0).add_(images))  # <- rank 0 is here


if __name__ == "__main__":
    options = parse_options(__doc__)
    run(DigitsClassifier(), LateRankZero(options.stall), options)
