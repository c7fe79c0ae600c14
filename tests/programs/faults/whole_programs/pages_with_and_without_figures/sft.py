"""Supervised fine-tuning of a small document model, sharded with FSDP2."""

import argparse
from pathlib import Path

import lightning as L
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from vlm.data import DocumentData
from vlm.lit import LitDocumentModel

from lightning_ncclsafe import SafeModelParallel


def read_config(path):
    path = Path(path)
    if not path.exists():
        path = Path(__file__).parent / path
    return yaml.safe_load(path.read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="sft.yaml")
    config = read_config(parser.parse_args().config)
    L.seed_everything(config["seed"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=config["world"],
        strategy=SafeModelParallel(data_parallel_size=config["world"], tensor_parallel_size=1),
        callbacks=[LearningRateMonitor("step")],
        **config["trainer"],
    )
    trainer.fit(LitDocumentModel(**config["model"], **config["optim"]), DocumentData(**config["data"]))


if __name__ == "__main__":
    main()
