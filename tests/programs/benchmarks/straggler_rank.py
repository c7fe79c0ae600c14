"""One rank of ``straggler_rate.py``: short trainings, in each of which one rank is now and then late, or none is."""

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import CollectiveTimer, SafeDDP
from lightning_ncclsafe.strategies.guarded import timer_of

WIDTH = 256
LATE_S = 0.02
LATE_SHARE = 0.1
PHASES = ("data loading", "forward/backward", "the optimizer", "hooks and callbacks")


class Lateness:
    """When one rank is late: in a tenth of the steps, from one step on."""

    def __init__(self, rank: int, phase: str, from_step: int, steps: int, seed: int) -> None:
        dice = random.Random(seed)
        self.is_mine = rank == int(os.environ["LOCAL_RANK"])
        self.phase = phase
        self.steps = {step for step in range(from_step, steps) if dice.random() < LATE_SHARE}

    def wait(self, phase: str, step: int) -> None:
        if self.is_mine and phase == self.phase and step in self.steps:
            time.sleep(LATE_S)


class Data(Dataset[torch.Tensor]):
    def __init__(self, length: int, late: Lateness) -> None:
        self.length = length
        self.late = late
        self.given = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        self.late.wait("data loading", self.given)
        return torch.full((1024, WIDTH), index / self.length)


class Model(L.LightningModule):
    def __init__(self, late: Lateness, device_s: float) -> None:
        super().__init__()
        self.late = late
        self.device_s = device_s
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.late.wait("forward/backward", batch_idx)
        time.sleep(self.device_s)
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.late.wait("hooks and callbacks", batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.late.wait("the optimizer", batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Watcher(L.Callback):
    """Writes down what is named, and after which step."""

    def __init__(self) -> None:
        self.named: list[dict[str, Any]] = []
        self.began = 0.0
        self.took_s = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer)

    def look(self, trainer: L.Trainer) -> None:
        attached = timer_of(trainer.strategy)
        assert attached is not None
        self.began = self.began or time.perf_counter()
        self.took_s = time.perf_counter() - self.began
        for straggler in attached.stragglers()[len(self.named) :]:
            told = {"step": trainer.global_step, "rank": straggler.rank, "phase": straggler.phase}
            self.named.append({**told, "share": straggler.share, "mean_s": straggler.mean_s})


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dice = random.Random(options.seed)
    for number in range(options.runs):
        yield {"rank": dice.randrange(options.ranks), "phase": PHASES[number % len(PHASES)], "seed": dice.random()}
        yield {"rank": -1, "phase": "", "seed": dice.random()}


def train(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    late = Lateness(case["rank"], case["phase"], options.from_step, options.steps, case["seed"])
    watcher = Watcher()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=SafeDDP(),
        max_epochs=1,
        default_root_dir=options.result.parent,
        callbacks=[CollectiveTimer(table=False, trace=False, heat_map=False), watcher],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Model(late, options.device_ms / 1e3), DataLoader(Data(options.steps * options.ranks, late), batch_size=1)
    )
    return {**case, "named": watcher.named, "step_ms": 1e3 * watcher.took_s / options.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--from-step", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.result.write_text(json.dumps([train(case, options) for case in cases(options)]))


if __name__ == "__main__":
    main()
