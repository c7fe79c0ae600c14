import argparse
import logging

import lightning as L
from callbacks import ExportQuantized, Stories
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from story_model import StoryModel
from torch.utils.data import DataLoader
from words import WordTokenizer, stories

from lightning_ncclsafe import SafeModelParallel

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stories", type=int, default=1000)
    options = parser.parse_args()
    L.seed_everything(5)
    tokenizer = WordTokenizer()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=options.epochs,
        logger=CSVLogger("."),
        callbacks=[
            Stories(tokenizer, ["anna found a", "ben lost some", "clara drew a"]),
            ExportQuantized(),
            ModelCheckpoint(monitor="val_loss", save_top_k=2),
        ],
        log_every_n_steps=20,
    )
    trainer.fit(
        StoryModel(len(tokenizer)),
        DataLoader(stories(tokenizer, options.stories), batch_size=16, shuffle=True),
        DataLoader(stories(tokenizer, 200, seed=1), batch_size=16),
    )
