"""Load forecasts for regions of a grid on a host that other people use, too."""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from governor import announce
from lightning_ncclsafe import SafeDDP

FOLDER = "governed"
PRIORITIES = {"south": "normal", "islands": "low", "east": "normal"}
WEATHER = "import sys; sys.path.insert(0, '.'); from governor import announce; announce(sys.argv[1], 'normal')"


def hours(region, count, window):
    generator = torch.Generator().manual_seed(len(region))
    t = torch.arange(count + window + 1, dtype=torch.float)
    load = (
        (2 * math.pi * t / 24).sin()
        + 0.4 * (2 * math.pi * t / 168).cos()
        + 0.1 * torch.randn(len(t), generator=generator)
    )
    rows = load.unfold(0, window + 1, 1)[:count]
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, -1:].contiguous())


class Governed(L.Callback):
    """Announces this rank; rank 0 also starts the governor and fetches the weather once."""

    def on_fit_start(self, trainer, module):
        announce(FOLDER, PRIORITIES[module.region])
        if trainer.is_global_zero:
            subprocess.run([sys.executable, "-c", WEATHER, FOLDER], check=True)
            self.process = subprocess.Popen(
                [sys.executable, "governor.py", FOLDER], stderr=open(Path(FOLDER) / "governor.err", "w")
            )

    def on_fit_end(self, trainer, module):
        (Path(FOLDER) / f"{os.getpid()}.pid").unlink(missing_ok=True)
        if trainer.is_global_zero:
            self.process.terminate()


class Forecast(L.LightningModule):
    def __init__(self, region, window=72, width=48):
        super().__init__()
        self.save_hyperparameters()
        self.region = region
        self.past = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def train_dataloader(self):
        return DataLoader(hours(self.region, 9600, self.hparams.window), batch_size=32, shuffle=True)

    def training_step(self, batch, batch_idx):
        past, following = batch
        states, _ = self.past(past.unsqueeze(-1))
        loss = (self.out(states[:, -1]) - following).abs().mean()
        self.log("train/mae", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    L.seed_everything(19)
    torch.set_num_threads(1)
    region = list(PRIORITIES)[int(os.environ["LOCAL_RANK"])]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[Governed()],
    )
    trainer.fit(Forecast(region))


if __name__ == "__main__":
    main()
