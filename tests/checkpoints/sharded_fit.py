"""A training whose model is split among ranks, and in which one rank does at one batch what the command line says.

Run by the tests as a program on every rank: ``python sharded_fit.py raise --strategy=SafeModelParallel``. After each
step every rank keeps what it has of weights and optimizer; ``--compare`` holds what is loaded against that.
"""

import argparse
import hashlib
import io
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[1]))

from fsdp_on_cpu import StockFSDP, let_fsdp_train_on_cpus

from lightning_ncclsafe import JustInTimeCheckpoint, SafeFSDP, SafeModelParallel
from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.checkpoints.shards import OwnShard, pieces_of

ROWS = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
BATCH, EPOCHS = 2, 2


def fail() -> None:
    raise ValueError("the batch is broken")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEEDS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "raise": fail,
    "kill": be_killed,
    "stall": lambda: threading.Event().wait(60),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] + random.random()


class Stands(nn.Module):
    """A place to stop at in the middle of the forward pass: some parameters are whole there, others are not."""

    def __init__(self, at: Callable[[], object]) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at()
        return x


class Split(pl.LightningModule):
    """Sizes that two ranks do not share out evenly, one of which has nothing of some; a buffer that is not split."""

    def __init__(self, at: Callable[[], object], *, is_flat: bool) -> None:
        super().__init__()
        self.is_flat = is_flat
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 7), Stands(at), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 1))

    def configure_model(self) -> None:
        if not self.is_flat and not isinstance(self.layers[0].weight, torch.distributed.tensor.DTensor):
            mesh = self.device_mesh["data_parallel"]
            for part in (self.layers[0], self.layers):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value).detach()
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def digest(trainer: pl.Trainer) -> str:
    """Of what this rank has of weights and optimizer."""
    content = io.BytesIO()
    for tensor in tensors([[*trainer.model.parameters()], [one.state_dict()["state"] for one in trainer.optimizers]]):
        content.write(tensor.float().numpy().tobytes())
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return hashlib.sha256(content.getvalue() + repr(rates).encode()).hexdigest()[:16]


def say(text: str) -> None:
    """Prints a line in one piece: ranks share an output, and the end of a line is a write of its own."""
    print(f"{text}\n", end="", flush=True)


def made() -> int:
    """How many collectives have been recorded."""
    return sum(len(dump.get("entries", ())) for dump in recorders.dumps(collectives=True))


class Watches(pl.Callback):
    """Says what this rank has after each step, what it begins with, and what reading that calls."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        say(f"rank {trainer.global_rank} begins at step {trainer.global_step} with {digest(trainer)}")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        before = made()
        shard = OwnShard(trainer.model)
        state = [shard.optimizer_state(one, one.param_groups) for one in trainer.optimizers]
        assert not shard.why_unread and pieces_of({"model": shard.weights(), "optimizer_0": state[0]}, is_first=True)
        say(f"rank {trainer.global_rank} has read its part with {made() - before} collectives")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        say(f"rank {trainer.global_rank} after step {trainer.global_step} has {digest(trainer)}")


def strategy_of(name: str, options: argparse.Namespace) -> Any:
    limits = {"suspect_after": options.suspect_after, "timeout": timedelta(seconds=options.timeout)}
    flat = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    # Stock loads folders also where it is told to save files.
    whole = {"save_distributed_checkpoint": False}
    return {
        "SafeModelParallel": lambda: SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1, **limits),
        "ModelParallelStrategy": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **whole),
        "SafeFSDP": lambda: SafeFSDP(**limits, **flat),
        "StockFSDP": lambda: StockFSDP(**flat, state_dict_type="full"),
    }[name]()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("--strategy", default="SafeModelParallel")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--batch", type=int, default=11, help="of all epochs, from 0")
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--suspect-after", type=float, default=1.0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--root-dir", type=Path, required=True)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    passed = 0

    def at() -> None:
        nonlocal passed
        time.sleep(options.pace)
        passed += 1
        if passed - 1 == options.batch and rank == options.rank:
            DEEDS[options.deed]()

    torch.set_num_threads(1)
    let_fsdp_train_on_cpus()
    pl.seed_everything(1, verbose=False)
    model = Split(at, is_flat="FSDP" in options.strategy)
    if options.resume:
        # What goes on has to get these from the checkpoint.
        random.seed(77)
        torch.manual_seed(77 + rank)
    safe = options.strategy.startswith("Safe")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=EPOCHS,
        default_root_dir=options.root_dir,
        callbacks=[Watches()] + [JustInTimeCheckpoint(options.root_dir / "checkpoints", resume=options.resume)] * safe,
        strategy=strategy_of(options.strategy, options),
    )
    trainer.fit(model, DataLoader(Noisy(), batch_size=BATCH, shuffle=True), ckpt_path=options.load)
    say(f"rank {rank} has made {trainer.global_step} steps and has {digest(trainer)}")


if __name__ == "__main__":
    main()
