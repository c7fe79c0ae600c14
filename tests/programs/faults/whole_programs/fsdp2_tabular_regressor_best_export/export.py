import lightning as L
import torch
from torch.distributed.tensor import DTensor

from scoreboard import Scoreboard


class BestWeightsExport(L.Callback):
    """Writes plain, unsharded weights for the serving team whenever the validation score is a new best."""

    def __init__(self, out_dir, monitor="val_mae", run_name="base"):
        self.out_dir = out_dir
        self.monitor = monitor
        self.run_name = run_name
        self.board = Scoreboard(f"{out_dir}/scores.jsonl")

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = float(trainer.callback_metrics[self.monitor])
        if not self.board.update(self.run_name, score, trainer.global_step):  # <- here
            return
        weights = self._gather(pl_module)
        if trainer.is_global_zero:
            torch.save(weights, f"{self.out_dir}/best_{self.run_name}.pt")

    @staticmethod
    def _gather(module):
        weights = {}
        for name, p in module.state_dict().items():
            weights[name] = (p.full_tensor() if isinstance(p, DTensor) else p).cpu()
        return weights
