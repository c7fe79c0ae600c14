"""A training with Lightning of before 2.0, under the name that it then had."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from hangs import HANGS, Here
from pytorch_lightning.strategies import DDPStrategy
from torch import nn


class Net(pl.LightningModule):
    def __init__(self, hang: Any, here: Here) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.hang, self.here = hang, here

    def on_fit_start(self) -> None:
        self.here.metrics, self.here.store = dist.new_group(), dist.distributed_c10d._get_default_store()
        self.hang.begin(self.here)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.hang.step(self.here, batch_idx)
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.hang.end(self.here)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def main() -> None:
    here, hang = Here(Path(sys.argv[2])), HANGS[sys.argv[1]]()
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=here.world_size,
        strategy=DDPStrategy(timeout=timedelta(minutes=20)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        replace_sampler_ddp=False,
        default_root_dir=here.folder,
    )
    hang.run(here, lambda: trainer.fit(Net(hang, here), hang.loader(here)))


if __name__ == "__main__":
    main()
