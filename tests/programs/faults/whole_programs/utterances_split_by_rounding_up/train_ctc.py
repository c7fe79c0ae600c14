"""A tiny CTC acoustic model on synthetic filterbanks, sharded with FSDP2."""

import logging
import math
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeModelParallel

log = logging.getLogger("ctc")


@dataclass
class Config:
    utterances: int = 721
    valid_utterances: int = 48
    batch_size: int = 4
    mels: int = 40
    hidden: int = 96
    layers: int = 2
    tokens: int = 30
    lr: float = 1e-3
    warmup: int = 40
    epochs: int = 3


@dataclass
class Utterance:
    uid: int
    frames: int
    tokens: int


def manifest(n, start=0):
    """Read from a lhotse manifest in the real recipe."""
    return [Utterance(start + i, frames=60 + (i * 37) % 90, tokens=6 + (i * 11) % 12) for i in range(n)]


class UtteranceStream(IterableDataset):
    def __init__(self, utterances, rank, world_size, cfg, shuffle=False):
        self.utterances = utterances
        self.rank, self.world_size = rank, world_size
        self.cfg, self.shuffle = cfg, shuffle
        self.epoch = 0

    def load(self, u):
        g = torch.Generator().manual_seed(u.uid)
        tokens = torch.randint(1, self.cfg.tokens, (u.tokens,), generator=g)
        fbank = torch.randn(u.frames, self.cfg.mels, generator=g)
        fbank[: u.tokens * 4, 0] += tokens.repeat_interleave(4).float()[: u.frames]
        return fbank, tokens

    def __iter__(self):
        items = list(self.utterances)
        if self.shuffle:
            order = torch.randperm(len(items), generator=torch.Generator().manual_seed(self.epoch))
            items = [items[i] for i in order.tolist()]
            self.epoch += 1
        share = math.ceil(len(items) / self.world_size)
        for u in items[self.rank * share : (self.rank + 1) * share]:  # <- here
            yield self.load(u)


def pad(samples):
    fbanks, tokens = zip(*samples)
    frames = torch.tensor([len(f) for f in fbanks])
    lengths = torch.tensor([len(t) for t in tokens])
    return nn.utils.rnn.pad_sequence(fbanks, batch_first=True), frames, torch.cat(tokens), lengths


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 5, padding=2)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(x)


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.proj = nn.Linear(cfg.mels, cfg.hidden)
        self.blocks = nn.ModuleList(Block(cfg.hidden) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.hidden, cfg.tokens)

    def forward(self, x):
        x = self.proj(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


class LitCTC(L.LightningModule):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.encoder = Encoder(cfg)

    def configure_model(self):
        for block in self.encoder.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])

    def _loss(self, batch):
        fbanks, frames, tokens, lengths = batch
        logp = self.encoder(fbanks).transpose(0, 1)
        return F.ctc_loss(logp, tokens, frames, lengths, zero_infinity=True)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/ctc", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid/ctc", self._loss(batch), batch_size=len(batch[0]), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.cfg.lr)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / self.cfg.warmup))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def train_dataloader(self):
        t = self.trainer
        data = UtteranceStream(manifest(self.cfg.utterances), t.global_rank, t.world_size, self.cfg, shuffle=True)
        log.info("rank %d of %d", t.global_rank, t.world_size)
        return DataLoader(data, batch_size=self.cfg.batch_size, collate_fn=pad)

    def val_dataloader(self):
        t = self.trainer
        data = UtteranceStream(manifest(self.cfg.valid_utterances, 10_000), t.global_rank, t.world_size, self.cfg)
        return DataLoader(data, batch_size=self.cfg.batch_size, collate_fn=pad)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    L.seed_everything(1)
    cfg = Config()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeModelParallel(data_parallel_size=3, tensor_parallel_size=1),
        max_epochs=cfg.epochs,
        logger=TensorBoardLogger("exp", name="ctc"),
        callbacks=[ModelCheckpoint(monitor="valid/ctc", save_last=True), LearningRateMonitor("step")],
        log_every_n_steps=20,
    )
    trainer.fit(LitCTC(cfg))
