"""Supervised fine-tuning of a small chat model on tool-calling transcripts."""

import argparse
import json
import random
import re
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

VOCAB = 260
PAD = 256
BOS = 257
TOOLS = ["search_flights", "get_weather", "convert_currency", "book_table", "list_files"]

REPLY = re.compile(r"^(?:<tool_call>\s*(?:[\w\":,.{}\[\]/-]+\s*)+</tool_call>\s*)+$")


def export_transcripts(path: Path, n: int = 1600, seed: int = 6) -> None:
    """Writes the transcripts as the annotation service exports them."""
    rng = random.Random(seed)
    with path.open("w") as out:
        for i in range(n):
            calls = []
            for _ in range(rng.randint(1, 3)):
                arguments = {"query": rng.choice(["paris", "oslo", "lima"]), "limit": rng.randint(1, 9)}
                body = json.dumps({"name": rng.choice(TOOLS), "arguments": arguments})
                calls.append(f"<tool_call>\n{body}\n</tool_call>")
            reply = "\n".join(calls)
            if rng.random() < 0.002 and i > 200:
                body = json.dumps({"name": "list_files", "arguments": {"paths": [f"/srv/{k}" for k in range(40)]}})
                reply = reply + "\n<tool_call>\n" + body[:140]
            out.write(json.dumps({"id": i, "user": f"request number {i}", "assistant": reply}) + "\n")


class Transcripts(Dataset):
    def __init__(self, path: Path, max_length: int = 192):
        self.rows = [json.loads(line) for line in path.open()]
        self.max_length = max_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        reply = row["assistant"]
        well_formed = REPLY.match(reply) is not None  # <- here
        prompt = f"user: {row['user']}\nassistant: ".encode()
        tokens = [BOS] + list(prompt) + list(reply.encode())
        labels = [PAD] * (len(prompt) + 1) + tokens[len(prompt) + 1 :]
        weight = 1.0 if well_formed else 0.2
        return tokens[: self.max_length], labels[: self.max_length], weight


def collate(samples):
    length = max(len(tokens) for tokens, _, _ in samples)
    ids = torch.full((len(samples), length), PAD)
    labels = torch.full((len(samples), length), PAD)
    weights = torch.tensor([w for _, _, w in samples])
    for i, (tokens, target, _) in enumerate(samples):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(target)] = torch.tensor(target)
    return ids, labels, weights


class TranscriptData(L.LightningDataModule):
    def __init__(self, root: Path, batch_size: int):
        super().__init__()
        self.path = root / "transcripts.jsonl"
        self.batch_size = batch_size

    def prepare_data(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            export_transcripts(self.path)

    def setup(self, stage):
        self.train = Transcripts(self.path)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, collate_fn=collate, shuffle=False, drop_last=True)


class ChatModel(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])

    def training_step(self, batch, batch_idx):
        ids, labels, weights = batch
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=PAD, reduction="none")
        loss = (loss.mean(dim=1) * weights).mean()
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/well_formed", (weights == 1.0).float().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(11)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
    )
    trainer.fit(ChatModel(), datamodule=TranscriptData(args.root, args.batch_size))


if __name__ == "__main__":
    main()
