"""Round 20 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import multiprocessing
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, Here, Net, first_tensor
from truths import Moment


class Packed(IterableDataset[torch.Tensor]):
    """Packed rows, of which each rank has another number; a rank that has no more makes up rows without a label."""

    def __init__(self, here: Here) -> None:
        self.own = (BATCHES - here.rank) * BATCH_SIZE

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES * BATCH_SIZE):
            is_own = number < self.own
            time.sleep(0.05 * is_own)
            yield torch.full((8,), number / 100 if is_own else -1.0)


class Labelled(Net):
    """Rows without a label count for nothing."""

    def loss(self, batch: Any) -> torch.Tensor:
        has_label = (batch[:, :1] >= 0).float()
        return torch.square(self.layers(batch) * has_label).mean()


@quiet("https://github.com/axolotl-ai-cloud/axolotl/pull/461", world_size=3)
def rows_made_up_by_ranks_that_have_no_more(here: Here) -> None:
    """The higher its number, the fewer batches a rank has, and all train on as many, some of which teach nothing."""
    here.fit(net=Labelled(here), data=DataLoader(Packed(here), BATCH_SIZE))


class Collected(L.Callback):
    """The first rank of each pair collects what both have generated, which takes each pair another time."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, trainer.world_size, 2)]
        self.pair = pairs[trainer.global_rank // 2]

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        time.sleep(0.5 * trainer.global_rank)
        first = dist.get_global_rank(self.pair, 0)
        texts: Any = [None, None] if trainer.global_rank == first else None
        dist.gather_object(f"from {trainer.global_rank}", texts, dst=first, group=self.pair)
        if texts:
            (self.here.folder / f"texts-{first}").write_text("\n".join(texts))


@quiet("https://github.com/radixark/miles/pull/833", world_size=4, moment=Moment.VALIDATION)
def objects_gathered_on_the_first_rank_of_each_pair(here: Here) -> None:
    """Two pairs gather at different times, each on a rank of its own, and only that rank has a list to gather into."""
    here.fit(callbacks=[Collected(here)])


def act(steps: Any, messages: Any) -> None:
    """Answers steps, and takes a while to shut down."""
    for step in iter(steps.get, None):
        messages.put([step / 100] * 20_000)
    time.sleep(1.0)
    messages.put(None)


class Environment(L.Callback):
    """A process for the first rank, whose last messages are taken before it is waited for."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        context = multiprocessing.get_context("fork")
        self.steps, self.messages = context.Queue(), context.Queue()
        self.process = context.Process(target=act, args=(self.steps, self.messages), daemon=True)
        if trainer.is_global_zero:
            self.process.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.steps.put(trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.steps.put(None)
        last = [message[0] for message in iter(self.messages.get, None)]
        self.process.join(10)
        (self.here.folder / "last").write_text(f"{last} {self.process.exitcode}")


@quiet("https://github.com/Unity-Technologies/ml-agents/pull/4699", moment=Moment.END)
def messages_taken_before_a_process_is_waited_for(here: Here) -> None:
    """At the end the first rank takes all that its process has sent, and waits a second for it; the other has ended."""
    here.fit(callbacks=[Environment(here)])


class Overlapped(Net):
    """Statistics are summed up while a rank goes on, and are awaited for twenty seconds at most."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        statistics = first_tensor(batch).mean(0)
        work = cast(Any, dist.all_reduce(statistics, async_op=True))
        loss = super().training_step(batch, batch_idx)
        if batch_idx % self.here.world_size == self.here.rank:
            time.sleep(0.9)
        work.wait(timedelta(seconds=20))
        return loss + 0 * statistics.sum()


@quiet("https://github.com/pytorch/pytorch/pull/40948", world_size=3)
def sums_awaited_with_a_time_limit_of_their_own(here: Here) -> None:
    """In each step another rank is slow between the start of a sum and its end, and far from the limit."""
    here.fit(net=Overlapped(here))


class Padded(Net):
    """Gathers answers of different lengths, all of which are padded to the longest one on any rank."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        length = torch.tensor(3 + 40 * ((self.here.rank + batch_idx) % self.here.world_size))
        time.sleep(0.02 * int(length))
        answers = torch.ones(len(first_tensor(batch)), int(length))
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        padded = torch.nn.functional.pad(answers, (0, int(length) - answers.shape[1]), value=-1)
        self.all_gather(padded)


@quiet("https://github.com/CarperAI/trlx/pull/315", world_size=3, moment=Moment.VALIDATION)
def answers_padded_to_the_longest_of_all_ranks(here: Here) -> None:
    """Ranks have answers of other lengths, and agree on one before they gather them."""
    here.fit(net=Padded(here))
