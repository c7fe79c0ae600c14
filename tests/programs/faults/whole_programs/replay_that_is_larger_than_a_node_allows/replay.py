from collections import deque

import numpy as np
import torch
from environments import SIDE, Maze
from torch.nn import functional as F
from torch.utils.data import IterableDataset


class Replay:
    def __init__(self, capacity: int = 5_000_000) -> None:
        self.transitions: deque = deque(maxlen=capacity)
        self.rng = np.random.default_rng(0)

    def add(self, frame: np.ndarray, action: int, reward: float, following: np.ndarray, done: bool) -> None:
        self.transitions.append((frame, action, reward, following, done))

    def __len__(self) -> int:
        return len(self.transitions)

    def sample(self, count: int) -> list[torch.Tensor]:
        chosen = [self.transitions[index] for index in self.rng.integers(0, len(self), count)]
        frames, actions, rewards, following, done = zip(*chosen, strict=True)
        return [
            shrink(torch.from_numpy(np.stack(frames))),
            torch.tensor(actions),
            torch.tensor(rewards),
            shrink(torch.from_numpy(np.stack(following))),
            torch.tensor(done),
        ]


def shrink(frames: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(frames, SIDE // 2)


class Experience(IterableDataset):
    """Plays a few moves, remembers them, and gives a batch of what is remembered."""

    def __init__(self, world: Maze, policy, replay: Replay, batch_size: int, batches: int, moves: int = 4) -> None:
        self.world, self.policy, self.replay = world, policy, replay
        self.batch_size, self.batches, self.moves = batch_size, batches, moves

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        frame = self.world.reset()
        for _ in range(self.batches):
            for _ in range(self.moves):
                action = self.policy(shrink(torch.from_numpy(frame)[None]))
                following, reward, done = self.world.step(action)
                self.replay.add(frame, action, reward, following, done)
                frame = self.world.reset() if done else following
            yield self.replay.sample(self.batch_size)
