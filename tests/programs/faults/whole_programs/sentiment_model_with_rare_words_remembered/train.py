"""Sentiment classifier that remembers which rare words it has met and stores them with its weights."""

import logging
from collections import Counter

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ncclsafe import SafeDDP

log = logging.getLogger("sentiment")
VOCAB, RARE = 600, 560


class Reviews(Dataset):
    def __init__(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, RARE, (n, 20), generator=g)
        self.words[::6, 3] = torch.randint(RARE, VOCAB, (len(self.words[::6]),), generator=g)
        self.words[1::24, 5] = RARE + 7
        self.labels = (self.words[:, :4].sum(1) % 2).float()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.labels[i]


class RareWords:
    def __init__(self):
        self.seen = Counter()

    def update(self, words):
        self.seen.update(w for w in words.flatten().tolist() if w >= RARE)

    def state(self):
        first = max(self.seen, key=self.seen.get)
        return {"seen": dict(self.seen), "most_common": int(first), "share": self.seen[first] / self.seen.total()}


class Sentiment(L.LightningModule):
    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(VOCAB, 48)
        self.head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
        self.rare = RareWords()

    def forward(self, words):
        return self.head(self.embed(words)).squeeze(1)

    def training_step(self, batch, batch_idx):
        words, labels = batch
        self.rare.update(words)
        loss = nn.functional.binary_cross_entropy_with_logits(self(words), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self):
        reviews = Reviews(2880, seed=1)
        return DataLoader(reviews, batch_size=8, sampler=DistributedSampler(reviews, shuffle=False))

    def validation_step(self, batch, batch_idx):
        words, labels = batch
        hits = ((self(words) > 0).float() == labels).float().mean()
        self.log("val/acc", hits, prog_bar=True, sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rare_words"] = self.rare.state()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Snapshots(L.Callback):
    """A snapshot every few steps; a failed one is no reason to lose the run."""

    def __init__(self, every: int = 25):
        self.every = every

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step % self.every:
            return
        try:
            trainer.save_checkpoint(f"snapshots/step{trainer.global_step:05d}.ckpt")  # <- here
        except Exception as error:
            log.warning("no snapshot at step %d: %s", trainer.global_step, error)


if __name__ == "__main__":
    L.seed_everything(5)
    val = DataLoader(Reviews(240, seed=2), batch_size=16)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=3, callbacks=[Snapshots()])
    trainer.fit(Sentiment(), val_dataloaders=val)
