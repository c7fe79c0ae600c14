"""Loggers that hold up rank 0."""

import time
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from training import FOR_LONG_S, Here, Net, rows
from truths import Moment, fault

ALL = ("SafeDDP", "SafeModelParallel", "SafeFSDP")


@fault("slow-logger", ranks=(0,), at={Moment.MIDDLE: (2, 3), Moment.FIRST_STEP: (2,)}, strategies=ALL)
def metrics_file_that_does_not_answer(here: Here) -> None:
    """The log directory's storage has stopped: the kernel blocks who writes there."""
    logger = stalled_csv(here)

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("loss", self.loss(batch))
            return super().training_step(batch, batch_idx)

    def stall(net: Net) -> None:
        logger.stalls = True

    here.fit(stall, net=Logging(here), logger=logger)


class StallingLogger(CSVLogger):
    stalls = False
    here: Here

    @rank_zero_only
    def save(self) -> None:
        if self.stalls:
            self.here.begins()
            time.sleep(FOR_LONG_S)  # <- metrics_file_that_does_not_answer


def stalled_csv(here: Here) -> StallingLogger:
    logger = StallingLogger(str(here.folder), flush_logs_every_n_steps=1)
    logger.here = here
    return logger


@fault("slow-logger", ranks=(0,), at={Moment.EPOCH_END: (2,), Moment.VALIDATION: (3,)}, has_phase=False)
def server_of_metrics_that_does_not_answer(here: Here) -> None:
    class Server(CSVLogger):
        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "epoch_loss" in metrics:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if here.case.moment is Moment.EPOCH_END:
                self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("epoch_loss", self.loss(batch))

    data = (rows(here), rows(here))
    here.fit(net=Logging(here), data=data, logger=Server(str(here.folder)), callbacks=[LearningRateMonitor()])
