import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from budget import batches_within
from galaxies import Galaxies
from network import MorphologyNet


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=2)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--epoch-seconds", type=float, default=2.0, help="time between two validations")
    p.add_argument("--batch-size", type=int, default=16)
    return p.parse_args()


def main():
    args = parse()
    L.seed_everything(1)
    model = MorphologyNet()
    train, val = Galaxies(20000, 1), Galaxies(320, 2)
    batches = batches_within(args.epoch_seconds, model, train, args.batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        limit_train_batches=batches,  # <- here
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max")],
        log_every_n_steps=10,
    )
    trainer.fit(
        model,
        DataLoader(train, args.batch_size, shuffle=True),
        DataLoader(val, 32),
    )


if __name__ == "__main__":
    main()
