"""One rank of ``overhead.py``: that of the benchmark for CPUs, as a node of its own with the GPU that all share."""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from one_gpu import environment

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import one_rank
from step_overhead import WARM_UP_STEPS


class DeviceTimer(one_rank.StepTimer):
    """What the device has been given is done when the first measured step begins, and when the last one ends."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        measured_from_to = (WARM_UP_STEPS, int(trainer.num_training_batches) - 1)
        if batch_idx in measured_from_to and torch.cuda.is_available():
            torch.cuda.synchronize()
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def make_trainer(ranks: int, **settings: Any) -> L.Trainer:
    """The benchmark's Trainer, but for where it runs."""
    return L.Trainer(**settings | {"accelerator": "auto", "devices": 1, "num_nodes": ranks})


def main() -> None:
    ranks = next(int(argument.partition("=")[2]) for argument in sys.argv if argument.startswith("--ranks="))
    # The device is chosen when CUDA is first used, and NCCL reads its settings when a group is made.
    os.environ.update(environment(int(os.environ["LOCAL_RANK"]), ranks, int(os.environ["MASTER_PORT"])))
    one_rank.StepTimer = DeviceTimer  # type: ignore[misc]
    one_rank.L = SimpleNamespace(Trainer=partial(make_trainer, ranks))  # type: ignore[attr-defined,assignment]
    one_rank.main()


if __name__ == "__main__":
    main()
