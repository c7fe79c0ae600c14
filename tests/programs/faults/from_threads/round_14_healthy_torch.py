"""Round 14 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import threading
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import quiet
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net, finding_unused, rows
from truths import Moment


@quiet("https://github.com/pytorch/pytorch/pull/161467", world_size=3, moment=Moment.VALIDATION)
def list_for_what_is_gathered_on_the_destination_only(here: Here) -> None:
    """Only the first rank has a list to gather into, and it draws what it has got for a second and a half."""

    class Gathered(L.Callback):
        losses: tuple[float, ...] = ()

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
            self.losses = (*self.losses, float(module.loss(batch)))

        def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            error = torch.tensor(self.losses, device=module.device).mean()
            is_first = trainer.global_rank == 0
            everyones = [torch.empty_like(error) for _ in range(trainer.world_size)] if is_first else None
            dist.gather(error, everyones, dst=0)
            if is_first:
                time.sleep(1.5)
            self.losses = ()

    here.fit(net=LoggingNet(here), callbacks=[Gathered()], data=(rows(here), rows(here)))


@quiet("https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/55", world_size=4, moment=Moment.EPOCH_END)
def files_of_which_one_rank_gets_none(here: Here) -> None:
    """The first rank hands out five files, two to each, so that the last rank has none and waits for the others."""

    class Handed(L.Callback):
        files = tuple(f"shard-{number}.tar" for number in range(5))

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            mine: list[Any] = [None]
            chunks = [self.files[2 * rank : 2 * rank + 2] for rank in range(trainer.world_size)]
            dist.scatter_object_list(mine, chunks if trainer.is_global_zero else None, src=0)
            for _ in mine[0]:
                time.sleep(0.7)
            dist.barrier()

    here.fit(callbacks=[Handed()])


@quiet("https://github.com/ai2cm/ace/issues/851", world_size=3, moment=Moment.CHECKPOINT)
def checkpoint_before_that_is_soon_written(here: Here) -> None:
    """A thread of the first rank writes the weights, and the next checkpoint waits for it, a second at the most."""

    class InBackground(L.Callback):
        writer: threading.Thread | None = None

        def write(self, state: Any, epoch: int) -> None:
            time.sleep(1.2)
            torch.save(state, here.folder / f"{epoch}.pt")

        def wait(self) -> None:
            if self.writer is not None:
                self.writer.join()

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.wait()
                state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
                self.writer = threading.Thread(target=self.write, args=(state, trainer.current_epoch))
                self.writer.start()

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.wait()

    here.fit(net=LoggingNet(here), callbacks=[InBackground()], max_epochs=4)


class EarlyExit(Net):
    """Asks its deeper layers only where the first ones are not sure, which takes longer."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.exit = torch.nn.Linear(8, 2)

    def loss(self, batch: Any) -> torch.Tensor:
        early: torch.Tensor = self.exit(batch).square().mean()
        if (int(batch[0, 0]) + self.here.rank) % 2:
            return early
        time.sleep(0.2)
        return early + super().loss(batch)


@quiet("https://github.com/FlagOpen/FlagEmbedding/issues/736", world_size=3)
def layers_left_out_where_ddp_looks_for_them(here: Here) -> None:
    """Now this rank leaves out its deeper layers and now that one, and DDP was told to look for what is not used."""

    def row(number: int) -> torch.Tensor:
        return torch.full((8,), float(number // here.world_size // BATCH_SIZE))

    stored: Any = [row(number) for number in range(BATCHES * BATCH_SIZE * here.world_size)]
    here.fit(net=EarlyExit(here), data=in_order(here, stored), strategy=finding_unused(here))
