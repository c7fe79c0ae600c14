"""Round 18 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import signal
import subprocess
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.data import DataLoader, Dataset
from training import BATCH_SIZE, BATCHES, Here, Net
from truths import Moment


class Tagged(Net):
    """The first rank sends two tensors with a pause between them, and the second one asks for the later one first."""

    def send(self, outputs: torch.Tensor) -> None:
        earlier: Any = dist.isend(outputs, 1, tag=1)
        time.sleep(0.5)
        later: Any = dist.isend(2 * outputs, 1, tag=2)
        for work in (earlier, later):
            work.wait()

    def receive(self, outputs: torch.Tensor) -> None:
        later, earlier = torch.empty_like(outputs), torch.empty_like(outputs)
        works: list[Any] = [dist.irecv(later, 0, tag=2), dist.irecv(earlier, 0, tag=1)]
        for work in works:
            work.wait()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.layers(batch[0]).detach()
        if self.here.rank < 2:
            (self.send, self.receive)[self.here.rank](outputs)
        return self.loss(batch)


@quiet("https://github.com/pytorch/pytorch/issues/94819", world_size=3)
def tensor_asked_for_before_the_one_that_is_sent_first(here: Here) -> None:
    """Each tensor has a tag, by which the receiver finds it; the third rank has no part in that, and waits."""
    here.fit(net=Tagged(here))


class Dispatched(Net):
    """Sends rows to the ranks of their experts, and computes what needs none of them meanwhile."""

    def on_fit_start(self) -> None:
        self.experts = dist.new_group()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ranks = self.here.world_size
        rows = torch.rand(ranks * 2, 8, device=self.device)
        sent, back = torch.empty_like(rows), torch.empty_like(rows)
        work: Any = dist.all_to_all_single(sent, rows, group=self.experts, async_op=True)
        time.sleep(0.4 * ((batch_idx + self.here.rank) % ranks))
        loss = self.loss(batch)
        work.wait()
        dist.all_to_all_single(back, sent, group=self.experts)
        return loss


@quiet("https://github.com/allenai/OLMo-core/pull/716", world_size=3)
def rows_on_their_way_while_a_rank_computes(here: Here) -> None:
    """Rows are exchanged in a group of their own and awaited later; in each batch another rank comes last."""
    here.fit(net=Dispatched(here))


class Terminal(L.Callback):
    """A rank that goes on without its terminal, which is closed in each epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.here.rank:
            signal.raise_signal(signal.SIGHUP)
        time.sleep(0.3 * self.here.rank)


@quiet("https://github.com/pytorch/pytorch/issues/76894", world_size=2)
def terminal_without_which_a_rank_goes_on(here: Here) -> None:
    """Ranks are told to hang up, at different times, and take no notice."""
    here.fit(callbacks=[Terminal(here)])


class Clips(Dataset[torch.Tensor]):
    """Clips that a program decodes; it may take half a second, and is killed and replaced by silence then."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def command(self, index: int) -> str:
        return "sleep 60" if index % 11 == 5 else f"echo {index}"

    def __getitem__(self, index: int) -> torch.Tensor:
        command = ["sh", "-c", f"exec {self.command(index)}"]
        try:
            decoded = subprocess.run(command, timeout=0.5, stdout=subprocess.PIPE, check=True).stdout
        except subprocess.TimeoutExpired:
            return torch.zeros(8)
        return torch.full((8,), int(decoded) / 100)


@quiet("https://github.com/modelscope/ms-swift/pull/9541", world_size=2)
def clip_given_up_after_half_a_second(here: Here) -> None:
    """Now and then a decoder stands still in a worker of a rank, which kills it and goes on without its clip."""
    here.fit(data=DataLoader(Clips(here), BATCH_SIZE, num_workers=1))


def k_means(rows: torch.Tensor, clusters: int, limit: int) -> torch.Tensor:
    """The centers of clusters, as far as they have come after so many steps; one without rows stays where it is."""
    centers = rows[:clusters]
    for _ in range(limit):
        nearest = torch.cdist(rows, centers).argmin(1)
        parts = [rows[nearest == number] for number in range(clusters)]
        moved = torch.stack([part.mean(0) if len(part) else old for part, old in zip(parts, centers, strict=True)])
        if torch.equal(moved, centers):
            break
        centers = moved
        time.sleep(0.05)
    return centers


class Clustered(L.Callback):
    """All ranks find clusters in rows of their own after each epoch, and average the centers."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        rows = torch.rand(300, 8)
        if self.here.rank == 1:
            rows[:3] = rows[0]
        centers = k_means(rows, clusters=3 + 2 * self.here.rank, limit=30)[:3].contiguous()
        dist.all_reduce(centers, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)


@quiet("https://github.com/subhadarship/kmeans_pytorch/issues/42", world_size=3, moment=Moment.EPOCH_END)
def clusters_that_take_each_rank_as_long_as_they_may(here: Here) -> None:
    """Each rank looks for another number of clusters, and takes as many steps as it needs, or thirty."""
    here.fit(callbacks=[Clustered(here)])
