"""The small training that all scenarios share: a model of two layers, some rows, and what may be put into it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset
from truths import Case, Moment

from lightning_ncclsafe import SafeDDP, SafeFSDP, SafeModelParallel

BATCHES = 6
BATCH_SIZE = 4
IN_THE_MIDDLE = 3
FOR_LONG_S = 120.0
"""How long something stands still that never comes back: until the case is over."""

STOCK_TIMEOUT_S = 15.0
"""After how long Lightning alone ends a collective, where it is run to be compared."""

Act = Callable[["Net"], Any]
_ONLY_THE_LOOPS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a scenario knows of the rank that it runs on.

    Attributes:
        case: The scenario, with its truth.
        rank: This rank.
        folder: For what it leaves behind: reports, logs, checkpoints.
        suspect_after_s: After how long ranks are asked; None where the run shows that.
        timeout_s: The hard limit, seconds.
        strategy_name: ``"SafeDDP"``, ``"SafeFSDP"``, ``"SafeModelParallel"``, or Lightning alone: ``"DDPStrategy"``,
            which as ``"PatientDDPStrategy"`` waits for longer, ``"FSDPStrategy"``, ``"ModelParallelStrategy"``.
        num_nodes: Number of hosts.
        gpu_backend: The back end where ranks share a GPU; empty on CPUs.
        has_defaults: Whether Trainers have a logger, checkpoints, a progress bar and a sanity check, as by default.
    """

    case: Case
    rank: int
    folder: Path
    suspect_after_s: float | None = 2.0
    timeout_s: float = 60.0
    strategy_name: str = "SafeDDP"
    num_nodes: int = 1
    gpu_backend: str = ""
    has_defaults: bool = False

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def is_hit(self) -> bool:
        """Whether the fault is this one's."""
        return self.rank in self.case.ranks

    def begins(self) -> None:
        """It goes wrong now: from here on the time until the verdict counts."""
        path = self.folder / f"began-{self.rank}"
        if not path.exists():
            path.write_text(str(time.time()))

    def strategy(self, **more: Any) -> Any:
        backend = {"process_group_backend": self.gpu_backend} if self.gpu_backend else {}
        if self.strategy_name == "DDPStrategy":
            return DDPStrategy(timeout=timedelta(seconds=STOCK_TIMEOUT_S), **backend)
        if self.strategy_name == "PatientDDPStrategy":
            return DDPStrategy(timeout=timedelta(seconds=self.timeout_s), **backend)
        split = {"data_parallel_size": self.world_size, "tensor_parallel_size": 1}
        if self.strategy_name == "ModelParallelStrategy":
            return ModelParallelStrategy(**split, timeout=timedelta(seconds=STOCK_TIMEOUT_S))
        limits = {"suspect_after": self.suspect_after_s, "timeout": timedelta(seconds=self.timeout_s)} | backend | more
        if self.strategy_name == "SafeModelParallel":
            return SafeModelParallel(**split, **limits)
        if self.strategy_name == "SafeFSDP" and self.gpu_backend:
            return SafeFSDP(**limits)
        if self.strategy_name in ("SafeFSDP", "FSDPStrategy"):
            from fsdp_on_cpu import StockFSDP, let_fsdp_train_on_cpus

            let_fsdp_train_on_cpus()
            return SafeFSDP(**limits) if self.strategy_name == "SafeFSDP" else StockFSDP(timeout=limits["timeout"])
        return SafeDDP(**limits)

    def trainer(self, *, strategy: Any = None, **more: Any) -> L.Trainer:
        usual = {"max_epochs": 2} | ({} if self.has_defaults else _ONLY_THE_LOOPS)
        return L.Trainer(
            accelerator=SharedGPU() if self.gpu_backend else "cpu",
            devices=self.world_size // self.num_nodes,
            num_nodes=self.num_nodes,
            default_root_dir=self.folder,
            strategy=strategy or self.strategy(),
            **(usual | more),
        )

    def fit(self, act: Act | None = None, *, net: "Net | None" = None, data: Any = None, **trainer_args: Any) -> None:
        """Trains: ``act`` is called on all ranks at the case's moment; ``data`` takes the place of `rows`."""
        net = net or Net(self)
        net.act = act or net.act
        loaders = data if isinstance(data, tuple) else (data,)
        if data is None:
            loaders = (rows(self), rows(self)) if self.case.moment is Moment.VALIDATION else (rows(self),)
        self.trainer(**trainer_args).fit(net, *loaders)

    @property
    def is_last(self) -> bool:
        """Whether this is the rank that is not as all others are, see `truths.odd_one_out`."""
        return self.rank == self.world_size - 1

    def with_(self, **more: Any) -> "Here":
        return replace(self, **more)


def finding_unused(here: Here) -> Any:
    """As ``strategy="ddp_find_unused_parameters_true"``."""
    strategy = here.strategy()
    strategy._ddp_kwargs["find_unused_parameters"] = True
    return strategy


def rows(here: Here, batches: int = BATCHES, **keywords: Any) -> DataLoader[Any]:
    """So many batches for each rank, of data that a sampler splits."""
    count = batches * BATCH_SIZE * here.world_size
    values = torch.arange(8.0 * count).reshape(count, 8) / (8 * count)
    return DataLoader(TensorDataset(values), **({"batch_size": BATCH_SIZE} | keywords))


class SharedGPU(CUDAAccelerator):
    """One GPU as the device of each local rank; Lightning asks for as many GPUs as there are ranks."""

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return [0] * devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", device) for device in devices]


class Data(L.LightningDataModule):
    """As many random rows as `rows` has."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8)), BATCH_SIZE)


class Net(L.LightningModule):
    """Calls ``act`` on every rank at the moment of the case."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.act: Act = lambda net: None
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.is_split = False

    def at(self, *moments: Moment) -> None:
        if self.here.case.moment in moments:
            self.act(self)

    def configure_model(self) -> None:
        if self._device_mesh is None or self.is_split:
            return
        from torch.distributed.fsdp import fully_shard

        self.is_split = True
        for module in (self.layers[0], self.layers[2], self.layers):
            fully_shard(module, mesh=self._device_mesh["data_parallel"])

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layers(first_tensor(batch)).square().mean()

    def setup(self, stage: str) -> None:
        self.at(Moment.START)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 0 and batch_idx in (0, IN_THE_MIDDLE):
            self.at(Moment.MIDDLE if batch_idx else Moment.FIRST_STEP)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.current_epoch == 0 and batch_idx == 1:
            self.at(Moment.VALIDATION)
        self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(first_tensor(batch))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.at(Moment.EPOCH_END)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class NormedNet(Net):
    """Has a norm before its layers."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.norm = torch.nn.BatchNorm1d(8)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layers(self.norm(first_tensor(batch))).square().mean()


class LoggingNet(Net):
    """Logs the loss of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class MeetingNet(Net):
    """All ranks meet in validation, too, where nothing else would let them wait for one another."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_loss", self.loss(batch), sync_dist=True)


def first_tensor(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = batch[0]
    return batch


def quick_patience() -> None:
    """All that the guard learns or excuses takes a fraction of the time, so that what is healthy is soon seen to be.

    Proportions are kept: what is always too short to ask about, what is where nothing is known, and what is known to
    take long.
    """
    from lightning_ncclsafe import settings
    from lightning_ncclsafe.facts import phase_kinds
    from lightning_ncclsafe.guard import stuck, thresholds
    from lightning_ncclsafe.rules import expected_waits

    for module in (stuck, phase_kinds, expected_waits, settings, thresholds):
        for name, seconds in QUICK_S.items():
            if hasattr(module, name):
                setattr(module, name, seconds)


QUICK_S = {
    "FLOOR_S": 2.5,
    "UNKNOWN_S": 6.0,
    "EARLY_S": 4.0,
    "PASSING_S": 4.0,
    "ASLEEP_S": 2.0,
    "DEFAULT_SUSPECT_AFTER_S": 6.0,
    "LONG_S": 30.0,
}
"""In place of 10, 60, 20, 20, 10, 60 and 300 s."""


def rank_of_environment() -> int:
    """Of a program without a rank it is 0: Lightning starts the other ranks from there."""
    if "LOCAL_RANK" not in os.environ:
        return 0
    of_hosts_before = (
        int(os.environ.get("NODE_RANK", 0)) * int(os.environ["WORLD_SIZE"]) // int(os.environ.get("NODES", 1))
    )
    return of_hosts_before + int(os.environ["LOCAL_RANK"])
