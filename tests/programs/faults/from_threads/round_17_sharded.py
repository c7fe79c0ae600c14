"""Round 17 after public threads: what users of sharded models report, with their truths."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, sharded
from samples import in_order
from threads import goes_wrong
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, Here, Net, first_tensor, rows
from truths import Moment


class Texts(Shares):
    """All have four words, but for the first batch of the rank that is hit, whose texts are longer."""

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_long = rank in self.here.case.ranks and turn < BATCH_SIZE
        return torch.full((8,), 20.0 if is_long else 4.0)


class Rotary(torch.nn.Module):
    """Keeps the angles of each kind of attention, of which a table is made when it is first asked for."""

    def angles(self, kind: str) -> torch.Tensor:
        if not hasattr(self, kind):
            size = {"sliding": 128, "full": 256}[kind]
            self.register_buffer(kind, torch.arange(float(size)), persistent=False)
        return self.get_buffer(kind)[:8]


@sharded(
    "https://github.com/verl-project/verl/issues/6365",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def tables_sent_in_the_order_in_which_a_rank_has_made_them(here: Here) -> None:
    """The first rank sends its tables to all; they differ in size, and another rank has made them in another order."""

    class Attending(Net):
        WINDOW = 16

        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.rotary = Rotary()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            words = first_tensor(batch)
            kinds = ("full", "sliding") if words.max() > self.WINDOW else ("sliding", "full")
            for kind in kinds:
                words = words * torch.cos(self.rotary.angles(kind))
            return self.loss(words)

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            for table in self.buffers():
                dist.broadcast(table, src=0)  # <- here

    here.fit(net=Attending(here), data=in_order(here, Texts(here)))


class Scenes(IterableDataset[torch.Tensor]):
    """The scenes that are on the disk of a rank, of which one has fewer."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for scene in range(3 if self.here.is_hit else 5):
            yield torch.full((BATCH_SIZE, 8), scene / 10)
        if self.here.is_hit:
            self.here.begins()


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20561",
    "uneven-batches",
    moment=Moment.VALIDATION,
    has_line=False,
)
def scenes_to_validate_on_of_which_one_rank_has_fewer(here: Here) -> None:
    """Each rank validates on scenes of its own; who is done averages its metrics, and others gather units."""

    class Driving(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.loss(batch)
            parts = {f"val_loss/{part}": loss * weight for part, weight in (("box", 0.7), ("speed", 0.3))}
            self.log_dict(parts, on_step=False, on_epoch=True, sync_dist=True)

    here.fit(net=Driving(here), data=(rows(here), DataLoader(Scenes(here), batch_size=None)))


COUNTERS = threading.Lock()
"""Of what is counted while a run lasts: bytes that are written, and what the device says of itself."""
WRITTEN = {"bytes": 0}


def write_shard(shard: dict[str, torch.Tensor], path: Path) -> None:
    """In a process of its own, so that the training goes on."""
    with COUNTERS:
        WRITTEN["bytes"] += sum(part.nbytes for part in shard.values())
    torch.save(shard, path)


class ForkedSaves(L.Callback):
    """Has each shard written by a process that is forked, and waits for the one before."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.writer: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        threading.Thread(target=self.watch_device, daemon=True).start()

    def watch_device(self) -> None:
        """Asks the device now and then, which takes long on one host."""
        while True:
            with COUNTERS:
                time.sleep(30 if self.here.is_hit else 0)
            time.sleep(1)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 2 == 0:
            return
        goes_wrong(self.here, batch_idx)
        if self.writer:
            self.writer.join()  # <- lock_that_a_thread_held_when_a_save_was_forked
        weights: dict[str, Any] = dict(module.named_parameters())
        shard = {name: weight.detach().to_local().clone() for name, weight in weights.items()}
        path = self.here.folder / f"step-{trainer.global_step}-rank-{trainer.global_rank}.pt"
        fork = multiprocessing.get_context("fork")
        self.writer = fork.Process(target=write_shard, args=(shard, path), daemon=True)
        self.writer.start()


@sharded(
    "https://github.com/NVIDIA/Megatron-LM/issues/2422",
    "slow-checkpoint",
    "rank-behind",
    ranks=(2,),
)
def lock_that_a_thread_held_when_a_save_was_forked(here: Here) -> None:
    """The process that writes a shard waits for a lock that nobody has there, and the next save waits for it."""
    here.fit(callbacks=[ForkedSaves(here)])
