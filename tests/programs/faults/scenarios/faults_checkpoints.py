"""Checkpoints that take too long, that fail, or that not all ranks take part in."""

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from training import FOR_LONG_S, Here, Net
from truths import Moment, fault


def saving(here: Here, **more: Any) -> dict[str, Any]:
    """Trainer arguments: checkpoints at the moment of the case."""
    often = {"every_n_train_steps": 4} if here.case.moment is Moment.MIDDLE else {"save_on_train_epoch_end": True}
    callback = ModelCheckpoint(here.folder / "checkpoints", **often)
    return {"enable_checkpointing": True, "callbacks": [callback], **more}


@fault("slow-checkpoint", ranks=(0,), at={Moment.EPOCH_END: (2, 3), Moment.MIDDLE: (2,)}, has_phase=False)
def storage_of_checkpoints_that_does_not_answer(here: Here) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(**saving(here, plugins=[Slow()]))


@fault("slow-checkpoint", ranks=(0,), at={Moment.CHECKPOINT: (2, 3)}, has_line=False, whose="either")
def checkpoint_written_to_a_pipe(here: Here) -> None:
    """Real writing: the file system takes nothing more."""

    class Pipe(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            pipe = here.folder / "pipe"
            os.mkfifo(pipe)
            threading.Thread(target=open_and_wait, args=(pipe,), daemon=True).start()
            here.begins()
            torch.save(checkpoint | {"more": torch.zeros(1_000_000)}, pipe)

    def open_and_wait(pipe: Path) -> None:
        with pipe.open("rb"):
            time.sleep(FOR_LONG_S)

    here.fit(**saving(here, plugins=[Pipe()]))


@fault(
    "exception-during-save",
    ranks=(0,),
    at={Moment.EPOCH_END: (2, 3), Moment.MIDDLE: (2,)},
    has_phase=False,
    whose="machine",
)
def no_space_left_for_a_checkpoint(here: Here) -> None:
    class Full(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            here.begins()
            raise OSError(errno.ENOSPC, "No space left on device", str(here.folder))  # <- here

    here.fit(**saving(here, plugins=[Full()]))


@fault("exception-during-save", ranks=(1,), at={Moment.EPOCH_END: (2,)}, has_phase=False)
def state_of_one_rank_that_cannot_be_saved(here: Here) -> None:
    class Sampler(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            if here.is_hit:
                here.begins()
                raise RuntimeError("the sampler's state lies on a device that is gone")  # <- here
            return {}

    trainer_args = saving(here)
    trainer_args["callbacks"].append(Sampler())
    here.fit(**trainer_args)


@fault(
    "checkpoint-skipped-barrier",
    ranks=(0,),
    at={Moment.EPOCH_END: (2, 3), Moment.MIDDLE: (2,)},
    has_line=False,
    has_phase=False,
)
def failed_save_that_is_swallowed(here: Here) -> None:
    class Failing(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            here.begins()
            raise ConnectionError("the bucket does not answer")

    def save(net: Net) -> None:
        with suppress(ConnectionError):
            net.trainer.save_checkpoint(here.folder / "mine.ckpt")

    here.fit(save, plugins=[Failing()])


@fault(
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.EPOCH_END: (2, 3), Moment.MIDDLE: (2,)},
    phase="checkpoint",
)
def save_on_rank_zero_only(here: Here) -> None:
    """What many write, though all ranks have to take part: the barrier at its end is rank 0's alone."""

    def save(net: Net) -> None:
        if net.global_rank == 0:
            here.begins()
            net.trainer.save_checkpoint(here.folder / "mine.ckpt")  # <- here

    here.fit(save)
