"""One rank of the benchmark: runs short trainings one after the other in this process and writes down their step times.

Started by ``step_overhead.py``, which sets ``LOCAL_RANK`` and ``MASTER_PORT``. The process group is created by the
first training and lives on, so that all of them run in the same processes over the same connections.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).parents[2]))
from fsdp_on_cpu import StockFSDP, let_fsdp_train_on_cpus  # type: ignore[import-not-found]

WIDTH = 128
NAMES = ("stock", "safe", "safe-broadcast", "timer", "timer-broadcast", "saved", "recommended")
STOCK: dict[str, Callable[[], Any]] = {"ddp": DDPStrategy, "fsdp": StockFSDP, "model-parallel": ModelParallelStrategy}


class Model(L.LightningModule):
    """Small enough that Lightning and the collectives are most of its step: what we add shows all the more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
        )

    def configure_model(self) -> None:
        if self._device_mesh is None or hasattr(self, "is_split"):
            return
        from torch.distributed.fsdp import fully_shard

        self.is_split = True
        for module in (self.layers[0], self.layers[2], self.layers):
            fully_shard(module, mesh=self._device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor | list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch if isinstance(batch, torch.Tensor) else batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Stream(IterableDataset[torch.Tensor]):
    """Batches of which nobody knows how many come; their last digits differ from rank to rank, as real data do."""

    def __init__(self, batches: int, batch_size: int) -> None:
        self.count = batches
        self.batches = torch.rand(min(batches, 16), batch_size, WIDTH) + int(os.environ["LOCAL_RANK"])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.islice(itertools.cycle(self.batches), self.count)


class StepTimer(L.Callback):
    """Takes the time at the beginning of each batch, and how long all threads of this process have been computing."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps_ms(self) -> dict[str, list[float]]:
        return {"wall": _gaps_ms(self.wall), "cpu": _gaps_ms(self.cpu)}


def _gaps_ms(times: list[float]) -> list[float]:
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]


def make_strategy(name: str, parallel: str) -> tuple[Any, list[L.Callback]]:
    if name == "stock":
        return STOCK[parallel](), []
    # Not at the top: a process that trains with stock alone, to compare memory, must not load the package.
    from lightning_ncclsafe import (
        CollectiveTimer,
        JustInTimeCheckpoint,
        SafeDDP,
        SafeFSDP,
        SafeModelParallel,
        safe_callbacks,
    )

    safe: dict[str, Any] = {"ddp": SafeDDP, "fsdp": SafeFSDP, "model-parallel": SafeModelParallel}
    callbacks: list[L.Callback] = [CollectiveTimer(table=False)] if name.startswith("timer") else []
    if name == "saved":
        callbacks = [JustInTimeCheckpoint("never written")]
    if name == "recommended":
        callbacks = safe_callbacks()
    return safe[parallel](sigterm_broadcast=name.endswith("broadcast")), callbacks


def make_loader(data: str, batches: int, batch_size: int, ranks: int) -> DataLoader[Any]:
    if data == "stream":
        return DataLoader(Stream(batches, batch_size), batch_size=None)
    # The same on all ranks, as it is split among them.
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.rand(batches * batch_size * ranks, WIDTH)), batch_size=batch_size)


def train(strategy: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each step of one training."""
    timer = StepTimer()
    parallel, callbacks = make_strategy(strategy, options.strategy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=parallel,
        max_epochs=1,
        default_root_dir=options.result.parent,
        callbacks=[timer, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # One more: a step ends where the next one begins.
    loader = make_loader(options.data, options.steps + 1, options.batch_size, options.ranks)
    # What a training leaves is collected on its own time; what was there before is nobody's, and takes long to search.
    gc.collect()
    gc.freeze()
    trainer.fit(Model(), loader)
    return timer.steps_ms()


def peak_mb() -> float:
    """The most memory that this process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainings", nargs="+", choices=NAMES, help="one for each training, in this order")
    parser.add_argument("--strategy", choices=STOCK, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--data", choices=["known", "stream"], required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    if options.strategy == "fsdp" and not torch.cuda.is_available():
        let_fsdp_train_on_cpus()
    steps_ms = [train(name, options) for name in options.trainings]
    options.result.write_text(json.dumps({"steps_ms": steps_ms, "peak_mb": peak_mb()}))


if __name__ == "__main__":
    main()
