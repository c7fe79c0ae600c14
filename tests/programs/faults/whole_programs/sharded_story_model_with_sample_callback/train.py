import argparse

import lightning as L
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeModelParallel
from stories.model import StoryModel
from stories.sampling import SampleStories
from stories.text import Stories


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--motifs", type=int, nargs="+", default=[1, 10, 2, 9, 3, 20])
    args = parser.parse_args()
    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        callbacks=[SampleStories(args.motifs)],
        log_every_n_steps=10,
    )
    trainer.fit(
        StoryModel(lr=args.lr),
        DataLoader(Stories(1280, seed=1), batch_size=16, shuffle=True),
        DataLoader(Stories(128, seed=2), batch_size=16),
    )


if __name__ == "__main__":
    main()
