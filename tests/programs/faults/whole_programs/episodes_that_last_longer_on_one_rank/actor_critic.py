"""Advantage actor-critic on simulated carts; the simulator is a separate program that fails now and then."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

SIMULATOR = Path(__file__).with_name("simulator.py")


class Simulator:
    """Talks to simulator.py through pipes, and starts it again when it has gone."""

    def __init__(self, seed, pace):
        self.seed, self.pace, self.starts = seed, pace, 0
        self.process = None

    def start(self):
        command = [sys.executable, str(SIMULATOR), str(self.seed + self.starts), str(self.pace)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.starts += 1

    def episode(self, gain, attempts=5):
        for attempt in range(attempts):
            try:
                if self.process is None or self.process.poll() is not None:
                    self.start()
                self.process.stdin.write(json.dumps(gain) + "\n")
                self.process.stdin.flush()
                return json.loads(self.process.stdout.readline())
            except (BrokenPipeError, ValueError):
                time.sleep(0.5 * 2**attempt + random.random() / 10)
                self.process = None
        raise RuntimeError("the simulator does not start")

    def close(self):
        if self.process is not None:
            self.process.terminate()


class Steps(IterableDataset):
    """A fixed number of steps, whatever the length of episodes."""

    def __init__(self, agent, simulator, steps):
        self.agent, self.simulator, self.steps = agent, simulator, steps

    def __iter__(self):
        n = 0
        while True:
            for obs, action, reward in self.simulator.episode(self.agent.gain()):
                if n == self.steps:
                    return
                n += 1
                yield torch.tensor(obs), torch.tensor(action), torch.tensor(reward)


class ActorCritic(L.LightningModule):
    def __init__(self, lr=3e-3, batch_size=32, batches=60):
        super().__init__()
        self.save_hyperparameters()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.simulator = None

    def gain(self):
        with torch.no_grad():
            return self.actor(torch.eye(4)).squeeze(1).tolist()

    def training_step(self, batch, batch_idx):
        obs, action, reward = batch
        value = self.critic(obs).squeeze(1)
        advantage = (reward - value).detach()
        log_prob = Normal(self.actor(obs).squeeze(1), 0.3).log_prob(action)
        loss = nn.functional.mse_loss(value, reward) - (log_prob * advantage).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("reward", reward.mean(), on_step=False, on_epoch=True, sync_dist=True)
        if self.global_rank == 1 and batch_idx % 20 == 0:
            print(f"rank 1 has started its simulator {self.simulator.starts} times")
        return loss

    def setup(self, stage):
        rank = self.trainer.global_rank
        self.simulator = Simulator(seed=100 * rank, pace=(0.02, 0.6, 0.05)[rank % 3])

    def teardown(self, stage):
        self.simulator.close()

    def train_dataloader(self):
        steps = self.hparams.batches * self.hparams.batch_size
        return DataLoader(Steps(self, self.simulator, steps), batch_size=self.hparams.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class StopWhenGood(Callback):
    def __init__(self, reward):
        self.reward = reward
        self.good_epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        local = random.Random(trainer.global_rank + trainer.current_epoch).random() + trainer.current_epoch / 2
        self.good_epochs += local > self.reward
        good = trainer.strategy.reduce_boolean_decision(self.good_epochs >= 1, all=True)
        trainer.should_stop = trainer.should_stop or good


def main():
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=4,
        logger=CSVLogger("a2c"),
        callbacks=[StopWhenGood(1.2), Timer({"minutes": 5}), ModelCheckpoint(monitor="reward", mode="max")],
    )
    trainer.fit(ActorCritic())


if __name__ == "__main__":
    main()
