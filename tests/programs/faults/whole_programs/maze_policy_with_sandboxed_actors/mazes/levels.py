import json
import random
from pathlib import Path


def design(root: Path, sizes=(9, 61), count: int = 40) -> None:
    """One set of levels per rank; the second set is the hard one of the paper."""
    root.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        rng = random.Random(number)
        levels = [[[int(rng.random() < 0.25) for _ in range(size)] for _ in range(size)] for _ in range(count)]
        for level in levels:
            level[0][0] = level[-1][-1] = 0
        (root / f"set{number}.json").write_text(json.dumps(levels))


def distances(level):
    """Breadth first search from the exit; the expert's policy follows it."""
    size = len(level)
    found = {(size - 1, size - 1): 0}
    border = [(size - 1, size - 1)]
    while border:
        following = []
        for y, x in border:
            for step in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                inside = 0 <= step[0] < size and 0 <= step[1] < size
                if inside and step not in found and not level[step[0]][step[1]]:
                    found[step] = found[y, x] + 1
                    following.append(step)
        border = following
    return found
