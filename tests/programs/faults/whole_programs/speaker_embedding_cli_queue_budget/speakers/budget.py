"""Ends a run in time for its slot in the queue, with a margin for the last checkpoint."""

import os
import time

import lightning as L

STARTED = time.time()


class SlotBudget(L.Callback):
    def __init__(self, slot_seconds: float = 14.0, margin_seconds: float = 2.0):
        self.deadline = STARTED + slot_seconds - margin_seconds

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if time.time() > self.deadline:
            trainer.should_stop = True  # <- here

    def on_fit_end(self, trainer, pl_module):
        print(f"{os.getpid()}: stopped after {time.time() - STARTED:.0f} s, {trainer.global_step} steps")
