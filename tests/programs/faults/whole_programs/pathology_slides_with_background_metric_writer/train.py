"""Federated-style training: every rank stands in for a hospital and reads only its own export."""

import argparse
import os

import lightning as L
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from slides.data import SiteSlides
from slides.model import SlideClassifier
from slides.sites import SITES, export
from slides.writer import SlideLossWriter


class SiteData(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def prepare_data(self):
        if not os.path.isdir(self.root):
            export(self.root)

    def train_dataloader(self):
        site = list(SITES)[int(os.environ["RANK"])]
        return DataLoader(SiteSlides(f"{self.root}/{site}.csv"), self.batch_size, shuffle=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    L.seed_everything(13)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(SITES),
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[SlideLossWriter()],
        log_every_n_steps=10,
    )
    trainer.fit(SlideClassifier(), datamodule=SiteData("exports", args.batch_size))


if __name__ == "__main__":
    main()
