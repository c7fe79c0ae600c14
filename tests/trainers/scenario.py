"""A small training on several ranks in which one of them does, at one batch, what the command line says.

Run by the tests as a program, under every launcher: ``python scenario.py raise --rank 1 --batch 3``.
"""

import argparse
import gc
import inspect
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe import DatasetAgreement, SafeDDP, SafeModelParallel
from lightning_ncclsafe._torch import recorders

# So that the end of each process does not look at everything that was imported.
gc.freeze()


def raise_error() -> None:
    raise ValueError("the batch is broken")  # <- raise


def misspell() -> None:
    """Wrong code, wherever it runs."""
    no_such_name()  # type: ignore[name-defined] # noqa: F821


def leave_silently() -> None:
    sys.exit(0)  # <- exit


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil() -> None:
    # A loop in C that never looks up, as in a faulty extension.
    sum(itertools.repeat(1, 10**12))  # <- gil


def be_told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def tell_the_launcher_to_end() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def stall(seconds: float) -> Callable[[], None]:
    def wait() -> None:
        threading.Event().wait(seconds)  # <- stall

    return wait


ALL = -1

DEEDS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "estimate": lambda: None,
    "raise": raise_error,
    "misspell": misspell,
    "exit": leave_silently,
    "kill": be_killed,
    "stop": be_stopped,
    "sigterm": be_told_to_end,
    "sigterm-launcher": tell_the_launcher_to_end,
    "gil": hold_the_gil,
    "stall": stall(60),
    "recover": stall(7),
}


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    """Of unknown length, so that ranks vote before each batch; each rank has its own numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        for index in range(64):
            if self.options.hook == "loader" and (rank, index) == (self.options.rank, 4 * self.options.batch):
                DEEDS[self.options.deed]()
            yield torch.full((8,), float(100 * rank + index))


class Scenario(L.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.layer = torch.nn.Linear(8, 2)
        self.is_split = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        options = self.options
        if batch_idx == options.batch and self.current_epoch == 0:
            self._do_in("training_step")
        time.sleep(options.pace)
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == self.options.batch and not self.trainer.sanity_checking:
            self._do_in("validation_step")
        time.sleep(self.options.pace)
        self.log("val_loss", self.layer(batch).sum(), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).sum(), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.options.batch:
            self._do_in("predict_step")
        time.sleep(self.options.pace)
        return self.layer(batch)

    def _do_in(self, hook: str) -> None:
        if self.options.hook == hook and self.options.rank in (self.global_rank, ALL):
            DEEDS[self.options.deed]()

    def configure_model(self) -> None:
        if self._device_mesh is None or self.is_split:
            return
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        self.is_split = True
        data, tensor = self._device_mesh["data_parallel"], self._device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.layer, tensor, ColwiseParallel(output_layouts=Replicate()))
        if data.size() > 1:
            fully_shard(self.layer, mesh=data)

    def setup(self, stage: str) -> None:
        self._do_in("setup")

    def on_train_epoch_end(self) -> None:
        self._do_in("on_train_epoch_end")

    def on_fit_end(self) -> None:
        self._do_in("on_fit_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.options.deed == "estimate" and self.global_rank == self.options.rank:
            # Lightning makes the training's loader for it, with a barrier.
            _ = self.trainer.estimated_stepping_batches  # <- estimate
        return torch.optim.SGD(self.parameters(), lr=0.001)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("--rank", type=int, default=1, help="-1 for all of them")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--hook", default="training_step")
    parser.add_argument("--data", choices=["numbers", "stream"], default="numbers")
    parser.add_argument("--validated-by", type=int, help="only this rank has a validation loader")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, help="split the model among so many ranks, and by FSDP2")
    parser.add_argument("--suspect-after", type=float, default=1.5)
    parser.add_argument("--timeout", type=float, default=20)
    parser.add_argument("--on-timeout", default="abort")
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--calls", nargs="*", default=["fit"])
    parser.add_argument("--root-dir", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=0, help="how long every batch takes besides, seconds")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--keep", action="store_true", help="save a checkpoint where training ends with an exception")
    parser.add_argument("--refuse", action="store_true", help="whatever ranks disagree about, not only what would hang")
    parser.add_argument("--sigterm-broadcast", action="store_true")
    return parser.parse_args()


def kept(folder: Path) -> list[L.Callback]:
    # Only newer ones can save on an exception; it is saved by the other as well.
    can_save = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
    newer = {"save_on_exception": True} if can_save else {}
    return [
        OnExceptionCheckpoint(folder),
        ModelCheckpoint(folder / "best", filename="{step}", save_top_k=0, **newer),
    ]


def strategy_of(options: argparse.Namespace) -> SafeDDP | SafeModelParallel:
    guard = {
        "suspect_after": options.suspect_after,
        "timeout": timedelta(seconds=options.timeout),
        "on_timeout": options.on_timeout,
        "sigterm_broadcast": options.sigterm_broadcast,
    }
    peers = options.tensor_parallel
    if peers is None:
        return SafeDDP(start_method=options.start_method, **guard)
    return SafeModelParallel(data_parallel_size=options.devices // peers, tensor_parallel_size=peers, **guard)


def batches_of(trainer: L.Trainer) -> str:
    loop = trainer.fit_loop.epoch_loop
    begun, validation = loop.batch_progress.total.ready, loop.val_loop.batch_progress.current.completed
    recorded = [
        entry["profiling_name"] for dump in recorders.dumps(collectives=True) for entry in dump.get("entries", ())
    ]
    broadcasts = sum(name.endswith(":broadcast") for name in recorded)
    return f"begun {begun} batches and ended {validation} of validation, with {broadcasts} broadcasts"


def main() -> None:
    options = parse_options()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.max_epochs,
        accumulate_grad_batches=options.accumulate,
        callbacks=[
            *(kept(options.root_dir) if options.keep else []),
            *([DatasetAgreement()] if options.refuse else []),
        ],
        default_root_dir=options.root_dir,
        logger=False,
        enable_checkpointing=options.keep,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=strategy_of(options),
    )
    model, data = Scenario(options), Numbers() if options.data == "numbers" else Stream(options)
    loaders = [DataLoader(data, batch_size=4)]
    if options.validated_by == int(os.environ.get("LOCAL_RANK", 0)):
        loaders.append(DataLoader(Numbers(), batch_size=4))
    if options.validate:
        loaders.append(DataLoader(Numbers(), batch_size=4))
    for call in options.calls:
        try:
            getattr(trainer, call)(model, *loaders)
        finally:
            print(f"rank {trainer.global_rank} has made {trainer.global_step} steps, {batches_of(trainer)}", flush=True)
    left = [t.name for t in threading.enumerate() if t.name.startswith("ncclsafe")]
    print(f"rank {trainer.global_rank} done, left behind: {left}", flush=True)


if __name__ == "__main__":
    main()
