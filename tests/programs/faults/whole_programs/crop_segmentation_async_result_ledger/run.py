import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from crops.callbacks import RecordResults
from crops.data import loaders
from crops.model import CropSegmenter

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    L.seed_everything(14)
    train, val = loaders(8)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=args.epochs, callbacks=[RecordResults()]
    )
    trainer.fit(CropSegmenter(), train, val)
