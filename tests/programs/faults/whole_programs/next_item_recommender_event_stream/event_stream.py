"""Reads a day's event files with a thread that stays a few batches ahead of the training loop."""

import json
import queue
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

HISTORY = 10


class EventStream(IterableDataset):
    """Batches of (history, next item) for one partition of the users."""

    def __init__(self, folder: Path, partition: int, batch_size: int, batches: int, ahead: int = 8) -> None:
        self.file = folder / f"part-{partition:03d}.jsonl"
        self.batch_size, self.batches, self.ahead = batch_size, batches, ahead

    def _events(self) -> Iterator[tuple[list[int], int]]:
        histories: dict[str, deque[int]] = {}
        while True:
            with self.file.open() as lines:
                for line in lines:
                    event = json.loads(line)
                    history = histories.setdefault(event["user"], deque([0] * HISTORY, maxlen=HISTORY))
                    yield list(history), event["item"]
                    history.append(event["item"])

    def _produce(self, ready: queue.Queue) -> None:
        rows: list[tuple[list[int], int]] = []
        for row in self._events():
            rows.append(row)
            if len(rows) == self.batch_size:
                ready.put((torch.tensor([h for h, _ in rows]), torch.tensor([i for _, i in rows])))
                rows = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ready: queue.Queue = queue.Queue(maxsize=self.ahead)
        threading.Thread(target=self._produce, args=(ready,), name="event-reader", daemon=True).start()
        for _ in range(self.batches):
            yield ready.get()  # <- here
