"""Trainings of public threads that go wrong before the first batch."""

import multiprocessing
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton
from training import Here, Net, rows
from truths import Moment, fault


@fault(
    "late-at-init",
    "file-lock",
    ranks=(2, 3),
    at={Moment.START: (4,)},
    source="https://github.com/pytorch/pytorch/issues/189245",
    whose="machine",
)
def extension_lock_left_by_a_killed_build(here: Here) -> None:
    """A build that was killed left its lock in the cache of the second node, and every later start waits for it."""
    cache = here.folder / f"node-{here.rank // 2}" / "torch_extensions"
    cache.mkdir(parents=True, exist_ok=True)
    if here.is_hit:
        (cache / "lock").touch()

    class WithKernels(Net):
        def setup(self, stage: str) -> None:
            build_kernels(here, cache)

    here.fit(net=WithKernels(here))


def build_kernels(here: Here, cache: Path) -> None:
    baton = FileBaton(str(cache / "lock"), wait_seconds=0.2)
    if (cache / "kernels.so").exists():
        return
    if baton.try_acquire():
        (cache / "kernels.so").touch()
        baton.release()
        return
    if here.is_hit:
        here.begins()
    baton.wait()  # <- extension_lock_left_by_a_killed_build


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/hao-ai-lab/FastVideo/pull/598",
)
def cache_that_appears_while_ranks_look_for_it(here: Here) -> None:
    """Rank 0 builds an index and waits for the others, who have found it meanwhile and returned before the barrier."""

    class Latents(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            time.sleep(0.8 * here.rank)
            self.files = self.files_and_lengths(here.folder / "index.txt")

        def files_and_lengths(self, index: Path) -> list[str]:
            if index.exists():
                return index.read_text().split()
            if here.rank == 0:
                index.write_text("part-0 part-1")
                here.begins()
            dist.barrier()  # <- here
            return self.files_and_lengths(index)

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Latents())


@fault(
    "late-at-init",
    ranks=(1,),
    at={Moment.START: (2,)},
    source="https://github.com/meta-pytorch/torchtune/issues/1178",
)
def prompt_that_only_one_rank_gets_an_answer_to(here: Here) -> None:
    """The user allows remote code at the terminal; that is the answer to rank 0, and rank 1 has asked, too."""
    terminal, keyboard = os.pipe()
    if here.rank == 0:
        os.write(keyboard, b"y\n")
    os.dup2(terminal, 0)

    class Articles(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            if here.is_hit:
                here.begins()
            if not trusts_remote_code("articles"):
                raise PermissionError("the data needs its loading script")

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Articles())


def trusts_remote_code(name: str) -> bool:
    print(f"{name} contains custom code. Do you wish to run it? [y/N]", flush=True)
    answer = input()  # <- prompt_that_only_one_rank_gets_an_answer_to
    return answer.lower() == "y"


VOCABULARY_LOCK = threading.Lock()


@fault(
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    at={Moment.START: (3,)},
    source="https://github.com/deepspeedai/DeepSpeed/issues/3905",
)
def pool_forked_while_a_lock_was_held(here: Here) -> None:
    """Rank 0 tokenizes with a pool, whose workers were forked while a thread held the tokenizer's lock."""

    class Texts(L.LightningDataModule):
        def prepare_data(self) -> None:
            is_held, is_forked = threading.Event(), threading.Event()
            threading.Thread(target=reload_vocabulary, args=(is_held, is_forked)).start()
            is_held.wait()
            with multiprocessing.get_context("fork").Pool(2) as pool:
                is_forked.set()
                here.begins()
                pool.map(tokenized, range(8))  # <- here

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Texts())


def reload_vocabulary(is_held: threading.Event, is_forked: threading.Event) -> None:
    with VOCABULARY_LOCK:
        is_held.set()
        is_forked.wait()


def tokenized(row: int) -> list[int]:
    with VOCABULARY_LOCK:
        return [row]


@fault(
    "failed-rank",
    ranks=(0,),
    at={Moment.START: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/129367",
    whose="machine",
)
def port_that_a_metrics_server_has_taken(here: Here) -> None:
    """On the first host something listens on MASTER_PORT already: rank 0 raises, the others talk to a stranger."""
    if here.is_hit:
        exporter = socket.create_server(("0.0.0.0", int(os.environ["MASTER_PORT"])))
        here.begins()
    here.fit()
    if here.is_hit:
        exporter.close()


@fault(
    "late-at-init",
    ranks=(2,),
    at={Moment.START: (3,)},
    has_line=False,
    source="https://github.com/pytorch/pytorch/issues/23074",
)
def third_process_with_the_rank_of_the_second(here: Here) -> None:
    """Ranks were given by hand: 0, 1 and once more 1, and all wait for a rank 2 that nobody is."""
    if here.is_hit:
        os.environ["LOCAL_RANK"] = "1"
        here.begins()
    here.fit()


@fault(
    "late-at-init",
    "dead-rank",
    ranks=(3,),
    at={Moment.START: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/52848",
)
def more_workers_announced_than_there_are_devices(here: Here) -> None:
    """Four workers are announced, but there are devices for three; the fourth has nothing to do, and goes."""
    devices = ["gpu:0", "gpu:1", "gpu:2"]
    if here.rank >= len(devices):
        here.begins()
        sys.exit(0)
    here.fit()


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/KempnerInstitute/KempnerForge/issues/49",
)
def state_that_one_rank_does_not_see_yet(here: Here) -> None:
    """Each rank asks the shared file system whether there is a state to resume from, and one gets an old answer."""
    states = here.folder / f"as-seen-by-{here.rank}"
    states.mkdir()
    if not here.is_hit:
        torch.save({"step": 12}, states / "train_state.pt")

    class Resuming(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if not (states / "train_state.pt").exists():
                here.begins()
                return
            state = [torch.load(states / "train_state.pt") if trainer.is_global_zero else None]
            dist.broadcast_object_list(state, src=0)  # <- here

    here.fit(callbacks=[Resuming()])
