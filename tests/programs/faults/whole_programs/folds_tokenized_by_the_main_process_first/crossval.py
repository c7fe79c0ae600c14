"""Cross-validation of a sentiment model: for each fold, tokenize, fit, test; the main process writes the table."""

import argparse
import csv
import statistics

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from reviews.dist_utils import main_process_first, setup
from reviews.fold import FoldData
from reviews.model import BagOfTokens

from lightning_ncclsafe import SafeDDP


def run_fold(fold: int, args) -> dict:
    with main_process_first(f"fold {fold}"):
        data = FoldData.cached(args.cache, fold, args.folds)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=CSVLogger("logs", name=f"fold{fold}"),
        callbacks=[EarlyStopping("val_loss", patience=1), ModelCheckpoint(monitor="val_loss")],
        log_every_n_steps=10,
    )
    model = BagOfTokens(vocabulary=len(data.vocabulary))
    trainer.fit(model, datamodule=data)
    return trainer.test(datamodule=data, ckpt_path="best", verbose=False)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cache", default="cache")
    args = parser.parse_args()

    setup()
    L.seed_everything(4)
    results = [run_fold(fold, args) for fold in range(args.folds)]
    if dist.get_rank() == 0:
        with open("crossval.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, results[0])
            writer.writeheader()
            writer.writerows(results)
        print("accuracy:", statistics.mean(r["test_acc"] for r in results))


if __name__ == "__main__":
    main()
