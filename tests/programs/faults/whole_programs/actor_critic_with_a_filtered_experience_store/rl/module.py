import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning as L

from .actor import Actor, Corridor
from .store import ExperienceStore

WINDS = {0: 0.35, 1: 0.30, 2: 0.95}


class Network(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.Tanh())
        self.logits = nn.Linear(width, 2)
        self.critic = nn.Linear(width, 1)

    def forward(self, observations):
        h = self.body(observations)
        return self.logits(h), self.critic(h).squeeze(-1)


class ActorCritic(L.LightningModule):
    def __init__(self, batch_size=64, fresh=48, steps_per_epoch=60, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.network = Network()

    @torch.no_grad()
    def act(self, observation):
        logits, _ = self.network(torch.from_numpy(observation))
        return int(torch.distributions.Categorical(logits=logits).sample())

    @torch.no_grad()
    def judge(self, observation):
        return float(self.network(torch.from_numpy(observation))[1])

    def on_fit_start(self):
        rng = np.random.default_rng(100 + self.global_rank)
        env = Corridor(5, WINDS[self.global_rank % len(WINDS)], rng)
        self.store = ExperienceStore()
        self.actor = Actor(env, self.act, self.judge, self.store)
        self.actor.start()
        self.seen = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.seen = self.store.wait_for_fresh(self.seen, self.hparams.fresh)

    def training_step(self, batch, batch_idx):
        number = min(self.hparams.batch_size, len(self.store))
        observations, actions, returns = zip(*self.store.sample(number))
        observations = torch.from_numpy(np.stack(observations))
        actions, returns = torch.tensor(actions), torch.tensor(returns, dtype=torch.float32)
        logits, values = self.network(observations)
        advantages = (returns - values).detach()
        chosen = F.log_softmax(logits, -1).gather(1, actions[:, None]).squeeze(1)
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        loss = F.mse_loss(values, returns) - (advantages * chosen).mean() - 0.01 * entropy
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log_dict(
            {"loss": loss, "return": returns.mean(), "kept": self.actor.kept / self.actor.played}, prog_bar=True
        )

    def on_fit_end(self):
        self.actor.stopped.set()
        self.actor.join()

    def train_dataloader(self):
        return DataLoader(range(self.hparams.steps_per_epoch * self.trainer.world_size), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
