"""An exponential moving average of sharded weights, kept as shards and exported as a whole."""

import io
import subprocess
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

# copies stdin to a file at no more than so many bytes a second, like rsync's --bwlimit
COPY = """
import sys, time
path, limit = sys.argv[1], int(sys.argv[2])
with open(path, "wb") as out:
    while chunk := sys.stdin.buffer.read(limit // 10):
        out.write(chunk)
        out.flush()
        time.sleep(0.1)
"""


class RemoteFile:
    def __init__(self, path: Path, bandwidth: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-S", "-c", COPY, str(path), str(bandwidth)]
        self.copy = subprocess.Popen(command, stdin=subprocess.PIPE)

    def write(self, data: bytes) -> None:
        self.copy.stdin.write(data)  # <- here

    def close(self) -> None:
        self.copy.stdin.close()
        self.copy.wait()


class ShardedEMA(Callback):
    def __init__(self, decay: float = 0.999, export_to: str = "bucket/ema", bandwidth: int = 24_000) -> None:
        self.decay, self.export_to, self.bandwidth = decay, Path(export_to), bandwidth
        self.shadow: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer, pl_module):
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            mean, new = self._local(self.shadow[name]), self._local(p)
            mean.lerp_(new, 1 - self.decay)

    @staticmethod
    def _local(t: torch.Tensor) -> torch.Tensor:
        return t.to_local() if isinstance(t, DTensor) else t

    def full_state(self) -> dict[str, torch.Tensor]:
        """Whole tensors; every rank has to take part."""
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.shadow.items()}

    def on_train_epoch_end(self, trainer, pl_module):
        state = self.full_state()
        if trainer.is_global_zero:
            buffer = io.BytesIO()
            torch.save({"ema": state, "step": trainer.global_step}, buffer)
            remote = RemoteFile(self.export_to / f"epoch{trainer.current_epoch}.pt", self.bandwidth)
            remote.write(buffer.getvalue())
            remote.close()
            print(f"exported {len(buffer.getvalue()) / 1e6:.1f} MB of averaged weights")
