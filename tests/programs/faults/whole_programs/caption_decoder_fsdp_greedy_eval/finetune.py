import argparse
from pathlib import Path

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from captioner.data import prepare
from captioner.module import CaptionModule

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data/captions")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(1)
    prepare(Path(args.root))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        limit_train_batches=20,
        limit_val_batches=5,
    )
    trainer.fit(CaptionModule(args.root))
