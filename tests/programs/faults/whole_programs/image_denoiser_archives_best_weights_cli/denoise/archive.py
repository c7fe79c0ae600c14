import hashlib
import queue
import tarfile
import threading
import time
from pathlib import Path

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info


class ArchiveWeights(Callback):
    """After some epochs, rank 0 packs the run directory and hands the archive to a mirror thread."""

    def __init__(self, folder: str = "archive", every_n_epochs: int = 3, bandwidth_kb: int = 60):
        self.folder = Path(folder)
        self.every_n_epochs = every_n_epochs
        self.bandwidth = bandwidth_kb * 1024
        self.pending = queue.Queue()
        self.mirror = None

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.mirror = threading.Thread(target=self.drain, name="mirror", daemon=True)
            self.mirror.start()

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        target = self.folder / f"epoch{trainer.current_epoch:02d}.tar.gz"
        with tarfile.open(target, "w:gz", compresslevel=9) as tar:
            tar.add(trainer.log_dir, arcname="run")  # <- here
        self.verify(target)
        self.pending.put(target)

    def verify(self, target, rounds=8):
        """The tape robot wants a checksum that is slow to compute."""
        digest = b""
        until = time.monotonic() + 2
        while time.monotonic() < until:
            digest = hashlib.pbkdf2_hmac("sha256", target.read_bytes()[:4096] + digest, b"tape", 20000 * rounds)
            time.sleep(0.3)
        target.with_suffix(".sum").write_text(digest.hex())

    def drain(self):
        while (target := self.pending.get()) is not None:
            copy = target.with_name("mirror-" + target.name)
            with target.open("rb") as source, copy.open("wb") as sink:
                while chunk := source.read(self.bandwidth):
                    sink.write(chunk)
                    time.sleep(0.2)
            rank_zero_info(f"mirrored {target.name}")

    def on_fit_end(self, trainer, pl_module):
        if self.mirror is not None:
            self.pending.put(None)
            self.mirror.join(timeout=20)
