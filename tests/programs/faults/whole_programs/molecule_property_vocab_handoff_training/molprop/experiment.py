"""Folder layout of one experiment."""

import json
import os
import time
from datetime import datetime
from pathlib import Path


def global_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


class Experiment:
    def __init__(self, name: str, root: str = "experiments"):
        self.name = name
        self.dir = Path(root) / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.dir.mkdir(parents=True, exist_ok=True)

    @property
    def vocab_file(self) -> Path:
        return self.dir / "vocab.json"

    def publish_vocab(self, vocab: dict) -> None:
        tmp = self.vocab_file.with_suffix(".tmp")
        tmp.write_text(json.dumps(vocab))
        tmp.rename(self.vocab_file)

    def wait_for_vocab(self, every: float = 0.5) -> dict:
        while not self.vocab_file.exists():
            time.sleep(every)  # <- here
        return json.loads(self.vocab_file.read_text())
