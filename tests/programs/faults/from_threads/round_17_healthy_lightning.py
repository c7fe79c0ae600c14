"""Round 17 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import os
import signal
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, first_tensor, rows
from truths import Moment


class Neighbours(MeetingNet):
    """Every rank has all features that it looks for neighbours in, and asks nobody for them."""

    def on_validation_epoch_start(self) -> None:
        time.sleep(0.4 * self.here.rank)
        bank: Any = DataLoader(TensorDataset(torch.rand(BATCH_SIZE * (4 + self.here.rank), 8)), BATCH_SIZE)
        with torch.no_grad():
            self.bank = torch.cat([self.layers(rows) for (rows,) in bank])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        torch.cdist(self.layers(first_tensor(batch)), self.bank).argmin(dim=1)


@quiet("https://github.com/lightly-ai/lightly/pull/1540", world_size=3, moment=Moment.VALIDATION)
def neighbours_looked_for_in_a_bank_of_each_rank(here: Here) -> None:
    """Before each validation every rank computes features of its own, of which it has more the higher its number."""
    here.fit(net=Neighbours(here), data=(rows(here), rows(here, batches=2)))


class Padded(LoggingNet):
    """Gathers lists of boxes, of which ranks have different numbers, padded to the longest one."""

    def on_train_epoch_end(self) -> None:
        boxes = [torch.rand(4) for _ in range(self.here.rank * 3)]
        longest = torch.tensor(len(boxes))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        padded = torch.zeros(int(longest), 4)
        for number, box in enumerate(boxes):
            padded[number] = box
        gathered: Any = self.all_gather(padded)
        assert gathered.shape == (self.here.world_size, int(longest), 4)


@quiet("https://github.com/Lightning-AI/torchmetrics/pull/3390", world_size=3, moment=Moment.EPOCH_END)
def boxes_padded_to_the_longest_list(here: Here) -> None:
    """The first rank has no boxes at all, and the last one most; all gather the same number."""
    here.fit(net=Padded(here), max_epochs=3)


class Notice(L.Callback):
    """Ends training on all ranks in the same step, whichever of them has got notice to leave."""

    def __init__(self, here: Here) -> None:
        self.here, self.has_notice = here, False

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGUSR2, self.leave)

    def leave(self, *signal: Any) -> None:
        self.has_notice = True

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == IN_THE_MIDDLE:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(1.0)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(self.has_notice, all=False)


@quiet(f"{LIGHTNING}/pull/20825", world_size=2, moment=Moment.MIDDLE)
def notice_to_leave_that_all_ranks_heed(here: Here) -> None:
    """One rank gets a signal, and all ranks stop early, in the same step."""
    here.fit(net=LoggingNet(here), callbacks=[Notice(here)])


class Fetched(L.Callback):
    """The first rank fetches the weights that training starts from, and tries again where that fails."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def fetch(self, attempt: int) -> None:
        time.sleep(0.5)
        if attempt < 2:
            raise ConnectionError("the server is busy")
        torch.save(torch.rand(16, 8), self.here.folder / "weights.pt")

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        try:
            if trainer.is_global_zero:
                for attempt in range(5):
                    try:
                        self.fetch(attempt)
                        break
                    except ConnectionError as error:
                        print(f"attempt {attempt}: {error}")
        finally:
            trainer.strategy.barrier()
        with torch.no_grad():
            module.layers[0].weight.copy_(torch.load(self.here.folder / "weights.pt"))


@quiet("https://github.com/mosaicml/composer/pull/334", world_size=3, moment=Moment.START)
def weights_fetched_at_the_third_attempt(here: Here) -> None:
    """The first rank tries again twice; the others wait for it at a barrier that it reaches in any case."""
    here.fit(net=LoggingNet(here), callbacks=[Fetched(here)])


class Symmetric(LoggingNet):
    """Learns to find boxes again that it has moved, and where there is none, from one that counts for nothing."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.denoiser = torch.nn.Linear(8, 8)

    def loss(self, batch: Any) -> torch.Tensor:
        measured = first_tensor(batch)
        boxes = measured[measured[:, 0] > 0]
        if len(boxes) == 0:
            nothing: torch.Tensor = 0.0 * self.denoiser(torch.zeros(1, 8)).sum()
            return super().loss(batch) + nothing
        found: torch.Tensor = self.denoiser(boxes + 0.1) - boxes
        return super().loss(batch) + found.square().mean()


@quiet("https://github.com/lyuwenyu/RT-DETR/pull/684", world_size=4, moment=Moment.FIRST_STEP)
def box_that_counts_for_nothing(here: Here) -> None:
    """One rank has no boxes in its first batches, and goes through all parts of the model nevertheless."""
    pictures = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.1
    pictures.view(BATCHES, BATCH_SIZE, here.world_size, 8)[:2, :, 1] *= -1
    here.fit(net=Symmetric(here), data=in_order(here, TensorDataset(pictures)))
