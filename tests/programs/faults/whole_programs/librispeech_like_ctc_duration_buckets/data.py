"""Utterances grouped into duration buckets, streamed shard by shard."""

import random

import torch
from torch.utils.data import IterableDataset


def make_cuts(n, seed):
    rng = random.Random(seed)
    return [
        {"id": f"utt{i:05d}", "frames": int(rng.lognormvariate(4.2, 0.45)), "tokens": rng.randint(3, 12)}
        for i in range(n)
    ]


class BucketedUtterances(IterableDataset):
    def __init__(self, cuts, rank, world_size, max_frames=1200, buckets=(60, 90, 140, 260), shuffle=True):
        self.cuts = sorted(cuts, key=lambda c: c["id"])[rank::world_size]
        self.max_frames, self.buckets, self.shuffle = max_frames, buckets, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self):
        order = list(self.cuts)
        if self.shuffle:
            random.Random(self.epoch).shuffle(order)
        open_batches = {b: [] for b in self.buckets}
        for cut in order:
            bucket = next((b for b in self.buckets if cut["frames"] <= b), None)
            if bucket is None or cut["frames"] < 4 * cut["tokens"]:
                continue
            batch = open_batches[bucket]
            batch.append(cut)
            if (len(batch) + 1) * bucket > self.max_frames:  # <- here
                yield batch
                open_batches[bucket] = []

    def __iter__(self):
        for batch in self.batches():
            width = max(c["frames"] for c in batch)
            feats = torch.zeros(len(batch), width, 40)
            targets = []
            for row, cut in enumerate(batch):
                gen = torch.Generator().manual_seed(int(cut["id"][3:]))
                feats[row, : cut["frames"]] = torch.randn(cut["frames"], 40, generator=gen)
                targets.append(torch.randint(1, 30, (cut["tokens"],), generator=gen))
            yield {
                "feats": feats,
                "feat_lens": torch.tensor([c["frames"] for c in batch]),
                "targets": torch.cat(targets),
                "target_lens": torch.tensor([c["tokens"] for c in batch]),
            }
