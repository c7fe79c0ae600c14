import random

import lightning as L
import torch
from tokenizer import END, PAD, START, encode
from torch.utils.data import DataLoader, Dataset

COLOURS = ["red", "green", "blue", "black", "white", "golden"]
THINGS = ["car", "house", "tree", "bird", "lamp", "river", "coat"]


def dialogue(rng: random.Random) -> tuple[str, str]:
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    if rng.random() < 0.5:
        return f"what colour is the {colour} {thing}?", f"{colour}."
    return f"which thing is {colour}, the {thing}?", f"yes, the {thing} is {colour}, as you say."


class Dialogues(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rows = [dialogue(rng) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        question, answer = self.rows[index]
        q, a = [START, *encode(question)], [*encode(answer), END]
        return q + a, [False] * len(q) + [True] * len(a)


def collate(rows):
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.full((len(rows), longest), PAD)
    is_answer = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (row, flags) in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        is_answer[i, : len(row)] = torch.tensor(flags)
    return {"tokens": tokens, "is_answer": is_answer}


class DialogueData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train, self.val = Dialogues(1120, seed=1), Dialogues(128, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=collate, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, collate_fn=collate)
