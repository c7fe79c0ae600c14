import socket

from lightning.pytorch.callbacks import Callback

from events.preview import start_preview
from events.registry import Registry


def free_port(taken):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return port if port not in taken else free_port(taken)


class RunRegistry(Callback):
    """Rank 0 claims a port and shows the registry; the last rank, which has the least to do, keeps the entry current."""

    def __init__(self, path, run):
        self.registry, self.run, self.preview = Registry(path), run, None

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            with self.registry.edit() as entries:
                port = free_port({e.get("port") for e in entries.values()})
                self.preview = start_preview(port, self.registry.path.parent)
                entries[self.run] = {"port": port, "world": trainer.world_size, "history": []}

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_rank == trainer.world_size - 1:
            metrics = {k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()}
            with self.registry.edit() as entries:
                entries[self.run]["history"].append({"epoch": trainer.current_epoch, **metrics})

    def on_fit_end(self, trainer, pl_module):
        if self.preview is not None:
            self.preview.terminate()
