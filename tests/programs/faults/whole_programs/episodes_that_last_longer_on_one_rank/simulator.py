"""python simulator.py SEED PACE: reads a gain a line, answers with an episode."""

import json
import os
import random
import sys
import time

rng = random.Random(int(sys.argv[1]))
pace = float(sys.argv[2])

for line in sys.stdin:
    gain = json.loads(line)
    if rng.random() < 0.04:
        os._exit(3)  # licence server
    state = [rng.gauss(0, 1) for _ in range(4)]
    episode = []
    for _ in range(rng.choice([20, 60, 400])):
        action = sum(g * s for g, s in zip(gain, state)) + rng.gauss(0, 0.3)
        state = [0.95 * s + 0.05 * action + rng.gauss(0, 0.05) for s in state]
        episode.append([state, action, -sum(s * s for s in state)])
    time.sleep(pace * rng.random() * 2)
    print(json.dumps(episode), flush=True)
