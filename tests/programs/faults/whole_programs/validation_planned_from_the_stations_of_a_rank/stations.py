"""Measurements of air quality stations, one csv file each."""

import csv
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

COLUMNS = ["hour", "temperature", "wind", "traffic", "no2"]
#: days for which a station has measurements
DAYS = {"bridge": 120, "market": 120, "park": 96, "port": 120, "ring-road": 120, "school": 96}


def write_stations(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (station, days) in enumerate(sorted(DAYS.items())):
        rng = random.Random(number)
        with open(folder / f"{station}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for hour in range(24 * days):
                temperature, wind = rng.gauss(12, 6), abs(rng.gauss(0, 3))
                traffic = max(0.0, rng.gauss(1 if 6 < hour % 24 < 20 else 0.2, 0.3))
                no2 = 20 + 30 * traffic - 4 * wind - 0.2 * temperature + rng.gauss(0, 3)
                rows.writerow([hour, *(f"{value:.3f}" for value in (temperature, wind, traffic, no2))])


def count_rows(file: Path) -> int:
    with open(file) as lines:
        return sum(1 for _ in lines) - 1


class Measurements(IterableDataset):
    """Rows of files in turn; without an end unless `once`."""

    def __init__(self, files: list[Path], once: bool = False) -> None:
        self.files, self.once = files, once

    def rows(self) -> Iterator[list[float]]:
        for file in self.files:
            with open(file, newline="") as lines:
                for row in csv.DictReader(lines):
                    yield [float(row[name]) for name in COLUMNS]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        passes = range(1) if self.once else itertools.count()
        for _ in passes:
            for hour, *features, no2 in self.rows():
                yield torch.tensor([hour % 24 / 24, *features]), torch.tensor(no2 / 50)
