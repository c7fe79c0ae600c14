"""Round 11 after public threads: training loops that look odd, and of which nothing is to be said."""

import queue
import random
import threading
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from training import IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment


@quiet("https://github.com/talmolab/sleap-nn/pull/471", world_size=3)
def stop_asked_for_on_rank_zero_and_agreed_upon(here: Here) -> None:
    """A message to the first rank asks for a stop, which all ranks learn of and take in the same step."""

    class Controller(L.Callback):
        def __init__(self) -> None:
            self.messages: queue.Queue[str] = queue.Queue()

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                threading.Timer(1.0, self.messages.put, ("stop",)).start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.2)
            asked = not self.messages.empty()
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(asked, all=False)

    here.fit(callbacks=[Controller()], max_epochs=20)


class SharpnessAware(Net):
    """Climbs along the gradient of its own batch, where it may, and exchanges the gradient that it has there."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def climb(self, batch: Any) -> None:
        model: Any = self.trainer.model
        with model.no_sync():
            self.manual_backward(self.loss(batch))
        time.sleep(0.3 * (1 + self.global_rank))
        for values in self.layers.parameters():
            if values.grad is not None:
                values.data.add_(values.grad, alpha=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.global_rank != batch_idx % self.trainer.world_size:
            optimizer.zero_grad()
            self.climb(batch)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@quiet("https://github.com/davda54/sam/issues/78", world_size=3)
def first_pass_that_one_rank_leaves_out_in_turn(here: Here) -> None:
    """Nothing is exchanged in the first of two backward passes, and in each step another rank goes without it."""
    here.fit(net=SharpnessAware(here))


@quiet("https://github.com/sgl-project/sglang/pull/26923", world_size=3, moment=Moment.EPOCH_END)
def uploads_counted_by_those_who_have_none(here: Here) -> None:
    """The first rank uploads in a thread, and all ask after each step whether it is done, whoever has something."""

    class Uploads(L.Callback):
        thread: threading.Thread | None = None
        is_open = False

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == IN_THE_MIDDLE and trainer.is_global_zero:
                self.thread = threading.Thread(target=time.sleep, args=(1.5,))
                self.thread.start()
            pending = torch.tensor([int(self.thread is not None and self.thread.is_alive())])
            dist.all_reduce(pending)
            self.is_open = bool(pending)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.thread is not None:
                self.thread.join()
            trainer.strategy.barrier("uploaded")

    here.fit(net=LoggingNet(here), callbacks=[Uploads()])


@quiet("https://github.com/facebookresearch/stochastic_gradient_push/issues/11", world_size=4)
def partners_drawn_by_all_in_the_same_way(here: Here) -> None:
    """Pairs of ranks average their weights, other pairs in each step, and some of them take longer."""

    class Gossip(L.Callback):
        random = random.Random(5)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            order = list(range(trainer.world_size))
            self.random.shuffle(order)
            partner = order[order.index(trainer.global_rank) ^ 1]
            time.sleep(0.25 * trainer.global_rank)
            weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
            received = torch.empty_like(weights)
            sent = dist.isend(weights, dst=partner)
            dist.recv(received, src=partner)
            assert sent is not None
            sent.wait()
            torch.nn.utils.vector_to_parameters((weights + received) / 2, module.parameters())

    here.fit(callbacks=[Gossip()])


class Shared(torch.optim.SGD):
    """Each rank updates some of the parameters, and sends them to all others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        values = [one for group in self.param_groups for one in group["params"]]
        for number, one in enumerate(values):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                time.sleep(0.1 * (1 + number))
                one.sub_(one.grad, alpha=0.001)
            dist.broadcast(one, src=owner)
        return loss


@quiet("https://github.com/nil0x9/flash-muon/issues/7", world_size=3)
def parameters_updated_by_their_owners(here: Here) -> None:
    """What an optimizer does is shared out: ranks wait for the owner of each parameter, one after the other."""

    class Distributed(LoggingNet):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Shared(self.parameters(), lr=0.001)

    here.fit(net=Distributed(here))


@quiet("https://github.com/LibreYOLO/libreyolo/pull/782", world_size=3, moment=Moment.EPOCH_END)
def best_weights_recalibrated_as_the_first_rank_says(here: Here) -> None:
    """The first rank knows whether there is something to be done, does it for two seconds, and all wait for it."""

    class Recalibration(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
            is_due = trainer.strategy.broadcast(trainer.is_global_zero and trainer.current_epoch == 1)
            if not is_due:
                return
            if trainer.is_global_zero:
                time.sleep(2.0)
                torch.save(module.state_dict(), here.folder / "best.pt")
            trainer.strategy.barrier("recalibrated")

    here.fit(callbacks=[Recalibration()], max_epochs=3)
