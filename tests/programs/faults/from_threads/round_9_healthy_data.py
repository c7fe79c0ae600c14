"""Round 9 after public threads: data and loops that look odd, and of which nothing is to be said."""

import multiprocessing
import os
import queue
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Chunks(L.LightningDataModule):
    """A chunk for each epoch, which another rank writes each time."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        path = self.here.folder / f"chunk-{epoch}.pt"
        if epoch % self.here.world_size == self.here.rank:
            time.sleep(1.4)
            torch.save(torch.rand((BATCHES - epoch) * BATCH_SIZE * self.here.world_size, 8), path)
        dist.barrier()
        return DataLoader(TensorDataset(torch.load(path)), batch_size=BATCH_SIZE)


@quiet(f"{LIGHTNING}/pull/5043", world_size=3, moment=Moment.EPOCH_END)
def chunk_that_another_rank_writes_in_each_epoch(here: Here) -> None:
    here.fit(data=Chunks(here), reload_dataloaders_every_n_epochs=1, max_epochs=4)


class Growing(Sampler[list[int]]):
    """Batches of a rank's share, which may be made larger from epoch to epoch."""

    def __init__(self, share: range) -> None:
        self.share = share
        self.size = 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*self.share[first : first + self.size]] for first in range(0, len(self.share), self.size)])

    def __len__(self) -> int:
        return -(-len(self.share) // self.size)


@quiet("https://github.com/MakazhanAlpamys/Soup/issues/114", world_size=3, moment=Moment.EPOCH_END)
def batches_enlarged_by_the_loss_of_all(here: Here) -> None:
    """Ranks have losses of their own, and enlarge their batches by the mean of them."""

    class Curriculum(LoggingNet):
        def on_train_epoch_start(self) -> None:
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx) * (1 + here.rank)
            self.losses.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            mean = torch.stack(self.losses).mean()
            dist.all_reduce(mean)
            sampler: Any = self.trainer.train_dataloader.batch_sampler
            sampler.size += 1 if mean < 1e6 else 0

    count = BATCHES * BATCH_SIZE * here.world_size
    sampler = Growing(range(here.rank, count, here.world_size))
    loader = DataLoader(TensorDataset(torch.rand(count, 8)), batch_sampler=sampler)
    here.fit(net=Curriculum(here), data=loader, use_distributed_sampler=False, max_epochs=4)


class Wound(IterableDataset[torch.Tensor]):
    """Reads what has been read before, and drops it; one rank's storage takes longer for that."""

    def __init__(self, here: Here, behind: int) -> None:
        self.here, self.behind = here, behind

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(BATCHES * BATCH_SIZE):
            if row < self.behind:
                time.sleep(0.15 if self.here.is_last else 0.02)
            else:
                yield torch.full((8,), self.here.rank + row / 100)


@quiet("https://github.com/TIGER-AI-Lab/VLM2Vec/issues/105", moment=Moment.START)
def stream_wound_forward_after_a_checkpoint(here: Here) -> None:
    saved = here.folder / "saved"
    first = here.trainer(max_epochs=1, callbacks=[ModelCheckpoint(saved, save_last=True)], enable_checkpointing=True)
    first.fit(LoggingNet(here), DataLoader(Wound(here, 0), batch_size=BATCH_SIZE))
    loader = DataLoader(Wound(here, 2 * BATCH_SIZE), batch_size=BATCH_SIZE)
    here.trainer(max_epochs=3).fit(LoggingNet(here), loader, ckpt_path=saved / "last.ckpt")


def make_patches(patches: Any, first: int, end: int, kill_at: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in range(first, end):
        if number == kill_at:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        patches.put([number, [[number / 100] * 8] * BATCH_SIZE])


class Replacing:
    """Patches made by a process; when it has died, another one goes on behind what it has delivered."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.fork = multiprocessing.get_context("fork")

    def started(self, first: int, kill_at: int) -> tuple[Any, Any]:
        patches: Any = self.fork.Queue(maxsize=1)
        process = self.fork.Process(target=make_patches, args=(patches, first, BATCHES, kill_at), daemon=True)
        process.start()
        return patches, process

    def __iter__(self) -> Iterator[torch.Tensor]:
        patches, process = self.started(0, kill_at=3 if self.here.is_last else -1)
        wanted = 0
        while wanted < BATCHES:
            try:
                number, patch = patches.get(timeout=0.3)
            except queue.Empty:
                if not process.is_alive():
                    patches, process = self.started(wanted, kill_at=-1)
                continue
            assert number == wanted
            wanted += 1
            yield torch.tensor(patch)
        process.join()


@quiet("https://github.com/MIC-DKFZ/nnUNet/issues/2281", world_size=3)
def augmenting_process_that_is_replaced(here: Here) -> None:
    here.fit(data=Replacing(here))


class Utterances(Sampler[list[int]]):
    """As many batches on each rank, of another number of utterances on each of them."""

    def __init__(self, rank: int, sizes: list[int]) -> None:
        self.rank = rank
        self.sizes = random.Random(rank).sample(sizes, len(sizes))

    def __iter__(self) -> Iterator[list[int]]:
        start = self.rank * sum(self.sizes)
        for size in self.sizes:
            yield [*range(start, start + size)]
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


class Lengthy(Dataset[torch.Tensor]):
    """The more utterances there are, the longer it takes to read them."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.full((8,), index / 1000)


@quiet("https://github.com/lhotse-speech/lhotse/pull/1341", world_size=3)
def batches_of_other_sizes_on_each_rank(here: Here) -> None:
    utterances = Utterances(here.rank, [1, 2, 4, 8, 12, 24])
    loader = DataLoader(Lengthy(), batch_sampler=utterances, num_workers=here.rank % 2)
    here.fit(net=LoggingNet(here), data=loader, use_distributed_sampler=False)


@quiet(f"{LIGHTNING}/issues/1406", world_size=3, moment=Moment.END)
def budget_of_tokens_counted_by_all_ranks(here: Here) -> None:
    """All leave in the midst of an epoch, because of what one of them has read."""

    class Tokens(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 40 * BATCH_SIZE * here.world_size

        def __getitem__(self, index: int) -> torch.Tensor:
            return (torch.arange(8) < (8 if index % here.world_size == 1 else 1)).float()

    class Budget(L.Callback):
        seen = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen += float(trainer.strategy.reduce(batch.count_nonzero().float(), reduce_op="sum"))
            trainer.should_stop = self.seen >= 300

    here.fit(net=Net(here), data=in_order(here, Tokens()), callbacks=[Budget()])
