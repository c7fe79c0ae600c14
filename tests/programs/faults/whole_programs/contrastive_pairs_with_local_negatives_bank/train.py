"""SimCLR-style pretraining on patches; blank patches are dropped, negatives come from all ranks."""

import argparse

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Patches(Dataset):
    """Histology patches; the scanner leaves blank ones at the borders of a slide."""

    def __init__(self, n=2048, blank=0.004, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.images = torch.rand(n, 1, 14, 14, generator=g)
        self.images[torch.rand(n, generator=g) < blank] = 1.0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


def augment(x):
    return (x + 0.1 * torch.randn_like(x)).roll(int(torch.randint(-2, 3, ())), dims=-1)


class SimCLR(L.LightningModule):
    def __init__(self, dim=32, temperature=0.2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.ReLU())
        self.projector = nn.Linear(64, dim)

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=-1)

    def gather_bank(self, z):
        bank = [torch.empty_like(z) for _ in range(self.trainer.world_size)]
        dist.all_gather(bank, z.detach().contiguous())  # <- here
        bank[self.global_rank] = z
        return torch.cat(bank)

    def training_step(self, x, batch_idx):
        tissue = x.flatten(1).std(1) > 0.05
        x = x[tissue]
        z1, z2 = self(augment(x)), self(augment(x))
        bank = self.gather_bank(z2)
        offset = self.global_rank * len(z1)
        target = torch.arange(len(z1), device=z1.device) + offset
        loss = F.cross_entropy(z1 @ bank.T / self.hparams.temperature, target)
        self.log("train/nt_xent", loss, prog_bar=True)
        self.log("train/tissue", tissue.float().mean())
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-4)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--temperature", type=float, default=0.2)
    args = p.parse_args()
    L.seed_everything(8)
    torch.set_num_threads(1)
    loader = DataLoader(Patches(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=8,
    )
    trainer.fit(SimCLR(temperature=args.temperature), loader)


if __name__ == "__main__":
    main()
