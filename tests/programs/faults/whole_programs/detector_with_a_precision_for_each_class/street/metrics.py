from __future__ import annotations

from torch import Tensor, nn
from torchmetrics import MeanMetric

from .data import CLASSES


class ClassPrecision(nn.ModuleDict):
    """Precision of the cells that hold an object, one metric for each class."""

    def __init__(self) -> None:
        super().__init__({name: MeanMetric() for name in CLASSES[1:]})

    def update_from(self, predicted: Tensor, target: Tensor) -> None:
        for c in target.unique().tolist():
            if c == 0:
                continue
            cells = target == c
            self[CLASSES[c]].update((predicted[cells] == c).float())
