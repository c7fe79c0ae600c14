"""Round 22 after public threads: what users of sharded models do that looks odd, and is as it should be."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from training import Data, Here, Net, first_tensor
from truths import Moment, healthy


class Validated(Net):
    """Validates for as long as every rank has a batch, which all of them tell one another before each."""

    def batches(self) -> Iterator[torch.Tensor]:
        for number in range(3 + 2 * self.global_rank):
            time.sleep(0.2 * (1 + self.global_rank))
            yield torch.full((4, 8), number / 10)

    @torch.no_grad()
    def validate(self) -> float:
        total, count, batches = torch.zeros(()), 0, self.batches()
        while True:
            batch = next(batches, None)
            has_data = torch.tensor(batch is not None, dtype=torch.int32)
            dist.all_reduce(has_data, dist.ReduceOp.MIN)
            if not has_data or batch is None:
                break
            total += self.loss(batch)
            count += 1
        dist.all_reduce(total)
        return total.item() / max(count, 1)

    def on_train_epoch_end(self) -> None:
        print(f"validation loss: {self.validate():.4f}", flush=True)


@healthy(
    {Moment.EPOCH_END: (3,)},
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2636",
    strategies=SPLIT,
)
def batches_that_end_with_those_of_the_first_rank_to_have_none(here: Here) -> None:
    """Ranks have three, five and seven batches to validate on, and all of them stop when one has no more."""
    here.fit(net=Validated(here))


@contextmanager
def first(is_first: bool) -> Iterator[None]:
    """Those that are first go through what is in it, and then all others do."""
    if not is_first:
        dist.barrier()
    yield
    if is_first:
        dist.barrier()


class Prepared(Data):
    """The first rank of all prepares the data, then the first one of each host, and then all others look it up."""

    def prepared(self, path: Path) -> torch.Tensor:
        if not path.exists():
            time.sleep(1.2)
            torch.save(torch.arange(96.0).reshape(-1, 8), path)
        found: torch.Tensor = torch.load(path)
        return found

    def setup(self, stage: str) -> None:
        host, local_rank = divmod(self.here.rank, 2)
        with first(self.here.rank == 0), first(local_rank == 0):
            self.rows = self.prepared(self.here.folder / f"cache-of-host-{host}.pt")


@healthy({Moment.START: (4,)}, source="https://github.com/huggingface/trl/pull/7241", strategies=SPLIT)
def data_prepared_by_the_first_rank_of_each_host(here: Here) -> None:
    """Two waits are within each other, and ranks come to the barriers at different lines, each as often as all."""
    here.trainer().fit(Net(here), datamodule=Prepared(here))


class Staggered(L.Callback):
    """Uploads the shard of each rank from a thread, one rank after the other, and lets nobody wait for that."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.uploads: list[threading.Thread] = []

    def upload(self, path: Path) -> None:
        time.sleep(0.7 * self.here.rank)
        path.with_suffix(".uploaded").write_bytes(path.read_bytes())

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state: dict[str, Any] = get_model_state_dict(module)
        shards = {name: weight.to_local() for name, weight in state.items()}
        path = self.here.folder / f"{trainer.current_epoch}-{self.here.rank}.pt"
        torch.save(shards, path)
        self.uploads.append(threading.Thread(target=self.upload, args=(path,)))
        self.uploads[-1].start()

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for upload in self.uploads:
            upload.join()


@healthy({Moment.CHECKPOINT: (4,)}, source="https://github.com/mosaicml/composer/pull/3275", strategies=SPLIT)
def shards_uploaded_one_rank_after_the_other(here: Here) -> None:
    """Each rank begins to upload later than the one before, and the last one is at it when the others are done."""
    here.fit(callbacks=[Staggered(here)], max_epochs=3)


class Prefetched(Net):
    """Ends what is being fetched once it is there on all ranks; who fetches nothing has nothing against it."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.ongoing: dict[int, float] = {}

    def is_over(self, request: int) -> bool:
        if request not in self.ongoing:
            missing = torch.zeros(1)
            dist.all_reduce(missing, dist.ReduceOp.MAX)
            return not missing
        missing = torch.tensor([float(time.monotonic() < self.ongoing[request])])
        dist.all_reduce(missing, dist.ReduceOp.MAX)
        return not missing

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (batch_idx + self.global_rank) % 3 == 0:
            self.ongoing[batch_idx] = time.monotonic() + 0.5
        while not self.is_over(batch_idx):
            time.sleep(0.1)
        self.ongoing.pop(batch_idx, None)
        return self.loss(batch)


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/sgl-project/sglang/pull/38284", strategies=SPLIT)
def requests_that_some_ranks_do_not_fetch(here: Here) -> None:
    """Ranks ask one another from two different lines whether all of them are done, and mostly one of them is not."""
    here.fit(net=Prefetched(here))


class Replies(Net):
    """In each pair of ranks the first one generates as long a reply as its prompts ask for, and sends each word on."""

    def on_fit_start(self) -> None:
        groups = [dist.new_group([number, number + 1]) for number in range(0, self.trainer.world_size, 2)]
        self.group, self.source = groups[self.global_rank // 2], self.global_rank // 2 * 2

    def generated(self, words: int) -> torch.Tensor:
        reply = []
        for number in range(words):
            word = torch.tensor(float(number))
            if self.global_rank == self.source:
                time.sleep(0.15)
            dist.broadcast(word, src=self.source, group=self.group)
            reply.append(word)
        return torch.stack(reply)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        reply = self.generated(2 + 3 * (self.global_rank // 2))
        return self.loss(first_tensor(batch)) * reply.mean()


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/verl-project/verl/pull/1449", strategies=SPLIT)
def replies_that_are_longer_in_one_pair_of_ranks(here: Here) -> None:
    """One pair of ranks sends more than twice as many words as the other, each in a group of its own."""
    here.fit(net=Replies(here), max_epochs=1)
