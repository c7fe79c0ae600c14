"""Synthetic control tasks; every rank collects episodes of one of them."""

import torch
from torch.utils.data import IterableDataset

TASKS = {"reach": 0.5, "push": 0.6, "stack": 2.2}


class RolloutStream(IterableDataset):
    def __init__(self, task, episodes, horizon, obs_dim, n_actions, seed):
        self.task, self.episodes, self.horizon = task, episodes, horizon
        self.obs_dim, self.n_actions, self.seed = obs_dim, n_actions, seed

    def __len__(self):
        return self.episodes

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        goal = torch.randn(self.obs_dim, generator=g)
        for _ in range(self.episodes):
            drift = torch.randn(self.horizon, self.obs_dim, generator=g).cumsum(0) * 0.1
            obs = (torch.randn(self.horizon, self.obs_dim, generator=g) + drift) * TASKS[self.task]
            yield {"obs": obs, "score": obs @ goal}
