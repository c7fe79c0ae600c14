import threading
import time

import numpy as np


class Corridor:
    """The agent walks left or right until it is at either end; a wind blows it back."""

    def __init__(self, length, wind, rng):
        self.length, self.wind, self.rng = length, wind, rng

    def reset(self):
        self.position, self.steps = 0, 0
        return self.observe()

    def observe(self):
        return np.array([self.position / self.length, self.steps / 50, self.wind], dtype=np.float32)

    def step(self, action):
        self.position += 1 if action else -1
        if self.rng.random() < self.wind:
            self.position -= int(np.sign(self.position))
        self.steps += 1
        done = abs(self.position) >= self.length or self.steps >= 50
        return self.observe(), float(self.position >= self.length), done


class Actor(threading.Thread):
    """Plays with the current policy and keeps episodes that the critic does not explain yet."""

    def __init__(self, env, policy, value, store, surprise=0.05, gamma=0.97):
        super().__init__(name="actor", daemon=True)
        self.env, self.policy, self.value, self.store = env, policy, value, store
        self.surprise, self.gamma = surprise, gamma
        self.played = self.kept = 0
        self.stopped = threading.Event()

    def run(self):
        while not self.stopped.is_set():
            episode = self.play()
            self.played += 1
            if self.is_informative(episode):
                self.kept += 1
                self.store.add(episode)
            time.sleep(0.004)

    def play(self):
        steps, observation, done = [], self.env.reset(), False
        while not done:
            action = self.policy(observation)
            following, reward, done = self.env.step(action)
            steps.append((observation, action, reward))
            observation = following
        returns, episode = 0.0, []
        for observation, action, reward in reversed(steps):
            returns = reward + self.gamma * returns
            episode.append((observation, action, returns))
        return episode

    def is_informative(self, episode):
        errors = [abs(returns - self.value(observation)) for observation, _, returns in episode]
        return sum(errors) / len(errors) > self.surprise
