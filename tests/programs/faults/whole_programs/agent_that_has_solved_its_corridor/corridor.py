import random

import torch


class Corridor:
    """Walk right to the end. Slippery; a step costs a little."""

    OBS = 12

    def __init__(self, length, seed=0, slip=0.1, limit=60):
        self.length, self.slip, self.limit = length, slip, limit
        self.rng = random.Random(seed)

    def _obs(self):
        obs = torch.zeros(self.OBS)
        obs[self.pos] = 1
        return obs

    def reset(self):
        self.pos, self.t = 0, 0
        return self._obs()

    def step(self, action):
        move = 1 if action else -1
        if self.rng.random() < self.slip:
            move = -move
        self.pos = max(0, min(self.length, self.pos + move))
        self.t += 1
        arrived = self.pos == self.length
        reward = 1.0 if arrived else -0.01
        return self._obs(), reward, arrived or self.t >= self.limit
