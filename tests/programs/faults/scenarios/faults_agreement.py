"""Ranks that run out of data before others do, and that would not read the same: these do not start."""

from typing import Any

import numpy as np
import torch
from samples import Claimed, Stream
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from training import BATCH_SIZE, BATCHES, Here, MeetingNet, Net, rows
from truths import Moment, fault, odd_one_out

from lightning_ncclsafe import DatasetAgreement

ALL = ("SafeDDP", "SafeModelParallel", "SafeFSDP")
START = {Moment.START: (2, 3)}
UNEVEN = (5, 3, 4, 6)


@fault("uneven-batches", ranks=(1,), at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def stream_shorter_than_it_claims(here: Here) -> None:
    here.begins()
    batches = BATCHES - 2 * here.is_hit
    here.fit(data=DataLoader(Claimed(batches, here.rank, BATCHES), batch_size=BATCH_SIZE), max_epochs=1)


@fault("stopped-early", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False)
def rank_that_ends_its_epoch_early(here: Here) -> None:
    class Enough(MeetingNet):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if here.is_hit and batch_idx == 3:
                here.begins()
                return -1  # <- here
            return None

    here.fit(net=Enough(here), data=(rows(here), rows(here)))


@fault("stopped-early", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def rank_that_stops_training(here: Here) -> None:
    """Its own loss is good enough."""

    def stop(net: Net) -> None:
        if here.is_hit:
            here.begins()
            net.trainer.should_stop = True

    here.fit(stop)


@fault("uneven-batches", ranks=(1,), at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def streams_of_unequal_length(here: Here) -> None:
    stream = Stream(BATCHES - 2 * here.is_hit, here.rank)
    disagree(here, data=DataLoader(stream, batch_size=BATCH_SIZE))


def disagree(here: Here, **trainer_args: Any) -> None:
    here.begins()
    here.fit(**trainer_args)


def refused(here: Here, **trainer_args: Any) -> None:
    """What stock trains on: refused where that is asked for."""
    disagree(here, callbacks=[DatasetAgreement()], **trainer_args)


def common(count: int, **keywords: Any) -> DataLoader[Any]:
    values = torch.arange(8.0 * count).reshape(count, 8)
    return DataLoader(TensorDataset(values), **({"batch_size": BATCH_SIZE} | keywords))


@fault(
    "different-data",
    ranks=None,
    at={Moment.START: (2, 3, 4)},
    has_line=False,
    has_phase=False,
    strategies=ALL,
    whose="code",
)
def split_without_a_seed(here: Here) -> None:
    """Llama-recipes: the same number of texts on every rank, and not the same texts."""
    np.random.seed(here.rank)
    chosen = np.random.permutation(96)[:48].tolist()
    data = TensorDataset(torch.arange(8.0 * 96).reshape(96, 8))
    refused(here, data=DataLoader(Subset(data, chosen), batch_size=BATCH_SIZE))


@fault("unequal-samples", ranks=None, at=START, has_line=False, has_phase=False, strategies=ALL)
def packing_after_a_split(here: Here) -> None:
    """With it the lengths differ, too."""
    disagree(here, data=common(48 + 8 * here.rank))


@fault("uneven-batches", ranks=None, at=START, has_line=False, has_phase=False)
def shards_of_unequal_size(here: Here) -> None:
    first = 1000 * here.rank
    count = UNEVEN[here.rank] * BATCH_SIZE
    data = TensorDataset(torch.arange(8.0 * first, 8.0 * (first + count)).reshape(count, 8))
    disagree(here, data=DataLoader(data, batch_size=BATCH_SIZE), use_distributed_sampler=False)


@fault("same-shard", ranks=None, at=START, has_line=False, has_phase=False)
def stream_that_is_not_split(here: Here) -> None:
    refused(here, data=DataLoader(Stream(BATCHES), batch_size=BATCH_SIZE))


@fault("loader-count", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def validation_data_more_on_one_rank(here: Here) -> None:
    data = [rows(here)] * (2 if here.is_last else 1)
    disagree(here, data=(rows(here), data))


@fault("loader-settings", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def batch_size_by_memory(here: Here) -> None:
    disagree(here, data=common(96, batch_size=3 if here.is_last else 4))


@fault("sampler-disagreement", ranks=None, at=START, has_line=False, has_phase=False)
def sampler_made_for_another_share(here: Here) -> None:
    data = TensorDataset(torch.arange(8.0 * 96).reshape(96, 8))
    sampler: Any = DistributedSampler(data, here.world_size, rank=0, shuffle=False)
    refused(here, data=DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler))


@fault("sized-and-unsized", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def stream_on_one_rank(here: Here) -> None:
    loader = DataLoader(Stream(BATCHES, 5.0), batch_size=BATCH_SIZE) if here.is_last else common(24)
    disagree(here, data=loader, use_distributed_sampler=False)


@fault("different-trainer-settings", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def validation_after_other_batches(here: Here) -> None:
    disagree(here, data=(rows(here), rows(here)), val_check_interval=2 if here.is_last else 3)


@fault("different-trainer-settings", ranks=odd_one_out, at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def another_accumulation(here: Here) -> None:
    """As where each rank works it out from its own memory."""
    here.begins()
    here.fit(max_epochs=1, accumulate_grad_batches=4 if here.is_last else 1)


@fault("stopped-early", ranks=(-1,), at={Moment.VALIDATION: (2, 3)}, has_phase=False)
def validation_that_one_rank_leaves_out(here: Here) -> None:
    """Who is late validates less often from then on."""

    class Hurrying(MeetingNet):
        def on_train_epoch_start(self) -> None:
            if here.is_hit and self.current_epoch == 1:
                here.begins()
                self.trainer.check_val_every_n_epoch = 9  # <- here

    here.fit(net=Hurrying(here), data=(rows(here), rows(here)), max_epochs=3)


@fault("stopped-early", ranks=(-1,), at={Moment.START: (2, 3)}, has_phase=False)
def epoch_that_a_rank_counts_from(here: Here) -> None:
    """Each rank goes on with the epoch in a file of its own."""

    class Resuming(Net):
        def on_train_start(self) -> None:
            if here.is_hit:
                here.begins()
            counted = self.trainer.fit_loop.epoch_progress.current
            counted.processed = 1 if here.is_hit else 0  # <- here

    here.fit(net=Resuming(here), max_epochs=3)
