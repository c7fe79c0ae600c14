"""A simulator that writes episodes to disk: python rollouts.py FOLDER ROUNDS SEED."""

import sys
import time
from pathlib import Path

import numpy as np


def episode(rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    state = rng.normal(size=4)
    states, actions, rewards = [], [], []
    for _ in range(steps):
        action = int(rng.integers(3))
        states.append(state.copy())
        actions.append(action)
        state = 0.9 * state + rng.normal(size=4) * 0.1
        state[0] += (action - 1) * 0.2
        rewards.append(-abs(state[0]))
    return np.array(states, np.float32), np.array(actions), np.array(rewards, np.float32)


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        time.sleep(2.0 if number % 2 else 8.0)
        parts = [episode(rng, int(rng.integers(30, 90))) for _ in range(20)]
        states, actions, rewards = (np.concatenate(p) for p in zip(*parts, strict=True))
        partial = folder / f"round{number:03d}.tmp.npz"
        np.savez(partial, states=states, actions=actions, rewards=rewards)
        partial.rename(folder / f"round{number:03d}.npz")


if __name__ == "__main__":
    main()
