"""Writes the document collection: letters, and folders ("binders") with attachments."""

import json
import random
import sys
from pathlib import Path


def page(rng):
    return " ".join(
        rng.choice(["invoice", "claim", "annex", "total", "dear", "sincerely"]) + str(rng.randrange(40))
        for _ in range(30)
    )


def main(out):
    rng = random.Random(21)
    Path(out).mkdir(parents=True, exist_ok=True)
    for i in range(480):
        doc = {"id": i, "label": rng.randrange(3), "pages": [page(rng)], "attachments": []}
        if 60 < i and i % 60 in (45, 47):
            doc["attachments"] = [{"id": f"{i}-{k}", "pages": [page(rng)], "attachments": []} for k in range(3)]
        Path(out, f"doc-{i:04d}.json").write_text(json.dumps(doc))


if __name__ == "__main__":
    main(sys.argv[1])
