import logging

import lightning as L
from intents.data import LABELS, VOCABULARY, loaders
from intents.export import ExportForService
from intents.module import IntentClassifier
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from options import parse

from lightning_ncclsafe import SafeModelParallel

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")


def main(options):
    L.seed_everything(options.seed, workers=True)
    train, val = loaders(batch_size=options.batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=SafeModelParallel(data_parallel_size=options.devices, tensor_parallel_size=1),
        max_epochs=options.max_epochs,
        logger=TensorBoardLogger(".", name="intents"),
        callbacks=[
            ExportForService(options.export_dir, LABELS),
            EarlyStopping("val_loss", patience=3),
            ModelCheckpoint(monitor="val_accuracy", mode="max", save_top_k=1),
        ],
    )
    trainer.fit(IntentClassifier(VOCABULARY, len(LABELS)), train, val)


if __name__ == "__main__":
    main(parse(max_epochs=4, devices=2, batch_size=24, seed=0, export_dir="export"))
