"""Sequence model whose samples are scored by our (old) scoring tool after every epoch."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

SCORER = """
import argparse, json, pathlib
p = argparse.ArgumentParser()
p.add_argument("--hyp", required=True)
p.add_argument("--out", required=True)
a = p.parse_args()
rows = [json.loads(l) for l in pathlib.Path(a.hyp).read_text().splitlines()]
hits = sum(h == r for row in rows for h, r in zip(row["hyp"], row["ref"]))
score = hits / max(1, sum(len(row["ref"]) for row in rows if row["ref"][0] > 0) - 1)
length = sum(len(row["hyp"]) for row in rows) / sum(len(row["src"]) for row in rows)
pathlib.Path(a.out).write_text(json.dumps({"score": score, "length_ratio": length}))
"""


class Copy(L.LightningModule):
    def __init__(self, vocab=40, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src):
        return self.out(self.rnn(self.emb(src))[0])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class ExternalScore(Callback):
    """The scorer runs as its own program because it pins another numpy."""

    def __init__(self, samples, workdir="scores"):
        self.src, self.ref = samples
        self.workdir = Path(workdir)

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        self.workdir.mkdir(exist_ok=True)
        epoch = trainer.current_epoch
        hyp, out = self.workdir / f"hyp-{epoch}.jsonl", self.workdir / f"score-{epoch}.json"
        with torch.no_grad():
            pred = pl_module(self.src).argmax(-1)
        with open(hyp, "w") as f:
            for h, r in zip(pred.tolist(), self.ref.tolist()):
                f.write(json.dumps({"hyp": h, "ref": r}) + "\n")
        with open(self.workdir / "scorer.log", "a") as log:
            subprocess.Popen([sys.executable, "score.py", "--hyp", hyp, "--out", out], stdout=log, stderr=log)
        while not out.exists():  # <- here
            time.sleep(0.5)
        result = json.loads(out.read_text())
        trainer.logger.log_metrics({f"score/{k}": v for k, v in result.items()}, step=trainer.global_step)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch-size", type=int, default=16)
    args = p.parse_args()
    Path("score.py").write_text(SCORER)
    L.seed_everything(9)
    torch.set_num_threads(1)
    src = torch.randint(1, 40, (1600, 12))
    ref = src.roll(1, dims=1)
    loader = DataLoader(TensorDataset(src[:1500], ref[:1500]), batch_size=args.batch_size, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[ExternalScore((src[1500:], ref[1500:]))],
    )
    trainer.fit(Copy(), loader)


if __name__ == "__main__":
    main()
