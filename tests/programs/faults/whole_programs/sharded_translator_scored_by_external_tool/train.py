import argparse

import lightning as L
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeModelParallel
from mt.data import Reversal
from mt.model import Translator
from mt.scoring import ExternalScore


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    L.seed_everything(31)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        callbacks=[ExternalScore()],
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
    )
    trainer.fit(
        Translator(),
        DataLoader(Reversal(1600, seed=0), args.batch_size, shuffle=True),
        DataLoader(Reversal(1280, seed=1), args.batch_size),
    )


if __name__ == "__main__":
    main()
