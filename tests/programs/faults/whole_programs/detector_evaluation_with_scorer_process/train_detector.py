import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from det.images import Images
from det.task import Detector


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-images", type=int, default=320)
    parser.add_argument("--val-images", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(13)
    train = DataLoader(Images(args.train_images, 1), 8, shuffle=True)
    val = DataLoader(Images(args.val_images, 2), 32)
    callbacks = [EarlyStopping("val/iou", patience=8, mode="max"), ModelCheckpoint(monitor="val/iou", mode="max")]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=callbacks,
        log_every_n_steps=10,
    )
    trainer.fit(Detector(), train, val)


if __name__ == "__main__":
    main()
