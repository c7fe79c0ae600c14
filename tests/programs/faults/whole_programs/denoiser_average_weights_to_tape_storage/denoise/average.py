import copy

import lightning as L
import torch


class AverageWeights(L.Callback):
    """Exponential average of the weights, used for validation and kept in the checkpoint."""

    def __init__(self, decay=0.98):
        self.decay = decay
        self.average = None
        self.live = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.average is None:
            self.average = copy.deepcopy(pl_module.state_dict())
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value.to(self.average[name].dtype), 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer, pl_module):
        if self.average is not None:
            self.live = copy.deepcopy(pl_module.state_dict())
            pl_module.load_state_dict(self.average)

    @torch.no_grad()
    def on_validation_end(self, trainer, pl_module):
        if self.live is not None:
            pl_module.load_state_dict(self.live)
            self.live = None

    def state_dict(self):
        return {"average": self.average}
