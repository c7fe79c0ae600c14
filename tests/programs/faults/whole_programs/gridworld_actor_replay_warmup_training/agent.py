import time
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

from envs import GridWorld, write_levels
from replay import Actor, ReplayBuffer


class ReplayBatches(IterableDataset):
    def __init__(self, agent, steps, batch_size):
        self.agent, self.steps, self.batch_size = agent, steps, batch_size

    def __iter__(self):
        for _ in range(self.steps):
            obs, action, ret = zip(*self.agent.buffer.sample(self.batch_size))
            yield torch.tensor(obs), torch.tensor(action), torch.tensor(ret)


class QAgent(L.LightningModule):
    def __init__(self, levels="levels", warmup=256, batch_size=64, steps_per_epoch=60, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def prepare_data(self):
        write_levels(self.hparams.levels)

    def setup(self, stage):
        names = sorted(Path(self.hparams.levels).glob("*.txt"))
        env = GridWorld(names[self.global_rank % len(names)], seed=self.global_rank)
        self.buffer = ReplayBuffer()
        self.actor = Actor(env, self.buffer)

    def on_fit_start(self):
        self.actor.start()
        while len(self.buffer) < self.hparams.warmup:  # <- here
            time.sleep(0.05)

    def train_dataloader(self):
        return DataLoader(ReplayBatches(self, self.hparams.steps_per_epoch, self.hparams.batch_size), batch_size=None)

    def training_step(self, batch, batch_idx):
        obs, action, ret = batch
        q = self.net(obs).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, ret)
        self.log("td_loss", loss, prog_bar=True, batch_size=len(obs))
        self.log("buffer", float(len(self.buffer)), batch_size=len(obs))
        return loss

    def on_fit_end(self):
        self.actor.running = False

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
