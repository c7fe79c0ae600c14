import argparse
from pathlib import Path

import lightning as L
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from episodes import Episodes, write_shows
from guards import MemoryLimit
from topics import TopicNet


class ShowData(L.LightningDataModule):
    def __init__(self, folder, batch_size=6):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not Path(self.folder).exists():
            write_shows(self.folder)

    def train_dataloader(self):
        episodes = Episodes(self.folder, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(episodes, self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shows", default="shows")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--memory-mb", type=float, default=60)
    args = parser.parse_args()
    L.seed_everything(9)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[MemoryLimit(args.memory_mb)],
        log_every_n_steps=10,
    )
    trainer.fit(TopicNet(), datamodule=ShowData(args.shows))
