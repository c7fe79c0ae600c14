from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from street.data import StreetData
from street.module import Detector

from lightning_ncclsafe import SafeDDP


def main() -> None:
    L.seed_everything(5, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=4,
        check_val_every_n_epoch=1,
        logger=TensorBoardLogger("tb", name="street"),
        callbacks=[
            ModelCheckpoint(monitor="val/loss", save_last=True),
            LearningRateMonitor("epoch"),
            ModelSummary(max_depth=2),
        ],
        log_every_n_steps=10,
    )
    trainer.fit(Detector(lr=3e-3), datamodule=StreetData(batch_size=8))


if __name__ == "__main__":
    main()
