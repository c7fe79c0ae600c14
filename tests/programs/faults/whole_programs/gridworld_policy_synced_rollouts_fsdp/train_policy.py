import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from policy.module import Reinforce

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=5,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
    )
    trainer.fit(Reinforce())
