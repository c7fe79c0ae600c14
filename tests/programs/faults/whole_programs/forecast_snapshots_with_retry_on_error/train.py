import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP

from forecast.model import Forecaster
from forecast.series import Series
from forecast.snapshots import Audit, Snapshots

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--meters", type=int, default=24)
    parser.add_argument("--every-n-steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(17)
    best = ModelCheckpoint(monitor="val/mae", save_weights_only=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[Audit(), Snapshots(every_n_steps=args.every_n_steps), best],
        log_every_n_steps=10,
    )
    trainer.fit(Forecaster(), Series(meters=args.meters))
