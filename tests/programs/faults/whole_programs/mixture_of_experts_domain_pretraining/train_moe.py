"""Pre-training of a sparse language model on several domains with FSDP2. Every rank streams one domain's shards."""

import argparse

import lightning as L
import torch
from moe import SparseLM
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeModelParallel

VOCAB = 256
DOMAINS = ["web", "code", "news"]


class DomainStream(IterableDataset):
    """Blocks of a domain. Code has long runs without the vocabulary's last quarter (accented letters, CJK)."""

    def __init__(self, domain: str, blocks: int, length: int = 33) -> None:
        self.domain, self.blocks, self.length = domain, blocks, length

    def __iter__(self):
        g = torch.Generator().manual_seed(DOMAINS.index(self.domain))
        for n in range(self.blocks):
            block = torch.randint(VOCAB, (self.length,), generator=g)
            if self.domain == "code" and n >= 160:
                block = block % 192
            yield block


class Pretraining(L.LightningModule):
    def __init__(self, lr: float = 1e-3, warmup: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lm = None

    def configure_model(self) -> None:
        if self.lm is not None:
            return
        self.lm = SparseLM(VOCAB)
        mesh = self.device_mesh["data_parallel"]
        for layer in self.lm.sparse:
            for expert in layer.experts:
                fully_shard(expert, mesh=mesh)
        fully_shard(self.lm, mesh=mesh)

    def training_step(self, blocks: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.lm(blocks[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, batch_size=len(blocks))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=self.hparams.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Domains(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        domain = DOMAINS[self.trainer.global_rank % len(DOMAINS)]
        return DataLoader(DomainStream(domain, blocks=4000), batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    L.seed_everything(10)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=args.steps,
        log_every_n_steps=10,
    )
    trainer.fit(Pretraining(), datamodule=Domains(args.batch_size))


if __name__ == "__main__":
    main()
