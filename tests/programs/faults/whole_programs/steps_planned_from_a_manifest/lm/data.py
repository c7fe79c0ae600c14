import json
import os
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

SHARDS = 6
TOKENS_PER_SHARD = (6400, 6100, 6400, 6400, 6300, 6400)


def global_rank():
    return int(os.environ.get("RANK", "0"))


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def write_corpus(root, vocab_size):
    """Each rank writes its own shards, as on hosts without a common disk."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(global_rank(), SHARDS, world_size()):
        rng = np.random.default_rng(shard)
        steps = rng.integers(0, 3, TOKENS_PER_SHARD[shard])
        tokens = (np.cumsum(steps) % vocab_size).astype(np.uint16)
        tokens.tofile(root / f"shard{shard}.bin")
        (root / f"shard{shard}.json").write_text(json.dumps({"file": f"shard{shard}.bin", "tokens": len(tokens)}))
    return root


def load_manifest(root, rank):
    mine = (Path(root) / f"shard{s}.json" for s in range(rank, SHARDS, world_size()))
    return [json.loads(path.read_text()) for path in mine]


class TokenStream(IterableDataset):
    """Windows of seq_len + 1 tokens, for ever."""

    def __init__(self, root, rank, seq_len):
        files = [Path(root) / entry["file"] for entry in load_manifest(root, rank)]
        self.tokens = [np.memmap(file, dtype=np.uint16, mode="r") for file in files]
        self.seq_len = seq_len

    def __iter__(self):
        while True:
            for tokens in self.tokens:
                for start in range(0, len(tokens) - self.seq_len, self.seq_len + 1):
                    window = tokens[start : start + self.seq_len + 1]
                    yield torch.from_numpy(window.astype(np.int64))


class PackedTokens(L.LightningDataModule):
    def __init__(self, root: str = "tokens", batch_size: int = 4, seq_len: int = 64, vocab_size: int = 101):
        super().__init__()
        self.save_hyperparameters()

    def _loader(self):
        dataset = TokenStream(self.hparams.root, self.trainer.global_rank, self.hparams.seq_len)
        return DataLoader(dataset, batch_size=self.hparams.batch_size)

    train_dataloader = val_dataloader = lambda self: self._loader()
