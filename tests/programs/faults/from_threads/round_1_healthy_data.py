"""Trainings whose data are odd, uneven or slow, as in public threads, and of which nothing is to be said."""

import itertools
import queue
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from filelock import FileLock
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from training import BATCH_SIZE, BATCHES, Here, MeetingNet, Net, rows
from truths import Moment, healthy


class Numbers(Dataset[torch.Tensor]):
    """So many rows, each of which takes so long to read."""

    def __init__(self, count: int, read_s: float = 0.0) -> None:
        self.count, self.read_s = count, read_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.read_s)
        return torch.full((8,), index / self.count)


class Documents(IterableDataset[torch.Tensor]):
    """So many documents of a rank, or no end of them; reading starts so late in each epoch."""

    def __init__(self, rank: int, count: int | None, fill_s: float = 0.0) -> None:
        self.rank, self.count, self.fill_s = rank, count, fill_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        time.sleep(self.fill_s)
        for number in itertools.count() if self.count is None else range(self.count):
            yield torch.full((8,), self.rank + number % 50 / 50)


# icefall: "Calling this on all copies of a DDP setup will sync the sizes so that all copies have the exact same number
# of batches."
@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/k2-fsa/icefall/pull/54")
def shares_cut_to_the_shortest_of_all_ranks(here: Here) -> None:
    class Cut(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            own = 20 + 6 * here.rank
            shortest = torch.tensor(own)
            dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
            return DataLoader(Documents(here.rank, int(shortest)), batch_size=BATCH_SIZE)

    here.fit(data=Cut(), max_epochs=2)


# webdataset: with resampled shards there is no end, and the number of batches is set instead.
@healthy({Moment.EPOCH_END: (2,)}, source="https://github.com/webdataset/webdataset/issues/379")
def stream_without_end_and_a_limit(here: Here) -> None:
    loader = DataLoader(Documents(here.rank, None), batch_size=BATCH_SIZE, num_workers=2, persistent_workers=True)
    here.fit(data=(loader, loader), limit_train_batches=5, limit_val_batches=2, max_epochs=2)


# DeepDeblur: a sampler for evaluation that repeats no sample, so that some ranks have a batch more: "does not require
# any communication between processes".
class EvalSampler(Sampler[int]):
    def __init__(self, count: int, ranks: int, rank: int) -> None:
        self.indices = range(rank, count, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@healthy({Moment.VALIDATION: (3,)}, source="https://github.com/SeungjunNah/DeepDeblur-PyTorch/issues/44")
def evaluation_that_repeats_no_sample(here: Here) -> None:
    class Evaluating(Net):
        def on_validation_epoch_start(self) -> None:
            self.sums = torch.zeros(2)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.3)
            self.sums += torch.tensor([float(self.loss(batch)) * len(batch), len(batch)])

        def on_validation_epoch_end(self) -> None:
            dist.all_reduce(self.sums)
            self.log("val_loss", self.sums[0] / self.sums[1])

    train = Numbers(BATCHES * BATCH_SIZE * here.world_size)
    val = Numbers(2 * BATCH_SIZE * here.world_size + 1)
    loaders = [
        DataLoader(data, batch_size=BATCH_SIZE, sampler=EvalSampler(len(data), here.world_size, here.rank))
        for data in (train, val)
    ]
    here.fit(net=Evaluating(here), data=tuple(loaders), use_distributed_sampler=False, max_epochs=2)


# Lightning: predictions are too many to be kept; each rank writes its own, with their indices, and rank 0 puts them
# together when all have finished.
class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        name = f"{trainer.global_rank}-{batch_indices[0]:04d}.pt"
        torch.save((batch_indices, prediction), self.folder / name)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            parts = [torch.load(path) for path in sorted(self.folder.glob("*.pt"))]
            torch.save(parts, self.folder / "all.pth")
        trainer.strategy.barrier()


@healthy({Moment.END: (4,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/13580")
def predictions_written_by_every_rank(here: Here) -> None:
    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1 * (1 + here.rank))
            return super().predict_step(batch, batch_idx)

    folder = here.folder / "predictions"
    folder.mkdir(exist_ok=True)
    data = Numbers(3 * BATCH_SIZE * here.world_size - 5)
    here.trainer(callbacks=[Writer(folder)]).predict(Predicting(here), DataLoader(data, batch_size=BATCH_SIZE))


# webdataset: "Sharded Dataset Has Long Delay Before First Batch", in each epoch, and not as long on each rank.
@healthy({Moment.FIRST_STEP: (2,)}, source="https://github.com/webdataset/webdataset/issues/267")
def buffer_that_fills_before_the_first_batch(here: Here) -> None:
    stream = Documents(here.rank, BATCHES * BATCH_SIZE, fill_s=3.0 + here.rank)
    here.fit(data=DataLoader(stream, batch_size=BATCH_SIZE, num_workers=1), max_epochs=2)


# Transformers: the length to pad to is agreed among ranks in each step, in a group of its own.
@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/huggingface/transformers/issues/10385")
def padding_agreed_in_each_step(here: Here) -> None:
    class Padding(Net):
        def on_fit_start(self) -> None:
            self.group = dist.new_group(list(range(here.world_size)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2 * ((here.rank + batch_idx) % 3))
            longest = torch.tensor(batch.shape[1])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
            return self.loss(torch.nn.functional.pad(batch, (0, 0, 0, int(longest) - batch.shape[1])))

    class Sentences(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((5 + index % 7, 8), index / self.count)

    data = Sentences(8 * BATCH_SIZE * here.world_size)
    loader = DataLoader(data, batch_size=BATCH_SIZE, collate_fn=lambda sentences: pad_sequence(sentences, True))
    here.fit(net=Padding(here), data=loader, max_epochs=1)


# torchtune: rank 0 draws the order of each epoch and broadcasts it, in the sampler.
class SharedOrder(Sampler[int]):
    def __init__(self, count: int, ranks: int, rank: int) -> None:
        self.count, self.ranks, self.rank = count, ranks, rank

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count)
        dist.broadcast(order, src=0)
        return iter(order.tolist()[self.rank :: self.ranks])

    def __len__(self) -> int:
        return self.count // self.ranks


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/meta-pytorch/torchtune/issues/217")
def order_that_rank_zero_draws_for_all(here: Here) -> None:
    count = BATCHES * BATCH_SIZE * here.world_size
    sampler = SharedOrder(count, here.world_size, here.rank)
    loader = DataLoader(Numbers(count), batch_size=BATCH_SIZE, sampler=sampler)
    here.fit(data=loader, use_distributed_sampler=False, max_epochs=3)


# villa: reads over the network break off now and then, and are tried again after a while.
class Flaky(Numbers):
    failures = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        for attempt in range(4):
            try:
                return self.fetch(index)
            except OSError:
                time.sleep(0.4 * 2**attempt)
        raise OSError(f"gave up on row {index}")

    def fetch(self, index: int) -> torch.Tensor:
        if index % 11 == 5 and self.failures < 2:
            self.failures += 1
            raise OSError("Response payload is not completed")
        self.failures = 0
        return super().__getitem__(index)


@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/ScrollPrize/villa/pull/1244")
def reads_that_fail_and_are_tried_again(here: Here) -> None:
    data = Flaky(BATCHES * BATCH_SIZE * here.world_size)
    here.fit(data=DataLoader(data, batch_size=BATCH_SIZE, num_workers=1), max_epochs=2)


# PyTorch: workers are expensive to start, as each connects to a database, and are started anew for each epoch.
def connect(worker: int) -> None:
    time.sleep(1.2 + 0.5 * worker)


@healthy({Moment.FIRST_STEP: (2,)}, source="https://github.com/pytorch/pytorch/issues/71543")
def workers_that_take_long_to_start(here: Here) -> None:
    loader = rows(here, num_workers=2, worker_init_fn=connect)
    here.fit(data=(loader, rows(here, batches=2, num_workers=1, worker_init_fn=connect)), max_epochs=3)


# pytorch-styleguide: BackgroundGenerator around the loader's iterator; here by hand.
class Background:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(maxsize=1)
        threading.Thread(target=self.fill, args=(batches,), daemon=True).start()
        yield from iter(batches.get, None)

    def fill(self, batches: "queue.Queue[Any]") -> None:
        for batch in self.loader:
            batches.put(batch)
        batches.put(None)


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/IgorSusmelj/pytorch-styleguide/issues/5")
def generator_in_the_background(here: Here) -> None:
    data = Numbers(BATCHES * BATCH_SIZE * here.world_size, read_s=0.05 * (1 + here.rank))
    sampler = EvalSampler(len(data), here.world_size, here.rank)
    here.fit(data=Background(DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)), max_epochs=2)


# datasets: file locks around the cache, so that ranks look at it one after the other.
@healthy({Moment.START: (4,)}, source="https://github.com/huggingface/datasets/pull/547")
def cache_that_ranks_check_in_turn(here: Here) -> None:
    class Cached(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            cache = here.folder / "tokens.pt"
            with FileLock(f"{cache}.lock"):
                time.sleep(0.9)
                if not cache.exists():
                    torch.save(torch.arange(8.0), cache)
                self.tokens = torch.load(cache)

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Cached(), max_epochs=1)


# llm-foundry: local rank 0 prepares the data while the others wait for its signal file; then all meet.
@healthy({Moment.START: (3,)}, source="https://github.com/mosaicml/llm-foundry/pull/716")
def data_prepared_by_local_rank_zero_first(here: Here) -> None:
    class Prepared(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            signal_file = here.folder / ".node_0_local_rank0_data_prep_completed"
            if here.rank == 0:
                time.sleep(3.5)
                signal_file.write_text("local_rank0_completed_data_prep")
            while not signal_file.exists():
                time.sleep(0.2)
            dist.barrier()
            if here.rank == 0:
                signal_file.unlink()

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Prepared(), max_epochs=1)


# NeMo Automodel: if any rank has nothing to learn from in its batch, all skip it together.
@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/NVIDIA-NeMo/Automodel/pull/2468")
def batch_that_all_ranks_skip_together(here: Here) -> None:
    class Lockstep(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            is_valid = torch.tensor(int(batch_idx % 4 != 3 - here.rank))
            dist.all_reduce(is_valid, op=dist.ReduceOp.MIN)
            if not is_valid:
                return
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    here.fit(net=Lockstep(here), max_epochs=3)


# Lightning: epochs of different length, for which loaders are made anew; how long is agreed among ranks.
@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/21773")
def epochs_that_become_longer(here: Here) -> None:
    class Growing(Net):
        level = 1

        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(2 * self.level * BATCH_SIZE * here.world_size), batch_size=BATCH_SIZE)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("error", loss.detach() * 0 + 0.2 * here.rank, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def on_train_epoch_end(self) -> None:
            if self.trainer.callback_metrics["error"] < 0.3:
                self.level += 1

    here.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=1).fit(Growing(here))


# Lightning: sources of different length, of which the short one gives None when it has ended.
@healthy({Moment.EPOCH_END: (2,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/16917")
def short_source_that_gives_none(here: Here) -> None:
    class Mixed(Net):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            return sum(self.loss(part) for part in batch.values() if part is not None)

    both = CombinedLoader({"speech": rows(here, batches=7), "noise": rows(here, batches=3)}, "max_size")
    val = CombinedLoader([rows(here, batches=2), rows(here, batches=4)], "sequential")
    here.fit(net=Mixed(here), data=(both, val), max_epochs=2)


# Lightning: "set_epoch not called for BatchSampler": each epoch has the same order, which harms nobody else. As it has
# no drop_last, ranks' last batches differ in size.
class Batches(Sampler[list[int]]):
    def __init__(self, count: int, ranks: int, rank: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
        self.batches = [order[first : first + BATCH_SIZE] for first in range(0, count, BATCH_SIZE)][rank::ranks]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/13316")
def batch_sampler_whose_epoch_is_never_set(here: Here) -> None:
    count = BATCHES * BATCH_SIZE * here.world_size - 3
    loader = DataLoader(Numbers(count, 0.02), batch_sampler=Batches(count, here.world_size, here.rank))
    here.fit(data=loader, use_distributed_sampler=False, max_epochs=2)


# audioread: a decoder for each sample, whose output is read to its end.
class Decoded(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        command = "head -c 100000 /dev/zero >&2; sleep 0.05; head -c 8 /dev/zero"
        decoder = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
        return torch.frombuffer(bytearray(decoder.stdout), dtype=torch.uint8).float()


@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/beetbox/audioread/issues/130")
def decoder_for_each_sample(here: Here) -> None:
    data = Decoded(BATCHES * BATCH_SIZE * here.world_size)
    here.fit(data=DataLoader(data, batch_size=BATCH_SIZE, num_workers=2, prefetch_factor=1), max_epochs=1)


# graphnet: the connection is closed after construction, and opened again by each worker.
class Events(Numbers):
    def __init__(self, path: Path, count: int) -> None:
        super().__init__(count)
        self.path = path
        self.connection: sqlite3.Connection | None = None
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, energy REAL)")
        connection.executemany("INSERT INTO events VALUES (?, ?)", ((id, id / count) for id in range(count)))
        connection.commit()
        connection.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        found = self.connection.execute("SELECT energy FROM events WHERE id = ?", (index,)).fetchone()
        return torch.full((8,), found[0])


@healthy({Moment.VALIDATION: (2,)}, source="https://github.com/graphnet-team/graphnet/pull/243")
def database_opened_by_each_worker(here: Here) -> None:
    data = Events(here.folder / f"events-{here.rank}.db", BATCHES * BATCH_SIZE * here.world_size)
    train = DataLoader(data, batch_size=BATCH_SIZE, num_workers=2, shuffle=True)
    val = DataLoader(data, batch_size=2 * BATCH_SIZE, num_workers=1, persistent_workers=True)
    here.fit(net=MeetingNet(here), data=(train, val), max_epochs=2)


# datasets: "I finally solve it by using torch.distributed.algorithms.join.Join." A head is fitted after each epoch to
# as many features as the rank happens to have.
class FitHead(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.head = DistributedDataParallel(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.01)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with Join([self.head]):
            for _ in range(2 + 3 * trainer.global_rank):
                time.sleep(0.1)
                self.optimizer.zero_grad()
                self.head(torch.ones(BATCH_SIZE, 8)).square().mean().backward()
                self.optimizer.step()


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/huggingface/datasets/issues/6437")
def uneven_inputs_that_are_joined(here: Here) -> None:
    here.fit(callbacks=[FitHead()], max_epochs=2)
