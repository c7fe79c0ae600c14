import argparse

import lightning as L
import torch

from lightning_ncclsafe import SafeDDP
from robust.retries import with_retries
from robust.tagger import Tagger
from robust.treebank import Treebank


def train(args):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        default_root_dir=args.output,
    )
    trainer.fit(Tagger(), datamodule=Treebank(args.treebank))
    return trainer.callback_metrics


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--treebank", default="treebank")
    parser.add_argument("--output", default="runs")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(31)
    print(with_retries(lambda: train(args)))


if __name__ == "__main__":
    main()
