import argparse
import os
import subprocess
import sys

import lightning as L
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from docmoe.corpus import ShardedDocs
from docmoe.module import DocClassifier


class DocsData(L.LightningDataModule):
    def __init__(self, folder, batch_size):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not os.path.exists(os.path.join(self.folder, "part-000.jsonl")):
            subprocess.run([sys.executable, "prepare.py", self.folder], check=True)

    def setup(self, stage=None):
        self.docs = ShardedDocs(self.folder, self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self):
        return DataLoader(self.docs, batch_size=self.batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/docs")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.max_epochs,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(DocClassifier(), datamodule=DocsData(args.data, args.batch_size))
