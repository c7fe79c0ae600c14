"""Grid worlds loaded from level files, as a vectorisable toy environment."""

import random
from pathlib import Path

ACTIONS = [(0, 1), (1, 0), (0, -1), (-1, 0)]

LEVELS = {
    "corridor": "#######\n#S...G#\n#######",
    "room": "#####\n#S..#\n#...#\n#..G#\n#####",
    "hook": "######\n#S...#\n####.#\n#G...#\n######",
    "vault": "#######\n#S.#.G#\n#..#..#\n#######",
}


def write_levels(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in LEVELS.items():
        Path(folder, f"{name}.txt").write_text(text)


class GridWorld:
    def __init__(self, path, seed):
        self.rows = Path(path).read_text().splitlines()
        self.rng = random.Random(seed)
        cells = {c: (y, x) for y, row in enumerate(self.rows) for x, c in enumerate(row)}
        self.start, self.goal = cells["S"], cells["G"]

    def reset(self):
        self.pos = self.start
        return self._obs()

    def _obs(self):
        return [self.pos[0] / 6, self.pos[1] / 6, self.goal[0] / 6, self.goal[1] / 6]

    def step(self, action):
        dy, dx = ACTIONS[action]
        y, x = self.pos[0] + dy, self.pos[1] + dx
        if self.rows[y][x] != "#":
            self.pos = (y, x)
        done = self.pos == self.goal
        return self._obs(), float(done) - 0.01, done
