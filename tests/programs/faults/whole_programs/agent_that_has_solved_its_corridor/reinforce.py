"""REINFORCE with a baseline on random corridors. `python reinforce.py --target 0.9`"""

import argparse
from collections import deque

import lightning as L
import torch
from corridor import Corridor
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP


class Policy(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, n_actions)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


class Rollouts(IterableDataset):
    """Plays with the current policy; one item is one step of the environment."""

    def __init__(self, agent, env, steps_per_epoch):
        self.agent, self.env, self.steps_per_epoch = agent, env, steps_per_epoch

    def episode(self):
        obs, done, trajectory = self.env.reset(), False, []
        while not done:
            with torch.no_grad():
                logits, _ = self.agent.policy(obs)
            action = Categorical(logits=logits).sample()
            next_obs, reward, done = self.env.step(int(action))
            trajectory.append((obs, action, reward))
            obs = next_obs
        returns, g = [], 0.0
        for *_, reward in reversed(trajectory):
            g = reward + self.agent.hparams.gamma * g
            returns.append(g)
        self.agent.finished.append(sum(r for *_, r in trajectory))
        return [(o, a, torch.tensor(g)) for (o, a, _), g in zip(trajectory, reversed(returns))]

    def __iter__(self):
        n = 0
        while n < self.steps_per_epoch:
            for item in self.episode():
                yield item
                n += 1
                if n == self.steps_per_epoch:
                    return


class Reinforce(L.LightningModule):
    def __init__(self, target=0.9, gamma=0.98, lr=3e-3, batch_size=32, batches=300, entropy=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.policy = Policy(obs_dim=Corridor.OBS, n_actions=2)
        self.finished = deque(maxlen=50)

    @property
    def mean_return(self):
        return sum(self.finished) / max(1, len(self.finished))

    def training_step(self, batch, batch_idx):
        obs, actions, returns = batch
        logits, values = self.policy(obs)
        dist = Categorical(logits=logits)
        advantage = returns - values.detach()
        pg = -(dist.log_prob(actions) * advantage).mean()
        value_loss = nn.functional.mse_loss(values, returns)
        loss = pg + 0.5 * value_loss - self.hparams.entropy * dist.entropy().mean()
        self.log_dict({"loss": loss, "return": self.mean_return}, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        solved = len(self.finished) == self.finished.maxlen and self.mean_return >= self.hparams.target
        if solved:
            print(f"solved after {self.global_step} updates, mean return {self.mean_return:.2f}")
            self.trainer.should_stop = True  # <- here

    def train_dataloader(self):
        rank = self.trainer.global_rank
        env = Corridor(length=(9, 5, 7, 11)[rank % 4], seed=rank)
        steps = self.hparams.batches * self.hparams.batch_size
        return DataLoader(Rollouts(self, env, steps), batch_size=self.hparams.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", type=float, default=0.9)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()
    L.seed_everything(3)
    agent = Reinforce(target=args.target, lr=args.lr)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=CSVLogger("logs", name="reinforce"),
        callbacks=[ModelCheckpoint(monitor="return", mode="max", save_last=True)],
        gradient_clip_val=1.0,
    )
    trainer.fit(agent)
    print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
