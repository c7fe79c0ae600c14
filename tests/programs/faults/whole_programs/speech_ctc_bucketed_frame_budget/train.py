"""CTC finetuning with a frame budget per batch instead of a fixed batch size."""

import argparse
import math
import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ncclsafe import SafeDDP

VOCAB = 32


class Utterances(Dataset):
    """Log-mel features and token ids; durations follow a log-normal law like our call-centre data."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.frames = sorted(max(20, int(rng.lognormvariate(4.2, 0.6))) for _ in range(n))
        self.seed = seed

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        t = self.frames[i]
        return torch.randn(t, 40, generator=g), torch.randint(1, VOCAB, (max(1, t // 12),), generator=g)


class FrameBudgetSampler(Sampler):
    """Groups utterances of similar length until `max_frames` padded frames are reached."""

    def __init__(self, dataset, max_frames, rank, world, seed=0):
        self.dataset, self.max_frames, self.seed, self.epoch = dataset, max_frames, seed, 0
        n = len(dataset) // world
        self.mine = list(range(len(dataset)))[rank * n : (rank + 1) * n]  # <- here
        self.batches = self._plan()

    def _plan(self):
        batches, cur, longest = [], [], 0
        for i in self.mine:
            longest = max(longest, self.dataset.frames[i])
            if cur and longest * (len(cur) + 1) > self.max_frames:
                batches.append(cur)
                cur, longest = [], self.dataset.frames[i]
            cur.append(i)
        return batches + [cur] if cur else batches

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        order = list(self.batches)
        random.Random(self.seed + self.epoch).shuffle(order)
        return iter(order)


def collate(items):
    x = nn.utils.rnn.pad_sequence([a for a, _ in items], batch_first=True)
    return (
        x,
        torch.tensor([len(a) for a, _ in items]),
        torch.cat([b for _, b in items]),
        torch.tensor([len(b) for _, b in items]),
    )


class CTCModel(L.LightningModule):
    def __init__(self, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, VOCAB)

    def _loss(self, batch):
        x, xl, y, yl = batch
        logp = self.head(self.encoder(x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, y, xl, yl, zero_infinity=True)

    def training_step(self, batch, _):
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch, _):
        self.log("val/loss", self._loss(batch), sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20) / math.sqrt(1 + s / 200))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class ASRData(L.LightningDataModule):
    def setup(self, stage):
        self.train, self.val = Utterances(600, 1), Utterances(48, 2)

    def train_dataloader(self):
        sampler = FrameBudgetSampler(self.train, 1600, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.train, batch_sampler=sampler, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4, collate_fn=collate)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    args = p.parse_args()
    L.seed_everything(7)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, use_distributed_sampler=False
    )
    trainer.fit(CTCModel(), ASRData())
