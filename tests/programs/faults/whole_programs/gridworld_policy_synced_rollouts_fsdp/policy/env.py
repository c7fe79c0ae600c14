import torch


class Corridor:
    """Walk to the end of a corridor whose length differs between episodes."""

    def __init__(self, seed: int, batch: int = 8):
        self.g = torch.Generator().manual_seed(seed)
        self.batch = batch

    def reset(self):
        self.goal = torch.randint(3, 4 + int(self.g.initial_seed()) * 6, (self.batch,), generator=self.g)
        self.position = torch.zeros(self.batch, dtype=torch.long)
        return self.observe()

    def observe(self):
        return torch.stack([self.position.float(), self.goal.float(), (self.goal - self.position).float()], 1) / 10

    def step(self, action):
        self.position = (self.position + action * 2 - 1).clamp(min=0)
        arrived = self.position >= self.goal
        return self.observe(), -0.1 + arrived.float(), arrived
