"""Round 17 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from samples import Stream
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, Here, Net
from truths import Moment


class Repeated(IterableDataset[torch.Tensor]):
    """Batches of a rank, again and again until all ranks have gone through theirs."""

    def __init__(self, here: Here, batches: int) -> None:
        self.here = here
        self.batches = list(torch.rand(batches, BATCH_SIZE, 8))

    def __iter__(self) -> Iterator[torch.Tensor]:
        is_done = torch.zeros(self.here.world_size)
        for batch in itertools.cycle([*self.batches, None]):
            if batch is None:
                is_done[self.here.rank] = 1
                continue
            dist.all_reduce(is_done, op=dist.ReduceOp.MAX)
            if is_done.all():
                return
            time.sleep(0.1 * self.here.rank)
            yield batch


@quiet("https://github.com/huggingface/datasets/issues/6719", world_size=3, moment=Moment.EPOCH_END)
def texts_repeated_until_all_ranks_have_read_theirs(here: Here) -> None:
    """Ranks have four, six and eight batches, and one of them is slow; whoever is done begins again."""
    here.fit(data=DataLoader(Repeated(here, batches=4 + 2 * here.rank), batch_size=None))


class Estimated(Net):
    """Each rank estimates from its own data how many steps there are, and all make as many as the first one says."""

    def estimate(self) -> int:
        time.sleep(0.7 * self.here.rank)
        return 8 + self.here.rank % 2

    def on_fit_start(self) -> None:
        steps = torch.tensor(self.estimate(), device=self.device)
        dist.broadcast(steps, src=0)
        self.trainer.fit_loop.epoch_loop.max_steps = int(steps)


@quiet("https://github.com/deepmodeling/deepmd-kit/pull/5570", world_size=3, moment=Moment.START)
def steps_as_the_first_rank_has_estimated_them(here: Here) -> None:
    """Estimates differ by a step, and take each rank another time; that of the first rank is taken by all."""
    here.fit(net=Estimated(here), data=DataLoader(Stream(batches=100), BATCH_SIZE), max_epochs=-1, max_steps=50)


class Published(L.Callback):
    """The first rank publishes a metric after each batch, tries again once, and does without where that fails."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address, self.lost = address, 0

    def publish(self, line: bytes) -> None:
        for pause_s in (0.3, 0.0):
            try:
                with socket.create_connection(self.address, timeout=5) as connection:
                    return connection.sendall(line)
            except OSError:
                time.sleep(pause_s)
        self.lost += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self.publish(f"loss {float(outputs['loss'])}".encode())


@quiet("https://github.com/verl-project/verl/pull/5771", world_size=2)
def metrics_that_the_tracker_refuses(here: Here) -> None:
    """Nobody listens at the tracker's address; the first rank finds that out after each batch, and trains on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    here.fit(callbacks=[Published(address)])


class Played(Net):
    """Plays games until the first rank's clock says that it is enough, and compares them with those of all ranks."""

    def goes_on(self, end: float) -> bool:
        is_time = torch.tensor(float(time.monotonic() < end), device=self.device)
        dist.broadcast(is_time, src=0)
        return bool(is_time)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        end, games = time.monotonic() + 0.5, 0
        while self.goes_on(end):
            time.sleep(0.1 * (1 + (batch_idx + self.here.rank) % 3))
            games += 1
        steps = torch.ones(games * 100, device=self.device)
        dist.all_reduce(steps)
        return self.loss(batch)


@quiet("https://github.com/sgl-project/sglang/pull/27164", world_size=3)
def games_ended_by_the_clock_of_the_first_rank(here: Here) -> None:
    """Games take each rank another time, and how many there are differs between batches, and never between ranks."""
    here.fit(net=Played(here))


class Accumulating(Net):
    """Goes through a batch in parts, and exchanges gradients with the last one only."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, strategy = cast(Any, self.optimizers()), cast(Any, self.trainer.strategy)
        parts = batch[0].split(1 + (batch_idx + self.here.rank) % BATCH_SIZE)
        optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else strategy.block_backward_sync():
                self.manual_backward(self.loss(part) * len(part) / BATCH_SIZE)
                time.sleep(0.15)
        optimizer.step()


@quiet("https://github.com/karpathy/nanochat/pull/33", world_size=2)
def exchange_with_the_last_part_of_a_batch(here: Here) -> None:
    """Ranks cut their batches into other numbers of parts, and each exchanges gradients once for a batch."""
    here.fit(net=Accumulating(here))
