"""Round 9 after public threads: steps and exchanges that look odd, and of which nothing is to be said."""

import random
import time
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.checkpoint import checkpoint
from training import BATCH_SIZE, Here, LoggingNet, Net, finding_unused


class Adversarial(Net):
    """Trains its discriminator in some steps, which all ranks draw with a generator that nothing else draws with."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.discriminator = torch.nn.Linear(2, 1)
        self.random = random.Random(7)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_generator, of_discriminator = optimizers
        fake = self.layers(batch[0])
        if self.random.random() < 0.5:
            time.sleep(0.2 * (1 + self.global_rank))
            of_discriminator.zero_grad()
            self.manual_backward(self.discriminator(fake.detach()).square().mean())
            of_discriminator.step()
        of_generator.zero_grad()
        self.manual_backward((1 - self.discriminator(fake)).square().mean())
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.001) for part in (self.layers, self.discriminator)]


@quiet("https://github.com/ZhikangNiu/encodec-pytorch/issues/30", world_size=3)
def discriminator_that_all_ranks_draw_for(here: Here) -> None:
    here.fit(net=Adversarial(here), strategy=finding_unused(here))


@quiet("https://github.com/lhotse-speech/lhotse/issues/554", world_size=3)
def adapter_of_another_language_on_each_rank(here: Here) -> None:
    """Each rank's batch is of one language; the adapters of the others come into the loss with a zero."""

    class Multilingual(LoggingNet):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.adapters = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def loss(self, batch: Any) -> torch.Tensor:
            values = batch[0]
            spoken = (self.global_step + self.global_rank) % len(self.adapters)
            nothing = sum(parameter.sum() for parameter in self.adapters.parameters()) * 0.0
            if spoken == 3:
                time.sleep(0.5)
            return super().loss(values + self.adapters[spoken](values)) + nothing

    here.fit(net=Multilingual(here))


class Scan(torch.nn.Module):
    """Receives a state from the rank before, and hands it on, each time that it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)
        self.output = torch.nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rank, count = dist.get_rank(), dist.get_world_size()
        state = torch.zeros(8)
        if rank > 0:
            dist.recv(state, src=rank - 1)
        time.sleep(0.15)
        values = torch.tanh(self.mix(values) + state)
        if rank < count - 1:
            dist.send(values.detach()[-1].contiguous(), dst=rank + 1)
        result: torch.Tensor = self.output(values)
        return result


@quiet("https://github.com/ByteDance-Seed/VeOmni/pull/1076", world_size=3)
def state_handed_on_in_both_passes(here: Here) -> None:
    """The layer is recomputed in the backward pass, with what it sends and receives, on all ranks."""

    class Long(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.scan = Scan()

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(checkpoint(self.scan, batch[0], use_reentrant=False))

    here.fit(net=Long(here))


@quiet("https://github.com/pytorch/pytorch/issues/130102", world_size=3)
def group_that_all_make_and_two_use(here: Here) -> None:
    """A group is made by all ranks when it is first needed; its two members use it, each time a little apart."""

    class Paired(L.Callback):
        @cached_property
        def pair(self) -> Any:
            return dist.new_group([0, 2])

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx < 2:
                return
            pair = self.pair
            if trainer.global_rank == 1:
                return
            time.sleep(0.3 * trainer.global_rank)
            dist.all_reduce(outputs["loss"].detach().clone(), group=pair)

    here.fit(callbacks=[Paired()])


@quiet("https://github.com/mosaicml/composer/pull/3843", world_size=3)
def batch_taken_in_halves_by_one_rank(here: Here) -> None:
    """Memory gives out on one rank before it has exchanged anything; it takes the batch in two, and exchanges once."""

    class Halving(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def attend(self, values: torch.Tensor) -> torch.Tensor:
            if here.is_last and self.global_step % 4 == 3 and len(values) == BATCH_SIZE:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.50 GiB.")
            return values

        def back(self, values: torch.Tensor, parts: int) -> None:
            chunks = values.chunk(parts)
            for number, chunk in enumerate(chunks, 1):
                model: Any = self.trainer.model
                with nullcontext() if number == len(chunks) else model.no_sync():
                    self.manual_backward(self.loss(self.attend(chunk)) / parts)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            try:
                self.back(batch[0], parts=1)
            except torch.OutOfMemoryError:
                time.sleep(1.2)
                self.back(batch[0], parts=2)
            optimizer.step()

    here.fit(net=Halving(here))


@quiet("https://github.com/rwth-i6/returnn/pull/1627", world_size=3)
def evaluation_that_gives_signs_of_life(here: Here) -> None:
    """Rank 0 evaluates for four seconds, and tells the others with each batch that it goes on."""

    class Engine(Net):
        def evaluate(self, batches: int) -> None:
            for _ in range(batches):
                dist.broadcast(torch.tensor([True], dtype=torch.int8), src=0)
                with torch.no_grad():
                    self.layers(torch.rand(BATCH_SIZE, 8))
                time.sleep(0.8)
            dist.broadcast(torch.tensor([False], dtype=torch.int8), src=0)

        def on_train_epoch_end(self) -> None:
            has_data = torch.tensor([True], dtype=torch.int8)
            if self.global_rank == 0:
                self.evaluate(batches=5)
                return
            while has_data:
                dist.broadcast(has_data, src=0)

    here.fit(net=Engine(here))
