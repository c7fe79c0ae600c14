"""Small fits with a logger, as it is or offloaded, and what is stored by it afterwards."""

import re
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from own_threads import own_threads
from tensorboard.backend.event_processing.event_accumulator import DEFAULT_SIZE_GUIDANCE, EventAccumulator
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[1]))
import slow_storage

from lightning_ncclsafe import LoggerOffload
from lightning_ncclsafe.code.patching import ReplacedMethod

STALL = slow_storage.STALL

Deed = Callable[["Model"], Any]

STEPS = 4


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class Model(L.LightningModule):
    """Logs each step's number, and does something beside in the steps that are named."""

    def __init__(self, deeds: Mapping[int, Deed] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3, "betas": [0.9, 0.99], "name": "small"})
        self.layer = torch.nn.Linear(3, 1)
        self.deeds = dict(deeds or {})
        self.example_input_array = torch.ones(1, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(batch)
        return output

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("number", float(batch_idx))
        self.deeds.get(batch_idx, lambda model: None)(self)
        return self(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validated", batch.mean())

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("tested", batch.mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=1)

    val_dataloader = train_dataloader
    test_dataloader = train_dataloader


def make_trainer(logger: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    few = {"max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    options = {**quiet, **few, **options}
    return L.Trainer(accelerator="cpu", devices=1, logger=logger, callbacks=list(callbacks), **options)


def fit(logger: Any, deeds: Mapping[int, Deed] | None = None, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    torch.manual_seed(7)
    trainer = make_trainer(logger, *callbacks, **options)
    trainer.fit(Model(deeds))
    return trainer


def offload(folder: Path, **options: Any) -> LoggerOffload:
    return LoggerOffload(staging_dir=folder / "staging", **options)


def check_given_back(folder: Path, *loggers: Logger) -> None:
    """Nothing is left of an offload: no threads, no staging, no replaced attributes."""
    assert own_threads() == []
    staging = folder / "staging"
    assert not staging.exists() or list(staging.iterdir()) == []
    for logger in loggers:
        owners = (logger, getattr(logger, "_experiment", None), getattr(logger, "_mlflow_client", None))
        attributes = [attribute for owner in owners for attribute in getattr(owner, "__dict__", {}).values()]
        assert not [attribute for attribute in attributes if isinstance(attribute, ReplacedMethod)]


def counted(said: str) -> dict[str, int]:
    """The numbers of the last summary that was printed."""
    pattern = r"wrote (\d+) points?(?: and (\d+) other records?)?.* \((\d+) thinned, (\d+) dropped\)"
    points, records, thinned, dropped = re.findall(pattern, said)[-1]
    return {"points": int(points), "records": int(records or 0), "thinned": int(thinned), "dropped": int(dropped)}


def events(folder: Path) -> dict[str, EventAccumulator]:
    """What TensorBoard reads, by run."""
    found = {}
    for run in sorted({path.parent for path in folder.rglob("*tfevents*")}):
        accumulator = EventAccumulator(str(run), size_guidance=dict.fromkeys(DEFAULT_SIZE_GUIDANCE, 0))
        accumulator.Reload()
        # A run whose name is the time has another one each time.
        found[re.sub(r"\d{9,}\.\d+", "<time>", str(run.relative_to(folder)))] = accumulator
    return found


KINDS = {"scalars": "Scalars", "images": "Images", "audio": "Audio", "histograms": "Histograms", "tensors": "Tensors"}


def points(accumulator: EventAccumulator) -> dict[tuple[str, str], list[Any]]:
    """All events of a run, in order, by kind and tag."""
    tags = accumulator.Tags()
    return {(kind, tag): getattr(accumulator, read)(tag) for kind, read in KINDS.items() for tag in tags[kind]}


def stored(folder: Path, *, by_time: bool = False) -> dict[str, Any]:
    """All that is in the event files of a folder, but for the times; in order of the files, or of the times."""
    return {run: _stored(accumulator, by_time) for run, accumulator in events(folder).items()}


def _stored(accumulator: EventAccumulator, by_time: bool) -> dict[Any, Any]:
    tags = accumulator.Tags()
    found: dict[Any, Any] = {}
    for key, these in points(accumulator).items():
        found[key] = list(map(_plain, sorted(these, key=lambda event: event.wall_time) if by_time else these))
    for kind, tag in list(found):
        if kind == "tensors":
            found["metadata", tag] = accumulator.SummaryMetadata(tag).SerializeToString(deterministic=True)
    found["graph"] = accumulator.Graph().SerializeToString(deterministic=True) if tags["graph"] else b""
    found["plugins"] = {name: accumulator.PluginTagToContent(name) for name in _plugins(accumulator)}
    return found


def _plugins(accumulator: EventAccumulator) -> list[str]:
    return sorted(accumulator._plugin_to_tag_to_content)


def _plain(event: Any) -> tuple[Any, ...]:
    """An event without its time."""
    fields = {name: value for name, value in vars(event).items() if name != "wall_time"}
    return tuple(
        value.SerializeToString() if hasattr(value, "SerializeToString") else value for value in fields.values()
    )


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a tag of the run in a folder."""
    (accumulator,) = events(folder).values()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def wandb_rows(file: Path) -> list[dict[str, str]]:
    """The rows of an offline run's file, which is a log of LevelDB with records of protobuf; values are JSON."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            parsed = Record.FromString(record)
            if parsed.HasField("history"):
                items = parsed.history.item
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
            record = b""
    return rows
