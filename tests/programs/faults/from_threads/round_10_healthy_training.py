"""Round 10 after public threads: loops and groups that look odd, and of which nothing is to be said."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from training import Here, LoggingNet, Net, first_tensor, rows
from truths import Moment


class Proximal(Net):
    """Goes through each rollout until the policy has moved far enough, by the mean of all ranks."""

    most_epochs = 6

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def play(self, states: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3 * (self.global_rank + self.global_step) % 1.0)
        return states

    def has_moved(self, loss: torch.Tensor, first: torch.Tensor) -> bool:
        moved = (loss.detach() - first).abs() + 0.001 * self.global_rank
        dist.all_reduce(moved, op=dist.ReduceOp.SUM)
        return float(moved) / self.trainer.world_size > 0.0012

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        states = self.play(first_tensor(batch))
        first = self.loss(states).detach()
        for _ in range(self.most_epochs):
            loss = self.loss(states)
            if self.has_moved(loss, first):
                break
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@quiet("https://github.com/huggingface/trl/pull/254", world_size=3)
def rollout_that_all_ranks_leave_together(here: Here) -> None:
    """How often gradients are exchanged for a batch differs between batches, and never between ranks."""
    here.fit(net=Proximal(here))


class Answers:
    """What all ranks have written to their prompts, of which some have one less, and so an empty one at the end."""

    def __init__(self, net: Net, prompts: list[str]) -> None:
        self.net = net
        self.prompts = prompts

    def share(self) -> list[str | None]:
        ranks = self.net.trainer.world_size
        own: list[str | None] = [*self.prompts[self.net.global_rank :: ranks]]
        return own + [None] * (-(-len(self.prompts) // ranks) - len(own))

    def write(self, prompt: str) -> list[int]:
        time.sleep(0.1 * len(prompt))
        return [ord(letter) for letter in prompt]

    def gathered(self) -> list[list[int]]:
        found = []
        for prompt in self.share():
            tokens = [] if prompt is None else self.write(prompt)
            everybodys: list[Any] = [None] * self.net.trainer.world_size
            dist.all_gather_object(everybodys, tokens)
            found.extend(one for one in everybodys if one)
        return found


@quiet("https://github.com/huggingface/accelerate/pull/19", world_size=3, moment=Moment.EPOCH_END)
def prompts_of_which_some_ranks_have_one_less(here: Here) -> None:
    class Generating(LoggingNet):
        def on_train_epoch_end(self) -> None:
            answers = Answers(self, ["a", "bb", "a longer one", "b", "the fifth"]).gathered()
            assert len(answers) == 5

    here.fit(net=Generating(here))


class Snapshots(L.Callback):
    """The first rank puts together what all have written; the others wait for that, and for no more than that."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every

    def put_together(self) -> None:
        state: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob("part-*.pt")):
            time.sleep(0.4)
            state |= torch.load(path)
            path.unlink()
        torch.save(state, self.folder / "snapshot.pt")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every:
            return
        own = [*module.named_parameters()][trainer.global_rank :: trainer.world_size]
        torch.save({name: values.data for name, values in own}, self.folder / f"part-{trainer.global_rank}.pt")
        trainer.strategy.barrier("parts written")
        if trainer.is_global_zero:
            self.put_together()
        trainer.strategy.barrier("snapshot written")


@quiet("https://github.com/goodfire-ai/spd/pull/536", world_size=3)
def parts_put_together_between_two_barriers(here: Here) -> None:
    here.fit(net=LoggingNet(here), callbacks=[Snapshots(here.folder, every=5)])


class OffPolicy(Net):
    """Plays for a while with each batch, and learns as often from what it has seen as every rank can."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.replay: list[torch.Tensor] = []
        self.rounds = 0

    def play(self, states: torch.Tensor) -> None:
        self.rounds += 1
        episodes = (self.global_rank + self.rounds) % 3
        time.sleep(0.35 * episodes)
        self.replay.extend(states[:1] for _ in range(episodes))

    def updates(self) -> int:
        possible = torch.tensor(len(self.replay))
        dist.all_reduce(possible, op=dist.ReduceOp.MIN)
        return int(possible)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.play(first_tensor(batch))
        for _ in range(self.updates()):
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.replay.pop()))
            optimizer.step()


@quiet("https://github.com/ray-project/ray/pull/66030", world_size=3)
def updates_of_which_every_rank_is_capable(here: Here) -> None:
    """In some steps nobody learns, because one rank has seen nothing yet."""
    here.fit(net=OffPolicy(here), data=rows(here, batches=8))


class TokenCount(L.Callback):
    """The first rank of each host sums up with those of other hosts, after so many steps; the second one does not."""

    def __init__(self, every: int, ranks_per_host: int = 2) -> None:
        self.every, self.ranks_per_host = every, ranks_per_host
        self.own = 0

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.firsts = dist.new_group([*range(0, trainer.world_size, self.ranks_per_host)])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own += int(torch.count_nonzero(first_tensor(batch)))
        if trainer.global_rank % self.ranks_per_host or trainer.global_step % self.every:
            return
        time.sleep(0.5 * trainer.global_rank)
        tokens = torch.tensor(float(self.own))
        dist.all_reduce(tokens, group=self.firsts)
        self.own = 0


@quiet("https://github.com/LBANN/lbann/issues/34", world_size=4)
def tokens_summed_up_after_so_many_steps(here: Here) -> None:
    here.fit(callbacks=[TokenCount(every=3)])
