"""Trains a model of a guitar amplifier on a recording of its input and output."""

import argparse
import resource

import lightning as L
from amp.callbacks import PatientCheckpoint, WeightAverage
from amp.data import Recording
from amp.model import AmpModel
from lightning.pytorch.callbacks import RichModelSummary
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


def limit_file_size(megabytes: float) -> None:
    """The lab's disk is small, and somebody's log once filled it overnight."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 2**20), hard))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ema-from", type=int, default=2)
    parser.add_argument("--file-limit", type=float, default=3.5, help="MB")
    return parser.parse_args()


def main():
    args = parse()
    limit_file_size(args.file_limit)
    L.seed_everything(11)
    train = DataLoader(Recording(seconds=10, seed=1), batch_size=4, shuffle=True)
    val = DataLoader(Recording(seconds=2, seed=2), batch_size=16)
    callbacks = [
        WeightAverage(start_epoch=args.ema_from),
        PatientCheckpoint(filename="{epoch:03d}_{esr:.4f}", monitor="esr", save_top_k=3, every_n_epochs=1),
        RichModelSummary(max_depth=2),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=callbacks,
        gradient_clip_val=1.0,
    )
    trainer.fit(AmpModel(), train, val)
    print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
