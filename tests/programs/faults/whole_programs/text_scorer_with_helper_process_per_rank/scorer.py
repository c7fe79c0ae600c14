import argparse
import zlib

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ncclsafe import SafeDDP
from normaliser import Normaliser
from reviews import Reviews


class Scorer(L.LightningModule):
    def __init__(self, buckets=512, width=32):
        super().__init__()
        self.buckets = buckets
        self.words = nn.EmbeddingBag(buckets, width)
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def setup(self, stage):
        self.normalise = Normaliser()

    def teardown(self, stage):
        self.normalise.close()

    def score(self, texts):
        ids, offsets = [], []
        for text in self.normalise(texts):
            offsets.append(len(ids))
            ids.extend(zlib.crc32(word.encode()) % self.buckets for word in text.split())
        return self.head(self.words(torch.tensor(ids), torch.tensor(offsets))).squeeze(-1)

    def training_step(self, batch, batch_idx):
        texts, stars = batch
        loss = F.mse_loss(self.score(texts), torch.tensor(stars))
        self.log("train_loss", loss, prog_bar=True, batch_size=len(texts))
        return loss

    def validation_step(self, batch, batch_idx):
        texts, stars = batch
        error = F.l1_loss(self.score(texts), torch.tensor(stars))
        self.log("val_error", error, sync_dist=True, batch_size=len(texts))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(2)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10)
    trainer.fit(Scorer(), datamodule=Reviews())
