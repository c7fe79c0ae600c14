import json
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class HardNegativeMiner(Callback):
    """After every epoch, each process mines negatives for its queries; the parts are then merged to one file."""

    def __init__(self, folder, every=1, margin=0.15):
        self.folder, self.every, self.margin = Path(folder), every, margin

    def on_train_epoch_end(self, trainer, module):
        if (trainer.current_epoch + 1) % self.every:
            return
        folder = self.folder / f"epoch{trainer.current_epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        self.mine(trainer, module, folder)
        if trainer.is_global_zero:
            self.merge(folder, trainer.world_size)

    @torch.no_grad()
    def mine(self, trainer, module, folder):
        queries, positives, passages = trainer.datamodule.mining_set()
        q, p = module.encode(queries), module.encode(passages)
        scores = q @ p.T
        right = scores.gather(1, positives[:, None])
        close = (scores > right - self.margin) & (scores < right)
        found = [
            {"query": int(i), "negative": int(j), "score": round(float(scores[i, j]), 4)} for i, j in close.nonzero()
        ]
        if not found:
            return
        part = folder / f"part-{trainer.global_rank:02d}.jsonl"
        temporary = part.with_suffix(".tmp")
        temporary.write_text("\n".join(map(json.dumps, found)))
        temporary.rename(part)

    def merge(self, folder, parts):
        while len(list(folder.glob("part-*.jsonl"))) < parts:
            time.sleep(0.1)  # <- here
        lines = [line for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]
        (folder / "negatives.jsonl").write_text("\n".join(lines) + "\n")
