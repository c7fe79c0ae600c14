import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from encoder.model import ContrastiveEncoder

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    L.seed_everything(19)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
    )
    trainer.fit(ContrastiveEncoder())
