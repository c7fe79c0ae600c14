"""Corpus score with bootstrap intervals: python -m mt.score HYPOTHESES.json (the shared task's scorer, one core)."""

import json
import random
import sys
import time


def overlap(pair):
    hyp, ref = pair
    return sum(h == r for h, r in zip(hyp, ref)) / max(1, len(ref))


def main(path, seconds=8.0):
    pairs = json.load(open(path))
    scores = [overlap(p) for p in pairs]
    rng, means, end = random.Random(0), [], time.monotonic() + seconds
    while time.monotonic() < end:
        means.append(sum(rng.choices(scores, k=len(scores))) / len(scores))
        time.sleep(0.001)
    means.sort()
    print(json.dumps({"score": sum(scores) / len(scores), "low": means[len(means) // 40], "n": len(means)}))


if __name__ == "__main__":
    main(sys.argv[1])
