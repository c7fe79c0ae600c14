"""The loader workers of rank 1 stall, and every rank waits for rank 1's next batch (wenet#2511).

There, the host was short of memory for workers times prefetch; here, the workers read from storage that stops
answering. The main thread of rank 1 waits in the data loader, all others in a collective.

Stock, on rank 0:  RuntimeError: ... Timed out waiting 12000ms for recv operation to complete
                   (through backward; rank 0 exits, and rank 1 lives on with its workers)
SafeDDP:           data-stall: rank 1 waits for its loader, whose workers are at the line marked below
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from _run import DigitsClassifier, DigitsData, parse_options, run
from torch.utils.data import Dataset

STALL_AT_IMAGE = 200


class StallingStorage(Dataset[Any]):
    """The training images, with a pipe, on one rank, that each worker has to read at its 200th image."""

    def __init__(self, images: Any, pipe: Path | None) -> None:
        self.images, self.pipe, self.reads = images, pipe, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.pipe is not None and self.reads == STALL_AT_IMAGE:
            self.pipe.read_bytes()  # <- the workers of rank 1 are here
        return self.images[index]


class LoaderStall(DigitsData):
    def __init__(self, stall: float) -> None:
        super().__init__(num_workers=2)
        self.stall = stall

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.trainer is not None
        pipe: Path | None = None
        if self.trainer.global_rank == 1:
            pipe = Path(self.trainer.default_root_dir) / f"images-{os.getpid()}"
            pipe.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(pipe)
            threading.Thread(target=self.answer_late, args=(pipe,), daemon=True).start()
        self.train = StallingStorage(self.train, pipe)

    def answer_late(self, pipe: Path) -> None:
        """Hold the pipe open for the length of the stall: should this rank die first, its workers are freed."""
        while True:
            with pipe.open("wb"):
                time.sleep(self.stall)
            time.sleep(1)  # closed for long enough that every reader sees the end


if __name__ == "__main__":
    options = parse_options(__doc__)
    run(DigitsClassifier(), LoaderStall(options.stall), options)
