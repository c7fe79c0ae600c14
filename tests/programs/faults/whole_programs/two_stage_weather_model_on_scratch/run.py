"""python run.py --name a1: pretraining at lead 1, then continued at lead 2 with the optimizer's state."""

import argparse
import os

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ncclsafe import SafeDDP
from weather.data import Reanalysis
from weather.model import Forecaster
from weather.storage import newest_checkpoint, scratch_dir


def make_trainer(args, folder, max_epochs):
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{epoch:02d}", save_top_k=-1)
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=SafeDDP(),
        max_epochs=max_epochs,
        callbacks=[checkpoint],
        log_every_n_steps=10,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="a1")
    parser.add_argument("--pretrain-epochs", type=int, default=3)
    parser.add_argument("--finetune-epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(19)
    scratch = scratch_dir(args.name)
    scratch.mkdir(parents=True, exist_ok=True)

    model = Forecaster()
    if newest_checkpoint(scratch) is None:
        trainer = make_trainer(args, scratch, args.pretrain_epochs)
        trainer.fit(model, Reanalysis(lead=1))
        trainer.strategy.barrier()

    resume = newest_checkpoint(scratch)  # <- here
    trainer = make_trainer(args, scratch, args.pretrain_epochs + args.finetune_epochs)
    trainer.fit(model, Reanalysis(lead=2), ckpt_path=resume)
    trainer.validate(model, Reanalysis(lead=2))


if __name__ == "__main__":
    main()
