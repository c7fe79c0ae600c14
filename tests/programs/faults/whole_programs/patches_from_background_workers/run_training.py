import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from segmenter.cases import Case, split
from segmenter.dataloading import CaseDataModule
from segmenter.network import SegmentationModule

from lightning_ncclsafe import SafeDDP


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fold", type=int, default=0)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--num-processes", type=int, default=2, help="background workers per GPU")
    p.add_argument("--ram-gb", type=float, default=0.4, help="what a background worker may add to its memory")
    return p.parse_args()


if __name__ == "__main__":
    args = get_args()
    L.seed_everything(42 + args.fold)
    cases = Case.collection(60)
    train, val = split(cases, args.fold)
    data = CaseDataModule(train, val, num_processes=args.num_processes, ram_gb=args.ram_gb)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        logger=TensorBoardLogger("results", name=f"fold_{args.fold}"),
        callbacks=[ModelCheckpoint(monitor="dice", mode="max", filename="best-{epoch}-{dice:.2f}")],
    )
    trainer.fit(SegmentationModule(), datamodule=data)
