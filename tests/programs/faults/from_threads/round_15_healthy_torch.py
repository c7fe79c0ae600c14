"""Round 15 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import pickle
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from training import Here, LoggingNet, Net
from truths import Moment


class Told(Net):
    """The first rank looks for anchors, and the others are told."""

    def setup(self, stage: str) -> None:
        anchors = torch.ones(9, 2)
        if self.trainer.is_global_zero:
            for _ in range(15):
                anchors = anchors * torch.empty_like(anchors).normal_(1, 0.1).clamp(0.3, 3)
                time.sleep(0.1)
        self.anchors = self.trainer.strategy.broadcast(anchors)


@quiet("https://github.com/WongKinYiu/yolov7/issues/773", world_size=3, moment=Moment.START)
def anchors_found_in_a_moment(here: Here) -> None:
    """The first rank looks for anchors for a second and a half before training, and the others wait to be told."""
    here.fit(net=Told(here))


class Agreed(Net):
    """Leaves out a step of the optimizer where the loss of any rank is too large, which all gather before."""

    is_overflow = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.is_overflow = batch_idx % self.here.world_size == self.here.rank
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        mine = torch.tensor(float(self.is_overflow), device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.here.world_size)]
        dist.all_gather(everyones, mine)
        if torch.stack(everyones).any():
            optimizer.zero_grad()
            return
        dist.all_reduce(mine)


@quiet("https://github.com/hpcaitech/ColossalAI/pull/1175", world_size=4)
def overflow_that_all_ranks_hear_of(here: Here) -> None:
    """Now this rank overflows and now that one; all gather that, and leave out the same steps and collectives."""
    here.fit(net=Agreed(here))


class Padded(L.Callback):
    """Gathers objects by way of buffers as large as the largest of them; one rank has nothing, another one is late."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def gathered(self, data: Any, device: torch.device) -> list[Any]:
        encoded = torch.tensor(list(pickle.dumps(data)), dtype=torch.uint8, device=device)
        size = torch.tensor(len(encoded), device=device)
        sizes = [torch.empty_like(size) for _ in range(self.here.world_size)]
        dist.all_gather(sizes, size)
        buffer = torch.zeros(int(torch.stack(sizes).max()), dtype=torch.uint8, device=device)
        buffer[: len(encoded)] = encoded
        everyones = [torch.empty_like(buffer) for _ in sizes]
        dist.all_gather(everyones, buffer)
        return [pickle.loads(bytes(one.tolist())) for one in everyones]

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_last:
            time.sleep(1.2)
        answers = self.gathered(["so it is"] * 1000 * trainer.global_rank, module.device)
        if trainer.is_global_zero:
            print(f"{sum(map(len, answers))} answers", flush=True)


@quiet("https://github.com/facebookresearch/fairseq/issues/1491", world_size=3, moment=Moment.VALIDATION)
def answers_in_buffers_of_the_largest_size(here: Here) -> None:
    """Ranks have none, a thousand and two thousand answers, and tell one another how many bytes before they gather."""
    here.fit(net=LoggingNet(here), callbacks=[Padded(here)])


class InPieces(Net):
    """Goes through a batch in one, two or four pieces, with a barrier behind the last one."""

    def loss(self, batch: Any) -> torch.Tensor:
        losses = []
        for piece in batch[0].split(2 ** (self.here.rank % 3)):
            losses.append(super().loss(piece))
            time.sleep(0.1)
        dist.barrier()
        return torch.stack(losses).mean()


@quiet("https://github.com/dylanyunlon/Neuron_SP/pull/80", world_size=3)
def barrier_behind_the_last_piece(here: Here) -> None:
    """Ranks go through their batches in other numbers of pieces, and wait for one another behind the last."""
    here.fit(net=InPieces(here))
