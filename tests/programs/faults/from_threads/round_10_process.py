"""Round 10 after public threads: preempted hosts, caches, uploads, handlers, terminals, tools and databases."""

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import pty
import queue
import runpy
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, rows
from truths import Moment

LOG = logging.getLogger("train")


class Preemption(L.Callback):
    """Ends training together once any host has been told to go."""

    is_noticed = False

    def notice(self, number: int, frame: Any) -> None:
        self.is_noticed = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self.notice)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        notices = module.all_gather(torch.tensor(self.is_noticed))
        if bool(notices.any()):
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "preempted.ckpt")
            trainer.should_stop = True


class Scheduler(L.Callback):
    """Takes a host away, and signals every process that it has started there."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx) and trainer.current_epoch == 0:
            everyone = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            command = f"sleep 0.1; kill -TERM {' '.join(map(str, everyone))}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)


@thread(
    "https://github.com/KempnerInstitute/KempnerForge/pull/203",
    "worker-died",
    "failed-rank",
    ranks=(2,),
    has_line=False,
)
def workers_told_to_go_with_their_host(here: Here) -> None:
    """Ranks finish the step and save; the workers of the loader on that host have no such handler."""

    class Augmented(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.4)
            return super().training_step(batch, batch_idx)

    data = rows(here, num_workers=2, persistent_workers=True)
    here.fit(net=Augmented(here), data=data, callbacks=[Preemption(), Scheduler(here)])


class Frames(L.LightningDataModule):
    """Frames of simulations in text, converted by whoever comes first; a folder says that somebody is at it."""

    LOCK_TIMEOUT_S = 2.0

    def __init__(self, here: Here, source: Path) -> None:
        super().__init__()
        self.here = here
        self.cache, self.lock = source.with_suffix(".pt"), source.with_suffix(".lock")

    def parsed(self, frame: int) -> torch.Tensor:
        time.sleep(0.06)
        return torch.full((8,), frame / 100)

    def convert(self) -> None:
        frames = torch.stack([self.parsed(frame) for frame in range(BATCHES * BATCH_SIZE * self.here.world_size)])
        torch.save(frames, self.cache.with_suffix(".partial"))
        self.cache.with_suffix(".partial").rename(self.cache)

    def wait(self) -> None:
        deadline = time.monotonic() + self.LOCK_TIMEOUT_S
        while self.lock.exists():
            if time.monotonic() >= deadline:
                self.here.begins()
                raise TimeoutError(f"{self.lock} is in the way; is anybody converting?")  # <- frames_that_take_longer
            time.sleep(0.1)

    def setup(self, stage: str) -> None:
        time.sleep(0.2 * self.here.rank)
        try:
            self.lock.mkdir()
        except FileExistsError:
            self.wait()
        else:
            self.convert()
            self.lock.rmdir()
        self.frames = torch.load(self.cache)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.frames), batch_size=BATCH_SIZE)


@thread(
    "https://github.com/deepmodeling/deepmd-kit/pull/5984",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.START,
)
def frames_that_take_longer(here: Here) -> None:
    """The first rank converts a large file, in good order, for longer than the others are ready to wait."""
    here.fit(data=Frames(here, here.folder / "water.extxyz"))


class Gateway:
    """To a bucket; what is written goes out at the rate that the host was given."""

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self.file, self.bytes_per_s = path.open("wb"), bytes_per_s

    def write(self, data: Any) -> int:
        time.sleep(len(data) / self.bytes_per_s)  # <- shard_through_a_narrower_gateway
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


class Shards(L.Callback):
    """Each rank uploads its part of the optimizer's state, and the first one says when all parts are there."""

    def __init__(self, here: Here, bytes_per_s: float) -> None:
        self.here, self.bytes_per_s = here, bytes_per_s

    def upload(self, state: dict[str, Any], step: int) -> None:
        gateway = Gateway(self.here.folder / f"step-{step}-shard-{self.here.rank}.pt", self.bytes_per_s)
        torch.save(state, gateway)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx) or batch_idx == IN_THE_MIDDLE:
            moments = torch.zeros(250_000)
            self.upload({"model": module.state_dict(), "moments": moments}, trainer.global_step)
            dist.barrier()
            if trainer.is_global_zero:
                (self.here.folder / f"step-{trainer.global_step}-complete").touch()


@thread(
    "https://github.com/facebookresearch/fairseq2/issues/1485",
    "slow-checkpoint",
    ranks=(2,),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def shard_through_a_narrower_gateway(here: Here) -> None:
    """One host has been given a hundredth of what the others have."""
    here.fit(callbacks=[Shards(here, bytes_per_s=8_000 if here.is_hit else 50_000_000)])


class Status:
    """Of a run: written with each step, and shown to whoever asks for it with a signal."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.values: dict[str, float] = {}

    def listen(self) -> None:
        signal.signal(signal.SIGUSR1, self.show)

    def show(self, number: int, frame: Any) -> None:
        with self.lock:  # <- status_asked_for_while_it_is_written
            LOG.info("status: %s", self.values)

    def write(self) -> None:
        """A moment later the file server shows it to all hosts."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values))
        time.sleep(0.1)
        partial.replace(self.path)

    def update(self, **values: float) -> None:
        with self.lock:
            self.values.update(values)
            self.write()


class Monitored(LoggingNet):
    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.status = Status(here.folder / f"status-{here.rank}.json")

    def on_fit_start(self) -> None:
        self.status.listen()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.status.update(step=batch_idx, loss=float(loss.detach()))
        return loss


def ask_for_status(pid: int) -> None:
    """As somebody does who looks at one of the hosts."""
    asking = f"for turn in $(seq 12); do kill -USR1 {pid}; sleep 0.07; done"
    subprocess.Popen(["sh", "-c", asking], start_new_session=True)


@thread("https://github.com/pocoproject/poco/issues/4939", "rank-behind", ranks=(2,))
def status_asked_for_while_it_is_written(here: Here) -> None:
    class Operator(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                ask_for_status(os.getpid())

    here.fit(net=Monitored(here), callbacks=[Operator()])


class LeakFinder(L.Callback):
    """If there are many more tensors than after the step before, it is looked up who holds them."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.before: int | None = None

    def holders(self, tensors: list[Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for tensor in tensors:
            for holder in gc.get_referrers(tensor):  # <- negatives_that_look_like_a_leak
                found[type(holder).__name__] = found.get(type(holder).__name__, 0) + 1
        return found

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        if self.before is not None and len(tensors) - self.before > self.allowed:
            LOG.warning("%d tensors more, held by %s", len(tensors) - self.before, self.holders(tensors))
        self.before = len(tensors)


@thread(
    "https://github.com/mgedmin/objgraph/issues/61",
    "rank-zero-only-work",
    ranks=(3,),
    world_size=4,
)
def negatives_that_look_like_a_leak(here: Here) -> None:
    """Hard negatives are kept for the next epoch, one tensor each; one scan has very many of them."""

    class Detection(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.annotations = [{"scan": number, "nodules": [number]} for number in range(150_000)]
            self.negatives: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            count = 20_000 if goes_wrong(here, batch_idx) else 20
            self.negatives.extend(loss.detach().expand(count).split(1))
            return loss

    here.fit(net=Detection(here), callbacks=[LeakFinder(allowed=1000)])


REPORT = """
import json, sys

def main(arguments):
    path, = arguments
    with open(path) as file:
        print("accuracy:", json.load(file)["accuracy"])
    sys.exit(0)

if __name__ == "__main__":
    main(sys.argv[1:])
"""


class Reported(L.Callback):
    """Lets the same program that one calls by hand make the report of each epoch."""

    def __init__(self, here: Here) -> None:
        self.here, self.program = here, here.folder / "report.py"

    @rank_zero_only
    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.program.write_text(REPORT)

    def report(self, scores: dict[str, float], epoch: int) -> None:
        path = self.here.folder / f"scores-{epoch}.json"
        path.write_text(json.dumps(scores))
        sys.argv = [str(self.program), str(path)]
        runpy.run_path(str(self.program), run_name="__main__")  # <- report_made_by_a_program_that_exits

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.here.begins()
        self.report({"accuracy": 0.5}, trainer.current_epoch)


@thread(
    "https://github.com/mandiant/flare-floss/issues/189",
    "failed-rank",
    "dead-rank",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def report_made_by_a_program_that_exits(here: Here) -> None:
    """It exits with 0, as programs do that have done what they should."""
    here.fit(callbacks=[Reported(here)])


class Scores:
    """Of samples that were hard, in a database of all ranks; what an epoch has found is kept if the epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=3600)

    def create(self) -> None:
        with self.connection:
            self.connection.execute("CREATE TABLE scores (sample INTEGER, score REAL)")

    def add(self, sample: int, score: float) -> None:
        self.connection.execute("INSERT INTO scores VALUES (?, ?)", (sample, score))  # <- scores_kept_if_the_epoch_ends

    def commit(self) -> None:
        self.connection.commit()


@thread(
    "https://github.com/optuna/optuna/issues/4994",
    "file-lock",
    ranks=(),
    has_ranks=False,
)
def scores_kept_if_the_epoch_ends(here: Here) -> None:
    """Two ranks meet a hard sample in the same step: one writes, and the other one waits for it to be done."""

    class Mining(Net):
        scores = Scores(here.folder / "scores.sqlite")

        def setup(self, stage: str) -> None:
            if self.global_rank == 0:
                self.scores.create()

        def hardness(self, batch_idx: int) -> float:
            """A long sample takes longer."""
            if batch_idx != IN_THE_MIDDLE or self.global_rank == 2:
                return 0.1
            time.sleep(0.5 * self.global_rank)
            return 0.9

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hardness = self.hardness(batch_idx)
            if hardness > 0.5:
                here.begins()
                self.scores.add(batch_idx * self.trainer.world_size + self.global_rank, hardness)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.scores.commit()

    here.fit(net=Mining(here))


class Teacher(threading.Thread):
    """Answers beside the step, and remembers what it has answered."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.questions: queue.SimpleQueue[tuple[int, torch.Tensor]] = queue.SimpleQueue()
        self.is_answered = threading.Event()
        self.known: dict[int, torch.Tensor] = {}

    def think(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.6)
        return values.mean(1, keepdim=True)

    def run(self) -> None:
        while True:
            sample, values = self.questions.get()
            if sample not in self.known:
                self.known[sample] = self.think(values)
            self.is_answered.set()

    def ask(self, sample: int, values: torch.Tensor) -> None:
        self.questions.put((sample, values))

    def answer(self, sample: int) -> torch.Tensor:
        self.is_answered.clear()
        self.is_answered.wait()  # <- answer_that_was_there_already
        return self.known[sample]


@thread(
    "https://github.com/wpilibsuite/allwpilib/pull/9423",
    "rank-behind",
    ranks=(1,),
    world_size=4,
)
def answer_that_was_there_already(here: Here) -> None:
    """The teacher thinks for as long as the student does; one rank is given a sample for a second time."""

    class Distilled(Net):
        def on_fit_start(self) -> None:
            self.teacher = Teacher()
            self.teacher.start()

        def student(self, values: torch.Tensor) -> torch.Tensor:
            time.sleep(0.15)
            output: torch.Tensor = self.layers(values)
            return output

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            sample = 0 if goes_wrong(here, batch_idx) else batch_idx
            self.teacher.ask(sample, batch[0])
            output = self.student(batch[0])
            return (output - self.teacher.answer(sample)).square().mean()

    here.fit(net=Distilled(here), max_epochs=1)


class Console(Logger):
    """A line for each step."""

    name = "console"
    version = 0

    def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"step {step}  {values}", flush=True)  # <- terminal_stopped_with_a_key


class Terminal(L.Callback):
    """In which the first rank was started, on its host."""

    def __init__(self, here: Here, keys: dict[int, bytes]) -> None:
        self.here, self.keys = here, keys
        if here.rank == 0:
            self.screen, terminal = pty.openpty()
            os.dup2(terminal, 1)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx in self.keys and trainer.current_epoch == 0:
            self.here.begins()
            os.write(self.screen, self.keys[batch_idx])


@thread("https://github.com/tqdm/tqdm/issues/892", "slow-logger", "blocked-on-disk", ranks=(0,))
def terminal_stopped_with_a_key(here: Here) -> None:
    """Somebody has pressed Ctrl-S to read, and left."""
    here.fit(net=LoggingNet(here), logger=Console(), callbacks=[Terminal(here, {IN_THE_MIDDLE: b"\x13"})])


class Decoder:
    """Of clips; the library was written for a program of its own."""

    def __init__(self, codec: str) -> None:
        self.codec = codec

    def start(self) -> None:
        if self.codec != "h264":
            print(f"no decoder for {self.codec}", flush=True)
            sys.exit(0)  # <- clip_that_ends_its_worker

    def frame(self, number: int) -> torch.Tensor:
        self.start()
        return torch.full((8,), number / 100)


class Clips(Dataset[torch.Tensor]):
    """To validate on; one clip of the rank that is hit was recorded with another camera."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def codec(self, index: int) -> str:
        turn, rank = divmod(index, self.here.world_size)
        if rank in self.here.case.ranks and turn == 2 * BATCH_SIZE + 1:
            self.here.begins()
            return "av1"
        return "h264"

    def __getitem__(self, index: int) -> torch.Tensor:
        return Decoder(self.codec(index)).frame(index)


@thread(
    "https://github.com/facebookresearch/SymbolicMathematics/issues/6",
    "worker-died",
    "failed-rank",
    ranks=(1,),
    moment=Moment.VALIDATION,
)
def clip_that_ends_its_worker(here: Here) -> None:
    here.fit(net=MeetingNet(here), data=(rows(here), in_order(here, Clips(here), num_workers=1)))


class Judge:
    """Has answers judged by a service, of which two requests may run at a time; a refused one is made again."""

    def __init__(self, at_once: int = 2) -> None:
        self.at_once = at_once

    async def request(self, answer: str, attempt: int) -> float:
        await asyncio.sleep(0.05)
        if attempt == 0 and answer.endswith("?"):
            raise ConnectionError("429 Too Many Requests")
        return len(answer) / 100

    async def score(self, answer: str, attempt: int = 0) -> float:
        async with self.slots:
            try:
                return await self.request(answer, attempt)
            except ConnectionError:
                return await self.score(answer, attempt + 1)

    async def scores(self, answers: list[str]) -> list[float]:
        self.slots = asyncio.Semaphore(self.at_once)
        return await asyncio.gather(*map(self.score, answers))


@thread(
    "https://github.com/banteg/multicall.py/issues/93",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def request_made_again_within_its_slot(here: Here) -> None:
    """Two requests are refused at the same time: each keeps its slot, and waits for another one."""

    class Judged(L.Callback):
        judge = Judge()

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                answers = ["What do you mean?", "And why?", "It is so.", "Perhaps."]
                print(asyncio.run(self.judge.scores(answers)))

    here.fit(callbacks=[Judged()])


@thread(
    "https://github.com/hiyouga/LlamaFactory/issues/3036",
    "dead-rank",
    ranks=(3,),
    world_size=4,
    has_line=False,
)
def terminal_closed_on_the_last_host(here: Here) -> None:
    """The rank was started from a shell there, with nohup before a script that sets it aside."""

    class Slow(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.3)
            return super().training_step(batch, batch_idx)

    class Shell(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                subprocess.Popen(["sh", "-c", "sleep 0.1; kill -HUP $PPID"], start_new_session=True)

    here.fit(net=Slow(here), callbacks=[Shell()])
