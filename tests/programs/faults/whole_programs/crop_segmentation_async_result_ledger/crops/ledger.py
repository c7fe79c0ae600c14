"""Results of a run, appended to a JSON-lines file by a thread so that a slow home directory costs no time."""

import json
import queue
import threading
from pathlib import Path


class Ledger:
    def __init__(self, path: str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.pending = queue.Queue()
        self.thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self.thread.start()

    def _write(self):
        while True:
            record = self.pending.get()
            with self.path.open("a") as f:
                f.write(json.dumps(record) + "\n")
            self.pending.task_done()

    def add(self, **record):
        self.pending.put(record)

    def flush(self):
        """Returns when everything added so far is on disk."""
        self.pending.join()  # <- here
