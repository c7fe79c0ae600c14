import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from molnet.data import MoleculeData
from molnet.model import Regressor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scratch", default="scratch/fingerprints")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeModelParallel(data_parallel_size=3, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=10,
    )
    trainer.fit(Regressor(), datamodule=MoleculeData(args.scratch))


if __name__ == "__main__":
    main()
