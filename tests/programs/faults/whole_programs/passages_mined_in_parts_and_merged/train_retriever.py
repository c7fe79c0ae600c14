import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP

from retrieval.data import Passages
from retrieval.mining import HardNegativeMiner
from retrieval.module import Encoder

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--negatives", default="negatives")
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(13)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=5,
        use_distributed_sampler=False,
        callbacks=[HardNegativeMiner(args.negatives)],
    )
    trainer.fit(Encoder(), datamodule=Passages())
