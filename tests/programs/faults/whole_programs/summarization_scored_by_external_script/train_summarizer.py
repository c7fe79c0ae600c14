"""Extractive summarisation. Validation output of all ranks is gathered and scored by the group's scoring script."""

import json
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

HERE = Path(__file__).parent
WORDS = [a + b for a in ("mar", "tel", "von", "kas", "pri", "lod") for b in ("ket", "ium", "tor", "ane", "oss", "ify")]


class Articles(Dataset):
    def __init__(self, n: int, seed: int, sentences: int = 8) -> None:
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(len(WORDS), (n, sentences, 10), generator=g)
        self.best = (self.words < 6).sum(-1).argmax(-1)

    def __len__(self) -> int:
        return len(self.best)

    def __getitem__(self, i: int):
        return i, self.words[i], self.best[i]


class Summarizer(L.LightningModule):
    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(WORDS), 32)
        self.score = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        self.rows: list[dict] = []

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.score(self.embed(words).mean(2)).squeeze(-1)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        _, words, best = batch
        loss = F.cross_entropy(self(words), best)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        ids, words, best = batch
        choice = self(words).argmax(-1)
        for i, w, c, b in zip(ids.tolist(), words, choice.tolist(), best.tolist(), strict=True):
            prediction, reference = (" ".join(WORDS[k] for k in w[s].tolist()) for s in (c, b))
            self.rows.append({"id": i, "prediction": prediction, "reference": reference})

    def run_scorer(self, file: Path) -> float:
        scorer = subprocess.Popen(
            [sys.executable, str(HERE / "score_rouge.py"), str(file)], stdout=subprocess.PIPE, text=True
        )
        if scorer.wait() != 0:  # <- here
            raise RuntimeError("scoring failed")
        *_, last = scorer.stdout.read().strip().splitlines()
        return float(last.split()[1])

    def on_validation_epoch_end(self) -> None:
        gathered = [None] * self.trainer.world_size if self.global_rank == 0 else None
        dist.gather_object(self.rows, gathered, dst=0)
        self.rows = []
        rouge = torch.zeros(1)
        if gathered is not None:
            rows = sorted((row for part in gathered for row in part), key=lambda row: row["id"])
            file = Path("validation") / f"step{self.global_step:06d}.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            rouge[0] = self.run_scorer(file)
        dist.broadcast(rouge, src=0)
        self.log("rouge1", rouge.item(), prog_bar=True, rank_zero_only=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    L.seed_everything(21)
    train = DataLoader(Articles(4000, seed=1), batch_size=16, shuffle=True)
    val = DataLoader(Articles(1500, seed=2), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=4, check_val_every_n_epoch=1, log_every_n_steps=20
    )
    trainer.fit(Summarizer(), train, val)


if __name__ == "__main__":
    main()
