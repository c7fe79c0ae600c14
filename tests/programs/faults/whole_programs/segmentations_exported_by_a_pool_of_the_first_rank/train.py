import argparse

import lightning as L
from callbacks import ExportValidation, PolyLRPrinter
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from model import Segmenter
from slices import SliceData

from lightning_ncclsafe import SafeDDP


def build_callbacks(args):
    yield ModelCheckpoint(save_top_k=1, monitor="val_dice", mode="max", save_last=True)
    yield PolyLRPrinter()
    if args.export_processes:
        yield ExportValidation("predictions", args.export_processes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--export-processes", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(21)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=[TensorBoardLogger("tb"), CSVLogger("csv")],
        callbacks=list(build_callbacks(args)),
        gradient_clip_val=12,
    )
    data = SliceData()
    trainer.validate(Segmenter(epochs=args.epochs), data, verbose=False)
    trainer.fit(trainer.lightning_module, data)


if __name__ == "__main__":
    main()
