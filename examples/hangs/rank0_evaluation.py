"""Rank 0 evaluates alone at the end of the epoch, for too long (open_clip#1024).

`if not trainer.is_global_zero: return` looks harmless: the evaluation itself has no collective. But the others
continue, and the next thing that Lightning does has one: they wait there for as long as rank 0 evaluates.

Stock, on rank 1:  RuntimeError: ... Timed out waiting 12000ms for recv operation to complete
                   (at the end of a traceback through ModelCheckpoint, which has nothing to do with it)
SafeDDP:           rank-zero-only-work: rank 0 alone in on_train_epoch_end, at the line marked below
"""

from __future__ import annotations

import time

import torch
from _run import DigitsClassifier, DigitsData, parse_options, run


class RankZeroEvaluation(DigitsClassifier):
    def __init__(self, stall: float) -> None:
        super().__init__()
        self.stall = stall

    def on_train_epoch_end(self) -> None:
        if not self.trainer.is_global_zero:
            return
        self.zero_shot_evaluation()

    @torch.no_grad()
    def zero_shot_evaluation(self) -> None:
        """Score every digit against every other, again and again: too much validation data."""
        images, _ = self.trainer.datamodule.digits.tensors  # type: ignore[attr-defined]
        embedded = self.features(images.to(self.device)).flatten(1)
        end = time.monotonic() + self.stall
        while time.monotonic() < end:
            (embedded @ embedded.T).sort(descending=True)  # <- rank 0 is here


if __name__ == "__main__":
    options = parse_options(__doc__)
    run(RankZeroEvaluation(options.stall), DigitsData(), options)
