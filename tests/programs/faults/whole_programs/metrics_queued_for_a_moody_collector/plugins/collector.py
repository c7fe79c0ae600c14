"""Sends metrics to a collector, from a thread with a queue, and never lets the training wait for it."""

import http.server
import json
import logging
import queue
import random
import threading
import time
import urllib.error
import urllib.request

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)


class Sender(threading.Thread):
    def __init__(self, address, retries=4, timeout=1.5):
        super().__init__(name="metrics", daemon=True)
        self.address, self.retries, self.timeout = address, retries, timeout
        self.queue = queue.Queue(maxsize=200)
        self.dropped = 0

    def put(self, item):
        try:
            self.queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def run(self):
        while True:
            points = [self.queue.get()]
            while len(points) < 50 and not self.queue.empty():
                points.append(self.queue.get())
            for attempt in range(self.retries):
                try:
                    request = urllib.request.Request(self.address, json.dumps(points).encode())
                    urllib.request.urlopen(request, timeout=self.timeout).close()
                    break
                except (urllib.error.URLError, TimeoutError) as error:
                    log.warning("collector: %s, attempt %d", error, attempt + 1)
                    time.sleep(0.25 * 2**attempt + random.random() / 10)
            else:
                self.dropped += len(points)


class CollectorLogger(Logger):
    def __init__(self, address: str | None = None, flush_s: float = 10.0):
        super().__init__()
        self.address, self.flush_s = address, flush_s
        self._sender = None

    @property
    @rank_zero_experiment
    def experiment(self):
        if self._sender is None:
            self._sender = Sender(self.address or local_collector())
            self._sender.start()
        return self._sender

    name = property(lambda self: "collector")
    version = property(lambda self: 0)

    def log_hyperparams(self, *args, **kwargs):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.experiment.put({"step": step, **metrics})

    @rank_zero_only
    def finalize(self, status):
        end = time.monotonic() + self.flush_s
        while not self.experiment.queue.empty() and time.monotonic() < end:
            time.sleep(0.1)
        log.info("%s points dropped", self.experiment.dropped)


def local_collector():
    """For tries on a workstation: overloaded now and then, like the one of the cluster."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            mood = random.Random(time.time_ns()).random()
            if mood < 0.2:
                time.sleep(3)
            self.send_response(503 if mood < 0.6 else 204)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"
