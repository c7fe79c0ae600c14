"""Feature distillation: ranks of a pair share teacher features, so each rank runs the teacher on half of them."""

import argparse

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Signals(Dataset):
    def __init__(self, n=3000, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 64, generator=g)
        self.y = (self.x[:, :8].sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def pairs(world_size, size=2):
    return [list(range(k, min(k + size, world_size))) for k in range(0, world_size, size)]


class Distill(L.LightningModule):
    def __init__(self, width=32, alpha=0.5, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.teacher = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 2)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 2))
        self.group, self.members, self.eval_group = None, None, None

    def setup(self, stage):
        if stage != "fit":
            return
        for ranks in pairs(self.trainer.world_size):
            if self.global_rank in ranks and len(ranks) > 1:
                self.members = ranks
                self.group = dist.new_group(ranks)  # <- here
        self.eval_group = dist.new_group(backend="gloo")

    def teacher_bias(self, logits):
        mean = logits.mean(0)
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean = mean / len(self.members)
        return mean

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            t = self.teacher(x)
            t = t - self.teacher_bias(t)
        s = self.student(x)
        kd = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")
        loss = self.hparams.alpha * kd + (1 - self.hparams.alpha) * F.cross_entropy(s, y)
        self.log_dict({"train/kd": kd, "train/loss": loss}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        hits = torch.tensor([(self.student(x).argmax(-1) == y).sum(), len(y)], dtype=torch.float)
        dist.all_reduce(hits, group=self.eval_group)
        self.log("val/acc", hits[0] / hits[1], prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=self.hparams.lr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gpus", type=int, default=3)
    p.add_argument("--alpha", type=float, default=0.5)
    p.add_argument("--epochs", type=int, default=5)
    args = p.parse_args()
    L.seed_everything(13)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.gpus,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        gradient_clip_val=0.5,
    )
    trainer.fit(
        Distill(alpha=args.alpha),
        DataLoader(Signals(), batch_size=16, shuffle=True),
        DataLoader(Signals(300, seed=1), batch_size=16),
    )


if __name__ == "__main__":
    main()
