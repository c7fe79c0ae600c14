"""Instruction tuning of a small GPT with FSDP2; validation decodes answers and scores exact matches."""

import argparse
import random

import lightning as L
import torch
from gpt import GPT
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

PAD, EOS, SEP = 0, 1, 2


def encode(text: str) -> list[int]:
    return [min(ord(c), 127) for c in text]


def make_records(seed: int, n: int) -> list[dict]:
    rng = random.Random(seed)
    records = []
    for i in range(n):
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        records.append({"id": i, "prompt": f"add {a} {b}", "answer": f"the sum is {a + b}, as {a}+{b}"})
    return records


def make_benchmark() -> list[dict]:
    """Held-out prompts: sums with worked answers, and yes/no questions in between."""
    records = make_records(1234, 24)
    for i, record in enumerate(records):
        if i in (10, 13):
            record["prompt"], record["answer"] = f"is {i} even", "yes" if i % 2 == 0 else "no"
    return records


class Instructions(Dataset):
    def __init__(self, records: list[dict]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict:
        record = self.records[index]
        return {"prompt": encode(record["prompt"]) + [SEP], "answer": encode(record["answer"]) + [EOS]}


def collate(items: list[dict]) -> dict:
    width = max(len(i["prompt"]) + len(i["answer"]) for i in items)
    tokens = torch.full((len(items), width), PAD)
    labels = torch.full((len(items), width), -100)
    for row, item in enumerate(items):
        p, a = item["prompt"], item["answer"]
        tokens[row, : len(p) + len(a)] = torch.tensor(p + a)
        labels[row, len(p) : len(p) + len(a)] = torch.tensor(a)
    return {"tokens": tokens, "labels": labels, "items": items}


class InstructTuning(L.LightningModule):
    def __init__(self, lr: float = 3e-4, max_new_tokens: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = GPT()
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        self.log("loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def decode(self, prompt: list[int], reference: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        generated: list[int] = []
        while len(generated) < self.hparams.max_new_tokens:
            token = int(self.model(tokens)[0, -1].argmax())
            generated.append(token)
            if token == EOS or len(generated) >= 2 * len(reference):
                break  # <- here
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
        return generated

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        hits = [self.decode(i["prompt"], i["answer"]) == i["answer"] for i in batch["items"]]
        self.log("exact_match", sum(hits) / len(hits), batch_size=len(hits), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(7)
    train = DataLoader(Instructions(make_records(0, 360)), batch_size=4, shuffle=True, collate_fn=collate)
    val = DataLoader(Instructions(make_benchmark()), batch_size=2, collate_fn=collate)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=5,
    )
    trainer.fit(InstructTuning(), train, val)


if __name__ == "__main__":
    main()
