"""A fit with LoaderTuner and HostPreflight; run by ``test_loader_tuner.py`` on each of two ranks.

``python tuned_fit.py FOLDER tuned`` fits with slow samples and a validation loader whose workers persist; ``raises``
asks for so many workers that the run is not to start; ``equal`` fits with random augmentation and one seed, with stock
and tuned. Each rank writes what it has seen to ``FOLDER/rank-<rank>.json``.
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[1]))
from children import living, pids_of_children  # type: ignore[import-not-found]

from lightning_ncclsafe import HostPreflight, HostPreflightError, LoaderTuner, SafeDDP

EPOCHS, SAMPLES = 2, 600
ASKED, VALIDATES = 8, 2


class Slow(Dataset[torch.Tensor]):
    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []
        self.workers: set[int] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += batch[:, 0].tolist()
        self.note()
        time.sleep(0.004)
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note()

    def note(self) -> None:
        self.workers.add(len(living(pids_of_children(os.getpid()))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Augmented(Dataset[torch.Tensor]):
    """What it gives depends on who makes it, and when."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) * random.random() + float(numpy.random.random())


class Learns(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def weights(kind: str, workers: int) -> tuple[str, str]:
    """A fit with one seed, and what it has learned."""
    pl.seed_everything(5, workers=True, verbose=False)
    tuned = kind == "tuned"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        strategy=SafeDDP() if tuned else DDPStrategy(),
        callbacks=[LoaderTuner()] if tuned else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Learns()
    trainer.fit(net, DataLoader(Augmented(), batch_size=4, num_workers=workers, shuffle=True))
    learned = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return kind, hashlib.sha256(learned).hexdigest()


def compare(folder: Path) -> None:
    kinds = ("stock", "tuned", "tuned", "stock")
    found = {workers: [weights(kind, workers) for kind in kinds] for workers in (0, 2)}
    (folder / f"rank-{os.environ['LOCAL_RANK']}.json").write_text(json.dumps({"weights": found}))


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "equal":
        compare(folder)
        return
    callbacks: list[Any] = [HostPreflight(on_problem="raise")]
    if mode == "tuned":
        callbacks.append(LoaderTuner())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        strategy=SafeDDP(report_dir=folder / "reports"),
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(Slow(SAMPLES, 0.001), batch_size=4, num_workers=ASKED, shuffle=True)
    validate = DataLoader(Slow(40, 0.001), batch_size=4, num_workers=VALIDATES, persistent_workers=True)
    net, error = Net(), ""
    pl.seed_everything(3)
    try:
        trainer.fit(net, train, validate)
    except HostPreflightError as raised:
        error = str(raised)
    seen = {
        "error": error,
        "samples": net.seen,
        "workers": sorted(net.workers),
        "workers_after": len(pids_of_children(os.getpid())),
        "threads_after": [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclsafe")],
        "loader_after": [type(train).__name__, type(train) is DataLoader, train.num_workers, validate.num_workers],
    }
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))
    if error:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
