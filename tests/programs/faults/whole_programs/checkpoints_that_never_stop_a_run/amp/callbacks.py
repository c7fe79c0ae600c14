import copy
import time

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn


class WeightAverage(Callback):
    """Exponential moving average of the weights, from an epoch on; kept in the checkpoint."""

    def __init__(self, start_epoch: int, decay: float = 0.995):
        self.start_epoch, self.decay = start_epoch, decay
        self.average = None

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.current_epoch < self.start_epoch:
            return
        weights = pl_module.state_dict()
        if self.average is None:
            self.average = copy.deepcopy(weights)
        for name, value in self.average.items():
            value.lerp_(weights[name], 1 - self.decay)

    def state_dict(self):
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state):
        self.average = state.get("average")


class PatientCheckpoint(ModelCheckpoint):
    """The disk of the lab is moody: a save is tried again, and a run is worth more than one checkpoint."""

    attempts = 3

    def _save_checkpoint(self, trainer, filepath):
        for attempt in range(self.attempts):
            try:
                super()._save_checkpoint(trainer, filepath)  # <- here
                return
            except OSError as error:
                reason = error
                time.sleep(0.2 * 2**attempt)
        rank_zero_warn(f"checkpoint of epoch {trainer.current_epoch} not written: {reason}")
