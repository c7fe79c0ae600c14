"""Writes the dump that the crawler leaves: one JSON line per page."""

import json
import random
from pathlib import Path

WORDS = "open the panel select a tensor and run it again with more data before you save".split()


def page(rng, i):
    parts = [f"# Part {i}", "=== Overview ==="]
    for _ in range(rng.randint(3, 8)):
        parts.append(" ".join(rng.choices(WORDS, k=rng.randint(5, 20))) + ".")
        if rng.random() < 0.3:
            parts.append("```python\nprint('" + rng.choice(WORDS) + "')\n```")
    if i == 611:
        parts.append("-" * 48 + ">")
    return {"url": f"https://example.org/tutorial/{i}", "text": "\n".join(parts)}


def dump(path, pages=1200, seed=2):
    path = Path(path)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    path.write_text("\n".join(json.dumps(page(rng, i)) for i in range(pages)))
