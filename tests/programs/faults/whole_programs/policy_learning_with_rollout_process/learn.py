"""Policy learning from simulated episodes. Every rank has a simulator process; a round is one epoch."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

HERE = Path(__file__).parent


class Rounds(IterableDataset):
    """The episodes of the next round. Rounds differ in length, so ranks agree on the number of batches first."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        self.folder, self.batch_size, self.number = folder, batch_size, 0

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + 120
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {file}")
            time.sleep(0.2)

    def __iter__(self):
        file = self.folder / f"round{self.number:03d}.npz"
        self.number += 1
        self.wait_for(file)
        data = np.load(file)
        states, actions, rewards = (torch.from_numpy(data[k]) for k in ("states", "actions", "rewards"))
        batches = torch.tensor(len(states) // self.batch_size)
        dist.all_reduce(batches, op=dist.ReduceOp.MIN)
        order = torch.randperm(len(states))
        for b in range(int(batches)):
            rows = order[b * self.batch_size : (b + 1) * self.batch_size]
            yield states[rows], actions[rows], rewards[rows]


class Policy(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx: int) -> None:
        states, actions, rewards = batch
        actor_opt, critic_opt = self.optimizers()
        value = self.critic(states).squeeze(1)
        advantage = (rewards - value).detach()
        policy = torch.distributions.Categorical(logits=self.actor(states))
        actor_loss = -(policy.log_prob(actions) * advantage).mean() - 0.01 * policy.entropy().mean()
        critic_loss = F.mse_loss(value, rewards)
        actor_opt.zero_grad()
        critic_opt.zero_grad()
        self.manual_backward(actor_loss + critic_loss)
        actor_opt.step()
        if float(critic_loss) > 1e-3:
            critic_opt.step()
        self.log_dict({"actor": actor_loss.detach(), "critic": critic_loss.detach()}, prog_bar=True)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.actor.parameters(), lr=self.hparams.lr),
            torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr),
        )


class Simulated(L.LightningDataModule):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.process = rounds, None

    def setup(self, stage: str) -> None:
        rank = self.trainer.global_rank
        self.folder = Path("rollouts") / f"rank{rank}"
        command = [sys.executable, str(HERE / "rollouts.py"), str(self.folder), str(self.rounds), str(rank)]
        self.process = subprocess.Popen(command)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rounds(self.folder, batch_size=16), batch_size=None)

    def teardown(self, stage: str) -> None:
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    L.seed_everything(3)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.rounds, log_every_n_steps=10)
    trainer.fit(Policy(), datamodule=Simulated(args.rounds))


if __name__ == "__main__":
    main()
