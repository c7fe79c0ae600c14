import argparse
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning_ncclsafe import SafeDDP

from slides.data import SlideData
from slides.model import TileClassifier


class MemoryGovernor(Callback):
    def __init__(self, share_mb, folder="job"):
        self.share_mb = share_mb
        self.folder = Path(folder)
        self.process = None

    def setup(self, trainer, pl_module, stage):
        self.folder.mkdir(exist_ok=True)
        self.entry = self.folder / f"{trainer.local_rank}.pid"
        self.entry.write_text(str(os.getpid()))

    def on_train_start(self, trainer, pl_module):
        if trainer.local_rank == 0:
            command = [
                sys.executable,
                "-m",
                "slides.governor",
                str(self.folder.resolve()),
                "--share-mb",
                str(self.share_mb),
            ]
            self.process = subprocess.Popen(command, start_new_session=True, cwd=Path(__file__).parent)

    def teardown(self, trainer, pl_module, stage):
        self.entry.unlink(missing_ok=True)
        if self.process is not None:
            self.process.terminate()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share-mb", type=int, default=700)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[MemoryGovernor(args.share_mb)],
    )
    trainer.fit(TileClassifier(), datamodule=SlideData())


if __name__ == "__main__":
    main()
