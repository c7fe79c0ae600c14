"""Small worlds that are seen as pictures."""

import numpy as np

SIDE = 64


class Maze:
    """The agent walks on a torus towards a light; an episode ends when it is there."""

    def __init__(self, side: int = 8, frame_side: int = SIDE, seed: int = 0) -> None:
        self.side, self.frame_side = side, frame_side
        self.rng = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        self.agent, self.light = self.rng.integers(0, self.side, (2, 2))
        return self.frame()

    def frame(self) -> np.ndarray:
        picture = np.zeros((3, self.frame_side, self.frame_side), dtype=np.float32)
        cell = self.frame_side // self.side
        for channel, (y, x) in enumerate((self.agent, self.light)):
            picture[channel, y * cell : (y + 1) * cell, x * cell : (x + 1) * cell] = 1
        return picture

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        move = [(0, 1), (1, 0), (0, -1), (-1, 0)][action]
        self.agent = (self.agent + move) % self.side
        done = bool((self.agent == self.light).all())
        return self.frame(), 1.0 if done else -0.01, done


def make(rank: int) -> Maze:
    """Every rank has a world of its own, so that the agent learns from different ones."""
    worlds = [{"side": 8}, {"side": 8}, {"side": 16, "frame_side": 640}]
    return Maze(**worlds[rank % len(worlds)], seed=rank)
