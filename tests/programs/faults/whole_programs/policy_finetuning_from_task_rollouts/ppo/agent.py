import lightning as L
import torch
from torch import nn
from torch.distributions import Categorical


def mlp(inp, hidden, out):
    return nn.Sequential(
        nn.Linear(inp, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, out)
    )


class PPOAgent(L.LightningModule):
    def __init__(
        self, obs_dim=24, n_actions=6, hidden=64, lr=3e-4, clip=0.2, update_epochs=4, minibatches=4, target_kl=0.015
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.actor = mlp(obs_dim, hidden, n_actions)
        self.critic = mlp(obs_dim, hidden, 1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, eps=1e-5)

    def collect(self, episode):
        obs = episode["obs"].flatten(0, -2)
        with torch.no_grad():
            policy = Categorical(logits=self.actor(obs))
            actions = policy.sample()
            reward = torch.where(actions == 0, episode["score"].flatten(), -0.1 * episode["score"].flatten())
            advantage = reward - self.critic(obs).squeeze(-1)
        return obs, actions, policy.log_prob(actions), advantage, reward

    def minibatch_indices(self, n):
        return torch.randperm(n).chunk(self.hparams.minibatches)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        obs, actions, old_logp, adv, returns = self.collect(batch)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        stats = []
        for _ in range(self.hparams.update_epochs):
            kls = []
            for idx in self.minibatch_indices(len(obs)):
                policy = Categorical(logits=self.actor(obs[idx]))
                logp = policy.log_prob(actions[idx])
                ratio = (logp - old_logp[idx]).exp()
                clipped = ratio.clamp(1 - self.hparams.clip, 1 + self.hparams.clip)
                pg_loss = -torch.min(ratio * adv[idx], clipped * adv[idx]).mean()
                v_loss = (self.critic(obs[idx]).squeeze(-1) - returns[idx]).pow(2).mean()
                loss = pg_loss + 0.5 * v_loss - 0.01 * policy.entropy().mean()
                opt.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(opt, gradient_clip_val=0.5)
                opt.step()
                kls.append(((ratio - 1) - ratio.log()).mean().detach())
                stats.append(loss.detach())
            if torch.stack(kls).mean() > 1.5 * self.hparams.target_kl:
                break  # <- here
        self.log("train/loss", torch.stack(stats).mean(), prog_bar=True)
        self.log("train/return", returns.mean(), on_step=False, on_epoch=True, sync_dist=True)
