import json
import random
from pathlib import Path


def write(path: Path, n: int = 1500) -> None:
    """Manifest sorted by date of recording; later sessions were read by slower speakers."""
    rng = random.Random(77)
    rows = []
    for i in range(n):
        rows.append({"id": i, "frames": int(rng.uniform(40, 90) + 40 * i / n), "words": rng.randint(2, 9)})
    path.write_text(json.dumps(rows))


def read(path: Path) -> list:
    return json.loads(path.read_text())
