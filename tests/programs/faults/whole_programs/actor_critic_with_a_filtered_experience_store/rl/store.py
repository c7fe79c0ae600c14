import random
import threading
import time
from collections import deque


class ExperienceStore:
    """Filled by the actor's thread, emptied by the learner."""

    def __init__(self, capacity=4096):
        self.lock = threading.Lock()
        self.items = deque(maxlen=capacity)
        self.added = 0

    def add(self, episode):
        with self.lock:
            self.items.extend(episode)
            self.added += len(episode)

    def __len__(self):
        with self.lock:
            return len(self.items)

    def wait_for_fresh(self, seen, number):
        while self.added - seen < number:
            time.sleep(0.02)  # <- here
        return self.added

    def sample(self, number):
        with self.lock:
            return random.sample(list(self.items), number)
