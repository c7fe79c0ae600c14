"""A Lightning logger for a single SQLite file that several trainings and the dashboard share."""

from __future__ import annotations

import json
import sqlite3
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, name TEXT, started REAL, params TEXT);
CREATE TABLE IF NOT EXISTS metrics (run INTEGER, step INTEGER, name TEXT, value REAL, at REAL);
CREATE TABLE IF NOT EXISTS curves (run INTEGER, name TEXT, bucket INTEGER, mean REAL);
"""


class SqliteLogger(Logger):
    def __init__(self, path: str | Path, name: str) -> None:
        super().__init__()
        self.path = Path(path)
        self._name = name
        self._run: int | None = None
        self._db: sqlite3.Connection | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return f"run{self._run}"

    @property
    def root_dir(self) -> str:
        return str(self.path.parent)

    @property
    def db(self) -> sqlite3.Connection:
        if self._db is None:
            # other trainings write to the file, too: be patient
            self._db = sqlite3.connect(self.path, timeout=900, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(SCHEMA)
            cursor = self._db.execute("INSERT INTO runs (name, started) VALUES (?, ?)", (self._name, time.time()))
            self._run = cursor.lastrowid
        return self._db

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        params = vars(params) if isinstance(params, Namespace) else dict(params)
        db = self.db
        db.execute("UPDATE runs SET params = ? WHERE id = ?", (json.dumps(params, default=str), self._run))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        db, now = self.db, time.time()
        for name, value in metrics.items():
            row = (self._run, step, name, float(value), now)
            db.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", row)  # <- here

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
