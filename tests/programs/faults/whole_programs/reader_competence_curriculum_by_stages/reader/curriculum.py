import lightning as L
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from .schools import SCHOOLS, collect


class CompetenceCurriculum(L.Callback):
    """Opens the next stage of the exercises once the mean loss of an epoch is low enough."""

    def __init__(self, stages=(0.4, 0.7, 1.0), mastered=0.62):
        self.stages, self.mastered = stages, mastered
        self.stage = 0
        self.losses = []

    @property
    def share(self):
        return self.stages[self.stage]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        mean = sum(self.losses) / len(self.losses)
        if mean < self.mastered and self.stage + 1 < len(self.stages):
            self.stage += 1
        self.losses.clear()

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state):
        self.stage = state["stage"]


class Exercises(L.LightningDataModule):
    def __init__(self, root, batch_size, curriculum):
        super().__init__()
        self.root, self.batch_size, self.curriculum = root, batch_size, curriculum

    def prepare_data(self):
        collect(self.root)

    def setup(self, stage):
        school = list(SCHOOLS)[self.trainer.global_rank]
        data = torch.load(self.root / f"{school}.pt")
        self.all = TensorDataset(data["x"], data["y"])

    def train_dataloader(self):
        count = int(len(self.all) * self.curriculum.share)
        return DataLoader(Subset(self.all, range(count)), self.batch_size, shuffle=True)  # <- here
