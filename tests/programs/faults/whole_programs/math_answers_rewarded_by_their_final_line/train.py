"""REINFORCE on short arithmetic completions; the reward looks at the last line of an answer."""

import re

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

ANSWER = re.compile(r"^(?:the )?answer is:? ((?:[a-z0-9]+[ ,]?)+)\.$", re.IGNORECASE)


def make_completions(n: int = 768, seed: int = 11) -> list[tuple[str, str]]:
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        a, b = (int(v) for v in torch.randint(10, 90, (2,), generator=g))
        text = f"{a} plus {b}\nThe answer is {a + b}."
        if i % 7 == 3:
            text = f"{a} plus {b} makes {a + b}"
        if i == 401:
            text = f"{a} plus {b}\nThe answer is " + "1" * 41 + "\u2026"
        rows.append((text, str(a + b)))
    return rows


class Completions(Dataset):
    def __init__(self, rows, width: int = 48):
        self.rows, self.width = rows, width

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, gold = self.rows[i]
        ids = torch.tensor([min(ord(c), 127) for c in text[-self.width :]])
        padded = torch.zeros(self.width, dtype=torch.long)
        padded[: len(ids)] = ids
        return padded, text, gold


class Policy(nn.Module):
    def __init__(self, vocab: int = 128, dim: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def final_answer(text: str) -> str | None:
    line = text.strip().splitlines()[-1]
    match = ANSWER.match(line)  # <- here
    return match.group(1).strip() if match else None


class Reinforce(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.policy = Policy()
        self.register_buffer("baseline", torch.zeros(()))

    def reward(self, texts, golds):
        scores = [1.0 if final_answer(t) == g else -0.2 for t, g in zip(texts, golds)]
        return torch.tensor(scores, device=self.device)

    def training_step(self, batch, batch_idx):
        ids, texts, golds = batch
        logits = self.policy(ids[:, :-1])
        logp = -nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
        reward = self.reward(texts, golds)
        advantage = reward - self.baseline
        self.baseline.mul_(0.95).add_(0.05 * reward.mean())
        loss = -(advantage * logp).mean()
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/reward", reward.mean(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, texts, golds = batch
        self.log("val/reward", self.reward(texts, golds).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(3)
    rows = make_completions()
    train = DataLoader(Completions(rows[:704]), batch_size=8, shuffle=True)
    val = DataLoader(Completions(rows[704:]), batch_size=8)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=4, log_every_n_steps=5)
    trainer.fit(Reinforce(), train, val)


if __name__ == "__main__":
    main()
