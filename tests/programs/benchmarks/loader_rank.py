"""One rank of ``loader_tuning.py`` and of ``loader_epochs.py``: trains some epochs with each of the loaders given."""

import argparse
import json
import multiprocessing
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import LoaderTuner, SafeDDP

BATCH = 8
SHAPE = (3, 64, 64)
WARM_S = 1.0


class Items(Dataset[torch.Tensor]):
    """Samples that take a worker so long to make: on a processor, and asleep as if storage were waited for.

    Args:
        cpu_ms: Processor time of one batch, on average.
        sleep_ms: Waiting time of one batch, on average.
        spread: Sigma of the logarithm of each sample's share; 0 makes all alike.
        batches: How many there are.
    """

    def __init__(self, cpu_ms: float, sleep_ms: float, spread: float, batches: int) -> None:
        self.batches = batches
        self.cpu_s, self.sleep_s = cpu_ms / 1e3 / BATCH, sleep_ms / 1e3 / BATCH
        # A mean of 1, whatever the spread.
        factors = np.random.default_rng(7).lognormal(-(spread**2) / 2, spread, 4096) if spread else np.ones(4096)
        self.factors = factors / factors.mean()

    def __len__(self) -> int:
        return self.batches * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        factor = self.factors[index % len(self.factors)]
        until = time.thread_time() + self.cpu_s * factor
        if self.sleep_s:
            time.sleep(self.sleep_s * factor)
        while time.thread_time() < until:
            pass
        return torch.full(SHAPE, random.random())  # as random augmentation does


class Model(L.LightningModule):
    """A step that mostly waits, as for a device."""

    def __init__(self, step_ms: float) -> None:
        super().__init__()
        self.step_s = step_ms / 1e3
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        loss: torch.Tensor = self.layer(batch.flatten()[:1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Notes when each epoch began and ended, and how many steps it had."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended = 0.0
        self.steps = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.began.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_train_end(self, *_: Any) -> None:
        self.ended = time.perf_counter()

    def rate(self, from_epoch: int) -> float:
        """Steps a second from an epoch on, with all that lies between the epochs."""
        epochs = len(self.began)
        return self.steps / epochs * (epochs - from_epoch) / (self.ended - self.began[from_epoch])


class WorkerCount:
    """How many worker processes there are, seen often; as a context manager."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "WorkerCount":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.05):
            alive = [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
            if not self.seen or self.seen[-1][1] != len(alive):
                self.seen.append((time.perf_counter(), len(alive)))


def train(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """Trains for some epochs: the rate of steps, how many workers there were, and what all of it took."""
    workers = case["workers"]
    multiprocessing.set_start_method(case.get("method", "fork"), force=True)
    if case.get("seed") is not None:
        L.seed_everything(case["seed"], workers=True, verbose=False)
    loader = DataLoader(
        Items(case["cpu_ms"], case["sleep_ms"], case["spread"], case["batches"]),
        batch_size=BATCH,
        num_workers=workers,
        prefetch_factor=case["prefetch"] or None,
        persistent_workers=bool(workers and case.get("persists")),
    )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.get("ranks", 1),
        strategy=DDPStrategy() if case["by"] == "stock" else SafeDDP(),
        max_epochs=case["epochs"],
        default_root_dir=root,
        callbacks=[clock, *([LoaderTuner()] if case["by"] == "tuned" else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    times = os.times()
    model = Model(case["step_ms"])
    with WorkerCount() as count:
        trainer.fit(model, loader)
    used = os.times()
    began, ended = clock.began[0], clock.ended
    changes = [moment - began for moment, _ in count.seen if began < moment < ended]
    return {
        **case,
        "rate": clock.rate(case.get("from_epoch", 0)),
        "wall_s": ended - began,
        "epochs_s": [end - start for start, end in zip(clock.began, [*clock.began[1:], ended], strict=True)],
        "cpu_s": sum(used[:4]) - sum(times[:4]),
        "most_workers": max((workers for _, workers in count.seen), default=0),
        "workers_at_end": max(
            (workers for moment, workers in count.seen if clock.began[-1] < moment < ended), default=0
        ),
        "settled_s": max(changes, default=0.0),
        "weights": [parameter.detach().double().sum().item().hex() for parameter in model.parameters()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())
    options.result.write_text(json.dumps([train(case, options.result.parent) for case in cases]))


if __name__ == "__main__":
    main()
