"""One rank of ``loader_tuning.py``: trains from loaders of one kind with fixed settings, and with LoaderTuner."""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import torch
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
    """

    def __init__(self, cpu_ms: float, sleep_ms: float, spread: float) -> None:
        self.cpu_s, self.sleep_s = cpu_ms / 1e3 / BATCH, sleep_ms / 1e3 / BATCH
        # A mean of 1, whatever the spread.
        factors = np.random.default_rng(7).lognormal(-(spread**2) / 2, spread, 4096) if spread else np.ones(4096)
        self.factors = factors / factors.mean()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        factor = self.factors[index % len(self.factors)]
        until = time.thread_time() + self.cpu_s * factor
        if self.sleep_s:
            time.sleep(self.sleep_s * factor)
        while time.thread_time() < until:
            pass
        return torch.zeros(SHAPE)


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
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Clock(L.Callback):
    """Notes when each step ended, and stops after so many seconds."""

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self.ended: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ended.append(time.perf_counter())
        if self.ended[-1] - self.ended[0] > self.for_s:
            trainer.should_stop = True

    def rate(self, from_s: float) -> float:
        """Steps a second from so long after the first step on."""
        late = [moment for moment in self.ended if moment - self.ended[0] >= from_s]
        return (len(late) - 1) / (late[-1] - late[0])


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
    """Trains for some seconds; the rate of steps, and how many workers there were."""
    loader = DataLoader(
        Items(case["cpu_ms"], case["sleep_ms"], case["spread"]),
        batch_size=BATCH,
        num_workers=case["workers"],
        prefetch_factor=case["prefetch"] or None,
    )
    clock = Clock(case["for_s"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SafeDDP(),
        max_epochs=1,
        default_root_dir=root,
        callbacks=[clock, *([LoaderTuner()] if case["tuned"] else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        min_epochs=0,
    )
    with WorkerCount() as count:
        trainer.fit(Model(case["step_ms"]), loader)
    began, ended = clock.ended[0], clock.ended[-1]
    changes = [moment - began for moment, _ in count.seen if began < moment < ended]
    return {
        **case,
        "rate": clock.rate(case["from_s"]),
        "most_workers": max((workers for _, workers in count.seen), default=0),
        "workers_at_end": next((workers for moment, workers in reversed(count.seen) if moment < ended), 0),
        "settled_s": max(changes, default=0.0),
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
