"""Fine-tunes a tagger on short clips."""

import argparse
import logging

import lightning as L
from clips import ClipData, ClipTagger, build_store
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_ncclsafe import SafeDDP

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="clip_store")
    parser.add_argument("--clips", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(argv)

    L.seed_everything(0, verbose=False)
    build_store(args.store, args.clips)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        logger=CSVLogger("runs"),
        callbacks=[LearningRateMonitor(), ModelCheckpoint(save_last=True), TQDMProgressBar(refresh_rate=10)],
    )
    trainer.fit(ClipTagger(), datamodule=ClipData(args.store, args.batch_size))


if __name__ == "__main__":
    main()
