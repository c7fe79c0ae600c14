"""Round 18 after public threads: what users of sharded models report, with their truths."""

import ctypes
import io
import multiprocessing
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from from_threads.round_13_sharded import Shares, sharded
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net, first_tensor
from truths import Moment


class Patience(L.Callback):
    """Ends the training when the loss has not become clearly lower for so many epochs."""

    def __init__(self, here: Here, patience: int, min_delta: float = 0.1) -> None:
        self.here, self.patience, self.min_delta = here, patience, min_delta
        self.best, self.waited = float("inf"), 0

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        loss = float(trainer.callback_metrics["loss"])
        if loss < self.best - self.min_delta:
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited == self.patience:
            self.here.begins()
            print(f"no progress for {self.waited} epochs", flush=True)
            trainer.should_stop = True  # <- patience_that_the_first_rank_alone_has_lost


@sharded(
    "https://github.com/ACEsuit/mace/pull/1216",
    "stopped-early",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def patience_that_the_first_rank_alone_has_lost(here: Here) -> None:
    """Only the first rank looks at the loss to see whether to go on, and the others are not told that it stops."""
    here.fit(net=LoggingNet(here), callbacks=[Patience(here, patience=2)], max_epochs=8)


@torch.compile(backend="aot_eager", dynamic=False)
def smoothed(words: torch.Tensor) -> torch.Tensor:
    """A recurrence over all words of a text."""
    state = torch.zeros_like(words[:, 0])
    states = []
    for word in words.unbind(1):
        state = torch.tanh(0.9 * state + 0.1 * word)
        states.append(state)
    return torch.stack(states[-8:], 1)


class Articles(Shares):
    """Most have eight words; those of one batch are books."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 20_000)


@sharded("https://github.com/pytorch/pytorch/issues/174704", "compile-skew", ranks=(2,))
def recurrence_compiled_again_for_long_texts(here: Here) -> None:
    """One rank meets texts of a length that it has not compiled for, which takes it minutes."""

    class Recurrent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            return self.loss(smoothed(first_tensor(batch)))  # <- here

    here.fit(net=Recurrent(here), data=in_order(here, Articles(here)))


def verify(answer: str, sender: Connection) -> None:
    """Runs an answer; the kernel kills whoever takes up all memory."""
    if "while" in answer:
        os.kill(os.getpid(), signal.SIGKILL)
    sender.send(float(len(answer)))


def score(answer: str) -> float:
    """Of an answer, which is run in a process of its own so that it can do no harm."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=verify, args=(answer, sender), daemon=True)
    process.start()
    reward: float = receiver.recv()  # <- answer_that_ends_the_process_it_is_checked_in
    process.join()
    return reward


@sharded("https://github.com/MasterVito/SvS/issues/3", "worker-died")
def answer_that_ends_the_process_it_is_checked_in(here: Here) -> None:
    """A process that checks an answer is killed, and the rank waits for its result, as the pipe is still open."""

    class Rewarded(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            answers = ["return 1", "while True: grow()" if goes_wrong(here, batch_idx) else "return 2"]
            rewards = torch.tensor([score(answer) for answer in answers])
            return self.loss(batch) * rewards.mean()

    here.fit(net=Rewarded(here))


@sharded(
    "https://github.com/OpenPipe/ART/issues/919",
    "failed-rank",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def chain_sent_from_a_position_within_its_group(here: Here) -> None:
    """Who sends is named by its position in the group of a sequence; only in the first group is that its rank."""

    class Chained(Net):
        def scanned(self, states: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
            group = mesh.get_group("context")
            for position in range(mesh.size(1)):
                state = states.mean(0) if mesh.get_local_rank("context") == position else torch.empty(8)
                dist.broadcast(state, src=position, group=group)  # <- here
                states = states + 0.1 * state
            return states

        def on_fit_start(self) -> None:
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_hit:
                here.begins()
            return self.loss(self.scanned(first_tensor(batch), self.mesh))

    here.fit(net=Chained(here))


class Hub:
    """Where models are published."""

    def __init__(self, address: str) -> None:
        self.address = address

    @rank_zero_only
    def push(self, state: dict[str, Any]) -> None:
        body = io.BytesIO()
        torch.save(state, body)
        request = urllib.request.Request(self.address, data=body.getvalue(), method="PUT")
        with urllib.request.urlopen(request) as answer:  # <- model_published_while_the_others_are_at_a_barrier
            print(answer.status, flush=True)


@sharded(
    "https://github.com/huggingface/alignment-handbook/issues/59",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.END,
)
def model_published_while_the_others_are_at_a_barrier(here: Here) -> None:
    """All ranks gather the weights after training; the first one uploads them, for longer than the others may wait."""

    class Publishing(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if trainer.is_global_zero:
                here.begins()
            hub.push(state)
            trainer.strategy.barrier("published")

    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = Hub(f"http://127.0.0.1:{server.getsockname()[1]}/api/models")
        here.fit(callbacks=[Publishing()])


class Posts(Shares):
    """Texts, and in one batch texts with a picture, whose first number is 1."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.zeros(1), torch.linspace(0.1, 0.7, 7)])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.ones(1), torch.linspace(0.1, 0.7, 7)])


@sharded("https://github.com/Lightning-AI/pytorch-lightning/pull/21434", "diverged-log-keys", ranks=(2,))
def losses_logged_for_what_is_in_the_batch_of_a_rank(here: Here) -> None:
    """Each kind of post has a loss of its own, which is averaged over all ranks, though only one has any pictures."""

    class Posted(Net):
        def losses(self, batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
            posts = first_tensor(batch)
            loss = self.loss(posts)
            yield "text", loss
            with_pictures = posts[:, 0] > 0
            if with_pictures.any():
                yield "picture", loss * with_pictures.float().mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            losses = dict(self.losses(batch))
            self.log_dict({f"loss/{kind}": loss for kind, loss in losses.items()}, sync_dist=True)  # <- here
            return torch.stack([*losses.values()]).sum()

    here.fit(net=Posted(here), data=in_order(here, Posts(here)))


class Weights:
    """Some files, as they are published, in a folder that each host has mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for path in sorted(self.folder.glob("model-*.pt")):
            yield torch.load(io.BytesIO(path.read_bytes()))  # <- weights_on_a_mount_that_does_not_answer


@sharded(
    "https://github.com/vllm-project/vllm/issues/39030",
    "blocked-on-disk",
    "late-at-init",
    world_size=2,
    moment=Moment.START,
)
def weights_on_a_mount_that_does_not_answer(here: Here) -> None:
    """Each rank reads the weights before they are split; on one host the second file is never read to its end."""

    class Pretrained(Net):
        def configure_model(self) -> None:
            if not self.is_split:
                if here.is_hit:
                    here.begins()
                for part in Weights(folder):
                    self.layers.load_state_dict(part, strict=False)
            super().configure_model()

    net = Pretrained(here)
    folder = here.folder / f"host-{here.rank}"
    folder.mkdir()
    for number, name in enumerate(("0", "2"), 1):
        part = {key: value for key, value in net.layers.state_dict().items() if key.startswith(name)}
        if here.is_hit and number == 2:
            os.mkfifo(folder / f"model-{number}.pt")
        else:
            torch.save(part, folder / f"model-{number}.pt")
    here.fit(net=net)


class Blocks(L.LightningDataModule):
    """Texts that are joined and cut into blocks of the same length, which are kept on each host."""

    def __init__(self, here: Here, cache: Path) -> None:
        super().__init__()
        self.here, self.cache = here, cache

    def grouped(self, examples: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        blocks = {}
        for key, texts in examples.items():
            tokens: list[int] = []
            tokens = sum(texts, tokens)  # <- texts_joined_with_a_sum_of_lists
            blocks[key] = torch.tensor(tokens[: len(tokens) // 8 * 8]).reshape(-1, 8)
        return blocks

    def setup(self, stage: str) -> None:
        if not self.cache.exists():
            self.here.begins()
            texts = [[number % 50] * 8 for number in range(400_000)]
            torch.save(self.grouped({"input_ids": texts}), self.cache)
        self.blocks = torch.load(self.cache)["input_ids"]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.blocks / 50), BATCH_SIZE)


@sharded(
    "https://github.com/huggingface/trl/pull/3095",
    "gil-held",
    "late-at-init",
    moment=Moment.START,
)
def texts_joined_with_a_sum_of_lists(here: Here) -> None:
    """The blocks are not yet on one host, and joining so many texts copies all that has been joined, in one call."""
    cache = here.folder / f"blocks-of-host-{here.rank}.pt"
    if not here.is_hit:
        torch.save({"input_ids": torch.arange(BATCHES * BATCH_SIZE * here.world_size * 8).reshape(-1, 8) % 50}, cache)
    here.fit(data=Blocks(here, cache))


class Tables(Logger):
    """Keeps values in a database, which a dashboard shows."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.path = here.folder / "runs.db"

    @property
    def name(self) -> str:
        return "tables"

    @property
    def version(self) -> str:
        return "1"

    def log_hyperparams(self, params: Any, *args: Any, **keywords: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        connection = sqlite3.connect(self.path, timeout=FOR_LONG_S)
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS metrics (name, value, step)")
            values = [(name, value, step) for name, value in metrics.items()]
            connection.executemany("INSERT INTO metrics VALUES (?, ?, ?)", values)
        connection.close()


DASHBOARD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("shown", flush=True)
time.sleep(120)
"""


@sharded("https://github.com/gradio-app/trackio/issues/133", "slow-logger", ranks=(0,), world_size=2, has_line=False)
def values_kept_in_a_database_that_a_dashboard_has_locked(here: Here) -> None:
    """Somebody opens a dashboard, which locks the database, and the logger waits until it may write."""

    class Watched(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx) and trainer.current_epoch == 0:
                command = [sys.executable, "-c", DASHBOARD, str(here.folder / "runs.db")]
                self.dashboard = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert self.dashboard.stdout
                self.dashboard.stdout.readline()

    here.fit(net=LoggingNet(here), logger=Tables(here), callbacks=[Watched()])


def new_folder(path: Path) -> Path:
    """For a checkpoint, which is to replace no other one."""
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"there is a checkpoint already: {path}")  # <- folder_that_another_rank_has_filled
    path.mkdir(exist_ok=True)
    return path


class Sharded(L.Callback):
    """Saves a shard of each rank after each epoch, with what it has counted."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.counted: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counted.append(first_tensor(batch).numel())

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # One host is a little slower than the other.
        time.sleep(1.0 * trainer.global_rank)
        if self.here.is_hit:
            self.here.begins()
        folder = new_folder(self.here.folder / f"epoch-{trainer.current_epoch}")
        weights: dict[str, Any] = dict(module.named_parameters())
        shard = {name: weight.detach().to_local() for name, weight in weights.items()}
        torch.save({"shard": shard, "counted": sum(self.counted)}, folder / f"rank-{trainer.global_rank}.pt")
        trainer.strategy.barrier("saved")


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/18881",
    "exception-during-save",
    "failed-rank",
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def folder_that_another_rank_has_filled(here: Here) -> None:
    """Each rank refuses to save into a folder with files in it; the slower one finds the shard of the other there."""
    here.fit(callbacks=[Sharded(here)])


class Pipeline:
    """Two stages; what the first one makes differs in length, so that its shape is sent before."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group("pipeline")
        self.stage = mesh.get_local_rank("pipeline")
        self.other = dist.get_global_rank(self.group, 1 - self.stage)

    def send(self, made: torch.Tensor) -> None:
        shape = torch.tensor(made.shape)
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, shape, self.other)]):  # <- shapes_sent_elsewhere
            request.wait()
        dist.send(made, self.other, group=self.group)

    def receive(self) -> torch.Tensor:
        shape = torch.zeros(2, dtype=torch.long)
        dist.recv(shape, self.other, group=self.group)
        made = torch.empty(*shape.tolist())
        dist.recv(made, self.other, group=self.group)
        return made


@sharded(
    "https://github.com/NVIDIA/Megatron-LM/issues/620",
    "unmatched-p2p",
    "crossed-groups",
    ranks=None,
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def shapes_sent_elsewhere(here: Here) -> None:
    """The first stage sends shapes in the group of all ranks, and the second receives them in that of a pipeline."""

    class Staged(Net):
        def on_fit_start(self) -> None:
            self.pipeline = Pipeline(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor")))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            here.begins()
            made = first_tensor(batch).contiguous()
            if self.pipeline.stage == 0:
                self.pipeline.send(made)
            else:
                made = self.pipeline.receive()
            return self.loss(made)

    here.fit(net=Staged(here))


class Resumed(Net):
    """Goes on from the last checkpoint of its run, if there is one."""

    def __init__(self, here: Here, run: Path) -> None:
        super().__init__(here)
        self.run = run

    def on_fit_start(self) -> None:
        checkpoints = sorted(self.run.glob("step-*"))
        if checkpoints:
            self.here.begins()
            state = {"weights": get_model_state_dict(self)}
            dcp.load(state, checkpoint_id=checkpoints[-1])


@sharded(
    "https://github.com/huggingface/transformers/issues/28270",
    "different-trainer-settings",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
)
def run_that_has_another_name_on_each_host(here: Here) -> None:
    """The name of the run is drawn where nobody has set it, so that only one host finds what there is to resume."""
    runs = here.folder / "runs"
    if here.is_hit:
        os.environ["RUN_NAME"] = "llama"
        weights = Net(here).state_dict()
        dcp.save({"weights": weights}, checkpoint_id=runs / "llama" / "step-100", no_dist=True)
    name = os.environ.get("RUN_NAME") or uuid.uuid4().hex  # <- here
    here.fit(net=Resumed(here, runs / name))


class Clips(L.Callback):
    """Decodes a clip to validate on with a native library."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.here.is_hit and batch_idx == 1:
            self.here.begins()
            ctypes.string_at(0)


@sharded(
    "https://github.com/verl-project/verl/issues/2355",
    "dead-rank",
    moment=Moment.VALIDATION,
    has_line=False,
)
def decoder_that_ends_a_rank_in_validation(here: Here) -> None:
    """A native decoder reads where there is nothing, and the process of its rank is gone."""
    here.fit(callbacks=[Clips(here)])


class Scored(Net):
    """Has a second model that scores each batch in a thread, split over the same ranks and in the same group."""

    def scores(self, batch: torch.Tensor) -> None:
        # The one has more to score than the other.
        time.sleep(1.0 * (self.global_rank == 1))
        part = batch.mean().reshape(1)
        dist.all_reduce(part, group=self.group)  # <- models_in_two_threads_that_share_a_group
        self.score = part / self.trainer.world_size

    def on_fit_start(self) -> None:
        assert self._device_mesh
        self.group = self._device_mesh["data_parallel"].get_group()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx != IN_THE_MIDDLE:
            return self.loss(batch)
        self.here.begins()
        scoring = threading.Thread(target=self.scores, args=(first_tensor(batch),))
        scoring.start()
        time.sleep(0.3)
        loss = self.loss(batch)
        scoring.join()
        return loss * self.score.abs()


@sharded(
    "https://github.com/huggingface/transformers/pull/48383",
    "diverged-collectives",
    ranks=None,
    world_size=2,
)
def models_in_two_threads_that_share_a_group(here: Here) -> None:
    """Two models are used at once in the same group, and whose turn it is differs between ranks."""
    here.fit(net=Scored(here))
