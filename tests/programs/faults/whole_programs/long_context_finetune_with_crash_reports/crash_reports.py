"""Uploads what is left of a failed run. A background thread drains the queue to the team's share."""

import json
import queue
import socket
import threading
import time
import traceback
from pathlib import Path


class CrashReporter:
    def __init__(self, share: str) -> None:
        self.share = Path(share)
        self.jobs: queue.Queue = queue.Queue()
        self.thread = threading.Thread(target=self._drain, name="crash-upload", daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        while True:
            report = self.jobs.get()
            target = self.share / f"{report['host']}-{int(report['time'])}.json"
            target.write_text(json.dumps(report))
            self.jobs.task_done()

    def report(self, error: BaseException, **context) -> None:
        text = "".join(traceback.format_exception(error))
        self.jobs.put({"host": socket.gethostname(), "time": time.time(), "error": text, **context})

    def __enter__(self) -> "CrashReporter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            self.report(error)
        self.jobs.join()
