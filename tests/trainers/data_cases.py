"""Trainings of several ranks on data of every kind, one after the other in the same processes.

Run by the tests as one process for each rank: ``python data_cases.py [CASE ...] --folder FOLDER``. What becomes of each
case on this rank is written to a file there: what was raised, how many steps were made, on which samples.
"""

import argparse
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset

from lightning_ncclsafe import DatasetAgreement, SafeDDP
from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.facts import VOTE_GROUPS
from lightning_ncclsafe.loaders import collecting

RANK = int(os.environ["LOCAL_RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
BATCH_SIZE = 2
# Batches of each rank, where they differ.
UNEVEN = (5, 3, 4)
# What this rank reads begins with its number: sample 203 is the fourth of rank 2.
FIRST = 100 * RANK


def numbers(count: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1))


class Stream(IterableDataset[torch.Tensor]):
    """Numbers from ``first`` on, of which nobody knows how many come."""

    def __init__(self, count: int, first: int = FIRST) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            yield torch.tensor([float(self.first + number)])


class SizedStream(Stream):
    """Claims a length; it need not be true."""

    def __init__(self, count: int, claimed: int) -> None:
        super().__init__(count)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


class Batches:
    """What a user may write in place of a DataLoader."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class OddLength(DataLoader[Any]):
    def __len__(self) -> int:
        raise ValueError("nobody has counted")


LOADERS = (DataLoader, OddLength)


class Strided(Sampler[int]):
    """Splits the data among ranks, and says nothing about it."""

    def __init__(self, count: int) -> None:
        self.mine = range(RANK, count - count % WORLD_SIZE, WORLD_SIZE)

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


class Augmented(Dataset[torch.Tensor]):
    """Different on every rank, and every time."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.tensor([float(index)]))


class Net(L.LightningModule):
    """Remembers what it was trained and evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[list[float]] = []
        self.evaluated: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values = first_tensor(batch)
        self.trained.append(values.flatten().tolist())
        return self.layer(values).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        values = first_tensor(batch)
        self.evaluated.append(values.flatten().tolist())
        self.log("seen", values.mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.evaluated.append(first_tensor(batch).flatten().tolist())
        return self.layer(first_tensor(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def first_tensor(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


class Case:
    """One training: what it is run with is changed by the functions below."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Net()
        self.agreement: dict[str, Any] = {}
        self.trainer_args: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
        self.callbacks: list[L.Callback] = []
        self.loaders: tuple[Any, ...] = ()
        self.call = "fit"
        self.call_args: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=SafeDDP(suspect_after=20, timeout=timedelta(seconds=60)),
            callbacks=[*self.callbacks, *([DatasetAgreement(**self.agreement)] if self.agreement else [])],
            default_root_dir=self.folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **self.trainer_args,
        )
        raised, text, finding = "", "", ""
        try:
            getattr(trainer, self.call)(self.model, *self.loaders, **self.call_args)
        except Exception as error:
            raised, text = type(error).__name__, str(error)
            finding = next((found.rule for found in getattr(error, "findings", ())), "")
        return {
            "raised": raised,
            "text": text,
            "finding": finding,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "trained": self.model.trained,
            "evaluated": self.model.evaluated,
            "types": [type(loader).__name__ for loader in self.loaders],
            "left": what_is_left(trainer, self.loaders),
            "reports": sorted(path.parent.name for path in self.folder.glob("ncclsafe/*/report.json")),
        }


def what_is_left(trainer: L.Trainer, loaders: tuple[Any, ...]) -> list[str]:
    """What we have not taken away: threads, groups, what stands in for Lightning's methods, classes of loaders."""
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclsafe")]
    left += [group.description for group in process_groups.own_groups() if group.description in VOTE_GROUPS]
    left += [repr(loader) for loader in loaders if isinstance(loader, DataLoader) and type(loader) not in LOADERS]
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.predict_loop)
    owners = (trainer._signal_connector, trainer.fit_loop.epoch_loop, *(loop._data_source for loop in loops))
    return left + [
        str(value) for owner in owners for value in vars(owner).values() if isinstance(value, ReplacedMethod)
    ]


def stream(batches: int, **keywords: Any) -> DataLoader[Any]:
    return DataLoader(Stream(batches * BATCH_SIZE), batch_size=BATCH_SIZE, **keywords)


def listed(batches: int, **keywords: Any) -> DataLoader[Any]:
    return DataLoader(numbers(batches * BATCH_SIZE, FIRST), batch_size=BATCH_SIZE, **keywords)


def common(count: int = 12, **keywords: Any) -> DataLoader[Any]:
    """What is the same on all ranks, and to be split among them."""
    return DataLoader(numbers(count), batch_size=BATCH_SIZE, **keywords)


# Uneven ends.


def uneven_stream(case: Case, on_uneven: str) -> None:
    case.agreement = {"on_uneven": on_uneven}
    case.trainer_args |= {"max_epochs": 2}
    case.loaders = (stream(UNEVEN[RANK]),)


def uneven_stream_accumulated(case: Case, on_uneven: str) -> None:
    uneven_stream(case, on_uneven)
    case.trainer_args |= {"accumulate_grad_batches": 2}
    case.loaders = (stream(UNEVEN[RANK]), stream((2, 4, 3)[RANK]))


def uneven_stream_with_workers(case: Case) -> None:
    uneven_stream(case, "stop_together")
    case.loaders = (stream(UNEVEN[RANK], num_workers=1, persistent_workers=True),)


def uneven_validation(case: Case, **agreement: str) -> None:
    case.agreement = dict(agreement)
    case.loaders = (common(drop_last=True), [stream(2), stream(UNEVEN[RANK])])
    case.trainer_args |= {"use_distributed_sampler": True, "num_sanity_val_steps": 0}


def uneven_known(case: Case, **agreement: str) -> None:
    case.agreement = dict(agreement)
    case.trainer_args |= {"max_epochs": 2}
    case.loaders = (listed(UNEVEN[RANK]),)


def uneven_combined(case: Case) -> None:
    """The short loader goes round while the long one is read: both have to end alike on all ranks."""
    case.agreement = {"on_uneven": "stop_together"}
    case.loaders = (CombinedLoader({"a": stream(UNEVEN[RANK]), "b": listed((4, 2, 5)[RANK])}, "max_size_cycle"),)


def claimed_lengths(case: Case) -> None:
    """Streams that claim what they have, and that is different; a share of them is wanted."""
    case.agreement = {"on_uneven": "stop_together"}
    case.trainer_args |= {"limit_train_batches": 0.7}
    claimed = SizedStream(UNEVEN[RANK] * BATCH_SIZE, claimed=UNEVEN[RANK] * BATCH_SIZE)
    case.loaders = (DataLoader(claimed, batch_size=BATCH_SIZE),)


def user_looks(case: Case) -> None:
    """Rank 0 reads some batches by itself, before and in the middle of training, from loaders that ranks vote on."""

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            if RANK == 0:
                next(iter(trainer.train_dataloader))

        def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
            if RANK == 0:
                list(trainer.val_dataloaders)

        on_train_epoch_end = on_train_start

    case.callbacks = [Look()]
    case.trainer_args |= {"max_epochs": 2}
    case.loaders = (stream(3), stream(2))


def predict_shards(case: Case) -> None:
    case.call = "predict"
    case.loaders = ([listed(UNEVEN[RANK]), stream(UNEVEN[RANK])],)


def half_sized(case: Case, **agreement: str) -> None:
    case.agreement = dict(agreement)
    case.loaders = (stream(UNEVEN[RANK]) if RANK == 1 else listed(UNEVEN[RANK]),)


# Disagreements.


def unseeded_split(case: Case) -> None:
    case.trainer_args |= {"use_distributed_sampler": True}
    np.random.seed(RANK)
    order = np.random.permutation(24)[:12]
    case.loaders = (DataLoader(Subset(numbers(24), order.tolist()), batch_size=BATCH_SIZE),)


def unseeded_split_warned(case: Case) -> None:
    unseeded_split(case)
    case.agreement = {"on_mismatch": "warn"}


def unseeded_split_refused(case: Case) -> None:
    unseeded_split(case)
    case.agreement = {"on_mismatch": "raise"}


def unseeded_split_unread(case: Case) -> None:
    unseeded_split(case)
    case.agreement = {"content": "off"}


def different_number(case: Case) -> None:
    case.loaders = (listed(3), [listed(2)] * (2 if RANK == 1 else 1))


def no_validation_loader(case: Case) -> None:
    case.loaders = (listed(3), [] if RANK == 1 else [listed(2)])


def same_stream(case: Case) -> None:
    case.loaders = (DataLoader(Stream(8, first=0), batch_size=BATCH_SIZE),)


def same_stream_refused(case: Case) -> None:
    same_stream(case)
    case.agreement = {"on_mismatch": "raise"}


def whole_validation(case: Case) -> None:
    """Each rank has a shard to train on, and all of them the whole to validate with."""
    case.loaders = (listed(3), common(6))


def reloaded(case: Case) -> None:
    """The first epoch's data agree, the second's do not."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            return listed(3 if self.trainer.current_epoch == 0 else UNEVEN[RANK])

    case.trainer_args |= {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    case.loaders = (Data(),)


def validates_elsewhere(case: Case) -> None:
    case.trainer_args |= {"val_check_interval": 2 if RANK == 0 else 3}
    case.loaders = (listed(6), listed(1))


# Nothing to refuse.


def shuffled_and_padded(case: Case) -> None:
    case.trainer_args |= {"use_distributed_sampler": True}
    case.loaders = (common(13, shuffle=True), common(13))


def augmented(case: Case) -> None:
    torch.manual_seed(RANK)
    random.seed(RANK)
    case.agreement = {"content": "full"}
    case.trainer_args |= {"use_distributed_sampler": True}
    case.loaders = (DataLoader(Augmented(lambda value: value + torch.rand(1) + random.random()), batch_size=2),)


def sharded(case: Case) -> None:
    case.loaders = (listed(3), [listed(2), stream(2)])


def own_sampler(case: Case) -> None:
    data = numbers(14)
    case.loaders = (
        DataLoader(data, batch_size=BATCH_SIZE, sampler=Strided(14)),
        DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, WORLD_SIZE, RANK, shuffle=False)),
    )


def overfitted(case: Case) -> None:
    case.trainer_args |= {"overfit_batches": 2, "use_distributed_sampler": True}
    case.loaders = (common(shuffle=True), common())


def fast_dev_run(case: Case) -> None:
    case.trainer_args |= {"fast_dev_run": True}
    case.loaders = (stream(3), listed(3))


def resumed(case: Case) -> None:
    """From a checkpoint in the middle of an epoch."""
    checkpoint = case.folder / "half.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(checkpoint)

    first = Case(case.folder)
    for one in (first, case):
        one.trainer_args |= {"use_distributed_sampler": True}
        one.loaders = (common(shuffle=True),)
    first.callbacks = [Save()]
    first.run()
    case.call_args = {"ckpt_path": checkpoint}


def evaluation(case: Case, call: str) -> None:
    case.call = call
    case.trainer_args |= {"use_distributed_sampler": True}
    case.loaders = ([common(), common(5)],)


def odd_loaders(case: Case) -> None:
    """A class of the user's own for training, and for validation a generator that can be read once and a tensor."""
    values = [torch.tensor([[FIRST + number]], dtype=torch.float32) for number in range(4)]
    case.trainer_args |= {"num_sanity_val_steps": 0}
    case.loaders = (Batches(values), [(batch for batch in values[:3]), torch.stack(values)])


def same_object(case: Case) -> None:
    """One loader for training and for validation, given again for every epoch."""
    loader = stream(3)
    case.trainer_args |= {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    case.loaders = (loader, loader)


def odd_length(case: Case) -> None:
    case.loaders = (OddLength(Stream(4), batch_size=BATCH_SIZE),)


def blind_rank(case: Case) -> None:
    """Our own look at the loaders fails on one rank."""
    case.loaders = (listed(2), listed(1))
    if RANK == 1:
        case.callbacks = [BreakOurs()]


class BreakOurs(L.Callback):
    """Makes our probe of loaders fail for the length of one training."""

    def setup(self, *_: Any, **__: Any) -> None:
        self.probe, collecting.loader_facts = collecting.loader_facts, self.fail

    def teardown(self, *_: Any, **__: Any) -> None:
        collecting.loader_facts = self.probe

    def fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("our own fault")


CASES: dict[str, Callable[[Case], None]] = {
    "raise": lambda case: uneven_stream(case, "raise"),
    "stop-together": lambda case: uneven_stream(case, "stop_together"),
    "repeat": lambda case: uneven_stream(case, "repeat"),
    "stop-together-accumulated": lambda case: uneven_stream_accumulated(case, "stop_together"),
    "repeat-accumulated": lambda case: uneven_stream_accumulated(case, "repeat"),
    "workers": uneven_stream_with_workers,
    "uneven-validation": lambda case: uneven_validation(case, on_uneven="raise"),
    "uneven-validation-alone": uneven_validation,
    "known-raise": uneven_known,
    "known-stop-together": lambda case: uneven_known(case, on_uneven="stop_together"),
    "known-repeat": lambda case: uneven_known(case, on_uneven="repeat"),
    "known-warn": lambda case: uneven_known(case, on_mismatch="warn"),
    "combined": uneven_combined,
    "claimed-lengths": claimed_lengths,
    "user-looks": user_looks,
    "predict-shards": predict_shards,
    "half-sized": half_sized,
    "half-sized-warn": lambda case: half_sized(case, on_mismatch="warn", on_uneven="stop_together"),
    "unseeded-split": unseeded_split_refused,
    "unseeded-split-alone": unseeded_split,
    "unseeded-split-warn": unseeded_split_warned,
    "unseeded-split-off": unseeded_split_unread,
    "different-number": different_number,
    "no-validation-loader": no_validation_loader,
    "same-stream": same_stream_refused,
    "same-stream-alone": same_stream,
    "whole-validation": whole_validation,
    "reloaded": reloaded,
    "validates-elsewhere": validates_elsewhere,
    "shuffled-and-padded": shuffled_and_padded,
    "augmented": augmented,
    "sharded": sharded,
    "own-sampler": own_sampler,
    "overfitted": overfitted,
    "fast-dev-run": fast_dev_run,
    "resumed": resumed,
    "validate": lambda case: evaluation(case, "validate"),
    "test": lambda case: evaluation(case, "test"),
    "predict": lambda case: evaluation(case, "predict"),
    "odd-loaders": odd_loaders,
    "same-object": same_object,
    "odd-length": odd_length,
    "blind-rank": blind_rank,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    outcomes = {}
    for name in options.cases or CASES:
        case = Case(options.folder / name)
        case.folder.mkdir(exist_ok=True)
        CASES[name](case)
        outcomes[name] = case.run()
        (options.folder / f"rank{RANK}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
