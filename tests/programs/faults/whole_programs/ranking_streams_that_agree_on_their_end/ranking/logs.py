import json
import random
from pathlib import Path


def dump(root: Path, days: int = 14) -> None:
    """One file of clicks per day; days differ a lot in size."""
    root.mkdir(parents=True, exist_ok=True)
    for day in range(days):
        target = root / f"day{day:02d}.jsonl"
        if target.exists():
            continue
        rng = random.Random(day)
        with open(target, "w") as out:
            for _ in range(rng.randint(60, 400)):
                features = [round(rng.gauss(0, 1), 3) for _ in range(12)]
                out.write(json.dumps({"x": features, "clicked": int(sum(features[:4]) > 0.5)}) + "\n")
