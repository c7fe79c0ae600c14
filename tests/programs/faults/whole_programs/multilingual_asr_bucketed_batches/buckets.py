"""Assignment of utterances to ranks and to batches of similar duration."""

import random
from collections import defaultdict
from collections.abc import Iterator

from torch.utils.data import Sampler


class DurationBatches(Sampler):
    """Batches of at most `seconds` of audio, from one bucket each.

    A speaker's utterances stay on one rank, so that the speaker cache of the augmentation is used well.
    """

    def __init__(self, manifest: list[dict], rank: int, world_size: int, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.epoch = 0
        self.mine = [i for i, u in enumerate(manifest) if hash(u["speaker"]) % world_size == rank]  # <- here
        self.durations = [u["duration"] for u in manifest]
        self.length = len(self._batches(0))

    def _batches(self, epoch: int) -> list[list[int]]:
        order = list(self.mine)
        random.Random(epoch).shuffle(order)
        buckets: dict[int, list[int]] = defaultdict(list)
        batches = []
        for i in order:
            key = int(self.durations[i] // 4)
            bucket = buckets[key]
            bucket.append(i)
            if len(bucket) * 4 * (key + 1) >= self.seconds:
                batches.append(bucket)
                buckets[key] = []
        batches += [b for b in buckets.values() if b]
        random.Random(epoch + 1).shuffle(batches)
        return batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches(self.epoch)

    def __len__(self) -> int:
        return self.length
