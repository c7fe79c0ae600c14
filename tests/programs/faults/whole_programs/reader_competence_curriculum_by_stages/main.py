import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP

from reader.curriculum import CompetenceCurriculum, Exercises
from reader.model import Marker


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("exercises"))
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--mastered", type=float, default=0.62)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(4)
    curriculum = CompetenceCurriculum(mastered=args.mastered)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[curriculum],
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=10,
    )
    trainer.fit(Marker(), Exercises(args.root, args.batch_size, curriculum))


if __name__ == "__main__":
    main()
