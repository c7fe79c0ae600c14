import threading
from collections import OrderedDict

from recordings import read_recording


class DecoderCache:
    """Keeps the most recent recordings decoded; shared by all readers of a process."""

    def __init__(self, capacity=6):
        self.capacity = capacity
        self.lock = threading.Lock()
        self.entries = OrderedDict()
        self.hits = self.misses = 0

    def get(self, path):
        self.lock.acquire()  # <- here
        if path in self.entries:
            self.hits += 1
            self.entries.move_to_end(path)
            value = self.entries[path]
        else:
            self.misses += 1
            value = self.entries[path] = read_recording(path)
            if len(self.entries) > self.capacity:
                self.entries.popitem(last=False)
        self.lock.release()
        return value
