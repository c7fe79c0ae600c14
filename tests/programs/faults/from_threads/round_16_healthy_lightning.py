"""Round 16 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from from_threads.round_15_lightning import LIGHTNING
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torchmetrics import MeanMetric
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net, rows
from truths import Moment


class Around(IterableDataset[torch.Tensor]):
    """Rows of one rank, which begin anew when they have ended."""

    def __init__(self, count: int) -> None:
        self.rows = torch.rand(count, 8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.rows


class Measured(Net):
    """Averages its validation loss in a metric, which all ranks put together once, at the end."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        time.sleep(0.2)
        self.mean.update(self.loss(batch))
        self.log("val_loss", self.mean, on_step=False, on_epoch=True)


@quiet(f"{LIGHTNING}/issues/20404", world_size=3, moment=Moment.VALIDATION)
def shards_of_unequal_length_gone_through_again_and_again(here: Here) -> None:
    """Training is over after so many steps, on shards that begin anew; validation is longer where a shard is."""
    train = DataLoader(Around(10 + 3 * here.rank), BATCH_SIZE)
    validation = DataLoader(TensorDataset(torch.rand(BATCH_SIZE * (2 + 2 * here.rank), 8)), BATCH_SIZE)
    settings: dict[str, Any] = {"max_steps": 12, "max_epochs": -1, "val_check_interval": 6}
    here.fit(
        net=Measured(here),
        data=(train, validation),
        use_distributed_sampler=False,
        check_val_every_n_epoch=None,
        **settings,
    )


class Watched(LoggingNet):
    """The first rank logs what it alone has computed, and tells Lightning so."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            time.sleep(0.8)
            norm = torch.stack([weights.detach().norm() for weights in self.parameters()]).sum()
            self.log("norm", norm, rank_zero_only=True)


@quiet("https://github.com/dvl-tum/center-group/pull/2", world_size=2, moment=Moment.EPOCH_END)
def norm_that_the_first_rank_logs_for_itself(here: Here) -> None:
    """A value is logged on the first rank only, which is legal with `rank_zero_only`."""
    here.fit(net=Watched(here), data=(rows(here), rows(here, batches=2)), max_epochs=3)


@quiet(f"{LIGHTNING}/issues/495", world_size=2, moment=Moment.END)
def folds_each_with_a_trainer_of_its_own(here: Here) -> None:
    """Three trainings and tests in one program, each on what is left of the data without a third of it."""
    L.seed_everything(1)
    data = TensorDataset(torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8))
    for fold in range(3):
        kept = [number for number in range(len(data)) if number % 3 != fold]
        held_out = [number for number in range(len(data)) if number % 3 == fold]
        net, trainer = LoggingNet(here), here.trainer(max_epochs=1)
        trainer.fit(net, DataLoader(Subset(data, kept), BATCH_SIZE))
        trainer.test(net, DataLoader(Subset(data, held_out), BATCH_SIZE), verbose=False)


@quiet(f"{LIGHTNING}/issues/8227", world_size=3, moment=Moment.END)
def weights_saved_by_the_first_rank_after_training(here: Here) -> None:
    """The first rank saves the weights in a second, between training and test; the others wait at the test."""
    net, trainer = LoggingNet(here), here.trainer(max_epochs=2)
    trainer.fit(net, rows(here))
    weights = net.state_dict()
    if trainer.is_global_zero:
        time.sleep(1.2)
        torch.save(weights, here.folder / "weights.pt")
    trainer.test(net, rows(here, batches=2), verbose=False)
