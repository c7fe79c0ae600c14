"""Reads {"id", "prediction", "reference"} per line from a file and prints one score per line, then the mean."""

import json
import sys


def overlap(prediction: str, reference: str) -> float:
    p, r = prediction.split(), reference.split()
    hits = sum(min(p.count(w), r.count(w)) for w in set(r))
    return 2 * hits / max(1, len(p) + len(r))


def main() -> None:
    scores = []
    with open(sys.argv[1]) as lines:
        for line in lines:
            row = json.loads(line)
            scores.append(overlap(row["prediction"], row["reference"]))
            missing = sorted(set(row["reference"].split()) - set(row["prediction"].split()))
            print(json.dumps({"id": row["id"], "rouge1": round(scores[-1], 4), "missing": missing}))
    print(f"mean {sum(scores) / max(1, len(scores)):.6f}")


if __name__ == "__main__":
    main()
