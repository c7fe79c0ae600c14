"""An actor process that plays episodes and sends transitions to its learner."""

import resource

import numpy as np

GRAVITY = 0.0025


class MountainCar:
    def __init__(self, seed, track_length):
        self.rng = np.random.default_rng(seed)
        self.track = np.zeros(track_length, dtype=np.float32)

    def reset(self):
        self.position, self.velocity = self.rng.uniform(-0.6, -0.4), 0.0
        return self.state()

    def state(self):
        return np.array([self.position, self.velocity], dtype=np.float32)

    def step(self, action):
        self.velocity += 0.001 * (action - 1) - GRAVITY * np.cos(3 * self.position)
        self.velocity = float(np.clip(self.velocity, -0.07, 0.07))
        self.position = float(np.clip(self.position + self.velocity, -1.2, 0.6))
        done = self.position >= 0.5
        return self.state(), -1.0 + 100.0 * done, done


def run_actor(seed, track_length, cpu_budget, queue):
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_budget, cpu_budget))
    env = MountainCar(seed, track_length)
    while True:
        state, chunk = env.reset(), []
        for _ in range(64):
            action = int(env.rng.integers(3))
            nxt, reward, done = env.step(action)
            chunk.append((state, action, reward, nxt, done))
            state = env.reset() if done else nxt
        np.sort(env.track + env.rng.random(len(env.track), dtype=np.float32))
        queue.put([np.stack(column) for column in zip(*chunk)])
