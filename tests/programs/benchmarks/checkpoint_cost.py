"""What JustInTimeCheckpoint costs: each batch while nothing happens, and a checkpoint next to torch.save of the same.

One process, without a strategy: the ledger listens to every second training. A checkpoint is written, synced, read back
and named; torch.save is timed with and without a sync, in turns with it.

python tests/programs/benchmarks/checkpoint_cost.py
python tests/programs/benchmarks/checkpoint_cost.py --size-mb 2000 --folder /data/scratch
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints.folder import CheckpointFolder
from lightning_ncclsafe.checkpoints.ledger import StepLedger

WIDTH, WARM_UP_STEPS = 128, 20


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Timer(L.Callback):
    def __init__(self, *, notes: bool) -> None:
        self.notes = notes
        self.times: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.notes:
            StepLedger(trainer).attach()

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def step_us(self) -> float:
        pairs = itertools.pairwise(self.times[WARM_UP_STEPS:])
        return 1e6 * statistics.median(after - before for before, after in pairs)


def train(steps: int, *, notes: bool) -> float:
    """Microseconds of a step, the median."""
    timer = Timer(notes=notes)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.rand(steps * 64, WIDTH)), batch_size=64))
    return timer.step_us()


def save_s(checkpoint: Any, folder: Path) -> dict[str, float]:
    """Seconds that it takes in each way."""

    def stock(*, sync: bool) -> None:
        with (folder / "stock.ckpt").open("wb") as file:
            torch.save(checkpoint, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def ours() -> None:
        kept = CheckpointFolder(folder, keep=1, run="another")
        kept.write(0, 0, lambda file: tensors.save(checkpoint, file), lambda: None).unlink()

    ways = {"torch.save": lambda: stock(sync=False), "torch.save and fsync": lambda: stock(sync=True), "ours": ours}
    took = {}
    for name, act in ways.items():
        os.sync()
        began = time.perf_counter()
        act()
        took[name] = time.perf_counter() - began
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs = [(train(options.steps, notes=False), train(options.steps, notes=True)) for _ in range(options.rounds)]
    without, noted = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    print(f"a step: {without:.0f} µs without, {noted:.0f} µs with the ledger, ratio {ratio:.3f}")
    count = options.size_mb * 1_000_000 // (100 * 4)
    checkpoint = {"state_dict": {f"layers.{number}": torch.rand(count) for number in range(100)}}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rounds = [save_s(checkpoint, Path(folder)) for _ in range(options.rounds)]
    for name in rounds[0]:
        took = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each["ours"] / each[name] for each in rounds)
        print(f"{options.size_mb} MB: {name} {took:.2f} s; ours takes {ratio:.2f} times that")


if __name__ == "__main__":
    main()
