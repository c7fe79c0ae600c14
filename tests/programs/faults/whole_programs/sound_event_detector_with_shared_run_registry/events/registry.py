"""The lab's registry of runs: one JSON file that all jobs share."""

import contextlib
import fcntl
import json
from pathlib import Path


class Registry:
    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def edit(self):
        lock = open(self.path.with_suffix(".lock"), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # <- here
            entries = json.loads(self.path.read_text()) if self.path.exists() else {}
            yield entries
            self.path.write_text(json.dumps(entries, indent=1))
        finally:
            lock.close()
