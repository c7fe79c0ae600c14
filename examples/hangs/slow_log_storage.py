"""Rank 0's TensorBoard files lie on storage that stops answering (torchtitan#1092).

Lightning flushes the logger after every logged step, on the training thread of rank 0 (pytorch-lightning#20551).
When the storage stalls, so does that flush, and the other ranks wait for rank 0 in their next collective.

Stock, on rank 1:  RuntimeError: Application timeout caused pair closure
                   (at the end of a traceback through backward, and not a word about the logger)
SafeDDP:           slow-logger: rank 0 in TensorBoard's flush, at the line marked below
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from _run import DigitsClassifier, DigitsData, parse_options, run
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

STALL_AT_STEP = 29


class LoggerOnStallingStorage(TensorBoardLogger):
    """From one step on its event file is a pipe that nobody reads: the kernel blocks the next write."""

    def __init__(self, save_dir: str, stall: float) -> None:
        super().__init__(save_dir)
        self.stall = stall

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step == STALL_AT_STEP:
            event_file = self.experiment.file_writer.event_writer._file_name
            os.remove(event_file)
            os.mkfifo(event_file)
            threading.Thread(target=self.answer_late, args=(event_file,), daemon=True).start()
        super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        super().save()  # <- rank 0 is here

    def answer_late(self, event_file: str) -> None:
        time.sleep(self.stall)
        with open(event_file, "rb") as pipe:
            while True:
                pipe.read()
                time.sleep(0.1)


if __name__ == "__main__":
    options = parse_options(__doc__)
    logger = LoggerOnStallingStorage(str(options.root_dir), options.stall)
    run(DigitsClassifier(), DigitsData(), options, logger=logger)
