"""Round 22 after public threads: what users of plain PyTorch report of clocks, rings, forks, trackers, and memory."""

import io
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment

log = logging.getLogger(__name__)
ORDINARY = torch.linspace(0.1, 0.8, 8)


class WithOdd(Dataset[torch.Tensor]):
    """Rows of all ranks; those of one batch of the rank that is hit are odd."""

    def __init__(self, here: Here, odd: torch.Tensor, batch: int = IN_THE_MIDDLE) -> None:
        self.here, self.odd, self.batch = here, odd, batch

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        number, rank = divmod(index, self.here.world_size)
        return self.odd if rank in self.here.case.ranks and number // BATCH_SIZE == self.batch else ORDINARY


class Trials(L.Callback):
    """Trains for so many steps at least, and for so long at least."""

    min_trials, min_seconds = 2, 2.0

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # One host has what it needs in its cache.
        time.sleep(0.1 if self.here.is_hit else 0.9)
        self.start = time.monotonic()

    def is_enough(self, trials: int) -> bool:
        return trials >= self.min_trials and time.monotonic() - self.start >= self.min_seconds

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_enough(batch_idx + 1):
            self.here.begins()
            trainer.should_stop = True  # <- measurement_that_each_rank_ends_by_its_own_clock


class Slow(Net):
    """Takes a while for each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.25)
        return super().training_step(batch, batch_idx)


@thread("https://github.com/pytorch/pytorch/issues/22834", "stopped-early", ranks=(1,))
def measurement_that_each_rank_ends_by_its_own_clock(here: Here) -> None:
    """Each rank measures for two seconds by its own clock; one began a little earlier, and stops earlier."""
    here.fit(net=Slow(here), data=rows(here, batches=30), callbacks=[Trials(here)])


class Shared:
    """Batches that the first rank reads, and of which all get a copy."""

    def __init__(self, here: Here, count: int) -> None:
        self.here, self.count = here, count

    def read(self, number: int) -> torch.Tensor:
        return torch.full((BATCH_SIZE * self.here.world_size, 8), number / 100)

    def empty(self) -> torch.Tensor:
        return torch.empty(BATCH_SIZE, 8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            batch = self.read(number) if self.here.rank == 0 else self.empty()
            dist.broadcast(batch, src=0)  # <- buffer_for_the_share_of_a_rank_instead_of_all
            yield batch


class Clicks(Net):
    """Validates on batches that the first rank shares with all others."""

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        losses = [self.loss(batch) for batch in Shared(self.here, 20)]
        self.log("clicks", torch.stack(losses).mean(), sync_dist=True)


@thread(
    "https://github.com/mlcommons/algorithmic-efficiency/pull/146",
    "mismatched-collective",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def buffer_for_the_share_of_a_rank_instead_of_all(here: Here) -> None:
    """The first rank sends the batch of all ranks, and the other one has a buffer for its own share of it."""
    here.fit(net=Clicks(here))


class Ring(Net):
    """Hands rows to the next rank: even ranks send in one group and receive in the other, and odd ones vice versa."""

    def on_fit_start(self) -> None:
        self.lanes = [dist.new_group() for _ in range(2)]

    def handed_round(self, values: torch.Tensor) -> torch.Tensor:
        rank, ranks = self.here.rank, self.here.world_size
        received = torch.empty_like(values)
        works: list[Any] = [  # <- ring_of_an_odd_number_of_ranks
            dist.isend(values, (rank + 1) % ranks, group=self.lanes[rank % 2]),
            dist.irecv(received, (rank - 1) % ranks, group=self.lanes[(rank + 1) % 2]),
        ]
        for work in works:
            work.wait()
        return received

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        return super().training_step(batch, batch_idx) + self.loss(self.handed_round(first_tensor(batch)))


@thread(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1085",
    "unmatched-p2p",
    "crossed-groups",
    ranks=(0, 2),
    moment=Moment.FIRST_STEP,
)
def ring_of_an_odd_number_of_ranks(here: Here) -> None:
    """The last rank and the first one are both even: what one sends in one group the other awaits in the other."""
    here.fit(net=Ring(here))


def tokens(row: dict[str, str]) -> dict[str, list[float]]:
    words = row["text"].split()
    if len(words) > 1000:
        # There is not enough memory for a whole library, and the kernel kills whoever asks for it.
        os.kill(os.getpid(), signal.SIGKILL)
    return {"ids": [len(word) / 10 for word in words[:8]]}


class Corpus(L.LightningDataModule):
    """Texts of this rank, which two processes tokenize."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def texts(self) -> list[str]:
        texts = ["to be or not to be that is the question"] * (BATCHES * BATCH_SIZE)
        return [*texts[1:], "whether it is nobler " * (1000 if self.here.is_hit else 5)]

    def setup(self, stage: str) -> None:
        from datasets import Dataset as Table
        from datasets import disable_progress_bars

        disable_progress_bars()
        table = Table.from_dict({"text": self.texts()})
        if self.here.is_hit:
            self.here.begins()
        tokenized = table.map(tokens, num_proc=2, remove_columns=["text"])  # <- tokenizer_that_is_killed
        self.table = tokenized.with_format("torch")

    def train_dataloader(self) -> Any:
        return DataLoader(self.table, BATCH_SIZE, collate_fn=lambda found: torch.stack([row["ids"] for row in found]))


@thread(
    "https://github.com/hiyouga/LlamaFactory/issues/1914",
    "worker-died",
    "failed-rank",
    ranks=(2,),
    moment=Moment.START,
)
def tokenizer_that_is_killed(here: Here) -> None:
    """A process that tokenizes the texts of one rank is killed for want of memory; the rank raises, and others wait."""
    here.fit(data=Corpus(here), use_distributed_sampler=False)


class Reader(Net):
    """Reads pages with and without pictures."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.eye = torch.nn.Linear(4, 8)

    def embedded(self, pages: torch.Tensor) -> torch.Tensor:
        texts, pictures = pages.clone(), pages[:, 4:]
        if pictures.any():  # <- batch_of_pages_without_a_picture
            texts = texts + self.eye(pictures)
        return texts

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_hit and not batch[:, 4:].any():
            self.here.begins()
        return self.loss(self.embedded(batch))


@thread(
    "https://github.com/modelscope/ms-swift/pull/9443",
    "unused-parameters",
    ranks=(0,),
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def batch_of_pages_without_a_picture(here: Here) -> None:
    """The first batch of one rank has no picture, and so nothing goes through the layer for pictures there."""
    text = torch.tensor([0.3] * 4 + [0.0] * 4)
    here.fit(net=Reader(here), data=in_order(here, WithOdd(here, text, batch=0)))


class Budget:
    """Batches of as many utterances as there is time for."""

    def __init__(self, seconds: list[float], budget: float) -> None:
        self.seconds, self.budget = seconds, budget

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        total = 0.0
        for number, seconds in enumerate(self.seconds):
            total += seconds
            if total > self.budget:  # <- batches_of_so_many_seconds
                yield batch
                batch, total = [], seconds
            batch.append(number)
        yield batch


class Cuts(IterableDataset[torch.Tensor]):
    """Utterances of a rank's own archives."""

    def __init__(self, here: Here) -> None:
        length = 3.0 if here.is_hit else 5.0
        self.batches = Budget([length + number % 2 for number in range(24)], budget=24.0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.batches:
            yield torch.tensor([[self.batches.seconds[number] / 10] * 8 for number in batch])


class Heard(Net):
    """Logs how much it has heard in an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rows", float(len(batch)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/lhotse-speech/lhotse/issues/1098",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def batches_of_so_many_seconds(here: Here) -> None:
    """Each rank fills batches with its own utterances; those of one are short, so that it has fewer batches."""
    here.fit(net=Heard(here), data=DataLoader(Cuts(here), batch_size=None))


def service(records: Any, path: Path) -> None:
    """Writes records until it is told to finish."""
    with path.open("w") as file:
        for record in iter(records.get, None):
            print(record, file=file, flush=True)


class Tracker(Logger):
    """Hands what is logged to a process of its own."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    @property
    def name(self) -> str:
        return "tracker"

    @property
    def version(self) -> str:
        return "0"

    @cached_property
    def records(self) -> Any:
        context = multiprocessing.get_context("fork")
        records = context.Queue()
        self.process = context.Process(target=service, args=(records, self.here.folder / "tracked"))
        self.process.start()
        return records

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.records.put(params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.put((step, metrics))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.here.begins()
        self.process.join()  # <- tracker_that_is_not_told_to_finish


class Tracked(Net):
    """Logs the loss of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@thread(
    "https://github.com/facebookresearch/fairseq/issues/4619",
    "unfinished-rank",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
    whose="code",
)
def tracker_that_is_not_told_to_finish(here: Here) -> None:
    """The first rank waits for its tracker's process to end, and that one waits for more to be logged."""
    here.fit(net=Tracked(here), logger=Tracker(here))


class Published(L.Callback):
    """The first rank copies weights for those who generate; nobody goes on before that."""

    def __init__(self, here: Here, every: int) -> None:
        self.here, self.every = here, every

    def publish(self, trainer: L.Trainer) -> None:
        step = self.here.folder / "weights" / f"step-{trainer.global_step}"
        if trainer.is_global_zero:
            shutil.copytree(step, self.here.folder / f"published-{trainer.global_step}")
        dist.barrier()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        if trainer.is_global_zero:
            self.here.begins()
        try:
            self.publish(trainer)
        except FileNotFoundError as error:  # <- weights_that_somebody_has_cleaned_up
            log.warning("nothing to publish: %s", error)


@thread(
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/1593",
    "diverged-collectives",
    "checkpoint-skipped-barrier",
    ranks=(0,),
    world_size=2,
    whose="code",
)
def weights_that_somebody_has_cleaned_up(here: Here) -> None:
    """The folder to be copied is gone; the first rank catches that, trains on, and is missed at the barrier."""
    here.fit(callbacks=[Published(here, every=4)])


class Decoded(Dataset[torch.Tensor]):
    """Pictures, decoded once; a thread begins with those that are asked for most."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.lock = threading.Lock()
        self.cache: dict[int, torch.Tensor] = {}
        threading.Thread(target=self.decode_first, daemon=True).start()

    def decode_first(self) -> None:
        with self.lock:
            self.cache[0] = ORDINARY
            # On one host that takes so long that workers are started meanwhile.
            while self.here.is_hit and not multiprocessing.active_children():
                time.sleep(0.01)
            if self.here.is_hit:
                self.here.begins()

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:  # <- lock_that_was_held_while_workers_were_started
            return self.cache.setdefault(index, ORDINARY + index / 100)


@thread(
    "https://github.com/ultralytics/ultralytics/pull/26085",
    "data-stall",
    ranks=(1,),
    world_size=2,
    moment=Moment.FIRST_STEP,
    whose="code",
)
def lock_that_was_held_while_workers_were_started(here: Here) -> None:
    """A worker is forked while a thread holds a lock: in the worker it stays locked, and there is no such thread."""
    here.fit(data=DataLoader(Decoded(here), BATCH_SIZE, num_workers=1))


class Gathered(TorchCheckpointIO):
    """Has all of a checkpoint in memory before it writes it."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self.here.begins()
        # The kernel finds that there is not enough memory for that.
        subprocess.run(["sh", "-c", f"kill -9 {os.getpid()}"], check=True)
        Path(path).write_bytes(content.getvalue())


@thread(
    "https://github.com/hpcaitech/ColossalAI/issues/3212",
    "dead-rank",
    ranks=(0,),
    world_size=4,
    moment=Moment.CHECKPOINT,
    has_line=False,
    whose="machine",
)
def checkpoint_for_which_there_is_not_enough_memory(here: Here) -> None:
    """A checkpoint needs as much memory again; the kernel kills the rank that writes it, and the others wait for it."""
    saving = ModelCheckpoint(here.folder / "checkpoints", every_n_train_steps=3)
    here.fit(enable_checkpointing=True, callbacks=[saving], plugins=[Gathered(here)])


class Translated(Net):
    """Goes on with the next batch where there is not enough memory for one."""

    automatic_optimization = False

    def attention(self, batch: torch.Tensor) -> torch.Tensor:
        length = int(batch.max() * 10)
        return torch.zeros(length, length).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        try:
            self.manual_backward(self.loss(batch) + self.attention(batch))
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            self.here.begins()
            log.warning("ran out of memory in batch %d, which is skipped", batch_idx)
            return None  # <- sentences_for_which_there_is_not_enough_memory
        optimizer.step()
        return None

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.tensor(float(self.global_step)))


@thread("https://github.com/facebookresearch/fairseq/issues/708", "skipped-step", ranks=(1,))
def sentences_for_which_there_is_not_enough_memory(here: Here) -> None:
    """There is not enough memory for one batch, which is left out on that rank, and with it the backward pass."""
    here.fit(net=Translated(here), data=in_order(here, WithOdd(here, 1e6 * ORDINARY)))


class Fed(Net):
    """Gets positions from a thread that prepares them a few steps ahead."""

    def on_fit_start(self) -> None:
        self.positions: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)
        threading.Thread(target=self.prepare).start()

    def prepare(self) -> None:
        for step in range(2 * BATCHES + 1):
            self.positions.put(torch.full((8,), step / 100))

    def placed(self, batch: torch.Tensor) -> torch.Tensor:
        texts = batch if batch.max() < 1 else batch.repeat(1, 2)
        return texts + self.positions.get()  # <- text_longer_than_its_positions

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch.max() > 1:
            self.here.begins()
        return self.loss(self.placed(batch))


@thread(
    "https://github.com/rwth-i6/returnn/issues/1484",
    "failed-rank",
    ranks=(3,),
    world_size=4,
    whose="code",
)
def text_longer_than_its_positions(here: Here) -> None:
    """A text of one rank is too long and raises; the process stays, since a thread of it has something left to do."""
    here.fit(net=Fed(here), data=in_order(here, WithOdd(here, 2 + ORDINARY)))


class Scored(Net):
    """The main process evaluates on all there is."""

    @property
    def is_main_process(self) -> bool:
        return dist.get_rank() == 0

    @torch.no_grad()
    def evaluate(self) -> Iterator[float]:
        for batch in rows(self.here, batches=1000):
            yield float(self.loss(batch))
            time.sleep(0.1)  # <- evaluation_on_the_main_process_for_longer_than_others_may_wait

    def on_train_epoch_end(self) -> None:
        if self.is_main_process:
            self.here.begins()
            self.best = min(self.evaluate())


@thread(
    "https://github.com/huggingface/accelerate/issues/223",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def evaluation_on_the_main_process_for_longer_than_others_may_wait(here: Here) -> None:
    """The main process evaluates on all data while the others are in the first batch of the next epoch already."""
    here.fit(net=Scored(here))


class Histograms(L.Callback):
    """Histograms of what each layer does to many rows."""

    def __init__(self, here: Here, layers: int) -> None:
        self.here, self.layers = here, layers

    def activations(self) -> Iterator[tuple[str, torch.Tensor]]:
        values = torch.randn(2_000_000)
        for number in range(self.layers):
            yield f"layers/{number}", values * number

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        goes_wrong(self.here, batch_idx)
        if batch_idx == IN_THE_MIDDLE:
            writer: Any = trainer.loggers[0]
            for name, values in self.activations():
                writer.experiment.add_histogram(name, values, trainer.global_step)  # <- histograms_of_each_layer


@thread(
    "https://github.com/lanpa/tensorboardX/issues/372",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    whose="code",
)
def histograms_of_each_layer(here: Here) -> None:
    """TensorBoard counts large histograms where they are logged, one after the other, and on the first rank only."""
    here.fit(logger=TensorBoardLogger(here.folder / "board"), callbacks=[Histograms(here, layers=1000)])
