"""Server logs, one file per host; a line is a level, a template and its fields."""

import json
import random
from pathlib import Path

TEMPLATES = [
    "login {user}",
    "disk {pct} full",
    "GET {path} {code}",
    "job {id} done",
    "job {id} failed",
    "link {port} down",
]


def write_logs(folder, hosts=6, lines=700, seed=77):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for h in range(hosts):
        rng = random.Random(seed + h)
        with open(folder / f"host{h}.jsonl", "w") as f:
            for n in range(lines):
                t = rng.randrange(len(TEMPLATES))
                row = {
                    "template": t,
                    "code": rng.choice([200, 200, 200, 404, 500]),
                    "ms": round(rng.expovariate(0.02), 2),
                }
                if h == 5 and n % 250 == 120:
                    row["code"] = None
                f.write(json.dumps(row) + "\n")
