import gzip
import json
import math
import random
import time
from pathlib import Path


def write_station(path, seed, hours=900):
    rng = random.Random(seed)
    base = rng.uniform(-5, 20)
    rows = [
        [h, base + 6 * math.sin(h / 24 * 2 * math.pi) + rng.gauss(0, 1), rng.uniform(980, 1030)] for h in range(hours)
    ]
    with gzip.open(path, "wt") as f:
        json.dump(rows, f)


class StationCache:
    """Decodes the stations once: the leader builds the cache, the others wait for its marker file."""

    def __init__(self, raw, cache, leader, seconds_per_station=1.2):
        self.raw, self.cache, self.leader = Path(raw), Path(cache), leader
        self.pace = seconds_per_station

    def ensure(self):
        marker = self.cache / "_SUCCESS"
        if self.leader:
            self.cache.mkdir(parents=True, exist_ok=True)
            for f in sorted(self.raw.glob("*.json.gz")):
                start = time.monotonic()
                with gzip.open(f, "rt") as g:
                    rows = json.load(g)
                (self.cache / f.name.replace(".gz", "")).write_text(json.dumps([r[1:] for r in rows]))
                time.sleep(max(0.0, self.pace - (time.monotonic() - start)))
            marker.touch()
        else:
            while not marker.exists():
                time.sleep(0.25)

    def load(self):
        return [json.loads(f.read_text()) for f in sorted(self.cache.glob("*.json"))]
