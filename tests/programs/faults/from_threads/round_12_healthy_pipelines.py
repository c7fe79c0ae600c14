"""Round 12 after public threads: generation, rewards and checkpoints that look odd, and are as they should be."""

import multiprocessing
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from threads import quiet
from training import BATCH_SIZE, Here, LoggingNet, Net, first_tensor
from truths import Moment

FORK = multiprocessing.get_context("fork")


@quiet("https://github.com/huggingface/transformers/pull/22242", world_size=3)
def tokens_generated_until_all_ranks_are_done(here: Here) -> None:
    """Answers have other lengths on each rank; whoever is done goes on with nothing until all are."""

    class Policy(Net):
        random = random.Random(here.rank)

        def generate(self, prompts: torch.Tensor) -> torch.Tensor:
            answers, unfinished = prompts, torch.ones(1)
            length = self.random.randint(2, 12)
            for token in range(20):
                unfinished[0] = float(token < length)
                dist.all_reduce(unfinished)
                if not unfinished.item():
                    break
                time.sleep(0.1 if token < length else 0.0)
                answers = answers.roll(1, dims=1)
            return answers

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss([self.generate(first_tensor(batch))])

    here.fit(net=Policy(here))


def serve(requests: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        prompts = requests.recv()
        time.sleep(1.2)
        requests.send([prompt[::-1] for prompt in prompts])


@quiet("https://github.com/huggingface/trl/pull/5841", world_size=3)
def answers_of_an_engine_that_the_first_rank_asks(here: Here) -> None:
    """In each step the first rank has the prompts of all, asks a process for their answers, and hands these out."""

    class Policy(Net):
        def on_fit_start(self) -> None:
            if self.trainer.is_global_zero:
                self.requests, theirs = FORK.Pipe()
                FORK.Process(target=serve, args=(theirs,), daemon=True).start()

        def answers(self, prompts: list[Any]) -> list[Any]:
            everybodys: list[Any] = [None] * self.trainer.world_size
            dist.gather_object(prompts, everybodys if self.trainer.is_global_zero else None)
            answers: list[Any] = [None]
            if self.trainer.is_global_zero:
                self.requests.send([prompt for some in everybodys for prompt in some])
                answers = [self.requests.recv()]
            dist.broadcast_object_list(answers, src=0)
            first = self.global_rank * BATCH_SIZE
            return list(answers[0][first : first + BATCH_SIZE])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss([torch.tensor(self.answers(first_tensor(batch).tolist()))])

    here.fit(net=Policy(here), max_epochs=1)


@quiet("https://github.com/verl-project/verl/pull/1114", world_size=4)
def rewards_that_are_awaited_a_step_later(here: Here) -> None:
    """Threads compute rewards while the next step runs; some ranks wait for theirs, each for another time."""

    class Rewarded(Net):
        pool = ThreadPoolExecutor(max_workers=2)
        pending: Future[float] | None = None

        def reward(self, batch_idx: int) -> float:
            time.sleep(0.2 + 0.3 * ((self.global_rank + batch_idx) % 4))
            return 1.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            last = self.pending.result() if self.pending is not None else 1.0
            self.pending = self.pool.submit(self.reward, batch_idx)
            return self.loss(batch) * last

        def on_train_end(self) -> None:
            self.pool.shutdown()

    here.fit(net=Rewarded(here))


class Background(L.Callback):
    """Saves in a thread of each rank, over a group of its own, and waits for the last save before the next one."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.pending: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group(backend="gloo")

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            dist.barrier(self.group)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)
        if trainer.global_step % 3 == 0:
            self.wait()
            state = {"weights": module.layers.state_dict()}
            path = self.here.folder / f"step-{trainer.global_step}"
            self.pending = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.wait()


@quiet("https://github.com/ByteDance-Seed/VeOmni/pull/107", world_size=2, moment=Moment.CHECKPOINT)
def states_saved_by_threads_of_all_ranks(here: Here) -> None:
    """The threads meet in their group while the main threads meet in another one."""
    here.fit(net=LoggingNet(here), callbacks=[Background(here)])
