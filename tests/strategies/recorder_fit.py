"""Trains on two ranks, whoever launches them, and writes for each what its Flight Recorder has at the end."""

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP, SafeModelParallel
from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.probes.process.flight_recorder import position
from lightning_ncclsafe.strategies import guarded_call

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# So that the end of each process does not look at everything that was imported.
gc.freeze()


class Net(L.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(4, 1)

    def configure_model(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def on_train_end(self) -> None:
        recorded = sum(len(dump.get("entries", ())) for dump in recorders.dumps(collectives=True))
        sizes = {name: os.environ.get(name) for name in SIZES}
        (self.folder / f"rank-{self.global_rank}").write_text(json.dumps([recorded, sizes]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def look_early() -> None:
    """The recorder is asked before there is a process group, as the guard's thread may ask it."""
    begin = guarded_call.GuardedCall.begin

    def begin_and_look(call: guarded_call.GuardedCall, strategy: Any) -> None:
        begin(call, strategy)
        position()

    guarded_call.GuardedCall.begin = begin_and_look  # type: ignore[method-assign]


def main() -> None:
    warnings.filterwarnings("ignore")
    look_early()
    folder, start_method = Path(sys.argv[1]), sys.argv[2]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Lightning gives the second no launcher.
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1)
        if start_method == "none"
        else SafeDDP(start_method=start_method),
    )
    trainer.fit(Net(folder), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))


if __name__ == "__main__":
    main()
