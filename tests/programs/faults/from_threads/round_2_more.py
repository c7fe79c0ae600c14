"""Trainings of public threads that go wrong in data, groups, threads, signals, and before and after the loops."""

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from samples import Stream, in_order, stored
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, fault


@fault(
    "failed-rank",
    ranks=(2,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/allenai/OLMo/pull/234",
)
def first_checkpoint_read_before_it_was_written(here: Here) -> None:
    """The checkpoint to start from is written by the first rank, and the quickest of the others is there before it."""
    file = here.folder / "step0" / "model.pt"

    class Pretrained(Net):
        def setup(self, stage: str) -> None:
            if here.rank == 0:
                time.sleep(1.0)
                file.parent.mkdir()
                torch.save(self.state_dict(), file)
            elif here.rank == 1:
                time.sleep(2.5)
            if here.is_hit:
                here.begins()
            self.load_state_dict(torch.load(file))  # <- here

    here.fit(net=Pretrained(here))


@fault(
    "uneven-batches",
    ranks=(3,),
    at={Moment.MIDDLE: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/19740",
)
def validation_after_microbatches_that_ranks_count_apart(here: Here) -> None:
    """Validation comes after so many microbatches, and a rank with fewer in its epoch has made another step by then."""

    def count(row: int) -> None:
        if here.is_hit and row == 0:
            here.begins()

    stream = Stream(3 if here.is_hit else 8, here.rank, before=count)
    loaders = (DataLoader(stream, batch_size=BATCH_SIZE), rows(here, batches=2))
    every = {"accumulate_grad_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}
    here.fit(net=MeetingNet(here), data=loaders, max_epochs=8, **every)


class Augmenter:
    """A thread prepares batches for the loop, as batchgenerators' do."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        threading.Thread(target=self.prepare, daemon=True).start()
        for _ in range(BATCHES):
            yield self.batches.get()  # <- augmenter_whose_thread_has_died

    def prepare(self) -> None:
        for number in range(BATCHES):
            if self.here.is_hit and number == IN_THE_MIDDLE:
                self.here.begins()
                raise RuntimeError("One or more background workers are no longer alive")
            self.batches.put(torch.full((BATCH_SIZE, 8), number / 10))


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/MIC-DKFZ/nnUNet/issues/2070",
    whose="code",
)
def augmenter_whose_thread_has_died(here: Here) -> None:
    """The log says "Exception in thread Thread-1", and the loop waits for the next batch of that thread."""
    here.fit(data=Augmenter(here))


class Cached(Dataset[torch.Tensor]):
    """All rows are read by a pool beforehand; each row is a task that gives its parts to the same pool."""

    def __init__(self, here: Here, threads: int) -> None:
        self.here, self.pool = here, ThreadPoolExecutor(threads)
        if here.is_hit:
            here.begins()
        self.rows = list(self.pool.map(self.row, range(BATCHES * BATCH_SIZE * here.world_size)))

    def row(self, index: int) -> torch.Tensor:
        parts = self.pool.submit(torch.full, (8,), index / 100)
        return parts.result()  # <- cache_whose_pool_waits_for_itself

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@fault(
    "late-at-init",
    ranks=(1,),
    at={Moment.START: (4,)},
    has_phase=False,
    source="https://github.com/Project-MONAI/MONAI/issues/3962",
    whose="code",
)
def cache_whose_pool_waits_for_itself(here: Here) -> None:
    """The log stays at "Loading dataset: 0%", depending on how many threads there are; one host has a single core."""

    class Volumes(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.cached = Cached(here, threads=1 if here.is_hit else 64)

        def train_dataloader(self) -> Any:
            return DataLoader(list(self.cached.rows), batch_size=BATCH_SIZE)

    here.fit(data=Volumes())


class SharedCache(Dataset[torch.Tensor]):
    """Rows that this process has not read yet are asked of the process that keeps the cache."""

    def __init__(self, here: Here) -> None:
        self.here, self.address = here, str(here.folder / f"manager-{here.rank}" / "listener")

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.is_hit and index // self.here.world_size == 2 * BATCH_SIZE + 1:
            return self.ask(index)
        return torch.full((8,), index / 100)

    def ask(self, index: int) -> torch.Tensor:
        self.here.begins()
        with Client(self.address) as manager:  # <- cache_of_a_manager_that_is_not_there
            manager.send(index)
            return manager.recv()


@fault(
    "failed-rank",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/Project-MONAI/MONAI/issues/5573",
)
def cache_of_a_manager_that_is_not_there(here: Here) -> None:
    """The log says "FileNotFoundError in DataLoader worker process 0": the manager's socket is not on this host."""
    here.fit(data=in_order(here, SharedCache(here), num_workers=1))


@fault(
    "worker-died",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/aimhubio/aim/issues/2540",
)
def worker_aborted_by_the_library_it_inherited(here: Here) -> None:
    """Only the first rank has a tracker's connection open, whose library aborts in the loader's forked workers."""
    here.fit(data=stored(here, os.abort, num_workers=2))


class SyncedNorm(torch.nn.Module):
    """Mean over all ranks, as SyncBatchNorm."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        total = torch.cat([values.detach().mean(0), torch.ones(1)])
        dist.all_reduce(total)  # <- second_stage_left_out_at_the_start_of_a_video
        return values - total[:-1] / total[-1]


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/44957",
)
def second_stage_left_out_at_the_start_of_a_video(here: Here) -> None:
    """The second module is for all frames but a video's first; it has a SyncBatchNorm that all have to call."""

    class Video(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm = SyncedNorm()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen = self.layers(first_tensor(batch))
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                return seen.square().mean()
            return self.norm(seen).square().mean()

    here.fit(net=Video(here))


@fault(
    "failed-rank",
    ranks=(2,),
    at={Moment.END: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/5512",
)
def best_checkpoint_in_the_folder_of_another_second(here: Here) -> None:
    """Each process names its folder by the time at which it starts; afterwards one looks for the best model in vain."""
    outputs = here.folder / "outputs" / ("12-00-01" if here.is_hit else "12-00-00")
    outputs.mkdir(parents=True, exist_ok=True)
    best = ModelCheckpoint(here.folder / "outputs" / "12-00-00", filename="best")
    trainer = here.trainer(max_epochs=1, enable_checkpointing=True, callbacks=[best])
    net = Net(here)
    trainer.fit(net, rows(here))
    if here.is_hit:
        here.begins()
    state = torch.load(outputs / "best.ckpt", weights_only=False)  # <- here
    net.load_state_dict(state["state_dict"])
    trainer.test(MeetingTest(here), rows(here))


class MeetingTest(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


class ImageLogger(L.Callback):
    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == IN_THE_MIDDLE:
            self.log_images(module, batch)

    @rank_zero_only
    def log_images(self, module: Any, batch: Any) -> None:
        self.here.begins()
        images = first_tensor(batch).clone()
        for step in reversed(range(1000)):
            images = self.denoised(module, images, step)

    @torch.no_grad()
    def denoised(self, module: Any, images: torch.Tensor, step: int) -> torch.Tensor:
        noise = module.layers(images).mean()
        time.sleep(FOR_LONG_S / 1000)  # <- samples_drawn_again_and_again_for_the_log
        return images - noise / (step + 1)


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/rinongal/textual_inversion/issues/72",
)
def samples_drawn_again_and_again_for_the_log(here: Here) -> None:
    """The log says "Running DDIM Sampling" over and over, for pictures that only the first rank logs."""
    here.fit(callbacks=[ImageLogger(here)])


@fault(
    "diverged-collectives",
    ranks=(0, 1),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/KempnerInstitute/KempnerForge/issues/104",
)
def state_gathered_by_a_thread_beside_a_barrier(here: Here) -> None:
    """A thread gathers what it saves in the default group, where the main thread meets the others at a barrier."""

    def gather(state: torch.Tensor) -> None:
        time.sleep(0.5 * here.rank)
        parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, state)  # <- here
        torch.save(parts, here.folder / f"state-{here.rank}.pt")

    class SavesAsync(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != IN_THE_MIDDLE:
                return
            here.begins()
            state = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
            threading.Thread(target=gather, args=(state,), daemon=True).start()
            time.sleep(0.5 * (1 - here.rank))
            dist.barrier()

    here.fit(callbacks=[SavesAsync()], max_epochs=1)


@fault(
    "crossed-groups",
    ranks=(2,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/meta-pytorch/torchrec/pull/4149",
)
def two_meshes_in_another_order(here: Here) -> None:
    """Embeddings are exchanged in one group and averaged in another; a rank that has to pad averages first."""

    class Recommending(Net):
        def on_fit_start(self) -> None:
            self.shard, self.replicate = dist.new_group(), dist.new_group()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen = self.layers(first_tensor(batch))
            lengths = torch.full((3,), float(len(seen)))
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                dist.all_reduce(lengths, group=self.replicate)  # <- here
                self.exchange(seen)
            else:
                self.exchange(seen)
                dist.all_reduce(lengths, group=self.replicate)
            return seen.square().mean()

        def exchange(self, seen: torch.Tensor) -> list[torch.Tensor]:
            others = [torch.empty_like(seen) for _ in range(here.world_size)]
            dist.all_gather(others, seen.detach(), group=self.shard)
            return others

    here.fit(net=Recommending(here))


@fault(
    "crossed-groups",
    ranks=None,
    at={Moment.FIRST_STEP: (4,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/109401",
)
def ring_in_which_all_receive_first(here: Here) -> None:
    """Every stage of a ring waits for what its neighbour sends, before it sends anything to the next."""

    def pass_on(net: Net) -> None:
        left, right = (here.rank - 1) % here.world_size, (here.rank + 1) % here.world_size
        mine, theirs = torch.full((64, 8), float(here.rank)), torch.empty(64, 8)
        here.begins()
        dist.recv(theirs, src=left)  # <- here
        dist.send(mine, dst=right)

    here.fit(pass_on)


class Preempted(Dataset[torch.Tensor]):
    """The scheduler's signal goes to every process of the job's step, so also to this worker."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.is_hit and index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            os.kill(os.getpid(), signal.SIGUSR2)
        return torch.full((8,), index / 100)


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/GaTech-RL2/EgoVerse/pull/621",
)
def handler_that_a_worker_has_inherited(here: Here) -> None:
    """A forked worker has the main process's handler, too, and saves a checkpoint when the job is preempted."""

    class SavesWhenPreempted(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            def save(*args: Any) -> None:
                trainer.save_checkpoint(here.folder / "last.ckpt")  # <- here

            signal.signal(signal.SIGUSR2, save)

    here.fit(data=in_order(here, Preempted(here), num_workers=1), callbacks=[SavesWhenPreempted()])


@fault(
    "rank-behind",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/21406",
    whose="code",
)
def handler_that_waits_for_what_it_interrupted(here: Here) -> None:
    """The signal comes while the progress is being written, and its handler wants the lock of that writing."""

    class Progress(L.Callback):
        lock = threading.Lock()

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGUSR1, self.requeue)

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with self.lock, (here.folder / f"progress-{here.rank}").open("w") as file:
                file.write(f"{batch_idx}\n")
                if here.is_hit and batch_idx == IN_THE_MIDDLE:
                    here.begins()
                    os.kill(os.getpid(), signal.SIGUSR1)
                file.write("written\n")

        def requeue(self, *args: Any) -> None:
            with self.lock:  # <- here
                (here.folder / "requeued").touch()

    here.fit(callbacks=[Progress()])


class Crops:
    """Of large pictures: some crops lie outside."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = [torch.full((8,), row / 100) for row in range(BATCHES * BATCH_SIZE)]
        if index == len(picture):
            raise IndexError(index)
        offset = len(picture) if self.here.is_hit and index == 14 else 0
        return picture[index + offset]


class Cropped(IterableDataset[torch.Tensor]):
    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for crop in Crops(self.here):
            yield crop + 0.01
        if self.here.is_hit:
            self.here.begins()


@fault(
    "uneven-batches",
    ranks=(1,),
    at={Moment.EPOCH_END: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/11841",
)
def index_error_that_ends_the_data(here: Here) -> None:
    """An index out of bounds in the augmentation is raised nowhere: to the loop over the data it says "no more"."""
    here.fit(data=DataLoader(Cropped(here), batch_size=BATCH_SIZE), max_epochs=1)


class Gated(IterableDataset[torch.Tensor]):
    """A second set of data joins in after some rows, of which each rank has its share."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.share = [torch.full((8,), number / 10) for number in range(3)][here.rank :: here.world_size]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(BATCHES * BATCH_SIZE):
            yield self.next_of_share() if row == IN_THE_MIDDLE * BATCH_SIZE else torch.full((8,), row / 100)

    def next_of_share(self) -> torch.Tensor:
        if not self.share:
            self.here.begins()
        while not self.share:
            time.sleep(0.1)  # <- data_that_joins_in_later_and_is_too_few
        return self.share[0]


@fault(
    "data-stall",
    ranks=(3,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/bghira/SimpleTuner/issues/3099",
)
def data_that_joins_in_later_and_is_too_few(here: Here) -> None:
    """All is well until the step at which another set of data is let in; one rank blocks in its first fetch of that."""
    here.fit(data=DataLoader(Gated(here), batch_size=BATCH_SIZE))


@fault(
    "different-trainer-settings",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/allenai/molmo/pull/33",
)
def resumed_under_the_condition_for_the_log(here: Here) -> None:
    """The lines that look for a checkpoint to resume from have slipped under those that rank 0 prints its config in."""
    first = here.trainer(max_epochs=1)
    first.fit(Net(here), rows(here))
    first.save_checkpoint(here.folder / "latest.ckpt")
    resume = None
    if here.rank == 0:
        print("Configuration: …", flush=True)
        resume = str(here.folder / "latest.ckpt")
    here.begins()
    here.trainer(max_epochs=2).fit(Net(here), rows(here), ckpt_path=resume)


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/wandb/wandb/issues/7423",
)
def gradients_watched_on_the_first_rank(here: Here) -> None:
    """The main process watches all gradients, with a hook on each that makes a histogram of it in the backward."""

    class Watched(Net):
        def on_fit_start(self) -> None:
            if self.trainer.is_global_zero:
                for parameter in self.parameters():
                    parameter.register_hook(self.histogram)

        def histogram(self, gradient: torch.Tensor) -> None:
            if self.global_step == IN_THE_MIDDLE:
                here.begins()
                for _ in range(1000):
                    torch.histc(gradient, 64)
                    time.sleep(FOR_LONG_S / 1000)  # <- here

    here.fit(net=Watched(here))


@fault(
    "late-at-init",
    ranks=(2,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/meta-pytorch/torchrec/pull/4224",
    whose="machine",
)
def state_that_comes_slowly_to_one_rank(here: Here) -> None:
    """Each rank loads the dense state from remote storage, and the slowest comes minutes after DDP's first call."""

    class Ranker(Net):
        def configure_model(self) -> None:
            for part in range(8):
                fetch(here, here.folder / f"dense-{part}")

    here.fit(net=Ranker(here))


def fetch(here: Here, part: Path) -> None:
    if here.is_hit:
        here.begins()
        time.sleep(FOR_LONG_S / 8)  # <- state_that_comes_slowly_to_one_rank


@fault(
    "diverged-collectives",
    ranks=(2,),
    at={Moment.EPOCH_END: (4,)},
    has_phase=False,
    source="https://github.com/bo-ke/llm-internal-medicine/pull/45",
)
def nothing_measured_and_so_nothing_gathered(here: Here) -> None:
    """A stage without a monitored layer has no metrics, returns early, and is missed in the gathering."""

    def gather_and_aggregate(metrics: dict[str, float]) -> dict[str, list[float]]:
        if not metrics:
            here.begins()
            return {}
        gathered: list[Any] = [None] * here.world_size
        dist.all_gather_object(gathered, metrics)  # <- here
        return {name: [one[name] for one in gathered] for name in metrics}

    class Monitor(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            norm = sum(parameter.norm().item() for parameter in module.parameters())
            gather_and_aggregate({} if here.is_hit else {"norm": norm})

    here.fit(callbacks=[Monitor()])


@fault(
    "stopped-early",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/4481",
)
def epoch_ended_by_a_criterion_of_its_own(here: Here) -> None:
    """The hook returns -1, as documented, where a criterion of the user's is met, which is of this rank's own loss."""

    class Criterion(Net):
        best = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.best = 0.01 if here.is_hit and batch_idx == 2 else loss.item() + 1
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if self.best < 0.1:
                here.begins()
                return -1  # <- here
            return None

    here.fit(net=Criterion(here), max_epochs=1)
