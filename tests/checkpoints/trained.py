"""A model that shows each thing that a checkpoint may have wrong, and a loader that goes on where it was."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

FEATURES, BATCH = 4, 3


class Stateful:
    """Batches of which each is known by its number; its state is how many have been given in this epoch."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count = count
        self.rank = rank
        self.given = 0
        self._begins_at = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self._begins_at = self._begins_at, 0
        self.given = begin
        for number in range(begin, self.count):
            self.given = number + 1
            yield torch.sin(torch.arange(1.0, 1 + BATCH * FEATURES) * (number + 1 + self.rank)).reshape(BATCH, FEATURES)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = self._begins_at = state["given"] % self.count


class Trained(pl.LightningModule):
    """Weights, running statistics, an optimizer with a state, learning rates; each hook is a place to stop at."""

    def __init__(self, *, at: Callable[[str], None] = lambda hook: None, manual: bool = False) -> None:
        super().__init__()
        self.at = at
        self.automatic_optimization = not manual
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.at("training_step")
        loss = self.loss(batch)
        self.at("after forward")
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.at("after manual step")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.at("validation_step")
        self.log("loss", self.loss(batch), batch_size=BATCH)

    def on_after_backward(self) -> None:
        self.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.at("on_before_zero_grad")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("on_train_batch_end")

    def on_train_epoch_start(self) -> None:
        self.at("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


class Remembers(pl.Callback):
    """A callback with a state: how many batches, and how many validations, have ended."""

    def __init__(self) -> None:
        self.ended = self.validated = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1

    def on_validation_end(self, *args: Any) -> None:
        self.validated += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "validated": self.validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended, self.validated = state_dict["ended"], state_dict["validated"]
