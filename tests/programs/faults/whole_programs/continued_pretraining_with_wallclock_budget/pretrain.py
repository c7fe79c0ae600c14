"""Continued pre-training on domain text (FSDP2). The queue gives us a fixed slot, so the run ends by the clock."""

import argparse
import time

START = time.monotonic()

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from lightning_ncclsafe import SafeModelParallel  # noqa: E402

VOCAB = 96
CONTEXT = 32


class PackedCorpus(Dataset):
    """Documents, concatenated and cut into blocks of equal length."""

    def __init__(self, documents: int = 900, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(20, 200, (documents,), generator=g)
        stream = torch.cat([torch.randint(2, VOCAB, (int(n),), generator=g).sort().values for n in lengths])
        blocks = len(stream) // (CONTEXT + 1)
        self.blocks = stream[: blocks * (CONTEXT + 1)].view(blocks, CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.blocks[i]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.norm(self.mix(x)[0]))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pretraining(L.LightningModule):
    def __init__(self, lr: float = 1e-3, warmup: int = 50) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lm = None

    def configure_model(self) -> None:
        if self.lm is not None:
            return
        self.lm = LanguageModel()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.lm.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.lm, mesh=mesh)

    def training_step(self, blocks: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.lm(blocks[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / self.hparams.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SlotGuard(L.Callback):
    """Ends the run before the scheduler does, so that the last checkpoint is complete."""

    def __init__(self, slot: float, margin: float) -> None:
        self.usable = slot - margin

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args) -> None:
        if time.monotonic() - START > self.usable:
            trainer.should_stop = True  # <- here


class Throughput(L.Callback):
    def __init__(self, every: int = 50) -> None:
        self.every = every
        self.since = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every:
            return
        now = time.perf_counter()
        if self.since is not None:
            pl_module.log("tokens_per_second", self.every * batch[:, 1:].numel() / (now - self.since))
        self.since = now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slot", type=float, default=24.0, help="seconds that this job may use")
    parser.add_argument("--margin", type=float, default=4.0, help="seconds kept for the last checkpoint")
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    L.seed_everything(5)
    loader = DataLoader(PackedCorpus(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=100,
        callbacks=[SlotGuard(args.slot, args.margin), Throughput()],
    )
    trainer.fit(Pretraining(), loader)


if __name__ == "__main__":
    main()
