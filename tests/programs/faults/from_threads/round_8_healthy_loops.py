"""Round 8 after public threads: trainings that look odd, and of which nothing is to be said."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_8_data import LIGHTNING, Recordings
from from_threads.round_8_steps import TwoPlayers
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from samples import in_order
from threads import quiet
from training import Here, LoggingNet, Net, finding_unused, rows


@quiet(f"{LIGHTNING}/issues/379", world_size=3)
def stops_where_one_rank_wants_to(here: Here) -> None:
    """EarlyStopping asks all ranks, though each has a value of its own."""

    class Local(Net):
        def on_train_epoch_end(self) -> None:
            self.log("score", torch.tensor(float(self.current_epoch if here.is_last else -self.current_epoch)))

    here.fit(net=Local(here), callbacks=[EarlyStopping("score", patience=1)], max_epochs=6)


@quiet(f"{LIGHTNING}/issues/18740")
def ranks_train_another_of_two_networks(here: Here) -> None:
    """DDP looks for what is unused in each of them."""

    class Alternating(TwoPlayers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            chosen = (batch_idx + here.rank) % 2
            fake = self.layers(batch)
            loss = self.critic_loss(fake.detach()) if chosen else fake.square().mean()
            optimizer = self.optimizers()[chosen]
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    data = in_order(here, Recordings(here))
    here.fit(net=Alternating(here), data=data, strategy=finding_unused(here))


@quiet(f"{LIGHTNING}/issues")
def loaders_of_unequal_length_in_turn(here: Here) -> None:
    class Both(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = sum(self.loss(part) for part in batch if part is not None)
            self.log("loss", loss, sync_dist=True)
            return loss

    both = [rows(here, batches=3), rows(here, batches=8, num_workers=1)]
    here.fit(net=Both(here), data=CombinedLoader(both, mode="max_size"))


@quiet(f"{LIGHTNING}/issues/21296", world_size=3)
def epoch_that_all_leave_by_agreement(here: Here) -> None:
    class Agreeing(LoggingNet):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            has_data = torch.tensor(not (self.global_rank == 1 and batch_idx == 3))
            return None if bool(self.all_gather(has_data).all()) else -1

    here.fit(net=Agreeing(here), max_epochs=3)


@quiet(f"{LIGHTNING}/issues/11220", world_size=3)
def barriers_on_both_sides_of_a_branch(here: Here) -> None:
    class Ordered(Net):
        def setup(self, stage: str) -> None:
            if self.trainer.local_rank > 0:
                dist.barrier()
            time.sleep(0.8)
            if self.trainer.local_rank == 0:
                dist.barrier()

    here.fit(net=Ordered(here))


@quiet(f"{LIGHTNING}/issues/3762", world_size=3)
def pictures_drawn_by_rank_zero_now_and_then(here: Here) -> None:
    class Pictures(L.Callback):
        @rank_zero_only
        def on_train_batch_end(self, trainer: L.Trainer, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 3 == 1:
                time.sleep(1.6)

    here.fit(callbacks=[Pictures()])
