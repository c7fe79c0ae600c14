"""Ratings of a shop, one parquet file a month, read as a stream."""

from pathlib import Path

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

USERS, ITEMS = 400, 250
#: mean number of stars by month
MONTHS = {"01": 4.2, "02": 4.2, "03": 3.6, "04": 4.2, "05": 4.2, "06": 3.6}


def write_months(folder: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for month, mean in MONTHS.items():
        stars = np.clip(np.round(rng.normal(mean, 0.6, rows)), 1, 5).astype("int64")
        table = pa.table(
            {
                "user": rng.integers(0, USERS, rows),
                "item": rng.integers(0, ITEMS, rows),
                "stars": stars,
                "clicked": (rng.random(rows) < stars / 6).astype("int64"),
            }
        )
        pq.write_table(table, folder / f"ratings-{month}.parquet")


def read_files(files: list[str]):
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
            yield from batch.to_pylist()


class Ratings(L.LightningDataModule):
    def __init__(self, folder: Path, rows: int, batch_size: int, min_stars: int) -> None:
        super().__init__()
        self.folder, self.rows = folder, rows
        self.batch_size, self.min_stars = batch_size, min_stars

    def prepare_data(self) -> None:
        write_months(self.folder / "train", self.rows, seed=6)
        write_months(self.folder / "val", self.rows // 10, seed=2)

    def stream(self, split: str) -> IterableDataset:
        files = sorted(str(file) for file in (self.folder / split).glob("*.parquet"))
        dataset = IterableDataset.from_generator(read_files, gen_kwargs={"files": files})
        return split_dataset_by_node(dataset, rank=self.trainer.global_rank, world_size=self.trainer.world_size)

    def train_dataloader(self) -> DataLoader:
        stars = self.min_stars
        dataset = self.stream("train").filter(lambda rating: rating["stars"] >= stars)  # <- here
        dataset = dataset.shuffle(seed=3, buffer_size=500)
        return DataLoader(dataset.with_format("torch"), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.stream("val").with_format("torch"), batch_size=self.batch_size)
