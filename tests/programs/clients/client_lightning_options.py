"""Lightning's options and callbacks, each with a Trainer of its own, one after the other in the same processes."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from train import SEED, Run

REQUIREMENTS: list[str] = []
MONITOR = "loss"
# It makes many Trainers.
RESUMES = False
WIDTH = 32


class Rows(Dataset[torch.Tensor]):
    def __init__(self, count: int = 48) -> None:
        self.rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.1 * torch.randn(WIDTH)


class Stream(IterableDataset[torch.Tensor]):
    """Every rank its own share, and no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter(Rows()[number] for number in range(rank, 48, ranks))


class Batches:
    """Whatever can be iterated over, the same on every rank."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.ones(4, WIDTH) * number for number in range(6))


class Model(BoringModel):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = 0.01
        self.layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = torch.cat([*batch.values()]) if isinstance(batch, dict) else batch
        loss = self.step(rows)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Model):
    """Two optimizers, of which one is used in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        loss = self.step(batch)
        self.log("loss", loss)
        self.manual_backward(loss)
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.layer[0], self.layer[2])]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return loader()

    def val_dataloader(self) -> list[DataLoader[torch.Tensor]]:
        return [loader(), DataLoader(Rows(10), batch_size=4)]


def loader(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), **({"batch_size": 4, "shuffle": True} | options))


def combined(mode: str) -> CombinedLoader:
    return CombinedLoader({"one": loader(), "two": DataLoader(Rows(24), batch_size=4)}, mode)


# What of the Trainer's arguments is different, and what it trains on; kwargs "model" and "data" are ours.
OPTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "a data module": lambda run: {"data": Data()},
    "limits": lambda run: {"limit_train_batches": 0.5, "limit_val_batches": 2, "num_sanity_val_steps": 0},
    "validation in between": lambda run: {"val_check_interval": 2, "check_val_every_n_epoch": None},
    "reloading": lambda run: {"reload_dataloaders_every_n_epochs": 1, "data": Data()},
    "overfitting": lambda run: {"overfit_batches": 2},
    "clipping": lambda run: {"gradient_clip_val": 0.1, "detect_anomaly": True},
    "max_steps": lambda run: {"max_steps": 5, "max_epochs": -1},
    "max_time": lambda run: {"max_time": timedelta(hours=1)},
    "no sampler": lambda run: {"use_distributed_sampler": False},
    "a sampler": lambda run: {"data": loader(shuffle=False, sampler=RandomSampler(Rows()))},
    "weights": lambda run: {"data": loader(shuffle=False, sampler=WeightedRandomSampler(torch.ones(48), 48))},
    "a generator": lambda run: {"data": loader(generator=torch.Generator().manual_seed(SEED))},
    "workers": lambda run: {"data": loader(num_workers=1)},
    "workers that stay": lambda run: {"data": loader(num_workers=1, persistent_workers=True)},
    "a stream": lambda run: {"data": DataLoader(Stream(), batch_size=4)} if run.variant != "one_device" else {},
    "loaders, the longest": lambda run: {"data": combined("max_size_cycle")},
    "loaders, the shortest": lambda run: {"data": combined("min_size")},
    "no DataLoader": lambda run: {"data": Batches()},
    "manual optimization": lambda run: {"model": Manual()},
    "bf16": lambda run: {"precision": "bf16-mixed"},
    "barebones": lambda run: {"barebones": True, "log_every_n_steps": None, "logger": None},
    "no logger": lambda run: {"logger": False},
    "two loggers": lambda run: {"logger": [CSVLogger(run.folder, "two"), TensorBoardLogger(str(run.folder), "board")]},
    "no checkpoints": lambda run: {"enable_checkpointing": False},
    "a profiler": lambda run: {"profiler": "simple"},
    "finding a learning rate": lambda run: {
        "tune": lambda tuner, model: tuner.lr_find(model, loader(), num_training=5)
    },
    "weight averaging": lambda run: {"callbacks": [of_lightning.StochasticWeightAveraging(0.01, swa_epoch_start=1)]},
    "other callbacks": lambda run: {
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "callbacks": [
            of_lightning.LearningRateMonitor(),
            of_lightning.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=2),
            of_lightning.GradientAccumulationScheduler({1: 2}),
            of_lightning.Timer(),
            of_lightning.TQDMProgressBar(),
            of_lightning.RichModelSummary(),
            of_lightning.OnExceptionCheckpoint(str(run.folder)),
        ],
    },
    "an exponential average": lambda run: {"callbacks": [of_lightning.EMAWeightAveraging()]},
    "pruning": lambda run: {"callbacks": [of_lightning.ModelPruning("l1_unstructured", amount=0.5)]},
}


def train(run: Run) -> None:
    for name, option in OPTIONS.items():
        pl.seed_everything(SEED, workers=True, verbose=False)
        run.part = name
        fit_and_more(run, option(run))


def fit_and_more(run: Run, changed: dict[str, Any]) -> None:
    kwargs = run.kwargs()
    kwargs["callbacks"] += changed.pop("callbacks", [])
    model, data, tune = (changed.pop(name, None) for name in ("model", "data", "tune"))
    trainer = pl.Trainer(**(kwargs | changed))
    model = model or Model()
    if tune:
        tune(Tuner(trainer), model)
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, loader() if data is None else data, DataLoader(Rows(10), batch_size=4))
    trainer.validate(model, DataLoader(Rows(10), batch_size=4), verbose=False)
    trainer.test(model, DataLoader(Rows(10), batch_size=4), verbose=False)
    trainer.predict(model, DataLoader(Rows(10), batch_size=4), return_predictions=False)
