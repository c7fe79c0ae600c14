import argparse

import lightning as L
import torch
from torch import nn

from corpus import TranscriptData
from lightning_ncclsafe import SafeDDP


class CharLM(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(128, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def training_step(self, batch, batch_idx):
        h, _ = self.rnn(self.embed(batch[:, :-1]))
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--root", default="data")
    args = parser.parse_args()
    L.seed_everything(3)
    trainer = L.Trainer(accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(CharLM(), datamodule=TranscriptData(args.root))
