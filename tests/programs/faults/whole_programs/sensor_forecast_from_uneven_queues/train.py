import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from forecast.model import Forecaster, Plants


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeModelParallel(data_parallel_size=3, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=10,
    )
    trainer.fit(Forecaster(), Plants())
    trainer.print(f"done after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
