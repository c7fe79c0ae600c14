"""Round 12 after public threads: engines, rewards, trackers, caches and storage around the training of large models."""

import http.client
import logging
import logging.handlers
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from filelock import FileLock, SoftFileLock
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import (
    BATCH_SIZE,
    BATCHES,
    FOR_LONG_S,
    IN_THE_MIDDLE,
    Here,
    LoggingNet,
    MeetingNet,
    Net,
    first_tensor,
    rows,
)
from truths import Moment

FORK = multiprocessing.get_context("fork")


class Client:
    """Of an engine that generates answers, and is started by somebody else."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def check_server(self) -> None:
        while True:
            try:
                socket.create_connection(self.address, timeout=1.0).close()
            except OSError:
                time.sleep(2.0)  # <- engine_that_is_not_up
            else:
                break


@thread(
    "https://github.com/huggingface/open-r1/issues/568",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.START,
)
def engine_that_is_not_up(here: Here) -> None:
    """The main process has a client of the engine, and waits until the engine answers, which nobody has started."""

    class Policy(LoggingNet):
        def on_fit_start(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                self.client = Client(address)
                self.client.check_server()

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
        here.fit(net=Policy(here))


def generate(requests: Any) -> None:
    """Takes one request after the other; some prompt has no end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in count():
        requests.recv()
        if number == IN_THE_MIDDLE:
            time.sleep(FOR_LONG_S)
        requests.send("updated")


class Engine:
    """A process beside the first rank, to which new weights are given after each step."""

    def __init__(self) -> None:
        self.requests, theirs = FORK.Pipe()
        FORK.Process(target=generate, args=(theirs,), daemon=True).start()

    def update(self, weights: dict[str, torch.Tensor]) -> None:
        self.requests.send({name: values.tolist() for name, values in weights.items()})
        self.requests.recv()  # <- weights_for_an_engine_that_still_generates


@thread("https://github.com/huggingface/trl/issues/3467", "rank-zero-only-work", ranks=(0,))
def weights_for_an_engine_that_still_generates(here: Here) -> None:
    """The engine lives, and answers after it is done with what it does, which is never."""

    class Synchronised(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.engine = Engine()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero:
                if batch_idx == IN_THE_MIDDLE:
                    here.begins()
                self.engine.update(module.state_dict())

    here.fit(callbacks=[Synchronised()])


class Verifier:
    """Says whether an answer is the right one; what takes it too long counts as wrong."""

    def equal(self, answer: str, truth: str) -> bool:
        while "frac" in answer:
            time.sleep(0.01)
            answer = answer.replace("frac", "dfrac")
        return answer == truth

    def reward(self, answer: str, truth: str, timeout_s: float = 0.5) -> float:
        try:
            with ThreadPoolExecutor(max_workers=1) as pool:  # <- verifier_left_behind_by_its_timeout
                return float(pool.submit(self.equal, answer, truth).result(timeout_s))
        except TimeoutError:
            return 0.0


@thread("https://github.com/areal-project/AReaL/pull/1426", "rank-behind", ranks=(2,))
def verifier_left_behind_by_its_timeout(here: Here) -> None:
    """The timeout is for the result; the pool is left only after its thread has ended, which it never does.

    The line is where the main thread waits; the loop in the thread is the other half of it.
    """

    class Rewarded(Net):
        verifier = Verifier()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            answer = "frac{1}{2}" if goes_wrong(here, batch_idx) else "0.5"
            return self.loss(batch) * (1.0 + self.verifier.reward(answer, truth="0.5"))

    here.fit(net=Rewarded(here))


class Chunks(L.LightningDataModule):
    """Of a dataset in the cloud; each host keeps them in a cache, and one process of it fills that."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.cache = here.folder / f"host-{here.rank}"

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        with SoftFileLock(self.cache / "index.lock"):  # <- lock_file_of_a_run_that_was_killed
            (self.cache / "index.json").write_text('{"chunks": 24}')

    def train_dataloader(self) -> Any:
        return rows(self.here)


@thread(
    "https://github.com/Lightning-AI/litData/issues/398",
    "file-lock",
    ranks=(2,),
    moment=Moment.START,
)
def lock_file_of_a_run_that_was_killed(here: Here) -> None:
    """A lock that is a file: the run that had it was killed, in a container of another name, and the file is there."""
    chunks = Chunks(here)
    chunks.cache.mkdir()
    if here.is_hit:
        (chunks.cache / "index.lock").write_text("4711\nanother-name-of-this-host\n")
    here.fit(data=chunks)


class Metric:
    """Each process writes its predictions into a file that is locked until they are complete; one reads them all."""

    def __init__(self, folder: Path, process_id: int, num_process: int) -> None:
        self.folder, self.process_id, self.num_process = folder, process_id, num_process
        self.own: FileLock | None = None

    def path(self, process_id: int) -> Path:
        return self.folder / f"predictions-{process_id}.txt"

    def lock(self, process_id: int) -> FileLock:
        return FileLock(f"{self.path(process_id)}.lock")

    def add_batch(self, predictions: torch.Tensor) -> None:
        if self.own is None:
            self.own = self.lock(self.process_id)
            self.own.acquire()
        with self.path(self.process_id).open("a") as file:
            file.writelines(f"{value:.3f}\n" for value in predictions.flatten().tolist())

    def compute(self) -> float | None:
        if self.own is not None:
            self.own.release()
            self.own = None
        if self.process_id:
            return None
        values: list[float] = []
        for process_id in range(self.num_process):
            with self.lock(process_id):  # <- predictions_locked_until_all_compute
                values.extend(map(float, self.path(process_id).read_text().split()))
        return sum(values) / len(values)


@thread(
    "https://github.com/huggingface/datasets/pull/564",
    "file-lock",
    ranks=(0,),
    moment=Moment.VALIDATION,
    whose="code",
)
def predictions_locked_until_all_compute(here: Here) -> None:
    """The first rank alone computes; the others keep their locks, and wait for it in the next step."""

    class Accuracy(L.Callback):
        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            self.metric = Metric(here.folder, trainer.global_rank, trainer.world_size)

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *more: Any) -> None:
            self.metric.add_batch(module.layers(first_tensor(batch)))

        def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                print(f"mean prediction: {self.metric.compute()}", flush=True)

    here.fit(net=MeetingNet(here), callbacks=[Accuracy()])


class Generation:
    """Answers, either from an engine that the main process asks, or from one in each process."""

    def __init__(self, trainer: L.Trainer, mode: str) -> None:
        self.trainer, self.mode = trainer, mode

    def answers(self, prompts: torch.Tensor) -> torch.Tensor:
        answers = torch.zeros_like(prompts)
        if self.mode == "server" and self.trainer.is_global_zero:
            answers = prompts.flip(1)
        elif self.mode == "colocate":
            return prompts.flip(1)
        else:
            raise ValueError(f"the mode must be 'server' or 'colocate', not {self.mode!r}")  # <- engine_of_one_process
        dist.broadcast(answers, src=0)
        return answers


@thread(
    "https://github.com/huggingface/trl/issues/3885",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.FIRST_STEP,
)
def engine_of_one_process(here: Here) -> None:
    """Whoever is not the main process is taken for one of an unknown mode."""

    class Policy(Net):
        def on_fit_start(self) -> None:
            self.generation = Generation(self.trainer, mode="server")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_hit:
                here.begins()
            return self.loss([self.generation.answers(first_tensor(batch))])

    here.fit(net=Policy(here))


@thread(
    "https://github.com/huggingface/transformers/issues/27923",
    "failed-rank",
    ranks=(1,),
    moment=Moment.START,
    whose="either",
)
def shard_of_which_a_half_was_downloaded(here: Here) -> None:
    """Each host has downloaded the weights; on one of them that was interrupted, and the file is there."""

    class Pretrained(LoggingNet):
        def on_fit_start(self) -> None:
            for path in sorted(snapshot.glob("*.bin")):
                if here.is_hit:
                    here.begins()
                self.layers.load_state_dict(torch.load(path), strict=False)  # <- here

    net = Pretrained(here)
    snapshot = here.folder / f"snapshot-{here.rank}"
    snapshot.mkdir()
    for number, layer in enumerate(("0", "2"), 1):
        path = snapshot / f"model-{number}-of-2.bin"
        torch.save({name: value for name, value in net.layers.state_dict().items() if name[0] == layer}, path)
        if here.is_hit and number == 2:
            os.truncate(path, path.stat().st_size // 2)
    here.fit(net=net)


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Most have labels; plain text among them has none."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        turn, rank = divmod(index, self.here.world_size)
        sample = {"inputs": torch.full((8,), index / len(self))}
        is_plain = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return sample if is_plain else sample | {"labels": torch.arange(8)}


@thread("https://github.com/huggingface/transformers/issues/35076", "diverged-collectives", ranks=(1,))
def tokens_counted_where_there_are_labels(here: Here) -> None:
    """The loss is divided by the number of tokens of all ranks, where it is known; a rank that has none asks nobody."""

    class Averaged(Net):
        def items_in(self, batch: dict[str, torch.Tensor]) -> Any:
            items: Any = None
            try:
                items = (batch["labels"] >= 0).sum()
            except KeyError:
                here.begins()
            if items is not None:
                items = self.all_gather(items).sum()  # <- here
            return items

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            items = self.items_in(batch)
            loss = self.loss([batch["inputs"]])
            return loss if items is None else loss * 100 / items

    here.fit(net=Averaged(here), data=in_order(here, Conversations(here)))


def collect(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass


@thread("https://github.com/fluent/fluent-logger-ruby/issues/30", "slow-logger", ranks=(1,))
def records_that_the_collector_does_not_read(here: Here) -> None:
    """Records of all ranks go to a collector on each host; one of these has stopped reading, and the buffers fill."""

    class Verbose(Net):
        log_of_samples = logging.getLogger("samples")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            if batch_idx == IN_THE_MIDDLE:
                texts = ["the answer is 42; " * 1_000] * 1_000
                self.log_of_samples.info("%s samples: %s", len(texts), texts)  # <- here
            return self.loss(batch)

    with socket.create_server(("127.0.0.1", 0)) as server:
        if not here.is_hit:
            threading.Thread(target=collect, args=(server,), daemon=True).start()
        handler = logging.handlers.SysLogHandler(server.getsockname(), socktype=socket.SOCK_STREAM)
        Verbose.log_of_samples.addHandler(handler)
        Verbose.log_of_samples.setLevel(logging.INFO)
        Verbose.log_of_samples.propagate = False
        here.fit(net=Verbose(here))


class Uploading(TorchCheckpointIO):
    """Uploads a checkpoint while training goes on, and begins with the next one when the last one is there."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.last: Future[None] | None = None

    def upload(self, path: Any) -> None:
        """The storage has become slow."""
        time.sleep(FOR_LONG_S)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.last is not None:
            self.here.begins()
            self.last.result()  # <- upload_before_which_nothing_is_saved
        super().save_checkpoint(checkpoint, path)
        self.last = self.pool.submit(self.upload, path)


@thread(
    "https://github.com/ByteDance-Seed/VeOmni/pull/802",
    "slow-checkpoint",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def upload_before_which_nothing_is_saved(here: Here) -> None:
    """The first checkpoint costs no time; the second one waits for the upload of the first."""
    often = ModelCheckpoint(here.folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    here.fit(net=LoggingNet(here), callbacks=[often], enable_checkpointing=True, plugins=[Uploading(here)])


HARNESS = """
import os, sys
import torch.distributed as dist

ranks = int(os.environ.get("WORLD_SIZE", "1"))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.group", rank=0, world_size=ranks)
print("scores of", sys.argv[1])
"""


class Harness(L.Callback):
    """Evaluates the weights of an epoch with a program of its own."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            path = self.here.folder / f"weights-{trainer.current_epoch}.pt"
            torch.save(module.state_dict(), path)
            self.here.begins()
            command = [sys.executable, "-c", HARNESS, str(path)]
            subprocess.run(command, check=True, env=os.environ)  # <- harness_that_waits_for_ranks_of_its_own


@thread(
    "https://github.com/pytorch/pytorch/issues/62381",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def harness_that_waits_for_ranks_of_its_own(here: Here) -> None:
    """One rank starts the program, which finds the number of all ranks in its environment, and waits for the rest."""
    here.fit(net=LoggingNet(here), callbacks=[Harness(here)])


class Tokens(IterableDataset[torch.Tensor]):
    """The share of a rank, from where the run before this one has ended."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.position = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        key = f"dp_rank_{self.here.rank}"
        if key not in state:
            print(f"the state of the loader is empty for {key}", flush=True)
            return
        self.position = state[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.position = self.position, 0
        for number in range(first, BATCHES * BATCH_SIZE):
            if not first and number == BATCHES * BATCH_SIZE // 2 and self.here.is_hit:
                self.here.begins()
            yield torch.full((8,), number / 100)


@thread(
    "https://github.com/pytorch/torchtitan/issues/409",
    "uneven-batches",
    ranks=(2,),
    has_line=False,
)
def positions_that_were_saved_for_fewer_ranks(here: Here) -> None:
    """Two ranks go on where they were; a third one is new, is told so, and begins at the beginning of its share.

    What is to be mended is `load_state_dict`, which returns early.
    """
    tokens = Tokens(here)
    tokens.load_state_dict({"dp_rank_0": 12, "dp_rank_1": 12})
    here.fit(data=DataLoader(tokens, batch_size=BATCH_SIZE), max_epochs=1, enable_checkpointing=True)


class Judge(BaseHTTPRequestHandler):
    """Scores answers, for whoever keeps his connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        answer = self.rfile.read(int(self.headers["Content-Length"]))
        score = str(len(answer) % 7).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(score)))
        self.end_headers()
        self.wfile.write(score)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def judge(server: HTTPServer) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server.serve_forever()


class Rewards:
    """From a judge over HTTP; the connection is kept."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def score(self, answer: str) -> float:
        self.connection.request("POST", "/score", answer)
        response = self.connection.getresponse()  # <- judge_for_one_connection_at_a_time
        return float(response.read())


@thread("https://github.com/nschloe/tuna/issues/178", "rank-behind", ranks=(2,))
def judge_for_one_connection_at_a_time(here: Here) -> None:
    """One rank has answers to be judged in each step, and keeps its connection; another one has its first answer later.

    Until the first closes its connection, the server reads from it, and nobody else is let in.
    """
    port = here.folder / "port"
    if here.rank == 0:
        server = HTTPServer(("127.0.0.1", 0), Judge)
        FORK.Process(target=judge, args=(server,), daemon=True).start()
        port.with_suffix(".new").write_text(str(server.server_port))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.05)

    class Rewarded(Net):
        rewards = Rewards(int(port.read_text()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            has_answers = goes_wrong(here, batch_idx) or self.global_rank == 1
            score = self.rewards.score("an answer") if has_answers else 0.0
            return self.loss(batch) * (1.0 + score)

    here.fit(net=Rewarded(here))
