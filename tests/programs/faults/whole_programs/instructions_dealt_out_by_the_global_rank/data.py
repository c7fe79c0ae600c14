"""Instructions and answers from JSON lines, padded to the longest of their batch."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

SPLITS = {"train": 1600, "validation": 128}


def write_corpus(folder: Path, seed: int = 11) -> None:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SPLITS.items():
        with (folder / f"{split}.jsonl").open("w") as out:
            for _ in range(size):
                prompt = [rng.randrange(3, 512) for _ in range(rng.randint(6, 40))]
                answer = [rng.choice(prompt) for _ in range(rng.randint(4, 60))]
                out.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


class Instructions(IterableDataset):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rank, world = dist.get_rank(), dist.get_world_size()  # <- here
        with self.path.open() as lines:
            for index, line in enumerate(lines):
                if index % world != rank:
                    continue
                row = json.loads(line)
                ids = torch.tensor(row["prompt"] + row["answer"])
                labels = ids.clone()
                labels[: len(row["prompt"])] = -100  # the loss is on answers only
                yield {"input_ids": ids, "labels": labels}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": pad_sequence([r["input_ids"] for r in rows], batch_first=True),
        "labels": pad_sequence([r["labels"] for r in rows], batch_first=True, padding_value=-100),
    }


class InstructionData(L.LightningDataModule):
    def __init__(self, folder: Path, batch_size: int) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self) -> None:
        write_corpus(self.folder)

    def loader(self, split: str) -> DataLoader:
        return DataLoader(Instructions(self.folder / f"{split}.jsonl"), self.batch_size, collate_fn=collate)

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("validation")
