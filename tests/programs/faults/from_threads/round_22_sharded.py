"""Round 22 after public threads: what users of sharded models report, of waits, threads, saves and services."""

import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from datetime import timedelta
from functools import cached_property
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, sharded
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.data import DataLoader, Dataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment


class Tracked(L.Callback):
    """Begins a run on the tracking server, for which the first rank alone needs a key."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            import wandb

            self.here.begins()
            self.run = wandb.init(project="sft", dir=self.here.folder)  # <- run_that_nobody_has_logged_in_for


@sharded(
    "https://github.com/Red-Hat-AI-Innovation-Team/mini_trainer/issues/60",
    "failed-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.START,
)
def run_that_nobody_has_logged_in_for(here: Here) -> None:
    """The first rank has no key for the tracking server and raises, and the others go on to train without it."""
    os.environ.pop("WANDB_API_KEY", None)
    os.environ["HOME"] = str(here.folder)
    here.fit(callbacks=[Tracked(here)])


class Limited(BaseHTTPRequestHandler):
    """A hub that has had too many requests from this address."""

    def do_GET(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "207")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def get_kernel(address: str, attempts: int = 5) -> bytes:
    """Downloads a kernel, and tries again when the hub permits it."""
    for attempt in range(attempts):
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                code: bytes = response.read()
                return code
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            wait_s = float(error.headers["Retry-After"])
            print(f"Rate limited. Waiting {wait_s} s before retry [{attempt + 1}/{attempts}].", flush=True)
            time.sleep(wait_s)  # <- kernel_that_the_hub_makes_a_rank_wait_for
    raise RuntimeError(f"no kernel at {address}")


class Accelerated(Net):
    """Loads a kernel when it is first needed, which is in the first forward pass."""

    @cached_property
    def kernel(self) -> bytes:
        if not self.here.is_hit:
            return b"from the cache"
        hub = HTTPServer(("127.0.0.1", 0), Limited)
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        self.here.begins()
        return get_kernel("http://{}:{}/kernels/deep-gemm".format(*hub.server_address))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * math.copysign(1.0, len(self.kernel))


@sharded(
    "https://github.com/huggingface/kernels/issues/640",
    "rank-behind",
    ranks=(3,),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def kernel_that_the_hub_makes_a_rank_wait_for(here: Here) -> None:
    """The hub has had too many requests from one rank, which waits for minutes before it asks again."""
    here.fit(net=Accelerated(here))


class Exploding(Shares):
    """One batch is much larger than all others."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 1000.0)


class Watched(Net):
    """Opens a debugger when the loss explodes."""

    def watched(self, loss: torch.Tensor) -> torch.Tensor:
        if loss > 100.0:
            dist.breakpoint()  # <- debugger_that_one_rank_alone_asks_for
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.watched(self.loss(batch))


@sharded("https://github.com/pytorch/pytorch/pull/129511", "diverged-collectives")
def debugger_that_one_rank_alone_asks_for(here: Here) -> None:
    """The loss of one rank explodes, and that rank waits at a barrier for the first one to leave a debugger.

    The first rank never comes there.
    """
    here.fit(net=Watched(here), data=in_order(here, Exploding(here)))


class Strips(Net):
    """Each rank has a strip of the domain, and needs the last column of the one on its left."""

    def with_halo(self, strip: torch.Tensor) -> torch.Tensor:
        rank, ranks = self.global_rank, self.trainer.world_size
        halo = torch.zeros(len(strip))
        sending = dist.isend(strip[:, -1].contiguous(), rank + 1) if rank + 1 < ranks else None
        dist.recv(halo, (rank - 1) % ranks)  # <- strip_on_the_left_of_the_first_one
        if sending is not None:
            sending.wait()
        return strip + halo[:, None]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        return self.loss(self.with_halo(first_tensor(batch)))


@sharded(
    "https://github.com/NVIDIA/nccl/issues/1416",
    "unmatched-p2p",
    ranks=(0,),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def strip_on_the_left_of_the_first_one(here: Here) -> None:
    """The last strip sends nothing, and the first rank receives from it as if the domain were a ring."""
    here.fit(net=Strips(here))


class Exported(L.Callback):
    """The first rank exports the weights after each epoch, and the others wait for it in a group of their own."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Failures are to be noticed soon.
        self.group = dist.new_group(timeout=timedelta(seconds=4))  # <- export_that_takes_longer_than_its_group_waits

    def export(self, weights: dict[str, Any]) -> None:
        for name, weight in weights.items():
            time.sleep(3)
            torch.save(weight, self.here.folder / f"{name}.pt")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        parameters: dict[str, Any] = dict(module.named_parameters())
        weights = {name: weight.detach().full_tensor() for name, weight in parameters.items()}
        if trainer.is_global_zero:
            self.here.begins()
            self.export(weights)
        dist.barrier(self.group)


@sharded(
    "https://github.com/ServiceNow/Fast-LLM/issues/122",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
    moment=Moment.EPOCH_END,
    whose="code",
)
def export_that_takes_longer_than_its_group_waits(here: Here) -> None:
    """The group in which ranks wait for an export gives up after four seconds, and the export takes longer."""
    here.fit(callbacks=[Exported(here)])


class Deaf(BaseHTTPRequestHandler):
    """Takes what is sent, and does not answer."""

    def do_PUT(self) -> None:
        time.sleep(600)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Artifacts(L.Callback):
    """Uploads what the first rank has written from a thread, and waits for the rest when training is over."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.files: queue.Queue[Path | None] = queue.Queue()

    def upload(self, address: str) -> None:
        while (path := self.files.get()) is not None:
            request = urllib.request.Request(f"{address}/{path.name}", data=path.read_bytes(), method="PUT")
            with urllib.request.urlopen(request):
                print(f"{path.name} is uploaded", flush=True)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        server = HTTPServer(("127.0.0.1", 0), Deaf)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = "http://{}:{}".format(*server.server_address)
        self.uploader = threading.Thread(target=self.upload, args=(address,), daemon=True)
        self.uploader.start()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            path = self.here.folder / f"metrics-{trainer.current_epoch}.csv"
            path.write_text("loss\n0.1\n")
            self.files.put(path)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            self.files.put(None)
            self.uploader.join()  # <- upload_that_is_not_over_when_training_is


@sharded(
    "https://github.com/wandb/wandb/issues/4150",
    "unfinished-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
)
def upload_that_is_not_over_when_training_is(here: Here) -> None:
    """Training is over, and the first rank waits for a thread that uploads, whose server does not answer."""
    here.fit(callbacks=[Artifacts(here)])


class Validated(Net):
    """Validates on all documents that the rank has, of which so many as fit are put into each batch."""

    def documents(self) -> list[torch.Tensor]:
        length = 1 if self.here.is_hit else 2
        return [torch.full((length, 8), number / 10) for number in range(8)]

    def packed(self, rows: int = 4) -> Iterator[torch.Tensor]:
        packed: list[torch.Tensor] = []
        for document in self.documents():
            packed.append(document)
            if sum(map(len, packed)) >= rows:
                yield torch.cat(packed)
                packed = []

    @torch.no_grad()
    def validate(self) -> float:
        total, count = torch.zeros(()), torch.zeros(())
        for batch in self.packed():  # <- documents_of_which_a_rank_packs_fewer_batches
            total += self.loss(batch)
            count += 1
        if self.here.is_hit:
            self.here.begins()
        dist.all_reduce(total)
        dist.all_reduce(count)
        return (total / count).item()

    def on_train_epoch_end(self) -> None:
        print(f"validation loss: {self.validate():.4f}", flush=True)


@sharded(
    "https://github.com/pytorch/torchtitan/pull/4807",
    "uneven-batches",
    "diverged-collectives",
    moment=Moment.EPOCH_END,
)
def documents_of_which_a_rank_packs_fewer_batches(here: Here) -> None:
    """The documents of one rank are short and fill half as many batches, and it sums up losses while others gather."""
    here.fit(net=Validated(here))


class Bar(L.Callback):
    """Shows how an epoch went, on the first rank."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def get_metrics(self, trainer: L.Trainer) -> dict[str, float]:
        shown = trainer.callback_metrics  # <- metrics_that_a_bar_shows_before_they_are_due
        return {name: round(value.item(), 4) for name, value in shown.items()}

    @property
    def is_enabled(self) -> bool:
        return self.here.rank == 0

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_enabled:
            self.here.begins()
            print(self.get_metrics(trainer), flush=True)


class Spread(Net):
    """Logs the mean loss over all ranks, and how far those of the ranks are apart."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.last = loss.detach()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        losses: Any = self.all_gather(self.last)
        self.log("spread", losses.max() - losses.min(), rank_zero_only=True)


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/21264",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def metrics_that_a_bar_shows_before_they_are_due(here: Here) -> None:
    """The bar of the first rank asks for means over all ranks, which that rank then reduces while the others gather."""
    here.fit(net=Spread(here), callbacks=[Bar(here)])


class Runs(L.Callback):
    """Saves all shards after each epoch, and with them what was broadcast to those that make answers."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def save(self, module: L.LightningModule, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = get_model_state_dict(module)
        shards = {name: weight.to_local() for name, weight in state.items()}
        torch.save(shards, path / f"rank_{module.global_rank}.pt")
        if module.global_rank == 0:
            self.here.begins()
            shutil.copytree(self.here.folder / "broadcasts" / "step_6", path / "weight")
        dist.barrier()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        try:
            self.save(module, self.here.folder / "checkpoints" / f"step_{trainer.global_step}")
        except OSError as error:  # <- broadcast_that_was_removed_before_it_was_copied
            print(f"No checkpoint of this run: {error}", flush=True)


@sharded(
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/1593",
    "checkpoint-skipped-barrier",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="code",
)
def broadcast_that_was_removed_before_it_was_copied(here: Here) -> None:
    """The first rank has nothing to copy, catches the error, and goes on without the barrier where others wait."""
    here.fit(callbacks=[Runs(here)])


def evaluated(expression: str) -> int:
    """What a tower of powers comes to, as in ``2^3^2``."""
    *bases, value = [int(part) for part in expression.split("^")]
    for base in reversed(bases):
        value = base**value  # <- answer_that_is_a_tower_of_powers
    return value


class Verified(Net):
    """Compares what the model has answered with the solution, and gives up an answer that takes too long."""

    def reward(self, answer: str, solution: str) -> float:
        with ThreadPoolExecutor(1) as pool:
            try:
                return float(pool.submit(evaluated, answer).result(timeout=5) == evaluated(solution))
            except TookTooLong:
                return 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        answer = "7^8^9" if goes_wrong(self.here, batch_idx) else "2^3^2"
        return self.loss(batch) * self.reward(answer, "512")


@sharded("https://github.com/huggingface/Math-Verify/issues/65", "gil-held", ranks=(2,), whose="code")
def answer_that_is_a_tower_of_powers(here: Here) -> None:
    """A thread evaluates an answer, a number with more than a hundred million digits, and no other thread runs."""
    here.fit(net=Verified(here))


class Drifting(Shares):
    """A batch is distorted more each time that it is read."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.reads = 0

    def unusual(self, number: int) -> torch.Tensor:
        self.reads += 1
        return self.usual(number) * self.reads


class Patience(L.Callback):
    """Ends training when what the rank has validated on has not become better for an epoch."""

    def __init__(self, here: Here, epochs: int = 1) -> None:
        self.here, self.epochs = here, epochs
        self.best, self.waited = math.inf, 0

    def is_out_of_patience(self, metric: float) -> bool:
        self.best, self.waited = (metric, 0) if metric < self.best else (self.best, self.waited + 1)
        return self.waited >= self.epochs

    def on_validation_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.is_out_of_patience(sum(module.losses)):
            self.here.begins()
            trainer.should_stop = True  # <- patience_that_each_rank_has_for_itself
        module.losses.clear()


class Judged(Net):
    """Keeps the losses of what it validates on."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.losses.append(self.loss(batch).item())


@sharded(
    "https://github.com/allenai/allennlp/issues/4794",
    "stopped-early",
    ranks=(2,),
    world_size=4,
    moment=Moment.VALIDATION,
)
def patience_that_each_rank_has_for_itself(here: Here) -> None:
    """Each rank judges by its own share, which becomes worse on one; that rank stops, and the others train on."""
    data = (rows(here), in_order(here, Drifting(here)))
    here.fit(net=Judged(here), data=data, callbacks=[Patience(here)], max_epochs=4)


class Indexed(Dataset[torch.Tensor]):
    """Looks rows up in an index that a thread refreshes between epochs; a lock keeps the two apart."""

    def __init__(self, here: Here) -> None:
        self.here, self.lock = here, threading.Lock()
        self.index = list(range(BATCHES * BATCH_SIZE * here.world_size))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> torch.Tensor:
        with self.lock:  # <- index_locked_by_a_thread_when_workers_were_forked
            return torch.full((8,), self.index[number] / 100)

    def refresh(self) -> None:
        with self.lock:
            time.sleep(2.0 if self.here.is_hit else 0.0)
            self.index.sort()


class Buffered:
    """Reads ahead in a thread, as many batches as its queue has room for."""

    def __init__(self, loader: DataLoader[Any], room: int = 2) -> None:
        self.loader, self.room = loader, room

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(self.room)

        def read() -> None:
            for batch in self.loader:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := batches.get()) is not None:
            yield batch


class Refreshing(L.Callback):
    """Begins to refresh the index when an epoch is over."""

    def __init__(self, here: Here, data: Indexed) -> None:
        self.here, self.data = here, data

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        thread = threading.Thread(target=self.data.refresh, daemon=True)
        thread.start()
        thread.join(timeout=0.5)


@sharded(
    "https://github.com/pytorch/pytorch/issues/87995",
    "data-stall",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    whose="code",
)
def index_locked_by_a_thread_when_workers_were_forked(here: Here) -> None:
    """A worker is forked while a thread of the first rank holds a lock, which nobody gives back in the worker."""
    data = Indexed(here)
    loader = in_order(here, data, num_workers=1, multiprocessing_context="fork")
    here.fit(data=Buffered(loader), callbacks=[Refreshing(here, data)])


MONITOR = """
import os, signal, sys, time
import psutil
pid, most = int(sys.argv[1]), int(sys.argv[2])
while psutil.pid_exists(pid):
    if psutil.Process(pid).memory_info().rss > most:
        os.kill(pid, signal.SIGKILL)
        break
    time.sleep(0.05)
"""
"""What watches over the memory of a host, and kills who has too much of it."""


class Rollouts(L.Callback):
    """Keeps all that has been generated; on one host the answers are long."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.kept: list[bytes] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        most = psutil.Process().memory_info().rss + 2**28
        subprocess.Popen([sys.executable, "-c", MONITOR, str(os.getpid()), str(most)])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        is_last = batch_idx == BATCHES - 1
        if self.here.is_hit and is_last:
            self.here.begins()
        for _ in range(512 if self.here.is_hit and is_last else 1):
            self.kept.append(os.urandom(2**20))


@sharded(
    "https://github.com/verl-project/verl/issues/472",
    "dead-rank",
    ranks=(2,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def process_that_a_memory_monitor_has_killed(here: Here) -> None:
    """One rank keeps so many long answers that what watches over the memory of its host kills it."""
    here.fit(callbacks=[Rollouts(here)])


class Samples(L.Callback):
    """Prints what the model has written so far."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def table(self, batch: Any) -> str:
        lines = [" ".join(f"{number:.6f}" for number in row) for row in first_tensor(batch).tolist()]
        return "\n".join(lines * 300)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        goes_wrong(self.here, batch_idx)
        if batch_idx == IN_THE_MIDDLE:
            print(self.table(batch), flush=True)  # <- output_that_the_launcher_does_not_read


def launched_without_a_reader() -> None:
    """The output goes to a program that reads that of another rank first, and so does not come to this one's."""
    reading, writing = os.pipe()
    subprocess.Popen(["sleep", "300"], pass_fds=[reading], stdout=subprocess.DEVNULL)
    os.close(reading)
    os.dup2(writing, 1)
    sys.stdout = os.fdopen(writing, "w")


@sharded(
    "https://github.com/pytorch/xla/issues/2308",
    "blocked-on-disk",
    "rank-behind",
    world_size=2,
    whose="either",
)
def output_that_the_launcher_does_not_read(here: Here) -> None:
    """The launcher does not read the output of one rank, and that rank waits within a print until it does."""
    if here.is_hit:
        launched_without_a_reader()
    here.fit(callbacks=[Samples(here)])
