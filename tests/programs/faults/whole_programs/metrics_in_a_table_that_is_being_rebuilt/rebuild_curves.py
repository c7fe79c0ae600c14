"""python rebuild_curves.py metrics.sqlite: smoothed curves of all runs, for the dashboard."""

import sqlite3
import sys
import time

BUCKET = 20
PAUSE_S = 0.6  # the file is on a busy disk


def main(path: str) -> None:
    db = sqlite3.connect(path, timeout=60, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    db.execute("DELETE FROM curves")
    series = db.execute("SELECT DISTINCT run, name FROM metrics").fetchall()
    for run, name in series:
        rows = db.execute(
            "SELECT step / ?, AVG(value) FROM metrics WHERE run = ? AND name = ? GROUP BY 1", (BUCKET, run, name)
        ).fetchall()
        db.executemany("INSERT INTO curves VALUES (?, ?, ?, ?)", [(run, name, *row) for row in rows])
        time.sleep(PAUSE_S)
    db.execute("COMMIT")


if __name__ == "__main__":
    main(sys.argv[1])
