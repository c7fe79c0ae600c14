"""A training that its guard ends at the limit, wherever its main thread is by then: one rank of it, and how it is run.

On CPUs a stand-in is woken in place of NCCL's waits: as soon as the verdict is there, by something that does not raise,
as somebody's abort would. ``python ended_fit.py SCENE FOLDER``
"""

import _thread
import argparse
import atexit
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from one_gpu import Ended, run_ranks
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from lightning_ncclsafe.strategies import guarded_call

RANKS, LATE_RANK, WAITING_RANK = 3, 1, 2
TIMEOUT_S, LIMIT_S = 12.0, 90.0
# Of the first collective, which is not ended: connections are made in it, and its launch blocks the host.
LATE_S, LATE_TIMEOUT_S, LARGE = 60.0, 120.0, 1 << 24
STOPS_AT = 3
# Long enough for a thread that is woken to do what it wants to.
HARM_S = 1.0
# As a stream's synchronization does, to acquire it waits in C and says nothing in the end.
WAIT = _thread.allocate_lock()


def wait_in_vain(groups: tuple[Any, ...] = (None,)) -> None:
    """Waits for collectives that are not completed, as for a stream."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [torch.ones(8, device=device) for _ in groups]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    if device.type == "cpu":
        WAIT.acquire()
        WAIT.acquire()
    else:
        for work in works:
            # The stream waits, and the host goes on to where the value is read.
            work.wait()
    for tensor in tensors:
        tensor.sum().item()
    del works


class WaitsWhenSaved:
    """Something of a checkpoint that is on a device: it is brought to the host while the checkpoint is written."""

    def __reduce__(self) -> Any:
        wait_in_vain()
        return int, ()


class Net(L.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Stops(L.Callback):
    """After step 3, and before ModelCheckpoint: the late rank works, one waits, and rank 0 as the scene has it."""

    def __init__(self, scene: str, folder: Path, io: AsyncCheckpointIO) -> None:
        self.scene, self.folder, self.io = scene, folder, io
        self.groups: tuple[Any, ...] = (None,)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.scene == "communicators":
            self.groups = (None, *(dist.new_group() for _ in range(3)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.scene == LATE_FIRST:
            if trainer.global_rank == LATE_RANK:
                threading.Event().wait(float(os.environ.get("LATE_S", LATE_S)))
            tensor = torch.ones(LARGE, device=pl_module.device)
            dist.all_reduce(tensor, group=dist.new_group())
            tensor[0].item()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step < STOPS_AT or self.scene == LATE_FIRST:
            return
        if trainer.global_rank == LATE_RANK:
            threading.Event().wait(LIMIT_S)
        if trainer.global_rank == WAITING_RANK:
            tensor = torch.ones(8, device=pl_module.device)
            dist.all_reduce(tensor)
            tensor.sum().item()
        if self.scene == "async_save" and self.io._executor is not None:
            # Its only thread may still be writing earlier ones.
            self.io._executor.submit(int).result()
        (self.folder / "before.json").write_text(json.dumps(contents(self.folder)))
        if self.scene not in ("torch_save", "async_save"):
            wait_in_vain(self.groups)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step >= STOPS_AT and trainer.global_rank == 0 and self.scene in ("torch_save", "async_save"):
            checkpoint["late"] = WaitsWhenSaved()


def contents(folder: Path) -> dict[str, str]:
    """What lies with the checkpoints, by its name."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "checkpoints").iterdir())}


def wake(_: float) -> None:
    if WAIT.locked():
        WAIT.release()
    time.sleep(HARM_S)


def harm(trainer: L.Trainer, folder: Path) -> None:
    """What a program does that catches everything."""
    for save in (trainer.save_checkpoint, lambda path: torch.save(trainer.model.state_dict(), path)):
        try:
            save(folder / "checkpoints" / "after.ckpt")
        except Exception as error:
            print(f"refused: {type(error).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", choices=[*SCENES, LATE_FIRST])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    guarded_call.drain_all = wake  # type: ignore[assignment]
    if options.scene == "at_exit":
        atexit.register(threading.Event().wait)
        threading.Thread(target=threading.Event().wait).start()
    timeout_s = LATE_TIMEOUT_S if options.scene == LATE_FIRST else TIMEOUT_S
    there, io = options.folder / "checkpoints", AsyncCheckpointIO()
    trainer = L.Trainer(
        devices=1,
        max_epochs=1,
        default_root_dir=options.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[io] if options.scene == "async_save" else None,
        callbacks=[
            ModelCheckpoint(
                there, filename="{step}", every_n_train_steps=1, save_last=True, enable_version_counter=False
            ),
            OnExceptionCheckpoint(there, "exception"),
            Stops(options.scene, options.folder, io),
        ],
        strategy=SafeDDP(suspect_after=4, timeout=timedelta(seconds=timeout_s)),
    )
    try:
        trainer.fit(Net(), DataLoader(torch.zeros(64, 4), batch_size=1))
    except BaseException as error:
        print(f"caught: {type(error).__name__}", flush=True)
        harm(trainer, options.folder)


SCENES = ("model_checkpoint", "torch_save", "async_save", "communicators", "at_exit")
LATE_FIRST = "late_first"


@dataclass(frozen=True)
class Outcome:
    """How such a training has ended.

    Attributes:
        ended: Its ranks.
        before: What lay with the checkpoints when rank 0 began to wait.
        after: What lies there.
        took_s: How long after that the last rank was gone, seconds.
    """

    ended: Ended
    before: Mapping[str, str]
    after: Mapping[str, str]
    took_s: float


def start(scene: str, folder: Path, more: Mapping[str, str], limit_s: float) -> Ended:
    """Runs it with three ranks."""
    return run_ranks([__file__, scene, str(folder)], RANKS, folder, timeout_s=limit_s, more=more)


def run(scene: str, folder: Path, **more: str) -> Outcome:
    """Runs it until its guard ends it."""
    ended = start(scene, folder, more, LIMIT_S)
    took_s = time.time() - (folder / "before.json").stat().st_mtime
    return Outcome(ended, json.loads((folder / "before.json").read_text()), contents(folder), took_s)


def check(outcome: Outcome, exit_code: int) -> None:
    """Fails where a rank was not gone in time, did not say why, or a checkpoint is another one than before."""
    assert outcome.ended.exit_codes == (exit_code,) * RANKS, outcome.ended.story
    assert outcome.took_s < TIMEOUT_S + 30, outcome.took_s
    assert outcome.before, "no checkpoint had been saved"
    assert outcome.after == outcome.before, outcome.ended.story


if __name__ == "__main__":
    main()
