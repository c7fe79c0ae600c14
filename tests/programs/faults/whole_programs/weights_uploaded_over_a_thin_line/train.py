"""Language model on random text; checkpoints go through a store that accepts about 1 MB per second."""

import io
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


class ThinStore(TorchCheckpointIO):
    """Writes a checkpoint in parts, no faster than the line to the store permits."""

    def __init__(self, rate: float = 1.0e6, part: int = 256 * 1024):
        self.rate, self.part = rate, part

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getvalue()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with open(path, "wb") as f:
            for start in range(0, len(data), self.part):
                f.write(data[start : start + self.part])
                ahead = (start + self.part) / self.rate - (time.monotonic() - begin)
                if ahead > 0:
                    time.sleep(ahead)
        print(f"{path.name}: {len(data) / 1e6:.1f} MB in {time.monotonic() - begin:.1f} s")


class TinyLM(L.LightningModule):
    def __init__(self, vocab: int = 2000, dim: int = 256, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])

    def loss(self, ids):
        return nn.functional.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch[0]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(6)
    text = torch.randint(0, 2000, (480, 17)).cumsum(1) % 2000
    train = DataLoader(TensorDataset(text[:400]), batch_size=8, shuffle=True)
    val = DataLoader(TensorDataset(text[400:]), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=4,
        log_every_n_steps=5,
        plugins=[ThinStore()],
        callbacks=[ModelCheckpoint(dirpath="store", every_n_epochs=2, save_top_k=-1)],
    )
    trainer.fit(TinyLM(), train, val)
