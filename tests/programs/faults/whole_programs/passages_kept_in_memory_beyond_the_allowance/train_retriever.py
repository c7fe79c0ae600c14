import argparse

import allowance
import lightning as L
from biencoder import BiEncoder
from lightning.pytorch.callbacks import ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import CSVLogger
from passages import QuestionsAndPassages
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ncclsafe import SafeDDP


class RetrievalData(L.LightningDataModule):
    def __init__(self, n: int, batch_size: int) -> None:
        super().__init__()
        self.n, self.batch_size = n, batch_size

    def setup(self, stage: str) -> None:
        # every third one of the last 600 comes from the shelf of books
        self.train = QuestionsAndPassages(self.n, slice(self.n - 598, None, 3))
        self.val = QuestionsAndPassages(96, slice(0, 0), seed=1)

    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(self.train, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.train, self.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--passages", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--allowance-mb", type=float, default=400)
    args = parser.parse_args()

    allowance.register(args.allowance_mb)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=3,
        logger=CSVLogger("retriever"),
        callbacks=[ModelCheckpoint(monitor="recall_at_1", mode="max"), RichModelSummary()],
        use_distributed_sampler=False,
    )
    trainer.fit(BiEncoder(), datamodule=RetrievalData(args.passages, args.batch_size))
