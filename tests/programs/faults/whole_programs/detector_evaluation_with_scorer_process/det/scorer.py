"""Command line scorer of the challenge: boxes on stdin, one score per line on stdout."""

import json
import sys


def iou(a, b):
    left, top = max(a[0], b[0]), max(a[1], b[1])
    right, bottom = min(a[2], b[2]), min(a[3], b[3])
    overlap = max(0.0, right - left) * max(0.0, bottom - top)
    area = lambda box: max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])
    return overlap / (area(a) + area(b) - overlap + 1e-9)


def main():
    rows = [json.loads(line) for line in sys.stdin]
    for number, row in enumerate(rows):
        for box in row["boxes"]:
            if box[2] <= box[0] or box[3] <= box[1]:
                print(f"warning: image {number}: box {box} is degenerate and does not count", file=sys.stderr)
        best = max((iou(box, row["truth"]) for box in row["boxes"]), default=0.0)
        print(f"{best:.4f}")


if __name__ == "__main__":
    main()
