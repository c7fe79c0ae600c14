import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_ncclsafe import SafeDDP
from mt.corpus import Pairs
from mt.model import Translator
from mt.samples import TranslateSamples

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cache", default="cache/tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=5,
        callbacks=[TranslateSamples("samples"), EarlyStopping("val_loss", patience=3)],
    )
    trainer.fit(Translator(), datamodule=Pairs(args.cache))
