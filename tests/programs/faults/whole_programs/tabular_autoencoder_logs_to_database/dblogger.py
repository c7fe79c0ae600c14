import logging
import sqlite3
import threading
import time
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

log = logging.getLogger("dblogger")

SCHEMA = """
CREATE TABLE IF NOT EXISTS metrics (name TEXT, step INTEGER, value REAL, at REAL);
CREATE TABLE IF NOT EXISTS summary (name TEXT PRIMARY KEY, last REAL, steps_per_s REAL);
"""


class Rollup(threading.Thread):
    """Keeps the table that the group's dashboard reads."""

    def __init__(self, path, every):
        super().__init__(name="rollup", daemon=True)
        self.path = path
        self.every = every
        self.closing = threading.Event()

    def run(self):
        connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        while not self.closing.wait(self.every):
            try:
                self.refresh(connection)
            except Exception as error:
                log.warning("summary not refreshed: %s", error)

    def refresh(self, connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM summary")
        names = [name for (name,) in connection.execute("SELECT DISTINCT name FROM metrics")]
        for name in names:
            rows = connection.execute(
                "SELECT step, value, at FROM metrics WHERE name = ? ORDER BY at", (name,)
            ).fetchall()
            speed = (rows[-1][0] - rows[0][0]) / (rows[-1][2] - rows[0][2])
            connection.execute("INSERT INTO summary VALUES (?, ?, ?)", (name, rows[-1][1], speed))
        connection.execute("COMMIT")


class DatabaseLogger(Logger):
    def __init__(self, path="runs/metrics.db", run="default", every=2.0):
        super().__init__()
        self.path = Path(path)
        self.run = run
        self.every = every
        self._connection = None

    @property
    def name(self):
        return "database"

    @property
    def version(self):
        return self.run

    @property
    def save_dir(self):
        return str(self.path.parent)

    @property
    def experiment(self):
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=3600)
            self._connection.executescript(SCHEMA)
            self._rollup = Rollup(self.path, self.every)
            self._rollup.start()
        return self._connection

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        log.info("run %s: %s", self.run, params)

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        now = time.time()
        rows = [(name, step, float(value), now) for name, value in metrics.items()]
        self.experiment.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)  # <- here
        self.experiment.commit()

    @rank_zero_only
    def finalize(self, status):
        if self._connection is not None:
            self._rollup.closing.set()
            self._rollup.join()
            self._connection.close()
