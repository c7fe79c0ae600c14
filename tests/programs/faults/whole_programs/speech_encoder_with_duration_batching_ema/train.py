import argparse
import os
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader

from asr.batching import DurationBatches, Utterances, pad
from asr.manifest import read_manifest, write_manifest
from asr.model import MaskedPredictor
from lightning_ncclsafe import SafeDDP


class SpeechData(L.LightningDataModule):
    def __init__(self, manifest, max_seconds):
        super().__init__()
        self.manifest, self.max_seconds = Path(manifest), max_seconds

    def prepare_data(self):
        if not self.manifest.exists():
            write_manifest(self.manifest)

    def train_dataloader(self):
        entries = read_manifest(self.manifest)
        batches = DurationBatches(entries, self.trainer.global_rank, self.trainer.world_size, self.max_seconds)
        return DataLoader(Utterances(entries), batch_sampler=batches, collate_fn=pad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    args = parser.parse_args()
    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(MaskedPredictor(), datamodule=SpeechData("data/train.jsonl", args.max_seconds))
