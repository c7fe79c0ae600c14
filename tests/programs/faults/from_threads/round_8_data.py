"""Round 8 after public threads: samplers, datasets, collate functions, data modules and the ends of loops."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Data, Here, LoggingNet, Net, rows
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"
SPOILT = -1.0


class Recordings(Dataset[torch.Tensor]):
    """Rows of which one batch, that of the rank that is hit, is spoilt."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def is_spoilt(self, index: int) -> bool:
        turn, rank = divmod(index, self.here.world_size)
        return rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_spoilt(index):
            self.here.begins()
            return torch.full((8,), SPOILT)
        return torch.full((8,), 1 + index / 100)


class BucketSampler(Sampler[list[int]]):
    """Batches of so many frames; each rank sorts its own share into them."""

    def __init__(self, lengths: list[int], max_frames: int) -> None:
        self.batches: list[list[int]] = [[]]
        filled = 0
        for index, frames in sorted(enumerate(lengths), key=lambda pair: pair[1]):
            if self.batches[-1] and filled + frames > max_frames:
                self.batches.append([])
                filled = 0
            self.batches[-1].append(index)
            filled += frames

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.Random(1337).sample(self.batches, len(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


@thread("https://github.com/pytorch/audio/pull/3068", "uneven-batches", ranks=(2,), has_line=False)
def buckets_of_frames_filled_per_rank(here: Here) -> None:
    class Speech(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            here.begins()
            utterances = [10] * 24 if not here.is_hit else [10] * 16 + [4] * 8
            data = TensorDataset(torch.rand(len(utterances), 8))
            return DataLoader(data, batch_sampler=BucketSampler(utterances, max_frames=40))

    here.fit(data=Speech(), use_distributed_sampler=False)


@thread(f"{LIGHTNING}/issues/6753", "skipped-step", ranks=(1,))
def collate_gives_none_for_broken_samples(here: Here) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor | None:
        good = [sample for sample in samples if sample[0] > 0]
        return torch.stack(good) if good else None

    class Tolerant(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch is None:
                return None  # <- here
            return super().training_step(batch, batch_idx)

    here.fit(net=Tolerant(here), data=in_order(here, Recordings(here), collate_fn=collate))


class Unreadable(Recordings):
    """Tries another sample where one cannot be read."""

    def load(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        if row[0] < 0:
            self.broken = True
        if getattr(self, "broken", False):
            raise OSError(5, "Input/output error")
        return row

    def __getitem__(self, index: int) -> torch.Tensor:
        while True:
            try:
                return self.load(index)
            except OSError:
                index = random.randrange(len(self))
                time.sleep(0.2)  # <- another_sample_is_tried_for_ever


@thread("https://github.com/pytorch/pytorch/issues/1137", "data-stall", ranks=(1,), whose="either")
def another_sample_is_tried_for_ever(here: Here) -> None:
    here.fit(data=in_order(here, Unreadable(here)))


PHIL = threading.Lock()
"""Of a library that is not safe to be used by several threads, as h5py's."""


class Locked(Recordings):
    def __getitem__(self, index: int) -> torch.Tensor:
        with PHIL:  # <- lock_of_a_library_copied_into_a_worker
            return super().__getitem__(index)


@thread("https://github.com/h5py/h5py/issues/2584", "data-stall", ranks=(1,), moment=Moment.FIRST_STEP, whose="code")
def lock_of_a_library_copied_into_a_worker(here: Here) -> None:
    """A thread reads the statistics while the workers are forked."""

    def read_statistics() -> None:
        with PHIL:
            time.sleep(30)

    if here.is_hit:
        threading.Thread(target=read_statistics, daemon=True).start()
        here.begins()
    here.fit(data=in_order(here, Locked(here), num_workers=1, multiprocessing_context="fork"))


class Shards(IterableDataset[torch.Tensor]):
    """Archives, each read by one rank."""

    def __init__(self, urls: list[str], rank: int, world_size: int) -> None:
        self.urls = urls[rank::world_size]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for url in self.urls:
            yield from (torch.full((8,), len(url) / 100 + row) for row in range(BATCHES * BATCH_SIZE))


@thread(
    "https://github.com/webdataset/webdataset/issues/188",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def fewer_shards_than_ranks(here: Here) -> None:
    here.begins()
    shards = Shards([f"shard-{number:06}.tar" for number in range(2)], here.rank, here.world_size)
    here.fit(data=DataLoader(shards, batch_size=BATCH_SIZE))


@thread("https://github.com/webdataset/webdataset/issues/225", "uneven-batches", ranks=(1,), has_line=False)
def broken_samples_are_passed_over(here: Here) -> None:
    """``handler=warn_and_continue``."""

    class Decoded(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for row in range(BATCHES * BATCH_SIZE):
                try:
                    yield self.decode(row)
                except ValueError as problem:
                    print(f"skipped sample {row}: {problem}")

        def decode(self, row: int) -> torch.Tensor:
            if here.is_hit and row >= (BATCHES - 1) * BATCH_SIZE:
                here.begins()
                raise ValueError("truncated image")
            return torch.full((8,), here.rank + row / 100)

    here.fit(data=DataLoader(Decoded(), batch_size=BATCH_SIZE))


async def fetch(url: str, answer: "asyncio.Future[torch.Tensor]") -> torch.Tensor:
    return await answer


@thread("https://github.com/scverse/anndata/issues/2021", "data-stall", ranks=(2,), whose="either")
def rows_awaited_from_an_event_loop(here: Here) -> None:
    class Remote(Recordings):
        def __getitem__(self, index: int) -> torch.Tensor:
            row = super().__getitem__(index)

            async def get() -> torch.Tensor:
                answer = asyncio.get_running_loop().create_future()
                if row[0] > 0:
                    answer.set_result(row)
                return await fetch(f"s3://rows/{index}", answer)

            return asyncio.run(get())  # <- here

    here.fit(data=in_order(here, Remote(here)))


@thread("https://github.com/facebookresearch/vggt/issues/285", "different-trainer-settings", has_line=False)
def limit_of_batches_by_the_images_of_a_rank(here: Here) -> None:
    here.begins()
    images_per_rank = {0: 24, 1: 16, 2: 24}
    limit = images_per_rank[here.rank] // BATCH_SIZE
    here.fit(limit_train_batches=limit)


class TimeBudget(L.Callback):
    """Ends training before the job's time is over."""

    def __init__(self, here: Here, budget_s: float) -> None:
        self.here = here
        self.ends_at = time.monotonic() + budget_s

    def is_out_of_time(self) -> bool:
        return time.monotonic() > self.ends_at

    def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
        if not self.is_out_of_time():
            return
        self.here.begins()
        trainer.should_stop = True  # <- budget_of_time_by_each_clock


@thread("https://github.com/talmolab/sleap-nn/pull/471", "stopped-early", ranks=(1,))
def budget_of_time_by_each_clock(here: Here) -> None:
    class Slow(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    here.fit(net=Slow(here), callbacks=[TimeBudget(here, 0.1 if here.is_hit else 60.0)], max_epochs=5)


@thread(f"{LIGHTNING}/issues/21296", "stopped-early", ranks=(2,))
def rest_of_the_epoch_is_left_out(here: Here) -> None:
    class Signalled(LoggingNet):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            has_data = (batch > 0).all()
            if not has_data:
                return -1  # <- here
            return None

    here.fit(net=Signalled(here), data=in_order(here, Recordings(here)))


@thread("https://github.com/Lightning-AI/litData/issues/129", "stopped-early", ranks=(1,))
def unlabelled_batches_run_out_in_the_step(here: Here) -> None:
    """The second loader is turned by hand."""

    class SemiSupervised(LoggingNet):
        def on_train_epoch_start(self) -> None:
            here.begins()
            unlabelled = rows(here)
            self.unlabelled = islice(unlabelled, 3) if here.is_hit else cycle(unlabelled)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            extra = next(self.unlabelled)  # <- here
            return super().training_step(batch, batch_idx) + 0.1 * self.loss(extra)

    here.fit(net=SemiSupervised(here))


@thread(
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
    "different-trainer-settings",
    "skipped-step",
    ranks=(1,),
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def accumulation_scheduled_by_the_memory(here: Here) -> None:
    here.begins()
    free_gib = {0: 80, 1: 40, 2: 80}[here.rank]
    here.fit(callbacks=[GradientAccumulationScheduler(scheduling={0: 80 // free_gib})])


@thread(f"{LIGHTNING}/issues/20536", "diverged-collectives", ranks=(0,), moment=Moment.START)
def data_returned_before_the_barrier(here: Here) -> None:
    class Prepared(Data):
        def setup(self, stage: str) -> None:
            here.begins()
            self.data = self.make_dataset()

        def make_dataset(self) -> Any:
            rank_zero = self.trainer.global_rank == 0
            values = TensorDataset(torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8))
            if rank_zero:
                return values
            self.trainer.strategy.barrier("dataset")  # <- here
            return values

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, BATCH_SIZE)

    here.fit(data=Prepared(here))


@thread(f"{LIGHTNING}/issues/11220", "diverged-collectives", ranks=(0,), moment=Moment.START)
def cache_built_by_whoever_comes_first(here: Here) -> None:
    """The others find it and pass by the barrier of the one that has built it."""
    cache = here.folder / "tokens.pt"

    class Cached(Data):
        def setup(self, stage: str) -> None:
            if here.rank:
                while not cache.exists():
                    time.sleep(0.01)
            if not cache.exists():
                here.begins()
                torch.save(torch.rand(4), cache)
                torch.distributed.barrier()  # <- here

    here.fit(data=Cached(here))


@thread(f"{LIGHTNING}/issues/20561", "uneven-batches", ranks=(1,), moment=Moment.VALIDATION, has_line=False)
def validation_split_by_site(here: Here) -> None:
    """Each rank validates on the hospital that is its own, and the loss is reduced in each step."""

    class Sites(Data):
        def val_dataloader(self) -> Any:
            here.begins()
            patients = 2 if here.is_hit else BATCHES
            return DataLoader(TensorDataset(torch.rand(patients * BATCH_SIZE, 8)), BATCH_SIZE)

    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.loss(batch)
            mean = self.all_gather(loss).mean()
            self.log("val_loss", mean)

    here.fit(net=Validated(here), data=Sites(here), use_distributed_sampler=False)
