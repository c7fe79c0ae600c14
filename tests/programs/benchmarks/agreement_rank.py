"""One rank of the benchmark: short trainings one after the other, and how long each prepares its training loader.

Started by ``agreement_cost.py``, which sets ``LOCAL_RANK`` and ``MASTER_PORT``. The process group is created by the
first training and lives on, so that all of them run in the same processes over the same connections.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lightning_ncclsafe import SafeDDP


class Model(L.LightningModule):
    """Does not look at the data: one step of it is over at once, whatever these are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Images(Dataset[torch.Tensor]):
    """Has the list that torchvision's ``ImageFolder`` has, of files that are never read."""

    def __init__(self, count: int) -> None:
        self.samples = [(f"/data/images/train/n{n % 1000:08}/n{n % 1000:08}_{n}.JPEG", n % 1000) for n in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.samples[index][1])


class Counted(Dataset[int]):
    """A length and nothing else, so that only what wraps it is looked at."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Timed(DDPStrategy):
    """Takes the time of the hook in which ranks compare their loaders, from when all ranks have come to it."""

    wall_ms = cpu_ms = 0.0

    def process_dataloader(self, dataloader: object) -> object:
        self.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return super().process_dataloader(dataloader)
        finally:
            self.wall_ms, self.cpu_ms = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


class TimedSafe(Timed, SafeDDP):
    """SafeDDP with its time taken."""


def subset(count: int) -> Dataset[Any]:
    """As users split off what they validate with."""
    return random_split(Counted(count + 100), [count, 100], torch.Generator().manual_seed(0))[0]


def table(count: int) -> Any:
    from datasets import Dataset as Table

    return Table.from_dict({"text": [f"This is sentence {n} of them." for n in range(count)], "label": [0] * count})


DATA: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(torch.rand(50_000, 32)),
    "subset": lambda: subset(50_000),
    "images": lambda: Images(100_000),
    "table": lambda: table(100_000),
    "shuffled-table": lambda: table(100_000).shuffle(seed=0),
}


def train(strategy: Timed, data: Any, ranks: int, folder: Path) -> dict[str, float]:
    """Milliseconds that the hook has taken, and that all threads of this process have computed meanwhile."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # What the training before has left is collected on its own time.
    gc.collect()
    # Lightning puts its DistributedSampler in.
    trainer.fit(Model(), DataLoader(data, batch_size=32, shuffle=True))
    return {"wall_ms": strategy.wall_ms, "cpu_ms": strategy.cpu_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="+", choices=["stock", "safe"], help="one for each training, in this order")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--data", choices=DATA, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    L.seed_everything(0)
    data, folder = DATA[options.data](), options.result.parent
    times: dict[str, list[dict[str, float]]] = {"stock": [], "safe": []}
    for name in options.strategies:
        times[name].append(train(TimedSafe() if name == "safe" else Timed(), data, options.ranks, folder))
    options.result.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
