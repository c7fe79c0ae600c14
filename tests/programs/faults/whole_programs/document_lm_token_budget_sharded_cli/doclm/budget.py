import json
import os
from pathlib import Path

from lightning.pytorch.callbacks import Callback


class TokenBudget(Callback):
    """Trains on a number of tokens, not of steps, as the scaling-law runs of the paper do."""

    def __init__(self, tokens: int, ledger: str = "ledger"):
        self.tokens = tokens
        self.seen = 0
        self.ledger = Path(ledger)

    def setup(self, trainer, pl_module, stage):
        self.ledger.mkdir(exist_ok=True)
        self.share = self.tokens // trainer.world_size

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += int(batch["mask"].sum())
        if batch_idx % 20 == 0:
            self.write(trainer.global_rank, trainer.global_step)
        if self.seen >= self.share:
            trainer.should_stop = True  # <- here

    def on_train_end(self, trainer, pl_module):
        self.write(trainer.global_rank, trainer.global_step)

    def write(self, rank, step):
        path = self.ledger / f"rank{rank}.json"
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"step": step, "tokens": self.seen, "budget": self.share}))
        os.replace(scratch, path)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
