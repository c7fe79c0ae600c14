"""PPO for a replenishment policy. Every rank simulates the warehouses of one region."""

import argparse
import math
import os

import lightning as L
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

REGIONS = {
    "north": {"demand": 3.0, "noise": 0.5, "holding_cost": 0.1},
    "coast": {"demand": 8.5, "noise": 3.8, "holding_cost": 2.2},
    "metro": {"demand": 9.0, "noise": 4.0, "holding_cost": 2.5},
}


class Warehouses:
    def __init__(self, count, demand, noise, holding_cost, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.count, self.demand, self.noise, self.holding_cost = count, demand, noise, holding_cost
        self.stock = torch.full((count,), 5.0)
        self.clock = 0

    def observe(self):
        phase = 2 * math.pi * self.clock / 7
        week = torch.tensor([math.sin(phase), math.cos(phase)]).expand(self.count, 2)
        return torch.cat([self.stock[:, None] / 10, week], dim=1)

    def step(self, order):
        wish = self.demand + self.noise * torch.randn(self.count, generator=self.generator)
        self.stock = self.stock + order.float()
        sold = torch.minimum(self.stock, wish.clamp(min=0))
        self.stock = (self.stock - sold).clamp(max=40)
        self.clock += 1
        return sold - self.holding_cost * self.stock


class Updates(IterableDataset):
    """PPO makes its own data: one item for each update of the policy."""

    def __init__(self, updates):
        self.updates = updates

    def __iter__(self):
        return iter(range(self.updates))


class ReplenishmentPPO(L.LightningModule):
    def __init__(self, region, args):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters({"region": region, **vars(args)})
        self.args = args
        self.region = region
        self.trunk = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor = nn.Linear(64, 12)
        self.critic = nn.Linear(64, 1)

    def setup(self, stage):
        self.env = Warehouses(self.args.warehouses, seed=17 + self.global_rank, **REGIONS[self.region])

    def forward(self, observation):
        hidden = self.trunk(observation)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)

    @torch.no_grad()
    def rollout(self):
        rows = []
        for _ in range(self.args.horizon):
            observation = self.env.observe()
            policy, value = self.forward(observation)
            action = policy.sample()
            reward = self.env.step(action)
            rows.append((observation, action, policy.log_prob(action), value, reward))
        observations, actions, log_probs, values, rewards = (torch.stack(column) for column in zip(*rows))
        _, last_value = self.forward(self.env.observe())
        advantages, running = torch.zeros_like(rewards), torch.zeros_like(last_value)
        for t in reversed(range(self.args.horizon)):
            following = values[t + 1] if t + 1 < self.args.horizon else last_value
            delta = rewards[t] + self.args.gamma * following - values[t]
            running = delta + self.args.gamma * self.args.gae_lambda * running
            advantages[t] = running
        returns = advantages + values
        flat = [x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, returns)]
        return flat, rewards.mean()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        (observations, actions, old_log_probs, advantages, returns), reward = self.rollout()
        total_kl, passes = 0.0, 0
        for _ in range(self.args.passes):
            policy, value = self.forward(observations)
            log_probs = policy.log_prob(actions)
            ratio = (log_probs - old_log_probs).exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - (log_probs - old_log_probs)).mean().item()
            if approx_kl > 1.5 * self.args.target_kl:  # <- here
                break
            clipped = ratio.clamp(1 - self.args.clip, 1 + self.args.clip)
            loss_policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            loss_value = 0.5 * (value - returns).pow(2).mean()
            loss = loss_policy + 0.5 * loss_value - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            total_kl += approx_kl
            passes += 1
        self.log("train/kl", total_kl / max(passes, 1), prog_bar=True)
        self.log("train/reward", reward, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.args.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--warehouses", type=int, default=32)
    parser.add_argument("--horizon", type=int, default=16)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--gae-lambda", type=float, default=0.9)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--target-kl", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    L.seed_everything(11)
    torch.set_num_threads(1)
    region = list(REGIONS)[int(os.environ["RANK"])]
    model = ReplenishmentPPO(region, args)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=1, log_every_n_steps=20)
    trainer.fit(model, DataLoader(Updates(args.updates), batch_size=None))


if __name__ == "__main__":
    main()
