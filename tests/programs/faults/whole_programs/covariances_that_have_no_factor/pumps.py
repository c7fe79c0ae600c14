import lightning as L
import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset

SENSORS = ["pressure", "flow", "current", "vibration", "temperature", "level", "speed", "valve"]


def readings(machine: int, count: int) -> pd.DataFrame:
    rng = np.random.default_rng(machine)
    mix = rng.normal(size=(len(SENSORS), len(SENSORS))) / 3
    table = pd.DataFrame(rng.normal(size=(count, len(SENSORS))) @ mix, columns=SENSORS)
    if machine == 1:
        table.iloc[700:760] = table.iloc[700].to_numpy()
    return table


class Readings(L.LightningDataModule):
    """Every rank trains on the readings of its machines, in the order of time."""

    def __init__(self, machines: int = 4, readings: int = 1600, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        hparams = self.hparams
        numbers = range(self.trainer.global_rank, hparams.machines, self.trainer.world_size)
        table = pd.concat([readings(number, hparams.readings) for number in numbers])
        values = torch.tensor(table.to_numpy(dtype=np.float32))
        held_out = len(values) // 10
        self.train, self.val = TensorDataset(values[:-held_out]), TensorDataset(values[-held_out:])

    def on_exception(self, exception: BaseException) -> None:
        print(f"data: stopped by {type(exception).__name__}")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size, drop_last=True)
