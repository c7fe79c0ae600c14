"""Exports scanned ledgers to line files, one folder per archive box."""

import random
from pathlib import Path

WORDS = "invoice total paid account folio remitted balance carried forward per annum".split()


def line(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return f"{rng.choice(WORDS)} {rng.randint(1, 9)},{rng.randint(100, 999)},{rng.randint(100, 999)}.{rng.randint(10, 99)}"
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6)))


def export_boxes(root: Path, boxes: int, lines: int = 600) -> None:
    for box in range(boxes):
        target = root / f"box{box:02d}" / "lines.txt"
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        rng = random.Random(100 + box)
        rows = [line(rng) for _ in range(lines)]
        if box == 1:
            rows[371] = "sum of folios 1873264519283746501928374650192837465019 (illegible"
        target.write_text("\n".join(rows) + "\n")
