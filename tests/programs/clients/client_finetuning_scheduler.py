"""finetuning-scheduler: thaws a small network level by level; it looks at the strategy's name and class."""

import lightning.pytorch as pl
import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from train import Run

REQUIREMENTS = ["finetuning-scheduler"]
MONITOR = "val_loss"
# Frozen parameters get no gradient.
STRATEGY = {"find_unused_parameters": True}
EPOCHS = 3


class Model(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.01)


def train(run: Run) -> None:
    schedule = {
        level: {"params": [f"layer.{layer}.weight", f"layer.{layer}.bias"]} for level, layer in enumerate((2, 0))
    }
    schedule[0]["max_transition_epoch"] = 2
    kwargs = run.kwargs()
    kwargs["callbacks"] += [
        # Which every strategy needs that is given as an object, stock as well.
        FinetuningScheduler(ft_schedule=schedule, allow_untested=True),
        FTSEarlyStopping("val_loss", patience=1),
        FTSCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
    ]
    loaders = [DataLoader(RandomDataset(32, 40), batch_size=4, shuffle=shuffled) for shuffled in (True, False)]
    pl.Trainer(**kwargs).fit(Model(), *loaders, ckpt_path=run.ckpt_path)
