"""python -m tagger.evaluate WEIGHTS RESULT: scores weights; publishes what beats the best so far."""

import json
import sys
from pathlib import Path

import torch

from .network import Network
from .sentences import Sentences


def main(weights, result):
    torch.set_num_threads(1)
    model = Network()
    model.load_state_dict(torch.load(weights))
    data = Sentences(seed=1)
    with torch.no_grad():
        accuracy = (model(data.ids).argmax(-1) == data.tags).float().mean().item()
    board = Path(result).parent / "best.json"
    best = json.loads(board.read_text())["accuracy"] if board.exists() else 0.0
    if round(accuracy, 2) > best:
        board.write_text(json.dumps({"accuracy": round(accuracy, 2), "weights": weights}))
        Path(result).write_text(json.dumps({"accuracy": accuracy}))


if __name__ == "__main__":
    main(*sys.argv[1:])
