"""Two-tower recommender on uneven log shards, cut to the shortest share of all ranks."""

import random
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

USERS, ITEMS = 2000, 800


def write_logs(folder, shards=7, seed=9):
    folder.mkdir(exist_ok=True)
    rng = random.Random(seed)
    for s in range(shards):
        rows = (
            f"{rng.randrange(USERS)} {rng.randrange(ITEMS)} {rng.random():.3f}" for _ in range(rng.randint(900, 2600))
        )
        (folder / f"shard{s}.txt").write_text("\n".join(rows))


class ClickLogs(IterableDataset):
    def __init__(self, files, min_dwell=0.2):
        self.files, self.min_dwell = files, min_dwell
        self.limit = None

    def rows(self):
        for path in self.files:
            for line in path.read_text().splitlines():
                user, item, dwell = line.split()
                if float(dwell) >= self.min_dwell:
                    yield int(user), int(item)

    def agree_on_length(self):
        shortest = torch.tensor(sum(1 for _ in self.rows()))
        if dist.is_initialized():
            dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
        self.limit = int(shortest)

    def __iter__(self):
        for n, row in enumerate(self.rows()):
            if n >= self.limit:
                return
            yield row


class TwoTower(L.LightningModule):
    def __init__(self, dim=32, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.user = nn.Sequential(nn.Embedding(USERS, dim), nn.Linear(dim, dim))
        self.item = nn.Sequential(nn.Embedding(ITEMS, dim), nn.Linear(dim, dim))

    def training_step(self, batch, batch_idx):
        user, item = batch
        scores = F.normalize(self.user(user), dim=1) @ F.normalize(self.item(item), dim=1).t()
        loss = F.cross_entropy(scores / 0.1, torch.arange(len(user)))
        self.log("loss", loss, prog_bar=True, batch_size=len(user))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


class LogData(L.LightningDataModule):
    def prepare_data(self):
        write_logs(Path("logs"))

    def train_dataloader(self):
        files = sorted(Path("logs").glob("shard*.txt"))[self.trainer.global_rank :: self.trainer.world_size]
        data = ClickLogs(files)
        data.agree_on_length()
        return DataLoader(data, batch_size=32, drop_last=True, num_workers=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(2)
    trainer = L.Trainer(accelerator="cpu", devices=3, max_epochs=4, strategy=SafeDDP())
    trainer.fit(TwoTower(), datamodule=LogData())
