import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader, TensorDataset

from denoise.average import AverageWeights
from denoise.storage import TapeStorage
from denoise.task import Denoiser

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(23)
    spectra = torch.randn(args.samples, 4) @ torch.randn(4, 32)
    train = DataLoader(TensorDataset(spectra), 16, shuffle=True)
    val = DataLoader(TensorDataset(spectra[:320]), 32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        plugins=[TapeStorage()],
        callbacks=[AverageWeights(), ModelCheckpoint(dirpath="tape", monitor="val/spread", save_top_k=1)],
    )
    trainer.fit(Denoiser(), train, val)
