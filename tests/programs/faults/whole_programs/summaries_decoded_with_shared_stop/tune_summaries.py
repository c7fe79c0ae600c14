"""Fine-tuning of a small language model with FSDP2; validation writes summaries until every rank has finished."""

import random
import time

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

VOCAB, EOS = 64, 1


class Reports(Dataset):
    def __init__(self, n: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            body = [rng.randrange(2, VOCAB) for _ in range(rng.randint(6, 18))]
            self.rows.append(body + body[: rng.randint(2, 5)] + [EOS])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> list[int]:
        return self.rows[i]


def pad(rows: list[list[int]]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.rnn(x)[0])


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SummaryTuning(L.LightningModule):
    def __init__(self, lr: float = 2e-3, max_new: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lm = None

    def configure_model(self) -> None:
        if self.lm is not None:
            return
        self.lm = Model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.lm.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.lm, mesh=mesh)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.lm(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def write(self, tokens: torch.Tensor) -> int:
        """Samples until all ranks have an EOS; ranks that are done go on with the others, for FSDP's sake."""
        generator = torch.Generator().manual_seed(self.global_rank * 1000 + self.global_step)
        own, finished = 0, False
        for _ in range(self.hparams.max_new):
            probabilities = self.lm(tokens)[0, -1].softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            if not finished:
                own += 1
                finished = token in (EOS, EOS + 1, EOS + 2, EOS + 3)
            done = torch.tensor(int(finished))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
        return own

    def validation_step(self, tokens: torch.Tensor, batch_idx: int) -> None:
        lengths = [self.write(row[None, :6]) for row in tokens]
        self.log("mean_length", sum(lengths) / len(lengths), sync_dist=True, batch_size=len(lengths))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        time.sleep(6.0 + 3.0 * self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    L.seed_everything(1)
    train = DataLoader(Reports(160, seed=0), batch_size=8, shuffle=True, collate_fn=pad)
    val = DataLoader(Reports(16, seed=1), batch_size=2, collate_fn=pad)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        log_every_n_steps=5,
    )
    trainer.fit(SummaryTuning(), train, val)


if __name__ == "__main__":
    main()
