"""PPO on a small grid world, one environment batch per rank."""

import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, Dataset


class GridWorld:
    """Vectorised grid: reach the goal, lose reward in mud."""

    def __init__(self, num_envs, size, seed):
        self.num_envs, self.size = num_envs, size
        self.gen = torch.Generator().manual_seed(seed)
        self.mud = torch.rand(size, size, generator=self.gen) < 0.25
        self.reset()

    def reset(self):
        self.pos = torch.randint(0, self.size, (self.num_envs, 2), generator=self.gen)
        self.goal = torch.randint(0, self.size, (self.num_envs, 2), generator=self.gen)
        return self.observe()

    def observe(self):
        mud = self.mud[self.pos[:, 0], self.pos[:, 1]].float().unsqueeze(1)
        return torch.cat([self.pos / self.size, self.goal / self.size, mud], dim=1)

    def step(self, action):
        moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[action]
        self.pos = (self.pos + moves).clamp(0, self.size - 1)
        done = (self.pos == self.goal).all(dim=1)
        reward = done.float() - 0.02 - 0.1 * self.mud[self.pos[:, 0], self.pos[:, 1]].float()
        if done.any():
            fresh = torch.randint(0, self.size, (self.num_envs, 2), generator=self.gen)
            self.goal = torch.where(done.unsqueeze(1), fresh, self.goal)
        return self.observe(), reward, done


class Iterations(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i


class ActorCritic(nn.Module):
    def __init__(self, obs=5, hidden=64, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, actions)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class PPO(L.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.automatic_optimization = False
        self.cfg = cfg
        self.net = ActorCritic()

    def on_fit_start(self):
        self.env = GridWorld(self.cfg.num_envs, 8, seed=self.cfg.seed + self.global_rank)
        self.obs = self.env.reset()

    @torch.no_grad()
    def rollout(self):
        obs, act, logp, rew, val, done = [], [], [], [], [], []
        for _ in range(self.cfg.horizon):
            dist, v = self.net(self.obs)
            a = dist.sample()
            nxt, r, d = self.env.step(a)
            for store, x in zip((obs, act, logp, rew, val, done), (self.obs, a, dist.log_prob(a), r, v, d)):
                store.append(x)
            self.obs = nxt
        _, last = self.net(self.obs)
        adv, gae = [None] * len(rew), 0.0
        for t in reversed(range(len(rew))):
            mask = (~done[t]).float()
            delta = rew[t] + self.cfg.gamma * last * mask - val[t]
            gae = delta + self.cfg.gamma * self.cfg.lam * mask * gae
            adv[t], last = gae, val[t]
        adv = torch.stack(adv)
        returns = adv + torch.stack(val)
        flat = [torch.stack(x).flatten(0, 1) for x in (obs, act, logp)]
        return (*flat, adv.flatten(), returns.flatten(), torch.stack(rew).mean())

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        obs, act, logp_old, adv, ret, mean_reward = self.rollout()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        updates = 0
        for _ in range(self.cfg.update_epochs):
            stop = False
            for idx in torch.randperm(len(obs)).split(self.cfg.minibatch):
                dist, v = self.net(obs[idx])
                log_ratio = dist.log_prob(act[idx]) - logp_old[idx]
                ratio = log_ratio.exp()
                approx_kl = ((ratio - 1) - log_ratio).mean().item()
                if approx_kl > 1.5 * self.cfg.target_kl:  # <- here
                    stop = True
                    break
                surrogate = torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx])
                loss = -surrogate.mean() + 0.5 * (v - ret[idx]).pow(2).mean() - 0.01 * dist.entropy().mean()
                opt.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                opt.step()
                updates += 1
            if stop:
                break
        self.log("updates", float(updates), prog_bar=True)
        self.log("reward", mean_reward, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.cfg.lr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iterations", type=int, default=400)
    p.add_argument("--devices", type=int, default=3)
    p.add_argument("--num-envs", type=int, default=16)
    p.add_argument("--horizon", type=int, default=32)
    p.add_argument("--minibatch", type=int, default=128)
    p.add_argument("--update-epochs", type=int, default=4)
    p.add_argument("--gamma", type=float, default=0.98)
    p.add_argument("--lam", type=float, default=0.95)
    p.add_argument("--target-kl", type=float, default=0.02)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=11)
    cfg = p.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(cfg.seed)
    loader = DataLoader(Iterations(cfg.iterations * cfg.devices), batch_size=1)
    trainer = L.Trainer(accelerator="cpu", devices=cfg.devices, max_epochs=5, strategy=SafeDDP())
    trainer.fit(PPO(cfg), loader)


if __name__ == "__main__":
    main()
