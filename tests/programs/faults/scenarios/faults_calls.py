"""Ranks that call different collectives, or not all of them."""

import threading
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from training import IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment, fault


@fault("unpresented-loader", ranks=(0,), at={Moment.START: (2, 3)}, has_phase=False)
def steps_estimated_on_rank_zero(here: Here) -> None:
    class Estimating(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            if self.global_rank == 0:
                here.begins()
                _ = self.trainer.estimated_stepping_batches  # <- here
            return super().configure_optimizers()

    here.fit(net=Estimating(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (3,), Moment.EPOCH_END: (2, 3)})
def barrier_on_rank_zero(here: Here) -> None:
    def meet(net: Net) -> None:
        if net.global_rank == 0:
            here.begins()
            dist.barrier()  # <- here

    here.fit(meet)


@fault("diverged-collectives", ranks=(-1,), at={Moment.FIRST_STEP: (3,), Moment.MIDDLE: (3, 4)})
def other_collective_in_a_branch(here: Here) -> None:
    """A branch that depends on the data, not on the rank."""

    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            dist.broadcast(torch.ones(7), src=0)  # <- here
        else:
            dist.all_gather([torch.ones(3) for _ in range(here.world_size)], torch.ones(3))

    here.fit(gather)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (3,)}, has_line=False)
def collective_skipped_after_an_exception(here: Here) -> None:
    def average(net: Net) -> None:
        try:
            if here.is_hit:
                here.begins()
                raise ValueError("no faces in this image")
            dist.all_reduce(torch.ones(5))
        except ValueError:
            pass

    here.fit(average)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (3,)})
def part_that_is_passed_over(here: Here) -> None:
    """A helper's loop leaves out what is empty on its own rank."""

    def average(parts: list[torch.Tensor]) -> None:
        for part in parts:
            if not len(part):
                here.begins()
                continue
            dist.all_reduce(torch.tensor(float(len(part))))  # <- here

    def share(net: Net) -> None:
        average([torch.ones(3), torch.ones(0 if here.is_hit else 2), torch.ones(4)])

    here.fit(share)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (3,)})
def agreement_behind_an_and(here: Here) -> None:
    """Ranks agree on whether to stop, and those whose own patience is not used up do not ask."""

    class Patient(Net):
        def is_agreed(self) -> bool:
            done = torch.ones(())
            dist.all_reduce(done)  # <- here
            return bool(done == here.world_size)

        def is_over(self) -> bool:
            return not here.is_hit and self.is_agreed()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                here.begins()
                self.is_over()

    here.fit(net=Patient(here))


@fault("diverged-collectives", ranks=(-1,), at={Moment.EPOCH_END: (3,)})
def guard_two_calls_above(here: Here) -> None:
    """A helper of a helper returns before anything is shared."""

    def share(total: torch.Tensor) -> None:
        dist.all_reduce(total)  # <- here

    def report(losses: list[float]) -> None:
        if not losses:
            here.begins()
            return
        share(torch.tensor(losses).sum())

    def summarise(net: Net) -> None:
        report([] if here.is_hit else [0.5])

    here.fit(summarise)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (2, 3)})
def collective_in_another_thread(here: Here) -> None:
    """Samples are counted in the background, on each rank when its own clock says so."""

    def count() -> None:
        here.begins()
        dist.all_reduce(torch.ones(3))  # <- here

    def begin(net: Net) -> None:
        if here.is_hit:
            counter = threading.Thread(target=count, daemon=True)
            counter.start()
            counter.join(0.5)

    here.fit(begin)


@fault("diverged-collectives", ranks=(), at={Moment.VALIDATION: (2,)}, has_ranks=False)
def searched_for_longer_in_each_batch(here: Here) -> None:
    """A search that takes rank 0 twice as many collectives: rank 1 has validated, and trains on."""

    class Searching(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            best = self.loss(batch).detach()
            for _ in range(4 if self.global_rank == 0 else 2):
                here.begins()
                best = self.all_gather(best).min()  # <- here

    here.fit(net=Searching(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.EPOCH_END: (2, 3)})
def metric_computed_on_rank_zero(here: Here) -> None:
    class Measured(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                self.mean.compute()  # <- here

    here.fit(net=Measured(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (2, 3)})
def log_dir_on_rank_zero(here: Here) -> None:
    """A property that broadcasts."""

    def show(net: Net) -> None:
        if net.trainer.is_global_zero:
            here.begins()
            print(net.trainer.log_dir)  # <- here

    here.fit(show)


@fault("diverged-collectives", ranks=(-1,), at={Moment.EPOCH_END: (3, 4)})
def objects_gathered_on_one_rank(here: Here) -> None:
    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            dist.all_gather_object([None] * here.world_size, {"faces": 3})  # <- here

    here.fit(gather)


@fault("diverged-collectives", "rank-zero-only-work", ranks=(0,), at={Moment.END: (2,)}, has_phase=False)
def validation_after_training_on_rank_zero(here: Here) -> None:
    """With a Trainer of its own, of which the others know nothing: they have finished."""

    class Thorough(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            trainer.strategy.barrier("before")
            if trainer.is_global_zero:
                here.begins()
                here.trainer(strategy=here.strategy()).validate(Net(here), rows(here))  # <- here

    here.fit(callbacks=[Thorough()], max_epochs=1)


@fault(
    "mismatched-collective", ranks=(-1,), at={Moment.FIRST_STEP: (3,), Moment.MIDDLE: (3, 4), Moment.EPOCH_END: (3,)}
)
def tensors_of_unequal_length(here: Here) -> None:
    """Features of all samples of a batch, of which one rank has fewer."""

    def average(net: Net) -> None:
        here.begins()
        dist.all_reduce(torch.ones(1_000_000 if here.is_hit else 2_000_000))  # <- here

    here.fit(average)


@fault("mismatched-collective", ranks=(-1,), at={Moment.MIDDLE: (3,)})
def tensors_of_another_type(here: Here) -> None:
    def average(net: Net) -> None:
        here.begins()
        ones = torch.ones(500_000, dtype=torch.float64 if here.is_hit else torch.float32)
        dist.all_reduce(ones)  # <- here

    here.fit(average)


@fault("mismatched-collective", ranks=None, at={Moment.MIDDLE: (2,)})
def gathered_tensors_of_unequal_length(here: Here) -> None:
    def gather(net: Net) -> None:
        here.begins()
        mine = torch.ones(300_000 * (1 + here.rank))
        dist.all_gather([torch.empty_like(mine) for _ in range(here.world_size)], mine)  # <- here

    here.fit(gather)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (2,)}, has_phase=False)
def average_in_the_background_of_an_empty_class(here: Here) -> None:
    """Centres are averaged while the next batch is trained; one rank's batch has no sample of that class."""

    class Centred(Net):
        def start(self, centre: torch.Tensor) -> Any:
            return dist.all_reduce(centre, async_op=True)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_empty = here.is_hit and batch_idx == IN_THE_MIDDLE
            if is_empty:
                here.begins()
            if not is_empty:
                self.work = self.start(torch.ones(8))
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.work.wait()

    here.fit(net=Centred(here))


class Gathered(torch.autograd.Function):
    """Features of all ranks, with gradients for the own ones."""

    @staticmethod
    def forward(context: Any, features: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(every, features.contiguous())
        return torch.stack(every)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)  # <- features_that_one_rank_detaches
        return gradient[dist.get_rank()]


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (2,)}, has_phase=False)
def features_that_one_rank_detaches(here: Here) -> None:
    """Their gradients are added up in the backward pass, where they have any."""

    class Contrasting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = self.layers(first_tensor(batch))
            loss = features.square().mean()
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                features = features.detach()
            return loss + (features @ Gathered.apply(features)[0].T).mean()  # type: ignore[no-untyped-call]

    here.fit(net=Contrasting(here))


@fault("unmatched-p2p", "diverged-collectives", ranks=(), at={Moment.EPOCH_END: (3,)}, has_ranks=False, has_phase=False)
def experience_of_which_one_rank_sends_less(here: Here) -> None:
    """At the start of an epoch, rank 0 receives what the others have collected, three parts from each."""

    class Learning(Net):
        def receive(self, peer: int) -> None:
            for _ in range(3):
                dist.recv(torch.empty(4), peer)  # <- here

        def on_train_epoch_start(self) -> None:
            sends = 2 if self.current_epoch and here.is_last else 3
            if self.current_epoch:
                here.begins()
            for peer in range(1, here.world_size):
                if here.rank == 0:
                    self.receive(peer)
                elif here.rank == peer:
                    [dist.send(torch.ones(4), 0) for _ in range(sends)]

    here.fit(net=Learning(here))
