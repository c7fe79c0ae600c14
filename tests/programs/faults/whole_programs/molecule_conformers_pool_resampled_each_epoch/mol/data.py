import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from .conformers import ConformerPool, random_molecule


class ConformerData(L.LightningDataModule):
    """Every epoch each rank draws new molecules of its library and embeds them."""

    libraries = ["chains", "chains", "macrocycles", "chains"]

    def __init__(self, per_epoch=160, batch_size=16, processes=2):
        super().__init__()
        self.save_hyperparameters()
        self.pool = ConformerPool(processes)

    def train_dataloader(self):
        rank, epoch = self.trainer.global_rank, self.trainer.current_epoch
        rng = np.random.default_rng([rank, epoch])
        rings = self.libraries[rank % len(self.libraries)] == "macrocycles" and epoch >= 1
        molecules = [random_molecule(rng, rings) for _ in range(self.hparams.per_epoch)]
        features, radius = zip(*self.pool.embed_all(molecules))
        data = TensorDataset(torch.from_numpy(np.stack(features)), torch.tensor(radius, dtype=torch.float32))
        return DataLoader(data, self.hparams.batch_size, shuffle=True)

    def teardown(self, stage):
        self.pool.close()
