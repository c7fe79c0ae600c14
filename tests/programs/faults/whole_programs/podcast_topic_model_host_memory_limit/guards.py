import logging
import sys

import lightning as L

log = logging.getLogger("guards")


def resident_mb():
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    return 0.0


class MemoryLimit(L.Callback):
    """Leaves before the host's out-of-memory killer picks somebody else's process."""

    def __init__(self, grow_mb=60.0, every=2):
        self.grow_mb, self.every = grow_mb, every
        self.base = None

    def on_train_start(self, trainer, pl_module):
        self.base = resident_mb()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 6 and trainer.current_epoch == 0:
            self.base = resident_mb()
        if batch_idx > 6 and batch_idx % self.every == 0:
            used = resident_mb() - self.base
            if used > self.grow_mb:
                log.warning("host memory grew by %.0f MB, limit is %.0f MB: leaving", used, self.grow_mb)
                sys.exit(0)  # <- here
