"""A small shared record of the best score of a run, safe against concurrent writers."""

import fcntl
import json
from pathlib import Path


class Scoreboard:
    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def update(self, name, score, step):
        """Enter a score; says whether it is the best one so far."""
        with open(self.path, "a+") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.seek(0)
            rows = [json.loads(line) for line in f if line.strip()]
            best = min((r["score"] for r in rows if r["name"] == name), default=float("inf"))
            if score >= best:
                return False
            f.write(json.dumps({"name": name, "score": score, "step": step}) + "\n")
            f.flush()
            return True
