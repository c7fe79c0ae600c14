import argparse

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lm import CharLM, loader
from tracking import RunLogger

from lightning_ncclsafe import SafeDDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--validations", type=int, default=4, help="per epoch")
    args = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        val_check_interval=1 / args.validations,
        logger=RunLogger("char-lm"),
        callbacks=[ModelCheckpoint("ckpt", monitor="val/nll"), LearningRateMonitor()],
    )
    model = CharLM()
    trainer.fit(model, loader(1280, shuffle=True), loader(64))
    trainer.test(model, loader(256), ckpt_path="best")


if __name__ == "__main__":
    main()
