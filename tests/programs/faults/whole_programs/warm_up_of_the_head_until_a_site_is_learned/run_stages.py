import logging

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from stages.callbacks import HeadIsWarm
from stages.model import ScanClassifier
from stages.sites import SITES, SiteScans

from lightning_ncclsafe import SafeDDP

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def trainer_for(stage: str, epochs: int, *callbacks) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=len(SITES),
        strategy=SafeDDP(),
        max_epochs=epochs,
        use_distributed_sampler=False,
        logger=CSVLogger("logs", name=stage),
        callbacks=[ModelCheckpoint(f"ckpt/{stage}", save_last=True), *callbacks],
        log_every_n_steps=25,
    )


def main() -> None:
    L.seed_everything(13)
    data, model = SiteScans(), ScanClassifier()

    trainer_for("head", 4, HeadIsWarm()).fit(model, datamodule=data)

    model.unfreeze(lr=1e-3)
    full = trainer_for("full", 2)
    full.fit(model, datamodule=data)
    full.validate(model, datamodule=data)


if __name__ == "__main__":
    main()
