import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from protein.families import collate, write_families
from protein.masked import MaskedModel
from protein.settings import Settings


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("families"))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens-per-step", type=int, default=900)
    parser.add_argument("--epochs", type=int, default=10)
    settings = Settings(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    L.seed_everything(19)

    write_families(settings.root)
    data = settings.shard()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=settings.epochs,
        accumulate_grad_batches=settings.accumulation(data),  # <- here
        callbacks=[ModelCheckpoint(monitor="loss")],
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(MaskedModel(), DataLoader(data, settings.batch_size, shuffle=True, collate_fn=collate))


if __name__ == "__main__":
    main()
