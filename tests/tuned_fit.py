"""A fit with LoaderTuner and HostPreflight; run by ``test_loader_tuner.py`` on each of two ranks.

``python tuned_fit.py FOLDER tuned`` fits with slow samples and a validation loader whose workers persist; ``raises``
asks for so many workers that the run is not to start. Each rank writes what it has seen to ``FOLDER/rank-<rank>.json``.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import HostPreflight, HostPreflightError, LoaderTuner, SafeDDP

EPOCHS, SAMPLES = 2, 2000


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
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        self.workers.add(len(alive))
        if len(alive) > 1:
            print("MANY", [(c.cmdline()[:6], c.status(), time.time() - c.create_time()) for c in alive], flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
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
    train = DataLoader(Slow(SAMPLES, 0.001), batch_size=4, num_workers=8, shuffle=True)
    validate = DataLoader(Slow(40, 0.001), batch_size=4, num_workers=2, persistent_workers=True)
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
        "workers_after": len(psutil.Process().children()),
        "threads_after": [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclsafe")],
        "loader_after": [type(train).__name__, type(train) is DataLoader, train.num_workers, validate.num_workers],
    }
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))
    if error:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
