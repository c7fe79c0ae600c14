"""A tiny run registry on SQLite, shared by the ranks of a run and by the dashboard."""

import os
import sqlite3
import time

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, started REAL, epochs INTEGER DEFAULT 0, auc REAL);
CREATE TABLE IF NOT EXISTS hard_examples (run TEXT, rank INTEGER, step INTEGER, user INTEGER, item INTEGER, loss REAL);
"""


class Registry:
    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.connection = sqlite3.connect(path, timeout=900, isolation_level=None)
        self.connection.executescript(SCHEMA)

    def open_run(self, run: str) -> None:
        """A run appears on the dashboard with the results of its first epoch, not before."""
        self.connection.execute("BEGIN IMMEDIATE")  # <- here
        self.connection.execute("INSERT OR REPLACE INTO runs (run, started) VALUES (?, ?)", (run, time.time()))

    def close_epoch(self, run: str, auc: float) -> None:
        self.connection.execute("UPDATE runs SET epochs = epochs + 1, auc = ? WHERE run = ?", (auc, run))
        if self.connection.in_transaction:
            self.connection.execute("COMMIT")

    def add_hard_examples(self, rows: list[tuple]) -> None:
        self.connection.executemany("INSERT INTO hard_examples VALUES (?, ?, ?, ?, ?, ?)", rows)
