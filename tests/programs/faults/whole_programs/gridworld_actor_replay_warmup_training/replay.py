import random
import threading
import time
from collections import deque


class ReplayBuffer:
    """Holds transitions of finished episodes only, so that returns can be computed."""

    def __init__(self, capacity=5000, gamma=0.97):
        self.items = deque(maxlen=capacity)
        self.gamma = gamma
        self.lock = threading.Lock()

    def __len__(self):
        return len(self.items)

    def add_episode(self, episode):
        ret, out = 0.0, []
        for obs, action, reward in reversed(episode):
            ret = reward + self.gamma * ret
            out.append((obs, action, ret))
        with self.lock:
            self.items.extend(out)

    def sample(self, n):
        with self.lock:
            return random.sample(self.items, n)


class Actor(threading.Thread):
    """Plays random episodes in the background."""

    def __init__(self, env, buffer, pause=0.002):
        super().__init__(name="actor", daemon=True)
        self.env, self.buffer, self.pause = env, buffer, pause
        self.running = True

    def run(self):
        while self.running:
            obs, episode, done = self.env.reset(), [], False
            while not done and self.running:
                action = self.env.rng.randrange(4)
                nxt, reward, done = self.env.step(action)
                episode.append((obs, action, reward))
                episode = episode[-400:]
                obs = nxt
                if len(episode) % 20 == 0:
                    time.sleep(self.pause)
            self.buffer.add_episode(episode)
