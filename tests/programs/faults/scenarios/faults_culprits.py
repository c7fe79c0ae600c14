"""Who is to blame where several ranks wait apart from one another, or one of them has ended in a collective."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, MeetingNet, Net, rows
from truths import Moment, fault, odd_one_out

EVERYWHERE = {Moment.FIRST_STEP: (2, 3), Moment.MIDDLE: (2, 3, 4), Moment.VALIDATION: (2, 3)}


@fault("mismatched-collective", ranks=odd_one_out, at=EVERYWHERE, has_phase=False)
def sums_of_unequal_length(here: Here) -> None:
    """So unequal that gloo ends a process instead of waiting."""

    def add(net: Net) -> None:
        here.begins()
        dist.all_reduce(torch.ones(2403 if here.is_last else 2))  # <- here

    here.fit(add, net=MeetingNet(here))


@fault("mismatched-collective", ranks=odd_one_out, at=EVERYWHERE, has_phase=False)
def table_that_one_rank_has_longer(here: Here) -> None:
    def share(net: Net) -> None:
        here.begins()
        dist.broadcast(torch.ones(40_000 if here.is_last else 9), src=here.world_size - 1)  # <- here

    here.fit(share, net=MeetingNet(here))


@fault("mismatched-collective", ranks=odd_one_out, at=EVERYWHERE, has_phase=False)
def predictions_of_unequal_length(here: Here) -> None:
    def gather(net: Net) -> None:
        here.begins()
        mine = torch.ones(3000 if here.is_last else 30)
        dist.all_gather([torch.empty_like(mine) for _ in range(here.world_size)], mine)  # <- here

    here.fit(gather, net=MeetingNet(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (2, 3), Moment.VALIDATION: (2,)}, has_phase=False)
def large_tensor_gathered_on_rank_zero(here: Here) -> None:
    """While the others send the gradients, which are smaller."""

    def gather(net: Net) -> None:
        if net.global_rank == 0:
            here.begins()
            dist.all_reduce(torch.ones(100_000))  # <- here

    here.fit(gather, net=MeetingNet(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (2, 3), Moment.EPOCH_END: (2,)}, has_phase=False)
def gathered_where_a_flag_says_so(here: Here) -> None:
    """Nothing on the line names the rank; the others are where every training comes to."""

    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            dist.all_reduce(torch.ones(11))  # <- here

    here.fit(gather)


@fault("diverged-collectives", ranks=(0,), at={Moment.START: (2, 3)}, has_phase=False)
def barrier_in_prepare_data(here: Here) -> None:
    class Prepared(Net):
        def prepare_data(self) -> None:
            here.begins()
            self.trainer.strategy.barrier("prepared")  # <- here

    here.fit(net=Prepared(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.START: (2, 3)}, has_phase=False)
def rate_found_on_rank_zero(here: Here) -> None:
    class Tuned(Net):
        rate = 0.001

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    net, trainer = Tuned(here), here.trainer()
    here.begins()
    if here.rank == 0:
        Tuner(trainer).lr_find(net, rows(here), num_training=4, attr_name="rate")  # <- here
    trainer.fit(net, rows(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.END: (2, 3)}, has_phase=False)
def test_on_rank_zero(here: Here) -> None:
    """The other ranks' programs have come to their end."""
    net, trainer = Net(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    if here.rank == 0:
        here.begins()
        trainer.test(net, rows(here))  # <- here


@fault("diverged-collectives", ranks=(0,), at={Moment.START: (2, 3)}, has_phase=False)
def validation_before_training_on_rank_zero(here: Here) -> None:
    net, trainer = MeetingNet(here), here.trainer(max_epochs=1)
    here.begins()
    if trainer.global_rank == 0:
        trainer.validate(net, rows(here))  # <- here
    trainer.fit(net, rows(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.END: (2, 3)}, has_phase=False)
def second_training_on_rank_zero(here: Here) -> None:
    """The others wait for it in a barrier of their own, where no guard is."""
    net, trainer = Net(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    if here.rank == 0:
        here.begins()
        here.trainer(max_epochs=1).fit(net, rows(here))  # <- here
    dist.barrier()


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def checkpoint_by_a_value_of_one_rank(here: Here) -> None:
    """Only rank 0 has what ModelCheckpoint monitors."""

    class Scoring(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.global_rank == 0 and batch_idx == 3:
                here.begins()
                self.log("score", loss)
            return loss

    saves = ModelCheckpoint(here.folder / "checkpoints", monitor="score", every_n_train_steps=1)
    here.fit(net=Scoring(here), enable_checkpointing=True, callbacks=[saves])


class Gan(Net):
    """Two networks that are trained in turn, by manual optimization."""

    def __init__(self, here: Here, *, is_direct: bool = False) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.is_direct = is_direct
        self.critic = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        fake = self.layers(batch[0])
        self.step(critic, self.critic(fake.detach()).square().mean() + 0 * fake.sum())
        if self.here.is_hit and self.current_epoch == 0 and batch_idx == 3:
            self.here.begins()
            return
        self.step(generator, self.critic(self.layers(batch[0])).square().mean())

    def step(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = (self.layers, self.critic)
        return [torch.optim.SGD(part.parameters(), lr=0.001) for part in parts]


@fault("skipped-step", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def generator_that_is_left_out_once(here: Here) -> None:
    here.fit(net=Gan(here))


@fault("skipped-step", ranks=(-1,), at={Moment.MIDDLE: (3, 4)}, has_line=False, has_phase=False)
def gradients_accumulated_by_hand(here: Here) -> None:
    """Over as many batches as fit each rank's memory."""

    class Accumulating(Net):
        automatic_optimization = False

        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            here.begins()
            is_full = (batch_idx + 1) % (3 if here.is_hit else 2) == 0
            with nullcontext() if is_full else self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
            if is_full:
                self.optimizers().step()
                self.optimizers().zero_grad()

    here.fit(net=Accumulating(here))


class Counted(Metric):
    """A metric with as many states as there are classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        for number in range(classes):
            self.add_state(f"class_{number}", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, loss: torch.Tensor) -> None:
        self.class_0 += loss

    def compute(self) -> torch.Tensor:
        return self.class_0


class Classified(Net):
    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.score = Counted(2 if here.is_hit else 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.score.update(loss.detach())
        return loss


@fault("diverged-log-keys", ranks=(-1,), at={Moment.EPOCH_END: (3, 4)}, has_line=False, has_phase=False)
def metric_with_a_class_fewer(here: Here) -> None:
    class Computing(Classified):
        def on_train_epoch_end(self) -> None:
            here.begins()
            self.score.compute()
            self.score.reset()

    here.fit(net=Computing(here))


@fault("diverged-log-keys", ranks=odd_one_out, at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def logged_metric_with_a_class_fewer(here: Here) -> None:
    class Logging(Classified):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.score = Counted(2 if here.is_last else 3)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            here.begins()
            loss = super().training_step(batch, batch_idx)
            self.log("score", self.score, on_step=False, on_epoch=True)
            return loss

    here.fit(net=Logging(here))


@fault("slow-logger", ranks=(0,), at={Moment.EPOCH_END: (2,)}, has_phase=False, whose="either")
def checkpoint_that_is_sent_to_a_server(here: Here) -> None:
    class Sending(CSVLogger):
        @rank_zero_only
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    saves = ModelCheckpoint(here.folder / "checkpoints")
    here.fit(logger=Sending(str(here.folder)), enable_checkpointing=True, callbacks=[saves])


class Fed(IterableDataset[torch.Tensor]):
    """Rows that a thread reads ahead."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.rows: queue.Queue[torch.Tensor] = queue.Queue(1)

    def feed(self) -> None:
        for row in range(BATCHES * BATCH_SIZE):
            if self.here.is_hit and row == 3 * BATCH_SIZE:
                self.here.begins()
                return
            self.rows.put(torch.full((8,), self.here.rank + row / 100))

    def __iter__(self) -> Iterator[torch.Tensor]:
        threading.Thread(target=self.feed, daemon=True).start()
        for _ in range(BATCHES * BATCH_SIZE):
            yield self.rows.get()  # <- thread_of_the_data_that_has_ended


@fault("data-stall", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False, whose="code")
def thread_of_the_data_that_has_ended(here: Here) -> None:
    here.fit(data=DataLoader(Fed(here), batch_size=BATCH_SIZE))


@fault("diverged-collectives", "rank-zero-only-work", ranks=(0,), at={Moment.EPOCH_END: (2, 3)}, has_phase=False)
def evaluation_by_another_trainer(here: Here) -> None:
    class Thorough(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                here.trainer(strategy=here.strategy()).validate(Net(here), rows(here))  # <- here

    here.fit(callbacks=[Thorough()])
