import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from agent import QAgent


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=4)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--levels", default="levels")
    args = p.parse_args()
    L.seed_everything(40)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10
    )
    trainer.fit(QAgent(levels=args.levels))


if __name__ == "__main__":
    main()
