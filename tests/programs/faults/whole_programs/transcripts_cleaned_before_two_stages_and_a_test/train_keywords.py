from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from speech import Confusion, Keywords, SpeechData

from lightning_ncclsafe import SafeDDP


def trainer(stage: str, epochs: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=epochs,
        log_every_n_steps=10,
        logger=CSVLogger("keywords", name=stage),
        callbacks=[Confusion(), ModelCheckpoint(f"models/{stage}", monitor="val_acc", mode="max")],
    )


if __name__ == "__main__":
    L.seed_everything(30)
    data, model = SpeechData(Path("speech_data")), Keywords()

    model.freeze_encoder(True)
    trainer("head", 1).fit(model, datamodule=data)

    model.freeze_encoder(False)
    model.lr = 1e-3
    last = trainer("all", 2)
    last.fit(model, datamodule=data)
    print(last.test(model, datamodule=data, ckpt_path="best"))
