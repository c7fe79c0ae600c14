"""Round 20 after public threads: what users of sharded models do that looks odd, and is as it should be."""

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, IterableDataset
from training import Here, Net, first_tensor
from truths import Moment, healthy


class Dispatched(Net):
    """Sends rows to the ranks of their experts, each of which gets as many as there are, and sums up their norms."""

    def dispatched(self, batch: torch.Tensor) -> torch.Tensor:
        ranks = self.trainer.world_size
        sent = [len(batch)] + [0] * (ranks - 1) if self.global_rank == 0 else [1] + [0] * (ranks - 2) + [len(batch) - 1]
        received = torch.empty(ranks, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(sent))
        counts = received.tolist()
        rows = torch.empty(sum(counts), batch.shape[1])
        dist.all_to_all_single(rows, batch.contiguous(), counts, sent)
        time.sleep(0.2 * len(rows))
        norm = rows.square().sum() if len(rows) else torch.zeros(())
        dist.all_reduce(norm)
        return batch / norm.sqrt()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.dispatched(first_tensor(batch)))


@healthy({Moment.FIRST_STEP: (3,)}, source="https://github.com/deepspeedai/DeepSpeed/pull/8478", strategies=SPLIT)
def expert_to_which_no_rank_sends_any_row(here: Here) -> None:
    """Experts get very different numbers of rows, one of them none, which adds a zero to the sum of all ranks."""
    here.fit(net=Dispatched(here), max_epochs=1)


class Repeated(IterableDataset[torch.Tensor]):
    """Begins anew when it is over, until those of all ranks have been over once."""

    def __init__(self, here: Here, batches: int) -> None:
        self.here, self.batches = here, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        ended = torch.zeros(self.here.world_size, dtype=torch.int64)
        number = 0
        while True:
            ended[self.here.rank] = int(number >= self.batches)
            dist.all_reduce(ended, dist.ReduceOp.MAX)
            if ended.all():
                return
            time.sleep(0.1 * (1 + self.here.rank))
            yield torch.full((4, 8), number % self.batches / 10)
            number += 1


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/huggingface/datasets/issues/6623", strategies=SPLIT)
def stream_that_begins_anew_until_all_are_over(here: Here) -> None:
    """Ranks have two, four and six batches, and those with fewer begin anew until the longest one is over."""
    here.fit(data=DataLoader(Repeated(here, 2 + 2 * here.rank), batch_size=None), max_epochs=2)


class Behind(L.Callback):
    """All ranks gather the weights and meet, and only then the first one writes them, while the others go on."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        trainer.strategy.barrier("gathered")
        if not trainer.is_global_zero:
            return
        for name, weight in weights.items():
            time.sleep(0.4)
            torch.save(weight, self.here.folder / f"{name}-{trainer.current_epoch}.pt")


@healthy({Moment.CHECKPOINT: (4,)}, source="https://github.com/TRI-ML/prismatic-vlms/pull/38", strategies=SPLIT)
def weights_written_behind_a_barrier(here: Here) -> None:
    """The first rank writes for a second or two while the others are in the next epoch, where they wait for it."""
    here.fit(callbacks=[Behind(here)])


class Ring(Net):
    """Hands its rows on around a ring, in which every other rank receives before it sends."""

    def handed_on(self, rows: torch.Tensor) -> torch.Tensor:
        ranks = self.trainer.world_size
        after, before = (self.global_rank + 1) % ranks, (self.global_rank - 1) % ranks
        mine, theirs = rows.contiguous(), torch.empty_like(rows)
        if self.global_rank % 2:
            dist.recv(theirs, before)
            time.sleep(0.3)
            dist.send(mine, after)
        else:
            dist.send(mine, after)
            dist.recv(theirs, before)
        return theirs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = first_tensor(batch)
        for _ in range(self.trainer.world_size - 1):
            rows = self.handed_on(rows)
        return self.loss(rows)


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/NVIDIA/nccl/issues/784", strategies=SPLIT)
def ring_in_which_every_other_rank_receives_first(here: Here) -> None:
    """With three ranks, two neighbours send at first and one receives, and all of them get round nevertheless."""
    here.fit(net=Ring(here), max_epochs=1)
