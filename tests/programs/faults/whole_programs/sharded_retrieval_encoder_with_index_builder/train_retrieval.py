import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from retrieval.callbacks import RefreshIndex
from retrieval.encoder import Contrastive
from retrieval.passages import Passages

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--passages", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(31)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        callbacks=[RefreshIndex()],
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        log_every_n_steps=5,
    )
    trainer.fit(Contrastive(), DataLoader(Passages(Path("cache"), args.passages), 16, shuffle=True))
