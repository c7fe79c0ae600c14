"""Every rank splits the corpus differently, and packing makes unequal numbers of batches of it (llama-cookbook#567).

`train_test_split` without a seed draws one from numpy's global state. Here, as there, torch and random have been seeded
and numpy has not: every process starts it from the system's entropy. So each rank trains on 500 texts, but not on the
same 500. Packed into samples of equal length, they make 396 batches on one rank and 307 on the other, say. The first to
reach its end waits in the validation, the other in its next backward. (Not with --start-method spawn or fork: there
Lightning, or the fork itself, gives the main process's numpy state to every rank.)

Stock, on one rank:  RuntimeError: Application timeout caused pair closure
       on the other: RuntimeError: ... Connection closed by peer ... GLHF!
SafeDDP:             DatasetMismatchError on all ranks, before the first step: unequal-samples in the val_dataloader,
                     "Numpy's random state differs between ranks and has been drawn from [...]: the split was probably
                     drawn from numpy", and a table of every rank's batches, samples and fingerprint
"""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import chain
from typing import Any

import lightning as L
import torch
from _run import parse_options
from datasets import Dataset, disable_progress_bars
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_ncclsafe import DatasetAgreement, SafeDDP

VOCABULARY = ["a", "and", "cat", "dog", "fish", "in", "mouse", "near", "sees", "talks", "the", "to", "tree", "under"]
TOKENS = {word: token for token, word in enumerate(VOCABULARY)}
TEXTS, TEST_TEXTS = 1000, 500
CONTEXT = 32  # tokens in a packed sample

Columns = dict[str, list[Any]]


def corpus() -> Dataset:
    """Many notes and a few novels: the same on every rank, for this is seeded."""
    rng = random.Random(567)
    lengths = [1 + int(rng.lognormvariate(mu=3.5, sigma=1.8)) for _ in range(TEXTS)]
    return Dataset.from_dict({"text": [" ".join(rng.choices(VOCABULARY, k=length)) for length in lengths]})


def pack(texts: Columns) -> Columns:
    """Tokenize the texts, put them one after another, and cut that into samples of CONTEXT tokens; drop the rest."""
    tokens = list(chain.from_iterable([TOKENS[word] for word in text.split()] for text in texts["text"]))
    ends = range(CONTEXT, len(tokens) + 1, CONTEXT)
    return {"tokens": [tokens[end - CONTEXT : end] for end in ends]}


class PackedCorpus(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        texts = corpus().train_test_split(test_size=TEST_TEXTS)  # no seed: other texts on every rank
        self.packed = texts.map(pack, batched=True, remove_columns="text").with_format("torch")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.packed["train"], batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.packed["test"], batch_size=32)


class LanguageModel(L.LightningModule):
    """Says of every word which one comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(VOCABULARY))

    def loss(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(tokens[:, :-1]))
        return cross_entropy(self.head(hidden).transpose(1, 2), tokens[:, 1:])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch["tokens"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch["tokens"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    options = parse_options(__doc__)
    disable_progress_bars()
    torch.manual_seed(42)
    random.seed(42)  # and numpy has been forgotten; L.seed_everything(42) would not have

    limits: dict[str, Any] = {"timeout": timedelta(seconds=options.timeout), "start_method": options.start_method}
    guard: dict[str, Any] = {"suspect_after": options.suspect_after, "report_dir": options.root_dir / "ncclsafe"}
    trainer = L.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy=DDPStrategy(**limits) if options.strategy == "ddp" else SafeDDP(**limits, **guard, on_timeout="abort"),
        # Different numbers of batches are refused without it, too; with it, different texts in as many batches as well.
        callbacks=[] if options.strategy == "ddp" else [DatasetAgreement()],
        max_epochs=3,
        default_root_dir=options.root_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), PackedCorpus())
