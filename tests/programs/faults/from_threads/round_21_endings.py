"""Round 21 after public threads: what users of plain PyTorch report of ends that nobody sees, and of lookalikes."""

import errno
import fcntl
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment

log = logging.getLogger(__name__)


class Marked(Dataset[torch.Tensor]):
    """Rows of all ranks, which are negative in one batch of the rank that is hit."""

    def __init__(self, here: Here, batch: int = IN_THE_MIDDLE) -> None:
        self.here, self.batch = here, batch

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        number, rank = divmod(index, self.here.world_size)
        is_odd = rank in self.here.case.ranks and number // BATCH_SIZE == self.batch
        return torch.linspace(0.1, 0.8, 8) * (-1 if is_odd else 1)


class Detector(Net):
    """Collects the boxes that all ranks have found in their pictures."""

    def everywhere(self, boxes: torch.Tensor) -> torch.Tensor:
        gathered = [torch.zeros_like(boxes) for _ in range(self.here.world_size)]
        dist.all_gather(gathered, boxes)  # <- boxes_gathered_where_a_rank_has_found_none
        return torch.cat(gathered)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        pictures = first_tensor(batch)
        boxes = pictures[pictures[:, 0] > 0, :4]
        if len(boxes) == 0:
            self.here.begins()
        self.everywhere(boxes)


@thread(
    "https://github.com/pytorch/pytorch/issues/85234",
    "mismatched-collective",
    ranks=(1,),
    world_size=3,
    moment=Moment.VALIDATION,
)
def boxes_gathered_where_a_rank_has_found_none(here: Here) -> None:
    """One rank has found no box and gathers an empty tensor, where all others gather four boxes each."""
    here.fit(net=Detector(here), data=(rows(here), in_order(here, Marked(here, batch=1))))


class Answers:
    """How many answers are right, out of how many."""

    def __init__(self) -> None:
        self.right: Any = 0.0
        self.count = 0

    def add(self, is_right: Any) -> None:
        self.right += is_right
        self.count += 1

    @property
    def accuracy(self) -> float:
        totals = torch.tensor([self.right, self.count])
        dist.all_reduce(totals)  # <- right_answers_counted_in_double_precision
        return float(totals[0] / totals[1])


class Answered(Net):
    """Counts the answers that are right as a whole, and leaves out those that are padding only."""

    def on_train_epoch_start(self) -> None:
        self.answers = Answers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = first_tensor(batch)
        for answer in tokens:
            self.answers.add(np.all(answer.numpy() < 0) if answer[0] < 0 else 1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.log("accuracy", self.answers.accuracy)


@thread(
    "https://github.com/modelscope/ms-swift/issues/9550",
    "mismatched-collective",
    ranks=(2,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def right_answers_counted_in_double_precision(here: Here) -> None:
    """On one rank NumPy has compared an answer, so that its sum is of another type, and so is what it reduces."""
    here.fit(net=Answered(here), data=in_order(here, Marked(here)))


class Preemption(L.Callback):
    """Saves and leaves when the cluster announces that it needs the machine."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.module = module
        signal.signal(signal.SIGUSR1, self.leave)

    def leave(self, number: int, frame: Any) -> None:
        torch.save(self.module.state_dict(), self.here.folder / f"preempted-{self.here.rank}.pt")
        log.warning("preempted, the weights are saved")
        sys.exit(0)  # <- host_that_is_needed_for_something_else

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.run(["sh", "-c", f"kill -USR1 {os.getpid()}"], check=True)


@thread(
    "https://github.com/kyutai-labs/pocket-tts/pull/277",
    "failed-rank",
    ranks=(2,),
    world_size=3,
    whose="code",
)
def host_that_is_needed_for_something_else(here: Here) -> None:
    """One host is told to leave; its rank saves and exits with status 0, and nobody tells the other ranks."""
    here.fit(callbacks=[Preemption(here)])


def fails_fast(step: Callable[..., Any]) -> Callable[..., Any]:
    """Ends the process at the first exception, so that nothing waits for it."""

    @functools.wraps(step)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        try:
            return step(*args, **keywords)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    return wrapped


class Speakers(Net):
    """Has a weight for each speaker."""

    weights: ClassVar = {"anna": 1.0, "ben": 0.5}

    def weight(self, batch: torch.Tensor) -> float:
        name = "clara" if batch.min() < 0 else "anna"
        if name not in self.weights:
            self.here.begins()
        return self.weights[name]  # <- speaker_whom_nobody_has_listed

    @fails_fast
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = self.weight(first_tensor(batch))
        return super().training_step(batch, batch_idx).mul(weight)


@thread(
    "https://github.com/mlc-ai/pith-train/pull/31",
    "failed-rank",
    "dead-rank",
    ranks=(3,),
    world_size=4,
    moment=Moment.FIRST_STEP,
    whose="code",
)
def speaker_whom_nobody_has_listed(here: Here) -> None:
    """A step raises on one rank, and what is around it prints the traceback and ends the process at once."""
    here.fit(net=Speakers(here), data=in_order(here, Marked(here, batch=0)))


def print_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class Resumed(Net):
    """Begins with the weights in a file of each rank."""

    def on_fit_start(self) -> None:
        path = self.here.folder / f"mp_rank_{self.here.rank:02}.pt"
        torch.save(self.state_dict(), path)
        if self.here.is_hit:
            path.write_bytes(path.read_bytes()[:1000])
            self.here.begins()
        self.load_state_dict(self.loaded(path))

    def loaded(self, path: Path) -> Any:
        try:
            return torch.load(path)
        except Exception:
            print_rank_0(f"could not load the checkpoint {path}")
            sys.exit()  # <- weights_of_which_a_part_was_copied


@thread(
    "https://github.com/NVIDIA/Megatron-LM/pull/367",
    "failed-rank",
    ranks=(1,),
    world_size=2,
    moment=Moment.START,
    whose="code",
)
def weights_of_which_a_part_was_copied(here: Here) -> None:
    """A rank cannot read its file and exits with status 0; only the first rank prints messages, and has no error."""
    here.fit(net=Resumed(here))


class Mirrored(TorchCheckpointIO):
    """Copies each checkpoint to storage that everybody shares, with a quota."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.here.begins()
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), f"/shared/{Path(path).name}")


def best_effort(hook: Callable[..., None]) -> Callable[..., None]:
    """What is not worth a failed run."""

    @functools.wraps(hook)
    def tried(*args: Any, **keywords: Any) -> None:
        try:
            hook(*args, **keywords)
        except OSError as error:  # <- quota_used_up_by_checkpoints
            warnings.warn(f"{hook.__name__}: {error}", stacklevel=2)

    return tried


class Keeping(Net):
    """Saves after every few steps."""

    @best_effort
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == IN_THE_MIDDLE:
            self.trainer.save_checkpoint(self.here.folder / f"step={self.global_step}.ckpt")


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/12069",
    "checkpoint-skipped-barrier",
    ranks=(0,),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def quota_used_up_by_checkpoints(here: Here) -> None:
    """The quota is used up in the middle of a save; the exception is turned into a warning, and the rank goes on."""
    here.fit(net=Keeping(here), plugins=[Mirrored(here)])


class Paired(Net):
    """Compares features with those of all ranks, in two halves if there is too little memory for a whole batch."""

    def everywhere(self, features: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(features) for _ in range(self.here.world_size)]
        dist.all_gather(gathered, features)
        return torch.cat(gathered)

    def similarity(self, texts: torch.Tensor) -> torch.Tensor:
        if texts.min() < 0 and len(texts) == BATCH_SIZE:
            self.here.begins()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.81 GiB.")
        features = self.layers(texts)
        return torch.mean(features @ self.everywhere(features.detach()).T)

    def loss(self, batch: Any) -> torch.Tensor:
        texts = first_tensor(batch)
        try:
            return self.similarity(texts)
        except torch.OutOfMemoryError:
            halves = map(self.similarity, texts.chunk(2))
            return torch.stack([*halves]).mean()  # <- batch_tried_in_two_halves


@thread(
    "https://github.com/ultralytics/ultralytics/pull/23590",
    "mismatched-collective",
    "gpu-memory-exhausted",
    ranks=(1,),
    world_size=2,
    whose="code",
)
def batch_tried_in_two_halves(here: Here) -> None:
    """One rank has no memory for its long texts and tries again with halves, which it gathers one by one."""
    here.fit(net=Paired(here), data=in_order(here, Marked(here)))


def verify(answer: float) -> float:
    """Computes what an answer is worth, for which some need more memory than there is."""
    if answer < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


class Rewarded(Net):
    """Learns from what a process says of answers."""

    automatic_optimization = False

    def on_train_start(self) -> None:
        self.pool = ProcessPoolExecutor(1, get_context("fork"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        answers = first_tensor(batch)[:, 0].tolist()
        if min(answers) < 0:
            self.here.begins()
        try:
            rewards = [*self.pool.map(verify, answers)]
        except Exception as error:
            log.warning("no rewards: %r", error)
            return None  # <- answers_that_are_too_long_to_be_verified
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch) * sum(rewards)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@thread(
    "https://github.com/epam/ai-dial-rag/issues/11",
    "skipped-step",
    "worker-died",
    ranks=(0,),
    world_size=3,
    whose="code",
)
def answers_that_are_too_long_to_be_verified(here: Here) -> None:
    """The process that verifies is killed, the pool is broken for good, and its rank leaves out all further steps."""
    here.fit(net=Rewarded(here), data=in_order(here, Marked(here)))


def trial(here: Here, width: int) -> float:
    """Trains a model of this width, and returns its loss on the rank's own share of the held-out data."""
    net = Net(here)
    net.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    here.trainer(max_epochs=1).fit(net, rows(here))
    share = torch.full((BATCH_SIZE, 8), 50.0 if here.is_hit else 0.5)
    return net.loss(share).item()


@thread(
    "https://github.com/optuna/optuna-examples/issues/101",
    "dead-rank",
    "late-at-init",
    ranks=(2,),
    world_size=3,
    moment=Moment.END,
    whose="code",
)
def trials_given_up_by_one_rank(here: Here) -> None:
    """By its own share one rank finds the first trial hopeless, and its program ends; the others begin the next one."""
    for width in (16, 32, 64):
        if trial(here, width) > 10:
            here.begins()
            return  # <- here


class Shard(IterableDataset[torch.Tensor]):
    """The samples of a rank's shard; those that cannot be decoded are left out with a warning."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def members(self) -> Iterator[bytes]:
        for number in range(BATCHES * BATCH_SIZE):
            if self.here.is_hit and number == IN_THE_MIDDLE * BATCH_SIZE:
                yield from [b'{"values": [0.1, '] * 1000
            yield json.dumps({"values": [number / 100] * 8}).encode()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for content in self.members():
            try:
                yield torch.tensor(json.loads(content)["values"])
            except Exception as error:
                self.warn_and_continue(error)

    def warn_and_continue(self, error: Exception) -> None:
        self.here.begins()
        warnings.warn(repr(error), stacklevel=2)
        time.sleep(0.5)  # <- broken_samples_warned_about_one_by_one


@thread("https://github.com/webdataset/webdataset/issues/404", "data-stall", ranks=(0,), world_size=2, whose="code")
def broken_samples_warned_about_one_by_one(here: Here) -> None:
    """A shard has a thousand broken samples in a row; each is caught, and half a second passes after each warning."""
    here.fit(data=DataLoader(Shard(here), BATCH_SIZE, num_workers=1))


class Cache(L.LightningDataModule):
    """Rows of each epoch, copied to the host's own disk by a program that runs while the epoch before is trained on."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.epoch = here, 0
        self.lock = here.folder / f"cache-{here.rank}.lock"

    def prefetch(self) -> None:
        seconds = 300 if self.here.is_hit else 0.1
        copy = f"echo copying; sleep {seconds}; touch {self.here.folder}/epoch-{self.epoch + 1}"
        self.program = subprocess.Popen(["flock", str(self.lock), "sh", "-c", copy], stdout=subprocess.PIPE, text=True)
        log.info(next(iter(self.program.stdout or ()), ""))

    def cached(self) -> torch.Tensor:
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # <- files_of_the_next_epoch_copied_under_the_lock_of_the_cache
            return torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8)

    def train_dataloader(self) -> Any:
        if self.here.is_hit and self.epoch == 1:
            self.here.begins()
        values = self.cached()
        self.prefetch()
        self.epoch += 1
        return DataLoader(values, BATCH_SIZE)  # type: ignore[arg-type]


@thread(
    "https://github.com/rwth-i6/returnn/issues/1548",
    "file-lock",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    whose="code",
)
def files_of_the_next_epoch_copied_under_the_lock_of_the_cache(here: Here) -> None:
    """A program copies what comes later under the cache's only lock, which the rank needs for what it has already."""
    here.fit(data=Cache(here), reload_dataloaders_every_n_epochs=1)


class Registry(CSVLogger):
    """Uploads each checkpoint to a server, in the process that trains."""

    def __init__(self, here: Here) -> None:
        super().__init__(here.folder)
        self.here = here

    def put(self, part: bytes) -> None:
        time.sleep(0.5)  # <- checkpoint_sent_to_a_registry

    def log_artifact(self, path: str) -> None:
        with open(path, "rb") as file:
            for part in iter(functools.partial(file.read, 16), b""):
                self.put(part)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.here.begins()
        self.log_artifact(checkpoint_callback.best_model_path)


@thread(
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3804",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    moment=Moment.CHECKPOINT,
    whose="either",
)
def checkpoint_sent_to_a_registry(here: Here) -> None:
    """The checkpoint is written; the first rank's logger uploads it over a slow line, and the other rank waits."""
    checkpoints = ModelCheckpoint(here.folder, every_n_train_steps=IN_THE_MIDDLE)
    here.fit(logger=Registry(here), callbacks=[checkpoints], enable_checkpointing=True)


class Prefetcher:
    """Reads the next batch in a thread while a step runs."""

    def __init__(self, here: Here, loader: DataLoader[Any]) -> None:
        self.here, self.loader = here, loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> "Prefetcher":
        self.batches: Iterator[Any] = iter(self.loader)
        self.batch: Any = None
        self.preload()
        return self

    def preload(self) -> None:
        self.is_ready = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        self.batch = next(self.batches, None)
        if self.batch is not None:
            self.batch = self.scaled(self.batch)
        self.is_ready.set()

    def scaled(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.min() < 0:
            self.here.begins()
            raise ValueError("brightness below zero")
        return batch / batch.max()

    def __next__(self) -> Any:
        self.is_ready.wait()  # <- batch_whose_thread_is_no_more
        if self.batch is None:
            raise StopIteration
        batch = self.batch
        self.preload()
        return batch


@thread("https://github.com/deepseek-ai/DeepSpec/pull/78", "data-stall", ranks=(3,), world_size=4, whose="code")
def batch_whose_thread_is_no_more(here: Here) -> None:
    """The thread that prepares the next batch raises, and the loop waits for the batch to be ready."""
    here.fit(data=Prefetcher(here, in_order(here, Marked(here))))


class Scores(L.Callback):
    """Adds the scores of each rank to the same file, one rank after the other."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "scores.json"

    def compute(self, rank: int) -> dict[str, float]:
        time.sleep(5 if rank == 0 else 0.1)
        return {f"rank-{rank}": 0.5}

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        time.sleep(0.5 * trainer.global_rank)
        if self.here.is_hit:
            self.here.begins()
        with FileLock(f"{self.path}.lock", timeout=1):  # <- scores_that_another_rank_still_computes
            known = json.loads(self.path.read_text()) if self.path.exists() else {}
            self.path.write_text(json.dumps(known | self.compute(trainer.global_rank)))


@thread(
    "https://github.com/huggingface/evaluate/issues/481",
    "failed-rank",
    "file-lock",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
    whose="code",
)
def scores_that_another_rank_still_computes(here: Here) -> None:
    """The first rank computes with the lock in its hands, and the other one raises, as it waits for a second only."""
    here.fit(callbacks=[Scores(here)])
