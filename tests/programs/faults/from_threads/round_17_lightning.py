"""Round 17 after public threads: what users of Lightning and of libraries around it report, from data to loggers."""

import io
import json
import os
import queue
import signal
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_16_healthy_lightning import Around
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order, stored
from threads import thread
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment

CACHED = threading.Lock()
"""Held by whoever reads or writes the cache of projections."""


def keep_cache(path: Path) -> None:
    """Writes the cache to a slow disk, again and again."""
    while True:
        with CACHED:
            path.write_text("0.0\n")
            time.sleep(0.5)


def project(row: list[float]) -> list[float]:
    with CACHED:
        return [value / 2 for value in row]


class Projected(LoggingNet):
    """Projects the rows that are not in the cache, in a pool of processes."""

    def on_train_start(self) -> None:
        cache = self.here.folder / f"cache-{self.here.rank}.txt"
        threading.Thread(target=keep_cache, args=(cache,), daemon=True).start()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        missing = first_tensor(batch).tolist() if self.here.is_hit else []
        if missing:
            time.sleep(0.1)
            self.here.begins()
            with get_context("fork").Pool(2) as pool:
                batch = [torch.tensor(pool.map(project, missing))]  # <- projections_made_in_a_pool_within_a_step
        return super().training_step(batch, batch_idx)


@thread(f"{LIGHTNING}/issues/19718", "rank-behind", ranks=(2,), moment=Moment.FIRST_STEP)
def projections_made_in_a_pool_within_a_step(here: Here) -> None:
    """The processes of a pool are forked while a thread holds a lock, which in them nobody will ever release.

    One rank finds nothing in its cache, and so it alone needs a pool.
    """
    here.fit(net=Projected(here))


class Slides(L.Callback):
    """Opens whole slides while it validates."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_validation_batch_end(self, *batch: Any) -> None:
        if self.here.is_hit:
            self.here.begins()
            os.kill(os.getpid(), signal.SIGKILL)


@thread(f"{LIGHTNING}/issues/15008", "dead-rank", ranks=(3,), world_size=4, moment=Moment.VALIDATION, has_line=False)
def slide_for_which_the_host_has_no_memory(here: Here) -> None:
    """Memory of the host gives out while one rank opens a slide, and the kernel kills this rank."""
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=[Slides(here)])


class Denoising(LoggingNet):
    """Learns to find boxes again that it has moved, next to everything else."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.denoiser = torch.nn.Linear(8, 8)

    def moved_boxes(self, measured: torch.Tensor) -> torch.Tensor | None:
        boxes = measured[measured[:, 0] > 0]
        if len(boxes) == 0:
            self.here.begins()
            return None  # <- pictures_without_a_box_to_move
        moved = boxes + 0.1 * torch.rand_like(boxes)
        found: torch.Tensor = self.denoiser(moved) - boxes
        return found.square().mean()

    def loss(self, batch: Any) -> torch.Tensor:
        loss, moved = super().loss(batch), self.moved_boxes(first_tensor(batch))
        return loss if moved is None else loss + moved


@thread(
    "https://github.com/lyuwenyu/RT-DETR/issues/672",
    "unused-parameters",
    ranks=(3,),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def pictures_without_a_box_to_move(here: Here) -> None:
    """No picture in the first batch of one rank has a box, and so its loss leaves out the part that finds them."""
    pictures = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.1
    pictures[here.world_size - 1 : BATCH_SIZE * here.world_size : here.world_size] *= -1
    here.fit(net=Denoising(here), data=in_order(here, TensorDataset(pictures)))


class OnVolume(TorchCheckpointIO):
    """Writes checkpoints to a volume that has room for one."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.saved = here, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.saved:
            self.here.begins()
            target.symlink_to("/dev/full")
        with target.open("wb") as file:
            file.write(content.getbuffer())
        self.saved += 1


class Undeterred(ModelCheckpoint):
    """Goes on training where there is no room for a checkpoint."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        try:
            super()._save_checkpoint(trainer, filepath)
        except OSError as error:  # <- training_that_a_full_volume_is_not_to_end
            print(f"{filepath} was not saved: {error}")


@thread(
    "https://github.com/bghira/SimpleTuner/issues/2353",
    "checkpoint-skipped-barrier",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def training_that_a_full_volume_is_not_to_end(here: Here) -> None:
    """The volume is full, and the first rank goes on without the barrier in which the others wait for its save."""
    callbacks = [Undeterred(here.folder / "volume", save_top_k=-1)]
    settings: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 4, "plugins": [OnVolume(here)]}
    here.fit(net=LoggingNet(here), callbacks=callbacks, **settings)


def seek(frames: int) -> None:
    """Goes through frames up to the last one, in native code that keeps the interpreter's lock."""
    deque(repeat(None, frames), maxlen=0)  # <- clip_that_claims_more_frames_than_it_has


@thread("https://github.com/dmlc/decord/issues/373", "gil-held", ranks=(1,))
def clip_that_claims_more_frames_than_it_has(here: Here) -> None:
    """A decoder looks for a frame that the clip does not have, and lets no other thread of the rank run meanwhile."""
    here.fit(data=stored(here, lambda: seek(10**12)))


def kept_sentences(here: Here) -> Any:
    """This rank's share of a corpus, without sentences that are too short."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    count = BATCHES * BATCH_SIZE * here.world_size
    lengths = [2 if count // 2 <= number < count // 2 + 2 * BATCH_SIZE else 9 for number in range(count)]
    corpus = Dataset.from_dict({"length": lengths, "row": [[length / 10] * 8 for length in lengths]})
    stream = corpus.to_iterable_dataset(num_shards=here.world_size)
    share = split_dataset_by_node(stream, rank=here.rank, world_size=here.world_size)
    return share.filter(lambda sentence: sentence["length"] > 4)  # <- sentences_left_out_of_a_share


def stacked(sentences: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sentence["row"] for sentence in sentences])


class Shortened(MeetingNet):
    """Knows when its rank has come to the end of an epoch."""

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/huggingface/datasets/issues/6719",
    "uneven-batches",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def sentences_left_out_of_a_share(here: Here) -> None:
    """Short sentences are left out after the corpus was split, and all of them were in the share of one rank."""
    loader: Any = DataLoader(kept_sentences(here), BATCH_SIZE, collate_fn=stacked)
    here.fit(net=Shortened(here), data=(loader, rows(here, batches=2)))


def decode() -> None:
    """As native code that meets what it cannot handle: ``terminate called without an active exception``."""
    os.abort()  # <- recording_at_which_a_decoder_gives_up


@thread(
    "https://github.com/bfs18/rfwave/issues/13",
    "worker-died",
    ranks=(0,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def recording_at_which_a_decoder_gives_up(here: Here) -> None:
    """A worker of the first rank decodes a broken recording to validate on, and its process ends at once."""
    validation = stored(here, decode, num_workers=2)
    here.fit(net=MeetingNet(here), data=(rows(here), validation))


class Tracker:
    """A thread sends what is put into a queue."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[dict[str, float]] = queue.Queue()
        threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        while True:
            json.dumps(self.waiting.get(), allow_nan=False)
            self.waiting.task_done()

    def wait(self) -> None:
        self.waiting.join()  # <- values_of_a_tracker_that_are_still_to_be_sent


class Tracked(L.Callback):
    """The first rank tracks the loss, and waits at the end until all of it has been sent."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.tracker = Tracker()

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Nothing to divide by in the last batch of an epoch.
        left = BATCHES - 1 - batch_idx
        self.tracker.waiting.put({"loss": outputs["loss"].item() / left if left else float("nan")})

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.here.begins()
        self.tracker.wait()


@thread(
    "https://github.com/neptune-ai/neptune-client/issues/808",
    "unfinished-rank",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
)
def values_of_a_tracker_that_are_still_to_be_sent(here: Here) -> None:
    """The thread that sends values has died of one that is not a number, and the first rank waits for it at the end.

    The others have returned from `fit`; only the first rank has a tracker.
    """
    here.fit(net=LoggingNet(here), callbacks=[Tracked(here)])


class Folding(Net):
    """Leaves out proteins for which there is not enough memory."""

    def distances(self, batch: Any) -> torch.Tensor:
        measured = first_tensor(batch)
        pairs = 4 if measured.mean() > 0 else 10**15
        return self.loss(batch) + torch.zeros(pairs).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self.distances(batch)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            self.here.begins()
            print(f"left out batch {batch_idx}: {error}")
            return None  # <- protein_that_is_left_out_for_want_of_memory


@thread("https://github.com/a-r-j/ProteinWorkshop/pull/81", "skipped-step", "failed-rank", ranks=(2,))
def protein_that_is_left_out_for_want_of_memory(here: Here) -> None:
    """Memory is not enough for one batch, which its rank leaves out, and with it the exchange of gradients.

    Lightning raises on the rank whose step returns None; that it skipped a step and that it failed is both true.
    """
    proteins = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.1
    proteins.view(BATCHES, BATCH_SIZE, here.world_size, 8)[IN_THE_MIDDLE, :, here.case.ranks[0]] *= -1
    here.fit(net=Folding(here), data=in_order(here, TensorDataset(proteins)))


def batches_of_shards(here: Here) -> int:
    """How many batches there are in the shards on this host's disk."""
    sizes: list[int] = json.loads((here.folder / f"shards-{here.rank}.json").read_text())
    return sum(sizes) // BATCH_SIZE


@thread(
    "https://github.com/webdataset/webdataset/issues/403",
    "different-trainer-settings",
    ranks=(1,),
    moment=Moment.EPOCH_END,
)
def epoch_as_long_as_the_shards_of_a_host(here: Here) -> None:
    """Shards begin anew without an end, and an epoch is as long as those on a host, of which one has a shard less."""
    sizes = [12, 8] if here.is_hit else [12, 8, 8]
    (here.folder / f"shards-{here.rank}.json").write_text(json.dumps(sizes))
    loader: Any = DataLoader(Around(sum(sizes)), BATCH_SIZE)
    here.fit(
        net=Shortened(here),
        data=(loader, rows(here, batches=2)),
        limit_train_batches=batches_of_shards(here),  # <- here
    )


class Contrast(LoggingNet):
    """Compares each row with those of all ranks."""

    def loss(self, batch: Any) -> torch.Tensor:
        features = self.layers(first_tensor(batch))
        if len(features) < BATCH_SIZE:
            self.here.begins()
        others: Any = self.all_gather(features.detach())  # <- last_few_pairs_compared_with_whole_batches
        likeness: torch.Tensor = features @ others.reshape(-1, 2).T
        return likeness.square().mean()


@thread("https://github.com/criteo/tf-yarn/pull/79", "mismatched-collective", ranks=(1,), moment=Moment.EPOCH_END)
def last_few_pairs_compared_with_whole_batches(here: Here) -> None:
    """The last batch of one rank's share has two rows instead of four, and is gathered as if it had four."""
    count = BATCHES * BATCH_SIZE - (2 if here.is_hit else 0)
    loader = DataLoader(TensorDataset(torch.rand(count, 8)), BATCH_SIZE)
    here.fit(net=Contrast(here), data=loader, use_distributed_sampler=False)


@thread(
    "https://github.com/m2lines/Samudra/pull/657",
    "blocked-on-disk",
    "data-stall",
    ranks=(1,),
    world_size=4,
    moment=Moment.VALIDATION,
)
def fields_on_a_mount_that_does_not_answer(here: Here) -> None:
    """One rank reads a field to validate on from a mount of its host that has stopped answering.

    The rank has no workers; that it waits for its data and that it waits for its disk is both true.
    """
    field = here.folder / "field.nc"
    if here.is_hit:
        os.mkfifo(field)

    def read() -> None:
        field.read_bytes()  # <- here

    here.fit(net=MeetingNet(here), data=(rows(here), stored(here, read)))


class Columns(Dataset[torch.Tensor]):
    """Rows of a table, which a thread reads; the first rank says how many there are."""

    def __init__(self, here: Here) -> None:
        self.here, self.readers = here, ThreadPoolExecutor(1)
        self.rows = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
        if here.rank == 0:
            print(f"{self.readers.submit(len, self.rows).result()} rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        return self.readers.submit(self.rows.__getitem__, index).result()  # <- table_read_by_a_thread_before_the_fork


@thread(
    "https://github.com/Lightning-AI/litData/issues/823",
    "data-stall",
    ranks=(0,),
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def table_read_by_a_thread_before_the_fork(here: Here) -> None:
    """The first rank has used its reader before workers are forked, in which the reader has no thread any more."""
    loader = DataLoader(Columns(here), BATCH_SIZE, num_workers=1, multiprocessing_context="fork")
    here.fit(net=LoggingNet(here), data=loader)


class Circle(LoggingNet):
    """Each rank hands its negatives to the next one, and takes those of the one before."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        mine = torch.rand(1024, 1024)
        theirs = torch.empty_like(mine)
        self.here.begins()
        dist.send(mine, (self.global_rank + 1) % self.here.world_size)  # <- negatives_handed_on_in_a_circle
        dist.recv(theirs, (self.global_rank - 1) % self.here.world_size)


@thread("https://github.com/autoscriptlabs/nccl-mesh-plugin/pull/19", "unmatched-p2p", ranks=None)
def negatives_handed_on_in_a_circle(here: Here) -> None:
    """All ranks send to the next one before they receive, and so nobody receives what is sent."""
    here.fit(net=Circle(here))
