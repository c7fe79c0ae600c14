import argparse
from pathlib import Path

import lightning as L
import torch
from kaldi_io import prepare_corpus, read_feats
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from model import Utterances, XVector
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ncclsafe import SafeModelParallel


class ScpDataset(Dataset):
    def __init__(self, scp: Path):
        self.entries = [line.rstrip("\n").split(" ", 2) for line in scp.open()]

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        _, speaker, rspecifier = self.entries[index]
        return torch.from_numpy(read_feats(rspecifier).copy()), int(speaker)


def collate(items) -> Utterances:
    features, speakers = zip(*items, strict=True)
    lengths = torch.tensor([len(f) for f in features])
    return Utterances(pad_sequence(list(features), batch_first=True), lengths, torch.tensor(speakers))


class Corpus(L.LightningDataModule):
    def __init__(self, root: Path, utterances: int, batch_size: int, workers: int):
        super().__init__()
        self.root, self.utterances, self.batch_size, self.workers = root, utterances, batch_size, workers

    def prepare_data(self):
        prepare_corpus(self.root, self.utterances)

    def train_dataloader(self):
        # in the order of the corpus: a curriculum from short to long
        data = ScpDataset(self.root / "feats.scp")
        return DataLoader(
            data,
            self.batch_size,
            sampler=DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False),
            num_workers=self.workers,
            collate_fn=collate,
            persistent_workers=self.workers > 0,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data/train"))
    parser.add_argument("--utterances", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(1, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=args.epochs,
        gradient_clip_val=5.0,
        use_distributed_sampler=False,
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("exp/xvector", save_last=True), LearningRateMonitor()],
    )
    trainer.fit(XVector(), datamodule=Corpus(args.data, args.utterances, args.batch_size, args.workers))
