"""PPO on a small grid world; every rank plays its own environments and gradients are averaged."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

SIZE = 6
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
LEVELS = ["meadow", "meadow", "canyon", "meadow"]


class GridWorlds:
    """A batch of agents on a grid; canyons have steep penalties at the border."""

    def __init__(self, level: str, count: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.count = count
        self.border = {"meadow": -0.1, "canyon": -60.0}[level]
        self.position = self._start(count)
        self.goal = self._start(count)

    def _start(self, n):
        return torch.randint(0, SIZE, (n, 2), generator=self.generator)

    def observe(self):
        return torch.cat([self.position, self.goal, self.goal - self.position], dim=1).float() / SIZE

    def step(self, action):
        target = self.position + MOVES[action]
        outside = ((target < 0) | (target >= SIZE)).any(dim=1)
        self.position = target.clamp(0, SIZE - 1)
        reached = (self.position == self.goal).all(dim=1)
        reward = reached.float() * 1.0 - 0.01 + outside.float() * self.border
        fresh = self._start(int(reached.sum()))
        self.position[reached] = fresh
        return reward, reached


class Iterations(IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


class PPO(L.LightningModule):
    def __init__(self, horizon=32, minibatches=4, passes=4, clip=0.2, target_kl=0.4, gamma=0.97, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, len(MOVES))
        self.value = nn.Linear(64, 1)

    def on_fit_start(self):
        self.worlds = GridWorlds(LEVELS[self.global_rank % len(LEVELS)], 16, seed=self.global_rank)

    def forward(self, observation):
        hidden = self.body(observation)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)

    @torch.no_grad()
    def play(self):
        rows = []
        for _ in range(self.hparams.horizon):
            observation = self.worlds.observe()
            dist, value = self(observation)
            action = dist.sample()
            reward, done = self.worlds.step(action)
            rows.append((observation, action, dist.log_prob(action), value, reward, done.float()))
        observation, action, logp, value, reward, done = (torch.stack(x) for x in zip(*rows))
        returns = torch.zeros_like(reward)
        running = self(self.worlds.observe())[1]
        for t in reversed(range(self.hparams.horizon)):
            running = reward[t] + self.hparams.gamma * running * (1 - done[t])
            returns[t] = running
        return [x.flatten(0, 1) for x in (observation, action, logp, value, returns)], reward.mean()

    def training_step(self, batch, batch_idx):
        (observation, action, old_logp, value, returns), reward = self.play()
        advantage = returns - value
        optimizer = self.optimizers()
        size = len(action) // self.hparams.minibatches
        kl = torch.zeros(())
        for _ in range(self.hparams.passes):
            if kl > 1.5 * self.hparams.target_kl:  # <- here
                break
            for rows in torch.randperm(len(action)).split(size):
                dist, predicted = self(observation[rows])
                logp = dist.log_prob(action[rows])
                ratio = (logp - old_logp[rows]).exp()
                clipped = ratio.clamp(1 - self.hparams.clip, 1 + self.hparams.clip)
                gain = torch.min(ratio * advantage[rows], clipped * advantage[rows]).mean()
                loss = -gain + 0.5 * F.smooth_l1_loss(predicted, returns[rows]) - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                kl = (old_logp[rows] - logp).mean().detach()
        self.log_dict({"reward": reward, "kl": kl}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--target-kl", type=float, default=0.03)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=2,
        log_every_n_steps=5,
    )
    trainer.fit(PPO(target_kl=args.target_kl), DataLoader(Iterations(args.iterations), batch_size=None))
