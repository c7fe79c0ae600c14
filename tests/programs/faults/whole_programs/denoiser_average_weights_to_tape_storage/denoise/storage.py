import shutil
import time
from pathlib import Path

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class TapeStorage(TorchCheckpointIO):
    """Writes a checkpoint locally, then moves it to the tape robot's mount, which is slow but large."""

    def __init__(self, spool="spool", chunks=11, seconds_per_chunk=1.0):
        self.spool = Path(spool)
        self.chunks, self.seconds = chunks, seconds_per_chunk

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.spool.mkdir(exist_ok=True)
        local = self.spool / Path(path).name
        super().save_checkpoint(checkpoint, local, storage_options)
        data = local.read_bytes()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        size = len(data) // self.chunks + 1
        with open(path, "wb") as tape:
            for start in range(0, len(data), size):
                tape.write(data[start : start + size])
                tape.flush()
                time.sleep(self.seconds)
        shutil.rmtree(self.spool)
