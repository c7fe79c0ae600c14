"""Now and then, one rank takes longer over its data; the other waits, and the run is slow for no visible reason.

python examples/straggler.py                      # rank 1 is named, with the phase; a table, a trace, TensorBoard
python examples/straggler.py --rank 0 --late 0.05
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import lightning as L
from digits import Batch, DigitsClassifier, DigitsData, train

from lightning_ncclsafe import CollectiveTimer, SafeDDP


class NowAndThenSlow(DigitsData):
    """Digits; on one rank a tenth of the batches takes longer, as from a file server that is busy."""

    def __init__(self, rank: int, late_s: float, **data_args: Any) -> None:
        super().__init__(**data_args)
        self.rank, self.late_s = rank, late_s
        self.dice = random.Random(0)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        assert isinstance(self.trainer, L.Trainer)
        if self.trainer.training and self.trainer.global_rank == self.rank and self.dice.random() < 0.1:
            time.sleep(self.late_s)  # this line is the cause
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=1, help="the rank that is late (default: %(default)s)")
    parser.add_argument("--late", type=float, default=0.02, help="seconds (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--root-dir", type=Path, default=Path("runs/straggler"))
    args = parser.parse_args()
    train(
        DigitsClassifier(),
        NowAndThenSlow(args.rank, args.late),
        SafeDDP(),
        devices=args.devices,
        max_epochs=args.max_epochs,
        root_dir=args.root_dir,
        callbacks=[CollectiveTimer()],
    )


if __name__ == "__main__":
    main()
