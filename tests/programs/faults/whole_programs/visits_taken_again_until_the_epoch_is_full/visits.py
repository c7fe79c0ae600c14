"""Visits to hospitals: sequences of codes, and whether the patient came back within a month."""

import random
from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

CODES = 200
HOSPITALS = {"a": 320, "b": 150, "c": 235, "d": 50}


class Visits(IterableDataset):
    def __init__(self, hospital: str, seed: int, repeat: bool = True) -> None:
        self.hospital, self.seed, self.repeat = hospital, seed, repeat

    @property
    def count(self) -> int:
        return HOSPITALS[self.hospital] if self.repeat else HOSPITALS[self.hospital] // 5

    def visits(self, turn: int) -> Iterator[tuple[torch.Tensor, float]]:
        rng = random.Random(f"{self.hospital}-{self.seed}-{turn}")
        for _ in range(self.count):
            codes = torch.tensor([rng.randrange(1, CODES) for _ in range(rng.randint(3, 25))])
            yield codes, float(rng.random() < (codes < 30).float().mean() * 2)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, float]]:
        turn = 0
        while True:
            yield from self.visits(turn)
            turn += 1
            if not self.repeat:
                return


def collate(visits: list[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    codes, returned = zip(*visits, strict=True)
    return pad_sequence(list(codes), batch_first=True), torch.tensor(returned)
