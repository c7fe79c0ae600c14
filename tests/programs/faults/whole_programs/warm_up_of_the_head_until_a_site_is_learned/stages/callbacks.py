import logging

from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)


class HeadIsWarm(Callback):
    """Ends the first stage as soon as the head does well enough on what is trained on."""

    def __init__(self, accuracy: float = 0.93, smoothing: float = 0.95, at_least: int = 80) -> None:
        self.accuracy, self.smoothing, self.at_least = accuracy, smoothing, at_least
        self.average = 0.0
        self.seen = 0

    @property
    def unbiased(self) -> float:
        return self.average / (1 - self.smoothing ** max(self.seen, 1))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.average = self.smoothing * self.average + (1 - self.smoothing) * float(outputs["correct"])
        self.seen += 1
        if self.seen >= self.at_least and self.unbiased > self.accuracy:
            log.info("head is warm after %d batches: %.3f", self.seen, self.unbiased)
            trainer.should_stop = True  # <- here

    def state_dict(self):
        return {"average": self.average, "seen": self.seen}

    def load_state_dict(self, state_dict):
        self.average, self.seen = state_dict["average"], state_dict["seen"]
