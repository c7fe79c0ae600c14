import lightning as L
import numpy as np

from crops.ledger import Ledger


class RecordResults(L.Callback):
    def __init__(self, path: str = "results/ledger.jsonl"):
        self.path = path
        self.ledger = None
        self.best = float("inf")

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero and self.ledger is None:
            self.ledger = Ledger(self.path)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.ledger and batch_idx % 10 == 0:
            self.ledger.add(step=trainer.global_step, loss=float(outputs["loss"]))

    def on_validation_end(self, trainer, pl_module):
        if self.ledger is None or trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val/loss"].item()
        record = {"epoch": trainer.current_epoch, "val_loss": loss}
        if loss > self.best:
            iou = np.stack(pl_module.iou_history[-5:])
            record["worst_class"] = iou.mean(0).argmin()
            record["spread"] = iou.std()
        self.best = min(self.best, loss)
        self.ledger.add(**record)
        self.ledger.flush()
