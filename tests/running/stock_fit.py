"""Trains on two ranks as a program does that has never heard of this package: ``stock_fit.py START [hang]``."""

import gc
import hashlib
import os
import sys
import time

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

# So that the end of each process does not look at everything that was imported.
gc.freeze()


class OwnDDP(DDPStrategy):
    """One that only this program has."""


class Net(BoringModel):
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if sys.argv[-1] == "hang" and batch_idx == 3:
            self.evaluate()

    def evaluate(self) -> None:
        if self.global_rank == 0:
            time.sleep(60)

    def on_train_end(self) -> None:
        print(f"rank {self.global_rank} is guarded: {hasattr(self.trainer.strategy, 'watch')}", flush=True)


def main() -> None:
    start = sys.argv[1]
    # Where this program runs as a fork of another, it says which Python would have run it.
    sys.executable = os.environ["PYTHON"]
    L.seed_everything(7, verbose=False)
    strategies = {"fork": "ddp_fork", "popen": DDPStrategy(), "own-spawn": OwnDDP(start_method="spawn")}
    model = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies[start],
        max_epochs=1,
        limit_train_batches=8,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    print("callbacks", *(type(each).__name__ for each in trainer.callbacks), flush=True)
    trainer.fit(model)
    if trainer.is_global_zero:
        made = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(f"weights {hashlib.sha256(made).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
