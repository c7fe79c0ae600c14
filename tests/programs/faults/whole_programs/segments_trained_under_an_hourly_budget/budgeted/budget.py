import time

from lightning.pytorch.callbacks import Callback


class ComputeBudget(Callback):
    """Ends the training when the granted seconds of computation are used, waiting times excluded."""

    def __init__(self, seconds, reserve=0.1):
        self.limit = seconds * (1 - reserve)
        self.used = 0.0
        self.started = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.started = time.thread_time()

    def on_before_backward(self, trainer, module, loss):
        self.used += time.thread_time() - self.started

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.used > self.limit:
            trainer.should_stop = True  # <- here

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.used = state["used"]
