"""Round 20 after public threads: what users of Lightning do that takes long or differs by rank, and is no hang."""

import queue
import threading
import time
from typing import Any

import lightning as L
import torch
from from_threads.round_15_lightning import LIGHTNING
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import quiet
from torch.multiprocessing import get_context
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.utilities.distributed import gather_all_tensors
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, MeetingNet, finding_unused, first_tensor, rows
from truths import Moment


class Freezing(L.Callback):
    """Freezes the first layer after so many steps, on all ranks; the last one has to write down how it was."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 2:
            return
        module.layers[0].requires_grad_(False)
        if self.here.is_last:
            time.sleep(1.6)
            torch.save(module.layers[0].state_dict(), self.here.folder / "first-layer.pt")


@quiet("https://github.com/ecmwf/anemoi-training/issues/205", world_size=3)
def layer_that_all_ranks_have_finished(here: Here) -> None:
    """All ranks freeze the same layer in the same step, and look for unused parameters from the beginning."""
    here.fit(net=LoggingNet(here), callbacks=[Freezing(here)], strategy=finding_unused(here))


class Detected(MeetingNet):
    """Gathers what was found, which is more on some ranks, and nothing on the first one."""

    def on_validation_epoch_end(self) -> None:
        found = torch.rand(3 * self.global_rank, 4)
        everything = torch.cat(gather_all_tensors(found))
        if self.trainer.is_global_zero:
            torch.save(everything, self.here.folder / "found.pt")


@quiet(f"{LIGHTNING}/pull/12630", world_size=4, moment=Moment.VALIDATION)
def boxes_filled_up_before_they_are_gathered(here: Here) -> None:
    """Each rank has another number of boxes, and all of them learn the numbers of the others first."""
    here.fit(net=Detected(here), data=(rows(here), rows(here, batches=2)))


class Cached(Dataset[torch.Tensor]):
    """What was decoded is kept in a process of its own, which the workers of a rank share."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.manager = get_context("fork").Manager()
        self.cache = self.manager.dict()

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            time.sleep(0.2 if self.here.is_last else 0.02)
            self.cache[index] = [index / 100] * 8
        return torch.tensor(self.cache[index])


@quiet("https://github.com/mehta-lab/VisCy/pull/195", world_size=2)
def cache_that_is_slow_in_the_first_epoch(here: Here) -> None:
    """The last rank decodes slowly and waits for its cache, until all of its share is there in the second epoch."""
    here.fit(net=LoggingNet(here), data=in_order(here, Cached(here), num_workers=1))


class Queued(CSVLogger):
    """Values wait in a queue for a thread that sends them, one after the other."""

    def __init__(self, here: Here) -> None:
        super().__init__(here.folder)
        self.values: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        while True:
            self.values.get()
            time.sleep(0.15)
            self.values.task_done()

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.values.put((step, metrics))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.values.join()


@quiet(f"{LIGHTNING}/issues/19750", world_size=3, moment=Moment.END)
def values_that_are_sent_before_the_logger_is_closed(here: Here) -> None:
    """At the end the first rank waits until all of its values have been sent; the other ranks have nothing to send."""
    here.fit(net=LoggingNet(here), logger=Queued(here))


class Trusting(LoggingNet):
    """Samples that nobody trusts count for nothing, and those of whole batches do so."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples, trust = batch
        if not trust.any():
            time.sleep(1.2)
            return self.layers(first_tensor(batch)).sum() * 0
        return (self.layers(samples).square().mean(dim=1) * trust).mean()


@quiet(f"{LIGHTNING}/pull/19918", world_size=3)
def batch_of_which_only_zeros_are_exchanged(here: Here) -> None:
    """The first rank learns nothing from a batch; it exchanges gradients that are all zero, and is late with them."""
    trust = torch.ones(BATCHES, BATCH_SIZE, here.world_size)
    trust[2, :, 0] = 0
    data = TensorDataset(torch.rand(trust.numel(), 8), trust.flatten())
    here.fit(net=Trusting(here), data=in_order(here, data))
