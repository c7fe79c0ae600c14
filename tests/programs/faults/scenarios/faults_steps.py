"""Ranks whose steps differ: one that is skipped, a part of the model that is not needed, a value that is not logged."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from torchmetrics import Metric
from training import IN_THE_MIDDLE, Here, Net
from truths import Moment, fault


@fault("skipped-step", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)}, has_line=False)
def step_that_returns_none(here: Here) -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if here.is_hit and self.current_epoch == 0 and batch_idx == (3 if here.case.moment is Moment.MIDDLE else 0):
                here.begins()
                return None
            return loss

    here.fit(net=Skipping(here))


@fault("skipped-step", ranks=(-1,), at={Moment.MIDDLE: (2, 3)}, has_line=False)
def loss_that_is_not_a_number(here: Here) -> None:
    class Careful(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if here.is_hit and batch_idx == 3:
                here.begins()
                loss = loss * float("nan")
            return loss if torch.isfinite(loss) else None

    here.fit(net=Careful(here))


class Branching(Net):
    """A part of the model that only some batches need."""

    def __init__(self, here: Here, *, batch: int) -> None:
        super().__init__(here)
        self.batch = batch
        self.expert = torch.nn.Sequential(torch.nn.Linear(8, 300_000 // 8), torch.nn.Linear(300_000 // 8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.here.is_hit and batch_idx == self.batch and self.current_epoch == 0:
            self.here.begins()
            return loss
        return loss + self.expert(batch[0]).square().mean()


@fault("unused-parameters", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)}, has_line=False)
def expert_without_tokens(here: Here) -> None:
    batch = 3 if here.case.moment is Moment.MIDDLE else 0
    here.fit(net=Branching(here, batch=batch), strategy=here.strategy(bucket_cap_mb=1))


@fault("diverged-log-keys", ranks=(1,), at={Moment.MIDDLE: (2, 3), Moment.VALIDATION: (2,)}, has_phase=False)
def logged_on_some_ranks(here: Here) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if here.case.moment is Moment.MIDDLE and batch_idx == 3:
                self.faces(loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 1:
                self.faces(self.loss(batch))

        def faces(self, loss: torch.Tensor) -> None:
            here.begins()
            # What one rank's batch has none of.
            if here.is_hit:
                self.log("faces", loss, sync_dist=True)  # <- here

    here.fit(net=Logging(here))


@fault("diverged-log-keys", ranks=None, at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def other_keys_on_each_rank(here: Here) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                here.begins()
                names = ["loss_a", "loss_b"] if here.rank == 0 else ["loss_c"]
                self.log_dict(dict.fromkeys(names, loss), sync_dist=True)
            return loss

    here.fit(net=Logging(here))


@fault("diverged-log-keys", ranks=(0,), at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def epoch_mean_logged_on_some_ranks(here: Here) -> None:
    """It is reduced at the end of the epoch, where no line of the user's is."""

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if here.is_hit:
                here.begins()
                self.log("faces", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

    here.fit(net=Logging(here))


@fault("skipped-step", ranks=(-1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False)
def accumulation_by_each_ranks_own_batch(here: Here) -> None:
    """A budget of tokens that one rank's batch does not use up; what was set is as it was again afterwards."""

    class Budget(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            tokens = 1 if here.is_hit and batch_idx == IN_THE_MIDDLE else 3
            if tokens < 3:
                here.begins()
            trainer.accumulate_grad_batches = 3 // tokens  # <- here

    here.fit(callbacks=[Budget()])


@fault("diverged-log-keys", ranks=(), at={Moment.VALIDATION: (2,)}, has_ranks=False, has_phase=False)
def metric_that_one_rank_has_not_updated(here: Here) -> None:
    """As mean average precision keeps boxes: each entry is gathered by itself, and one rank has none."""

    class Boxes(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("boxes", default=[], dist_reduce_fx=None)

        def update(self, boxes: torch.Tensor) -> None:
            self.boxes.append(boxes)  # type: ignore[union-attr, operator]

        def compute(self) -> int:
            return len(self.boxes)  # type: ignore[arg-type]

    class Detecting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.found = Boxes()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.global_rank == 0:
                self.found.update(self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            here.begins()
            self.found.compute()  # <- here

    here.fit(net=Detecting(here))


@fault("skipped-step", ranks=(-1,), at={Moment.MIDDLE: (2,)}, has_phase=False)
def exchange_that_is_due_a_batch_later(here: Here) -> None:
    """Gradients of two batches accumulate, by their tokens, and one rank's batch has too few of them."""

    class Accumulating(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.tokens = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            is_short = here.is_hit and self.current_epoch == 0 and batch_idx == IN_THE_MIDDLE
            if is_short:
                here.begins()
            self.tokens += 1 if is_short else 2
            is_due = self.tokens >= 4
            model: Any = self.trainer.model
            with nullcontext() if is_due else model.no_sync():  # <- here
                self.manual_backward(self.loss(batch))
            if is_due:
                self.optimizers().step()  # type: ignore[union-attr]
                self.tokens = 0

    here.fit(net=Accumulating(here))
