import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from turbines.forecast import Forecaster
from turbines.keeper import BestSnapshot

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--monitor", default="val/mae")
    args = parser.parse_args()
    L.seed_everything(23)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[BestSnapshot(args.monitor)],
    )
    trainer.fit(Forecaster())
