"""Long-context fine-tuning with FSDP2 on contracts of very different length."""

import argparse
import os

import lightning as L
import torch
from crash_reports import CrashReporter
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ncclsafe import SafeModelParallel

VOCAB = 128


class Contracts(Dataset):
    """Token ids of contracts. Tables are rendered as text, which makes some of them longer than the filter assumed."""

    def __init__(self, n: int, max_characters: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.texts = []
        for i in range(n):
            characters = int(torch.randint(200, max_characters, (1,), generator=g))
            per_token = 4.0 if i % 401 != 89 else 2.2
            length = int(min(characters, max_characters) / per_token) if per_token == 4.0 else int(max_characters / 2.2)
            self.texts.append(torch.randint(1, VOCAB, (length,), generator=g))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.texts[i]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 5, padding=4)
        self.ff = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.norm(x).transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
        return x + self.ff(F.gelu(y))


class LongModel(nn.Module):
    def __init__(self, context: int, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(ids.size(1), device=ids.device)
        x = self.tokens(ids) + self.positions(steps)  # <- here
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LongTuning(L.LightningModule):
    def __init__(self, context: int, contracts: Dataset, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="contracts")
        self.contracts = contracts
        self.model = None

    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(self.contracts, self.trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(self.contracts, batch_size=1, sampler=sampler)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = LongModel(self.hparams.context)
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--share", default=os.path.join("share", "crashes"))
    args = parser.parse_args()

    L.seed_everything(0)
    contracts = Contracts(400, max_characters=4 * args.context)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        log_every_n_steps=10,
    )
    with CrashReporter(args.share):
        trainer.fit(LongTuning(args.context, contracts))


if __name__ == "__main__":
    main()
