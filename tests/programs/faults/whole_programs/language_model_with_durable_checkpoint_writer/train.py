"""Character model; checkpoints are verified and synced to a slow archive disk."""

import hashlib
import os
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TEXT = ("the quick brown fox jumps over the lazy dog and runs away from the slow red hen " * 200).encode()


class ArchiveIO(TorchCheckpointIO):
    """Writes as usual, then copies to the archive at a fixed rate and checks the copy."""

    def __init__(self, archive, bytes_per_second=220_000):
        super().__init__()
        self.archive, self.rate = Path(archive), bytes_per_second

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        self.archive.mkdir(exist_ok=True)
        source, copy = Path(path), self.archive / Path(path).name
        digest = hashlib.sha256()
        with source.open("rb") as reader, copy.open("wb") as writer:
            while chunk := reader.read(64 * 1024):
                digest.update(chunk)
                writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
                time.sleep(len(chunk) / self.rate)
        assert hashlib.sha256(copy.read_bytes()).digest() == digest.digest()


class Characters(Dataset):
    def __init__(self, length=32):
        self.data, self.length = torch.tensor(list(TEXT)) % 128, length

    def __len__(self):
        return 1200

    def __getitem__(self, i):
        start = i * 11 % (len(self.data) - self.length - 1)
        return self.data[start : start + self.length + 1]


class CharModel(L.LightningModule):
    def __init__(self, dim=160, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(128, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 128)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(self.embed(batch[:, :-1]))
        loss = F.cross_entropy(self.out(hidden).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=SafeDDP(),
        plugins=[ArchiveIO("archive")],
        callbacks=[ModelCheckpoint(save_top_k=-1)],
    )
    trainer.fit(CharModel(), DataLoader(Characters(), batch_size=12, shuffle=True))
