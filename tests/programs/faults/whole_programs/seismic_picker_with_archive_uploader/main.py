import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from archive import ArchiveUploader
from picker import OnsetPicker, Traces

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--archive", default="archive")
    args = parser.parse_args()
    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(save_top_k=1), ArchiveUploader(args.archive)],
        log_every_n_steps=10,
    )
    train = DataLoader(Traces(640, 1), batch_size=32, shuffle=True)
    val = DataLoader(Traces(128, 2), batch_size=32)
    trainer.fit(OnsetPicker(), train, val)
