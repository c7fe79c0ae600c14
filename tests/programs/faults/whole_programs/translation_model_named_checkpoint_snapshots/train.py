"""Toy translation (reverse and shift digits); keeps a snapshot of every improvement."""

import argparse
import logging
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("snapshots")
BOS, VOCAB, LENGTH = 0, 32, 12


class ReverseShift(Dataset):
    def __init__(self, n, offset=0):
        self.n, self.offset = n, offset

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i + self.offset)
        source = torch.randint(1, VOCAB, (LENGTH,), generator=gen)
        return source, (source.flip(0) % (VOCAB - 1)) + 1


class Translator(L.LightningModule):
    def __init__(self, dim=48, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, source, shifted):
        _, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(shifted), state)
        return self.out(hidden)

    def loss(self, batch):
        source, target = batch
        shifted = F.pad(target[:, :-1], (1, 0), value=BOS)
        logits = self(source, shifted)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits.argmax(-1)

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.samples = []

    def validation_step(self, batch, batch_idx):
        loss, pred = self.loss(batch)
        self.samples += [(s.tolist(), p.tolist()) for s, p in zip(batch[0][:4], pred[:4])]
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


class NamedSnapshots(L.Callback):
    """Snapshot files carry the settings of the run, so that they can be told apart later."""

    def __init__(self, folder, tags, keep_best=3):
        self.folder, self.tags, self.best = Path(folder), tags, float("inf")

    def name(self, trainer):
        fields = {"epoch": trainer.current_epoch, "step": trainer.global_step, **self.tags}
        if trainer.current_epoch > 1:
            fields.update({k: f"{v.item():.6f}" for k, v in trainer.callback_metrics.items()})
        return "-".join(f"{k}={v}" for k, v in fields.items()) + ".ckpt"

    def on_train_epoch_end(self, trainer, pl_module):
        value = trainer.callback_metrics["val_loss"].item()
        if value >= self.best:
            return
        self.best = value
        target = self.folder / self.name(trainer)
        try:
            trainer.save_checkpoint(target)  # <- here
        except OSError as error:
            log.warning("no snapshot: %s", error)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--notes", default="reverse shift baseline with gru encoder and gru decoder, digits to 31, seeds 1 to 3"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1)
    tags = {
        "lr": args.lr,
        "notes": args.notes.replace(" ", "_"),
        "torch": torch.__version__,
        "dim": 48,
        "vocab": VOCAB,
        "length": LENGTH,
        "optimizer": "torch.optim.adam.Adam",
        "schedule": "none",
        "layers": "1x1",
        "tied": False,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        max_epochs=args.epochs,
        strategy=SafeDDP(),
        log_every_n_steps=5,
        callbacks=[NamedSnapshots("snapshots", tags)],
    )
    model = Translator(lr=args.lr)
    trainer.fit(model, DataLoader(ReverseShift(960), 16, shuffle=True), DataLoader(ReverseShift(96, 10**6), 16))


if __name__ == "__main__":
    main()
