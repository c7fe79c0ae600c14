"""Keyword spotting on log-mel features, python train.py --set lr=3e-4 channels=48 ..."""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP
from network import KeywordSpotter
from snapshots import MilestoneSnapshots

DEFAULTS = {"n_mels": 20, "channels": 32, "n_words": 10, "dropout": 0.1, "lr": 1e-3, "weight_decay": 1e-2}


def features(n, cfg, seed):
    g = torch.Generator().manual_seed(seed)
    word = torch.randint(cfg["n_words"], (n,), generator=g)
    mels = torch.randn(n, cfg["n_mels"], 50, generator=g) + word[:, None, None] * 0.05
    return TensorDataset(mels, word)


def experiment_tag(cfg, args):
    parts = [f"{k}={v}" for k, v in cfg.items()] + [f"{k}={v}" for k, v in vars(args).items() if k != "set"]
    return (
        "kws_google-speech-commands-v2_fold-a_logmel-25ms-10ms_conv1d-bn-relu-x2_specaugment-none_sampler-uniform_"
        + "_".join(parts)
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--set", nargs="*", default=[])
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--milestones", type=int, nargs="*", default=[1, 4, 9])
    args = p.parse_args()
    cfg = DEFAULTS | {k: type(DEFAULTS[k])(v) for k, v in (s.split("=") for s in args.set)}
    L.seed_everything(1)
    tag = experiment_tag(cfg, args).replace(" ", "")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[MilestoneSnapshots("snapshots", tag, args.milestones)],
    )
    trainer.fit(
        KeywordSpotter(**cfg),
        DataLoader(features(1600, cfg, 0), args.batch_size, shuffle=True),
        DataLoader(features(320, cfg, 1), args.batch_size),
    )


if __name__ == "__main__":
    main()
