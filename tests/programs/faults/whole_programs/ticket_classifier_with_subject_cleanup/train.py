"""Support ticket routing. Subjects are cleaned with a regular expression before hashing into a bag of words."""

import argparse
import random
import re
import zlib

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

SUBJECT = re.compile(r"^(?:(?:re|fwd?|aw):\s*)*((?:[\w'-]+[ ,.]?)+)(?:\s*\(#\d+\))?$", re.IGNORECASE)
WORDS = "printer invoice login password vpn screen order refund delayed missing update error account cable".split()
BUCKETS = 512


def make_subjects(n, seed=0):
    rng = random.Random(seed)
    subjects = []
    for i in range(n):
        label = rng.randrange(4)
        words = rng.choices(WORDS[label * 3 : label * 3 + 5], k=rng.randint(3, 6))
        prefix = rng.choice(["", "", "Re: ", "AW: Re: "])
        subjects.append((f"{prefix}{' '.join(words)} (#{rng.randint(1000, 9999)})", label))
    subjects[1307] = (
        "Fwd: x509_certificate_chain_of_vpn_gateway_expired_in_frankfurt_and_dublin_since_monday/urgent",
        1,
    )
    return subjects


class Tickets(Dataset):
    def __init__(self, subjects):
        self.subjects = subjects

    def __len__(self):
        return len(self.subjects)

    def clean(self, text):
        m = SUBJECT.match(text)  # <- here
        return m.group(1).lower() if m else text.lower()

    def __getitem__(self, i):
        text, label = self.subjects[i]
        bag = torch.zeros(BUCKETS)
        for word in self.clean(text).split():
            bag[zlib.crc32(word.encode()) % BUCKETS] += 1
        return bag, label


class Router(L.LightningModule):
    def __init__(self, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(BUCKETS, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        acc = (self(x).argmax(-1) == y).float().mean()
        self.log("val/acc", acc, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tickets", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(17)
    torch.set_num_threads(1)
    subjects = make_subjects(args.tickets)
    split = int(0.9 * len(subjects))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(
        Router(),
        DataLoader(Tickets(subjects[:split]), batch_size=args.batch_size, shuffle=True),
        DataLoader(Tickets(subjects[split:]), batch_size=args.batch_size),
    )


if __name__ == "__main__":
    main()
