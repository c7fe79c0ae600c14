"""Round 18 after public threads: what users of sharded models do that looks odd, and of which nothing is to be said."""

import os
import signal
import subprocess
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from from_threads.round_14_sharded import Manual
from from_threads.round_18_sharded import Pipeline
from torch.distributed.device_mesh import init_device_mesh
from training import Here, Net, first_tensor
from truths import Moment, healthy


class Preempted(L.Callback):
    """Ends the training after a step in which any rank has been warned, which all of them learn of in that step."""

    def __init__(self) -> None:
        self.is_warned = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        def on_warning(number: int, frame: Any) -> None:
            self.is_warned = True

        signal.signal(signal.SIGUSR1, on_warning)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            subprocess.run(["sh", "-c", f"kill -USR1 {os.getpid()}"], check=True)
        is_any_warned = torch.tensor(int(self.is_warned))
        dist.all_reduce(is_any_warned, dist.ReduceOp.MAX)
        if is_any_warned:
            trainer.should_stop = True


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/ai2cm/ace/pull/1407", strategies=SPLIT)
def warning_to_one_rank_that_all_act_upon(here: Here) -> None:
    """One rank is warned by a signal, and all ranks leave the training in the middle of an epoch, together."""
    here.fit(callbacks=[Preempted()], max_epochs=4)


@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/mosaicml/composer/pull/3510", strategies=SPLIT)
def batch_that_all_ranks_do_again_in_halves(here: Here) -> None:
    """One rank has no memory for a batch, tells the others so, and all of them go through theirs in two halves."""

    class Halving(Manual):
        def activations(self, batch: torch.Tensor) -> torch.Tensor:
            if self.global_rank == 1 and batch[0, 0] > 0.5 and len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return batch * 1.0

        def is_out_of_memory(self, batch: torch.Tensor) -> bool:
            is_out = torch.tensor(0)
            try:
                self.activations(batch)
            except torch.OutOfMemoryError:
                is_out.fill_(1)
                time.sleep(1.0)
            dist.all_reduce(is_out, dist.ReduceOp.MAX)
            return bool(is_out)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            whole = first_tensor(batch)
            parts = whole.tensor_split(2) if self.is_out_of_memory(whole) else (whole,)
            for part in parts:
                self.manual_backward(self.loss(part) / len(parts))
            optimizer.step()
            optimizer.zero_grad()

    here.fit(net=Halving(here))


class Artifacts(L.Callback):
    """The first rank writes what belongs to a model after each epoch, and all others wait until it has."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def write(self, name: str) -> None:
        time.sleep(0.5)
        (self.here.folder / name).write_text("{}")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            for name in ("config.json", "tokenizer.json", "vocabulary.json"):
                self.write(name)
        trainer.strategy.barrier("artifacts")


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/instructlab/training/pull/566", strategies=SPLIT)
def artifacts_written_while_all_others_wait(here: Here) -> None:
    """The others wait at a barrier after each epoch until the first rank has written some files."""
    here.fit(callbacks=[Artifacts(here)])


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/dphnAI/sonar/issues/115", strategies=SPLIT)
def ranks_that_are_pinned_to_the_same_core(here: Here) -> None:
    """All ranks compute on one core, so that each step takes all of them several times as long as one alone."""

    class Pinned(Net):
        def on_fit_start(self) -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            until = time.process_time() + 0.15
            while time.process_time() < until:
                torch.rand(64, 64) @ torch.rand(64, 64)
            return self.loss(batch)

    here.fit(net=Pinned(here), max_epochs=1)


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/pytorch/PiPPy/issues/948", strategies=SPLIT)
def stages_that_hand_over_in_groups_of_their_own(here: Here) -> None:
    """The first two ranks send what they make to the last two, which wait, as one of the pipelines is slower."""

    class Handing(Net):
        def on_fit_start(self) -> None:
            self.pipeline = Pipeline(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor")))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            line, made = self.pipeline, first_tensor(batch).contiguous()
            if line.stage == 0:
                time.sleep(0.6 * self.global_rank)
                dist.send(made, line.other, group=line.group)
            else:
                dist.recv(made, line.other, group=line.group)
            return self.loss(made)

    here.fit(net=Handing(here))
