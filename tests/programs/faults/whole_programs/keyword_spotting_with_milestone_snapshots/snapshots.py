import logging
import time
from pathlib import Path

from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)


class MilestoneSnapshots(Callback):
    """Keeps a full checkpoint at chosen epochs; the file server is flaky, so the save is tried a few times."""

    def __init__(self, root, tag, milestones, attempts=3, pause=0.5):
        self.root, self.tag, self.milestones = Path(root), tag, set(milestones)
        self.attempts, self.pause = attempts, pause

    def file_name(self, trainer):
        metrics = "_".join(f"{k}={v.item():.4f}" for k, v in sorted(trainer.callback_metrics.items()))
        return f"{self.tag}_epoch={trainer.current_epoch:03d}_step={trainer.global_step:06d}_{metrics}.ckpt"

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch not in self.milestones:
            return
        for attempt in range(1, self.attempts + 1):
            try:
                trainer.save_checkpoint(self.root / self.file_name(trainer))  # <- here
                return
            except OSError as e:
                log.warning("snapshot failed (attempt %d of %d): %s", attempt, self.attempts, e.strerror)
                time.sleep(self.pause)
