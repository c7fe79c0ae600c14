"""Next-token model on source files; every rank has one tokenizer process."""

import argparse
import random

import lightning as L
import torch
from tokenizer_service import TokenizerService
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ncclsafe import SafeDDP

LENGTH = 48
NAMES = ["total", "index", "value", "node", "left", "right", "count", "queue", "offset", "buffer", "key"]


def synthesize(n: int, seed: int) -> list[str]:
    """Stands in for the crawl: short functions, now and then one with a table of constants."""
    rng = random.Random(seed)
    files = []
    for i in range(n):
        a, b, c = (rng.choice(NAMES) for _ in range(3))
        lines = [f"def {a}_{b}({b}, {c}):"]
        for _ in range(rng.randint(4, 9)):
            lines.append(f"    {a} = {b} * {rng.randrange(1000)} + {c}[{rng.randrange(64)}]")
        if i % 900 == 541:
            lines.append(f"    MASK = {0xCBF29CE484222325}")
        lines.append(f"    return {a}")
        files.append("\n".join(lines))
    return files


class SourceFiles(Dataset):
    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.service = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.service is None:
            self.service = TokenizerService()
        ids = self.service.encode(self.files[i])[: LENGTH + 1]
        return torch.tensor(ids + [0] * (LENGTH + 1 - len(ids)))


class CodeModel(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Sources(L.LightningDataModule):
    def __init__(self, files: int, batch_size: int) -> None:
        super().__init__()
        self.files, self.batch_size = files, batch_size

    def setup(self, stage: str) -> None:
        self.train = SourceFiles(synthesize(self.files, seed=3))

    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(
            self.train, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(self.train, batch_size=self.batch_size, sampler=sampler)

    def teardown(self, stage: str) -> None:
        if self.train.service is not None:
            self.train.service.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=900)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(9)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10)
    trainer.fit(CodeModel(), datamodule=Sources(args.files, batch_size=6))


if __name__ == "__main__":
    main()
