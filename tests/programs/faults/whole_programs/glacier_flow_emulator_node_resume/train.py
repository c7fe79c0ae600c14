import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP

from emulator.data import loaders
from emulator.net import FlowEmulator
from emulator.paths import latest_checkpoint, node_scratch


def trainer_for(args, folder, epochs):
    keep = ModelCheckpoint(dirpath=folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    return L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=epochs,
        callbacks=[keep],
        default_root_dir=folder,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    args = parser.parse_args()
    L.seed_everything(9)
    folder = node_scratch()
    ckpt = latest_checkpoint(folder) if args.resume else None  # <- here
    train, val = loaders(args.batch_size)
    trainer_for(args, folder, args.epochs).fit(FlowEmulator(), train, val, ckpt_path=ckpt)


if __name__ == "__main__":
    main()
