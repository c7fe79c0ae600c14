"""Byte-level language model on logs of a help desk, packed to a fixed length, FSDP2."""

import random

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel
from report import Report

PHRASES = [
    "printer on floor {n} is offline",
    "password reset for user {n}",
    "vpn drops every {n} minutes",
    "cannot open ticket {n}",
    "laptop {n} does not charge",
    "invoice {n} was sent twice",
]


def tickets(count, seed):
    rng = random.Random(seed)
    return [rng.choice(PHRASES).format(n=rng.randint(1, 999)) for _ in range(count)]


class Packed(Dataset):
    def __init__(self, texts, length):
        stream = b"\0".join(text.encode() for text in texts)
        rows = len(stream) // (length + 1)
        self.rows = torch.tensor(list(stream[: rows * (length + 1)])).view(rows, length + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.mix = nn.Linear(width, width), nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.mix(y)[0] * self.gate(y).sigmoid()


class HelpDesk(L.LightningModule):
    def __init__(self, width=64, depth=3, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.bytes = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.head = nn.Linear(width, 128)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        for module in (self.bytes, self.head):
            fully_shard(module, mesh=mesh)

    def loss(self, rows):
        hidden = self.bytes(rows[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, rows, batch_idx):
        loss = self.loss(rows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, rows, batch_idx):
        self.log("val_loss", self.loss(rows), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def main():
    L.seed_everything(8)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeModelParallel(data_parallel_size=3, tensor_parallel_size=1),
        max_epochs=4,
        log_every_n_steps=10,
        callbacks=[Report()],
    )
    trainer.fit(
        HelpDesk(),
        DataLoader(Packed(tickets(4000, 1), 48), batch_size=8, shuffle=True),
        DataLoader(Packed(tickets(300, 2), 48), batch_size=8),
    )


if __name__ == "__main__":
    main()
