from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from stations import StationCache, write_station


class WeatherData(L.LightningDataModule):
    def __init__(self, root: str = "weather", stations: int = 12, window: int = 48, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        raw = Path(self.hparams.root, "raw")
        raw.mkdir(parents=True, exist_ok=True)
        for i in range(self.hparams.stations):
            write_station(raw / f"station_{i:02d}.json.gz", seed=i)

    def setup(self, stage=None):
        root = Path(self.hparams.root)
        cache = StationCache(root / "raw", root / "cache", leader=self.trainer.is_global_zero)
        cache.ensure()
        w, xs, ys = self.hparams.window, [], []
        for rows in cache.load():
            series = (torch.tensor(rows) - torch.tensor([7.0, 1005.0])) / torch.tensor([8.0, 15.0])
            for start in range(0, len(series) - w - 1, 12):
                xs.append(series[start : start + w])
                ys.append(series[start + w, 0])
        data = TensorDataset(torch.stack(xs), torch.stack(ys))
        self.train_set, self.val_set = torch.utils.data.random_split(
            data, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 8)
