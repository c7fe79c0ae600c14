"""Rank 0 writes its TensorBoard files to storage that stops answering for a while (torchtitan#1092).

Lightning flushes the logger after every logged step, on the training thread of rank 0 (pytorch-lightning#20551).
When the storage stalls, so does that flush, and the other ranks wait for rank 0 in their next collective.

Stock, on rank 1:  RuntimeError: Application timeout caused pair closure
                   (at the end of a traceback through backward, which does not mention the logger)
SafeDDP:           slow-logger: rank 0 in TensorBoard's flush, at the line marked below
--offload:         training does not notice; logged points arrive as soon as the storage answers
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from _run import DigitsClassifier, DigitsData, argument_parser, run
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_ncclsafe import LoggerOffload

STALL_AT_STEP = 29


class LoggerOnStallingStorage(TensorBoardLogger):
    """At one step its event file becomes a pipe that nobody reads: the kernel blocks the next write."""

    def __init__(self, save_dir: str, stall: float) -> None:
        super().__init__(save_dir)
        self.stall = stall

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step == STALL_AT_STEP:
            [event_file] = Path(self.log_dir).glob("events.*")
            written = event_file.rename(event_file.with_name("written"))
            # The pipe has a second name to be read by: LoggerOffload delivers before this program opens an event file.
            pipe = event_file.with_name("pipe")
            os.mkfifo(pipe)
            event_file.hardlink_to(pipe)
            threading.Thread(target=self.answer_late, args=(event_file, written, pipe), daemon=True).start()
        super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        super().save()  # <- rank 0 is here

    def answer_late(self, event_file: Path, written: Path, pipe: Path) -> None:
        time.sleep(self.stall)
        with open(pipe, "rb") as late, open(written, "ab") as file:
            # Who opens the file now waits until this is closed: what is late comes before what is written next.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # in place of SIGIO, which ends a process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            written.rename(event_file)
            file.write(late.read())
        pipe.unlink()


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--offload", action="store_true", help="move the logger off the training thread")
    options = parser.parse_args()
    logger = LoggerOnStallingStorage(str(options.root_dir), options.stall)
    callbacks = [LoggerOffload()] if options.offload else []
    run(DigitsClassifier(), DigitsData(), options, logger=logger, callbacks=callbacks)
