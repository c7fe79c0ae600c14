"""Small LM pretraining from jsonl shards, with our own read-ahead thread (shards live on a slow mount)."""

import argparse
import json
import queue
import random
import threading
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

SHARDS, ROWS, SEQ, VOCAB = 12, 400, 24, 128


def write_shards(root):
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for s in range(SHARDS):
        rows = [
            json.dumps({"id": f"{s}-{r}", "tokens": [rng.randrange(VOCAB) for _ in range(SEQ)]}) for r in range(ROWS)
        ]
        if s == 4:
            rows = rows[:231] + [rows[231][:57]]
        (root / f"shard-{s:04d}.jsonl").write_text("\n".join(rows) + "\n")


class ReadAhead:
    """Keeps up to `depth` samples ready. Iteration ends after the last shard."""

    END = object()

    def __init__(self, paths, depth=64):
        self.buffer = queue.Queue(maxsize=depth)
        self.paths = paths
        self.thread = threading.Thread(target=self._fill, name="read-ahead", daemon=True)
        self.thread.start()

    def _fill(self):
        for path in self.paths:
            with open(path) as f:
                for line in f:
                    sample = json.loads(line)  # <- here
                    self.buffer.put(torch.tensor(sample["tokens"]))
        self.buffer.put(self.END)

    def __iter__(self):
        while True:
            item = self.buffer.get()
            if item is self.END:
                return
            yield item


class TokenStream(IterableDataset):
    def __init__(self, root, rank, world):
        self.paths = sorted(Path(root).glob("shard-*.jsonl"))[rank::world]

    def __iter__(self):
        yield from ReadAhead(self.paths)


class Corpus(L.LightningDataModule):
    def __init__(self, root="corpus", batch_size=16):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        if not self.root.exists():
            write_shards(self.root)

    def train_dataloader(self):
        stream = TokenStream(self.root, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(stream, batch_size=self.batch_size)


class TinyLM(L.LightningModule):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def training_step(self, tokens, batch_idx):
        h, _ = self.rnn(self.emb(tokens[:, :-1]))
        loss = F.cross_entropy(self.out(h).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train/ppl", loss.detach().exp(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=2000)
    ap.add_argument("--data", default="corpus")
    ns = ap.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(5)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_steps=ns.max_steps, log_every_n_steps=10)
    trainer.fit(TinyLM(), Corpus(ns.data))
