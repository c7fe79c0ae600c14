"""Trains with a strategy of Lightning's and with ours, side by side, and prints what each has come to, as JSON.

Run by the tests as a program on every rank: ``python conformance.py ddp FOLDER``. Both strategies train in the same
processes, one after the other, so what one saves the other can resume.
"""

import hashlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
from fsdp_on_cpu import StockFSDP, let_fsdp_train_on_cpus  # type: ignore[import-not-found]
from polling import until

from lightning_ncclsafe import (
    CollectiveTimer,
    DatasetAgreement,
    HostPreflight,
    LoaderTuner,
    PhaseTimeouts,
    SafeDDP,
    SafeFSDP,
    SafeModelParallel,
)
from lightning_ncclsafe._torch import process_groups

ROWS = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


STRATEGIES: dict[str, dict[str, Callable[..., Any]]] = {
    "ddp": {"stock": DDPStrategy, "safe": SafeDDP},
    "fsdp": {"stock": StockFSDP, "safe": SafeFSDP},
    "model-parallel": {"stock": ModelParallelStrategy, "safe": SafeModelParallel},
}


class Model(L.LightningModule):
    """Two layers, which are split as the strategy's mesh says."""

    def __init__(self, *, manual: bool = False, raises_at: int | None = None, batch_norm: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.raises_at = raises_at
        norm = [torch.nn.BatchNorm1d(16)] if batch_norm else []
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), *norm, torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.losses: list[float] = []
        self.is_split = False

    def configure_model(self) -> None:
        if self._device_mesh is None or self.is_split:
            return
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.is_split = True
        data, tensor = self._device_mesh["data_parallel"], self._device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.net, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if data.size() > 1:
            for module in (self.net[0], self.net[-1], self.net):
                fully_shard(module, mesh=data)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.raises_at:
            raise ValueError("the batch is broken")
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> list[list[float]]:
        return self.net(batch[0]).tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Experience(IterableDataset[torch.Tensor]):
    """As in reinforcement learning: what comes next depends on the model, and on chance, when it is asked for."""

    def __init__(self, model: "Playing", batches: int) -> None:
        self.model, self.batches = model, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        state = torch.full((8,), 0.1 * (1 + self.model.global_rank))
        for _ in range(self.batches):
            self.model.played_at.append(self.model.global_step)
            with torch.no_grad():
                action = self.model.net(state).sum() + torch.randn(1)
            state = (state + action).sin()
            yield state.unsqueeze(0)


class Playing(Model):
    """Remembers after how many steps it was asked for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.played_at: list[int] = []

    def experience(self, batches: int, **more: Any) -> DataLoader[Any]:
        return DataLoader(Experience(self, batches), batch_size=1, **more)


def loader(shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=shuffle)


def validation() -> DataLoader[Any]:
    """Two batches of each rank, which is as telling as four."""
    return DataLoader(TensorDataset(ROWS[:16]), batch_size=4)


def digest(tensors: dict[str, Any]) -> str:
    """Of this rank's part of what may be split among ranks."""
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(name.encode())
        whole.update(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes())
    return whole.hexdigest()


def timeouts_s() -> dict[str, float]:
    """Of the groups that this rank is a member of, by their ranks."""
    groups = {group.name: group.ranks for group in process_groups.own_groups()}
    return {str(groups[group.name]): group.timeout_s for group in process_groups.timed_groups()}


# What each rank has seen, by strategy, that is not the same with both.
OWN: dict[str, dict[str, dict[str, float]]] = {}


class GroupsSeen(L.Callback):
    """The timeouts of all groups in the midst of an epoch."""

    timeouts: dict[str, float]

    def on_train_batch_end(self, *_: object) -> None:
        self.timeouts = timeouts_s()


class Bench:
    """What both strategies are given to do, each with its own folder."""

    def __init__(self, kind: str, make: Callable[..., Any], folder: Path) -> None:
        self.kind, self.make, self.folder = kind, make, folder

    def trainer(self, *, strategy: dict[str, Any] | None = None, **more: Any) -> L.Trainer:
        L.seed_everything(1, verbose=False)
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": DEVICES,
            "max_epochs": 1,
            "num_sanity_val_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        return L.Trainer(strategy=self.make(**{**ARGUMENTS, **(strategy or {})}), **(options | more))

    def fitted(self, trainer: L.Trainer, model: Model | None = None, **more: Any) -> dict[str, Any]:
        model = model or Model()
        trainer.fit(model, loader(shuffle=True), validation(), **more)
        return self.told(trainer, model)

    def told(self, trainer: L.Trainer, model: Model) -> dict[str, Any]:
        return {
            "losses": [*model.losses],
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "weights": digest(dict(model.named_parameters())),
            "random numbers": [torch.rand(1).item(), random.random(), float(numpy.random.rand())],
            "steps": trainer.global_step,
            "ranks": [trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.num_nodes],
            "sampler": trainer.distributed_sampler_kwargs,
            "precision": type(trainer.precision_plugin).__name__,
        }


def plain(bench: Bench) -> dict[str, Any]:
    """Fit twice, then all other calls, with what Lightning users have beside their model."""
    trainer = bench.trainer(
        profiler="simple", enable_progress_bar=True, enable_model_summary=True, callbacks=[RichProgressBar()]
    )
    model = Model()
    first = bench.fitted(trainer, model)
    trainer.fit_loop.max_epochs = 2
    again = bench.fitted(trainer, model)
    others = [
        trainer.validate(model, validation(), verbose=False),
        trainer.test(model, validation(), verbose=False),
    ]
    predicted = trainer.predict(model, loader())
    own = type(trainer.strategy).__name__
    return {
        "first": first,
        "again": again,
        "others": others,
        "predicted": predicted,
        "profiled": sorted(name.replace(own, "Strategy") for name in trainer.profiler.recorded_durations),
    }


def accumulated(bench: Bench) -> dict[str, Any]:
    """Gradients of two batches for each step, and mixed precision."""
    return bench.fitted(bench.trainer(precision="bf16-mixed", accumulate_grad_batches=2))


def manual(bench: Bench) -> dict[str, Any]:
    return bench.fitted(bench.trainer(), Model(manual=True))


def played(bench: Bench) -> dict[str, Any]:
    """On data of unknown length that depends on when it is read: in this process, some of it, and in a worker."""
    found: dict[str, Any] = {}
    ways: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("whole", {"accumulate_grad_batches": 2}, {}),
        ("limited", {"limit_train_batches": 3, "limit_val_batches": 2}, {}),
        ("in a worker", {}, {"num_workers": 1}),
    )
    for name, options, of_loader in ways:
        trainer, model = bench.trainer(max_epochs=2, **options), Playing()
        trainer.fit(model, model.experience(5, **of_loader), model.experience(3))
        found[name] = bench.told(trainer, model) | {"played at": model.played_at}
    return found


def stopped_early(bench: Bench) -> dict[str, Any]:
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    told = bench.fitted(bench.trainer(max_epochs=9, callbacks=[stop]))
    return told | {"stopped": stop.stopped_epoch, "waited": stop.wait_count}


def averaged(bench: Bench) -> dict[str, Any]:
    swa = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    return bench.fitted(bench.trainer(max_epochs=3, callbacks=[swa]))


def synchronised_norm(bench: Bench) -> dict[str, Any]:
    """On a CPU PyTorch's layer refuses to train: both have to say the same."""
    try:
        return bench.fitted(bench.trainer(sync_batchnorm=True), Model(batch_norm=True))
    except (ValueError, RuntimeError) as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def compiled(bench: Bench) -> dict[str, Any]:
    trainer = bench.trainer()
    model = Model()
    model.net.compile(backend="eager")
    return bench.fitted(trainer, model)


def broken(bench: Bench) -> dict[str, Any]:
    """All ranks raise; the callback then saves, which takes all of them."""
    keep = OnExceptionCheckpoint(bench.folder, filename="broken")
    trainer = bench.trainer(enable_checkpointing=True, callbacks=[keep])
    with suppress(ValueError):
        bench.fitted(trainer, Model(raises_at=2))
        raise AssertionError("it has not raised")
    (path,) = bench.folder.glob("broken*")
    return {"steps": trainer.global_step, "saved": path.name}


def checkpoint(bench: Bench, **strategy: Any) -> Path:
    """The last of one epoch, by ModelCheckpoint."""
    keep = ModelCheckpoint(bench.folder / "-".join(["kept", *strategy]), save_last=True, save_top_k=0)
    trainer = bench.trainer(strategy=strategy, enable_checkpointing=True, callbacks=[keep])
    bench.fitted(trainer)
    return Path(keep.last_model_path)


class GathersSlowly(SafeModelParallel):
    """Rank 0 needs as long for the whole of the model as others take to ask why that of the optimizer is not there."""

    is_reported = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        folder = Path(self.lightning_module.trainer.default_root_dir)
        if self.global_rank == 0 and not self.is_reported:
            earlier = {*folder.rglob("report.json")}
            until(lambda: {*folder.rglob("report.json")} - earlier)
            self.is_reported = True
        return state


def gathered_slowly(bench: Bench) -> dict[str, Any]:
    """Ours says why ranks wait; Lightning's has nothing to say."""
    if bench.kind == "safe":
        slow = Bench("safe", GathersSlowly, bench.folder / "slow")
        checkpoint(slow, save_distributed_checkpoint=False, suspect_after=1.0)
    return {}


def content(path: Path) -> dict[str, Any]:
    """The names of what is in a checkpoint, and the model's weights; of one in parts, the files and their names."""
    if path.is_dir():
        meta = torch.load(path / "meta.pt", weights_only=False)
        files = sorted(file.name for file in path.iterdir())
        return {"keys": sorted(meta), "files": files}
    loaded = torch.load(path, weights_only=False)
    keys = {"keys": sorted(loaded), "weights": digest(loaded["state_dict"]), "of model": list(loaded["state_dict"])}
    return keys | {"callbacks": len(loaded["callbacks"]), "optimizers": len(loaded["optimizer_states"])}


def resumed(bench: Bench, path: Path, **strategy: Any) -> dict[str, Any]:
    """What another epoch comes to, from a checkpoint."""
    trainer = bench.trainer(strategy=strategy, max_epochs=2)
    # Lightning 2.5 reads everything anyway, and does not know the argument.
    whole = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    return bench.fitted(trainer, ckpt_path=path, **whole)


def interchanged(benches: list[Bench], **strategy: Any) -> dict[str, Any]:
    """What each strategy has saved, resumed by each of both."""
    paths = {bench.kind: checkpoint(bench, **strategy) for bench in benches}
    saved = {kind: content(path) for kind, path in paths.items()}
    whole = {
        bench.kind: {other: resumed(bench, path, **strategy) for other, path in paths.items()} for bench in benches
    }
    return {kind: {"saved": saved[kind], "resumed": whole[kind]} for kind in saved}


def watched(bench: Bench) -> dict[str, Any]:
    """Ours with all that it has, next to Lightning's with nothing; and of which groups collectives were timed."""
    callbacks, strategy = [], {}
    if bench.kind == "safe":
        callbacks = [CollectiveTimer(every_n_steps=1), LoaderTuner(), DatasetAgreement(), HostPreflight()]
        strategy = {"phase_timeouts": PhaseTimeouts(init=50, train=100), "timeout": timedelta(seconds=300)}
    trainer = bench.trainer(strategy=strategy, callbacks=callbacks, max_epochs=2)
    seen = GroupsSeen()
    trainer.callbacks.append(seen)
    told = bench.fitted(trainer)
    OWN[bench.kind] = {"while": seen.timeouts, "after": timeouts_s()}
    return told


CHECKS: dict[str, tuple[Callable[[Bench], Any], ...]] = {
    "ddp": (plain, accumulated, manual, played, stopped_early, broken, averaged, synchronised_norm, compiled),
    # One call only, and no checkpoint: the first version of FSDP cannot put its parameters together again on a CPU.
    "fsdp": (accumulated, stopped_early),
    "data-parallel": (plain, accumulated, broken, gathered_slowly),
    "tensor-parallel": (plain, manual),
    "both-parallel": (watched,),
}
SIZES = {"data-parallel": (2, 1), "tensor-parallel": (1, 2), "both-parallel": (2, 2)}
# How checkpoints are made.
CHECKPOINTS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"whole": {}},
    "data-parallel": {
        "whole": {"save_distributed_checkpoint": False},
        "in parts": {"save_distributed_checkpoint": True},
    },
    "both-parallel": {"whole": {"save_distributed_checkpoint": False}},
}
_sizes = SIZES.get(sys.argv[1], (2, 1))
DEVICES = _sizes[0] * _sizes[1]
ARGUMENTS = (
    dict(zip(("data_parallel_size", "tensor_parallel_size"), _sizes, strict=True)) if sys.argv[1] in SIZES else {}
)


def outcomes(name: str, benches: list[Bench]) -> Iterator[tuple[str, dict[str, Any]]]:
    for check in CHECKS[name]:
        yield check.__name__, {bench.kind: check(bench) for bench in benches}
    for how, strategy in CHECKPOINTS.get(name, {}).items():
        yield f"checkpoint {how}", interchanged(benches, **strategy)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "fsdp":
        let_fsdp_train_on_cpus()
    makes = STRATEGIES["model-parallel" if name in SIZES else name]
    benches = [Bench(kind, make, folder / kind) for kind, make in makes.items()]
    found = dict(outcomes(name, benches))
    rank = torch.distributed.get_rank()
    (folder / f"found-{rank}.json").write_text(json.dumps(found | {"own": OWN}))


if __name__ == "__main__":
    main()
