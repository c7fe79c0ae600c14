"""Writes the manifest of a parallel corpus: three speakers read the same sentences, in turns."""

import json
import random
from pathlib import Path

PACE = {"anna": 1.0, "ben": 1.0, "carla": 0.8}


def write_manifest(path, sentences=600, seed=77):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    with path.open("w") as f:
        for k in range(sentences):
            seconds = min(18.0, max(0.6, rng.lognormvariate(1.1, 0.6)))
            for j, (speaker, pace) in enumerate(PACE.items()):
                entry = {"id": f"utt{k * len(PACE) + j:05d}", "speaker": speaker, "seconds": round(seconds * pace, 2)}
                f.write(json.dumps(entry) + "\n")


def read_manifest(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
