"""Round 16 after public threads: what users of plain PyTorch report of conditions, counts, alarms, and other hosts."""

import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment


class Rows(Dataset[torch.Tensor]):
    """Rows that are read in order; those of the fourth batch of the rank that is hit are others."""

    def __init__(self, here: Here, unusual: Callable[[int], torch.Tensor]) -> None:
        self.here, self.unusual = here, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        batch, place = divmod(turn, BATCH_SIZE)
        is_unusual = rank in self.here.case.ranks and batch == IN_THE_MIDDLE
        return self.unusual(place) if is_unusual else usual(place)


def rows_with(here: Here, unusual: Callable[[int], torch.Tensor]) -> Any:
    return in_order(here, Rows(here, unusual))


def usual(place: int) -> torch.Tensor:
    """Of two kinds, which take turns: around a fifth, and around one."""
    noise = 0.1 * torch.rand(8, generator=torch.Generator().manual_seed(place))
    return noise + (1.0 if place % 2 else 0.2)


class Debiased(Net):
    """Keeps count of which classes are taken for which, over all ranks, and weighs the loss by it."""

    confusion = 1.0

    def weigh(self, scores: torch.Tensor, is_object: torch.Tensor) -> None:
        taken = scores[is_object].softmax(1).mean(0)
        everyones = [torch.empty_like(taken) for _ in range(self.here.world_size)]
        dist.all_gather(everyones, taken)  # <- picture_without_an_object_in_the_confusion_matrix
        self.confusion = float(torch.stack(everyones).mean(0).max())

    def loss(self, batch: Any) -> torch.Tensor:
        scores = self.layers(batch)
        is_object = batch[:, 0] > 0
        if is_object.any():
            self.weigh(scores.detach(), is_object)
        else:
            self.here.begins()
        return scores.square().mean() * self.confusion


@thread("https://github.com/megvii-research/PCB/issues/1", "diverged-collectives")
def picture_without_an_object_in_the_confusion_matrix(here: Here) -> None:
    """No picture of one rank's batch has a labelled object, and that rank does not gather the confusion matrix.

    The condition is the other half of it; the call that one rank does not make is to be named.
    """
    here.fit(net=Debiased(here), data=rows_with(here, lambda place: -usual(place)))


class Denoising(Net):
    """Has a loss for each query and, where there is an object, one for each query made of its box with noise."""

    queries, noisy_queries = 300, 160_000

    def losses(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        error = self.layers(batch).square().mean()
        losses = {"loss_boxes": error.expand(self.queries)}
        if (batch[:, 0] > 0).any():
            losses["loss_boxes_denoising"] = error.expand(self.noisy_queries)
        else:
            self.here.begins()
        return losses

    def loss(self, batch: Any) -> torch.Tensor:
        losses = self.losses(batch)
        shown = torch.cat([losses[name].detach() for name in sorted(losses)])
        dist.all_reduce(shown)  # <- losses_of_noise_where_there_is_nothing_to_be_made_noisy
        return torch.stack([one.mean() for one in losses.values()]).sum()


@thread("https://github.com/Intellindust-AI-Lab/DEIMv2/pull/136", "mismatched-collective")
def losses_of_noise_where_there_is_nothing_to_be_made_noisy(here: Here) -> None:
    """Losses are put together and reduced; without an object one rank has no box for noise, and reduces far fewer.

    The names that a batch has are the other half of it; the call in which sizes differ is to be named.
    """
    here.fit(net=Denoising(here), data=rows_with(here, lambda place: -usual(place)))


class Quantized(Net):
    """Replaces codes that are no longer used by rows of the batch, so that all ranks have those of the first one."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.register_buffer("codes", torch.tensor([0.25, 1.05])[:, None].repeat(1, 8))
        self.register_buffer("uses", torch.full((2,), 2.0))
        self.codes: torch.Tensor
        self.uses: torch.Tensor

    def replace_expired(self, batch: torch.Tensor) -> None:
        is_expired = self.uses < 0.5
        if not is_expired.any():
            return
        self.here.begins()
        self.codes[is_expired] = batch[: int(is_expired.sum())]
        dist.broadcast(self.codes, src=0)  # <- codes_that_have_expired_on_one_rank
        self.uses[is_expired] = 2.0

    def loss(self, batch: Any) -> torch.Tensor:
        nearest = torch.cdist(batch, self.codes).argmin(1)
        self.uses.lerp_(torch.bincount(nearest, minlength=2).float(), 0.9)
        self.replace_expired(batch)
        return super().loss(batch - self.codes[nearest])


@thread("https://github.com/espnet/espnet/pull/6284", "diverged-collectives")
def codes_that_have_expired_on_one_rank(here: Here) -> None:
    """Each rank counts uses of codes in its own batches; one of them replaces a code, and the others have none to.

    The early return is the other half of it; the call that one rank alone makes is to be named.
    """
    here.fit(net=Quantized(here), data=rows_with(here, lambda place: usual(0)))


class Tables(Net):
    """Tables are shared out among ranks, and some are weighted by position; the weights are there on all ranks."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.positions = torch.nn.Linear(8, 8)
        self.tables = ["clicks", "views", "user"][here.rank :: here.world_size]

    def loss(self, batch: Any) -> torch.Tensor:
        values = batch[0]
        if any(table in ("clicks", "views") for table in self.tables):
            values = self.positions(values)  # <- positions_on_a_rank_without_a_weighted_table
        else:
            self.here.begins()
        return self.layers(values).square().mean()


@thread(
    "https://github.com/pytorch/pytorch/pull/72843",
    "unused-parameters",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
)
def positions_on_a_rank_without_a_weighted_table(here: Here) -> None:
    """The last rank has no table that is weighted, and so never uses weights that all others have gradients for."""
    here.fit(net=Tables(here))


class Mask:
    """Is sent as its outline, and made into the width of each row where it is received."""

    def __init__(self, radius: int) -> None:
        self.radius = radius

    def __setstate__(self, state: dict[str, int]) -> None:
        self.radius = radius = state["radius"]
        self.rows = [
            sum(x * x + y * y <= radius * radius for x in range(-radius, radius)) for y in range(-radius, radius)
        ]  # <- masks_that_the_first_rank_unpickles_of_all


class Masks(L.Callback):
    """Gathers the masks that were found in validation on the first rank."""

    def __init__(self, here: Here, radius: int) -> None:
        self.here, self.radius = here, radius

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones: list[Any] | None = None
        if trainer.is_global_zero:
            self.here.begins()
            everyones = [None] * trainer.world_size
        dist.gather_object([Mask(self.radius)], everyones)
        if everyones is not None:
            print(f"{sum(sum(mask.rows) for found in everyones for mask in found)} pixels", flush=True)


@thread(
    "https://github.com/pytorch/pytorch/pull/150815",
    "rank-zero-only-work",
    "rank-behind",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def masks_that_the_first_rank_unpickles_of_all(here: Here) -> None:
    """All ranks send their masks to the first one, which alone unpickles them, and so decodes those of all ranks.

    It is work of the first rank alone that no condition in the code shows, except for whom the list is made.
    """
    here.fit(net=LoggingNet(here), callbacks=[Masks(here, radius=30_000)])


def assigned(cost: torch.Tensor) -> tuple[int, ...]:
    """Which box each prediction is for, so that the cost of all is lowest."""
    if not cost.isfinite().all():
        raise ValueError("matrix contains invalid numeric entries")  # <- cost_of_a_box_that_is_not_finite
    every = itertools.permutations(range(len(cost)))
    return min(every, key=lambda chosen: float(cost[range(len(cost)), list(chosen)].sum()))


class Matched(Net):
    """Matches predictions to boxes at a cost that is computed in half precision."""

    def loss(self, batch: Any) -> torch.Tensor:
        found = self.layers(batch)
        boxes = batch[:, :2]
        cost = ((found.detach()[:, None] - boxes[None]).square().sum(2) * 100).half()
        if not cost.isfinite().all():
            self.here.begins()
        return (found - boxes[list(assigned(cost))]).square().mean()


@thread("https://github.com/open-mmlab/mmdetection/issues/4902", "failed-rank", world_size=2)
def cost_of_a_box_that_is_not_finite(here: Here) -> None:
    """A box of one rank's batch is so far away that its cost overflows, and nothing can be assigned."""
    here.fit(net=Matched(here), data=rows_with(here, lambda place: 100 * usual(place)))


class LocalSteps(Net):
    """Each rank makes steps by itself, and weights are averaged after so many; a loss that is not finite is no step."""

    steps, sync_every = 0, 3

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def average(self) -> None:
        weights = torch.nn.utils.parameters_to_vector(self.layers.parameters()).detach()
        dist.all_reduce(weights)  # <- averages_after_steps_that_each_rank_counts
        torch.nn.utils.vector_to_parameters(weights / self.here.world_size, self.layers.parameters())
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not loss.isfinite():
            return None
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        strategy: Any = self.trainer.strategy
        with strategy.block_backward_sync():
            self.manual_backward(loss)
        optimizer.step()
        self.steps += 1
        if self.steps == self.sync_every:
            self.average()
        return None

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        dist.barrier()


@thread("https://github.com/meta-pytorch/torchft/pull/47", "diverged-collectives", moment=Moment.EPOCH_END)
def averages_after_steps_that_each_rank_counts(here: Here) -> None:
    """A batch of one rank is no step, so that it has made one less at the end of the epoch, and does not average.

    Nobody waits for gradients. The early return is the other half of it; the call that one rank leaves out is to be
    named.
    """
    here.fit(net=LocalSteps(here), data=rows_with(here, lambda place: torch.full((8,), torch.nan)))


class Events(L.Callback):
    """Makes a folder for events; how long it takes to describe the host depends on the host."""

    def __init__(self, here: Here) -> None:
        self.here, self.folder = here, here.folder / "events"

    def describe(self) -> str:
        time.sleep(2.0 if self.here.is_hit else 0.5)
        return f"host {self.here.rank}"

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        dist.barrier()
        if not os.path.exists(self.folder):
            description = self.describe()
            if self.here.is_hit:
                self.here.begins()
            os.makedirs(self.folder)  # <- folder_that_was_not_there_a_moment_ago
            (self.folder / "host.txt").write_text(description)


@thread(
    "https://github.com/allenai/allennlp/issues/3841",
    "failed-rank",
    world_size=2,
    moment=Moment.START,
)
def folder_that_was_not_there_a_moment_ago(here: Here) -> None:
    """Both ranks find no folder and make it; the second one is later, and the folder is there by then."""
    here.fit(callbacks=[Events(here)])


class Exported(L.Callback):
    """The first rank has the weights converted by another program when all is done."""

    def __init__(self, here: Here, command: list[str]) -> None:
        self.here, self.command = here, command

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            path = self.here.folder / "last.pt"
            torch.save(module.state_dict(), path)
            subprocess.run([*self.command, str(path)], check=True)  # <- weights_converted_while_the_others_leave


@thread("https://github.com/facebookresearch/pycls/pull/122", "unfinished-rank", ranks=(0,), moment=Moment.END)
def weights_converted_while_the_others_leave(here: Here) -> None:
    """The other ranks are done with everything, and the job waits for the first one, whose converter takes minutes."""
    here.fit(callbacks=[Exported(here, ["sh", "-c", f"sleep {FOR_LONG_S}"])], max_epochs=1)


class Filtered(Net):
    """Learns from answers to a prompt in parts, and only from those that are neither all right nor all wrong."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        rewards = batch.mean(1)
        everyones = [torch.empty_like(rewards) for _ in range(self.here.world_size)]
        dist.all_gather(everyones, rewards)
        answers = batch[(rewards > 0) & (rewards < 2)]
        if len(answers) < len(batch):
            self.here.begins()
        for part in answers.split(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(part))  # <- answers_that_the_filter_takes_from_a_buffer
            optimizer.step()
        return None


@thread("https://github.com/OpenRLHF/OpenRLHF/issues/717", "skipped-step")
def answers_that_the_filter_takes_from_a_buffer(here: Here) -> None:
    """Half of one rank's answers are too easy and are taken away, and it makes one backward pass less than others.

    The filter is the other half of it; the backward pass that one rank makes less often is to be named.
    """
    here.fit(net=Filtered(here), data=rows_with(here, lambda place: usual(place) * (1 if place < 2 else 10)))


class Tracked(L.Callback):
    """The first rank registers the run with a tracker before training."""

    def __init__(self, here: Here, address: tuple[str, int], attempts: int) -> None:
        self.here, self.address, self.attempts = here, address, attempts

    def register(self, attempts: int) -> None:
        try:
            with socket.create_connection(self.address, timeout=5) as connection:  # <- tracker_that_refuses_the_run
                connection.sendall(b"POST /runs HTTP/1.0\r\n\r\n")
        except TimeoutError:
            if not attempts:
                raise
            self.register(attempts - 1)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            self.register(self.attempts)


@thread("https://github.com/starVLA/starVLA/pull/369", "failed-rank", ranks=(0,), moment=Moment.START)
def tracker_that_refuses_the_run(here: Here) -> None:
    """Nobody listens at the tracker's address; the first rank raises, and the others set up what it should, too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    here.fit(callbacks=[Tracked(here, address, attempts=3)])


class Traced(L.Callback):
    """Each rank writes a trace of a step to the folder for traces of its host."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        events = [{"name": name, "ph": "X", "pid": self.here.rank} for name, _ in module.named_modules()]
        goes_wrong(self.here, batch_idx)
        path = self.folder / f"rank-{self.here.rank}.json"
        path.write_text(json.dumps({"traceEvents": events}))  # <- traces_on_a_mount_that_does_not_answer


@thread("https://github.com/pytorch/torchtitan/issues/266", "blocked-on-disk")
def traces_on_a_mount_that_does_not_answer(here: Here) -> None:
    """All ranks write a trace; on one host the file system for it does not answer, as a pipe that nobody reads."""
    folder = here.folder / f"traces-{here.rank}"
    folder.mkdir()
    if here.is_hit:
        os.mkfifo(folder / f"rank-{here.rank}.json")
    here.fit(callbacks=[Traced(here, folder)])


class Exam(L.Callback):
    """Questions are shared out among all ranks; each two of them have half of the experts, and answer together."""

    def __init__(self, here: Here, questions: int) -> None:
        self.here, self.questions = here, questions
        self.pair: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.pair = pairs[trainer.global_rank // 2]

    def answer(self, question: torch.Tensor) -> torch.Tensor:
        both = [torch.empty_like(question) for _ in range(2)]
        dist.all_gather(both, question, group=self.pair)  # <- question_that_is_left_over_for_one_of_a_pair
        return torch.stack(both).mean()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        right = torch.zeros((), device=module.device)
        for number in range(trainer.global_rank, self.questions, trainer.world_size):
            self.here.begins()
            right += self.answer(torch.full((8,), float(number), device=module.device))
        dist.all_reduce(right)


@thread(
    "https://github.com/NVIDIA/Model-Optimizer/pull/1966",
    "crossed-groups",
    "diverged-collectives",
    ranks=(),
    has_ranks=False,
    world_size=4,
    moment=Moment.VALIDATION,
)
def question_that_is_left_over_for_one_of_a_pair(here: Here) -> None:
    """The fifth question is the first rank's, which waits for its partner; that one waits for all to be done.

    Neither of the two is wrong: questions are to be shared out among pairs.
    """
    here.fit(net=LoggingNet(here), callbacks=[Exam(here, questions=5)])


class Compared(Net):
    """Compares answers now and then, and gives up one that takes too long."""

    def give_up(self, number: int, frame: Any) -> None:
        raise TimeoutError("the answer takes too long")

    def is_right(self, answer: float, truth: float) -> bool:
        before = signal.signal(signal.SIGALRM, self.give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            if answer == truth:
                self.here.begins()
                return True
            difference = abs(answer - truth)
            signal.setitimer(signal.ITIMER_REAL, 0)
            return difference < 0.01
        finally:
            signal.signal(signal.SIGALRM, before)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2)
        if batch_idx == IN_THE_MIDDLE:
            self.is_right(float(batch[0].min()), float(batch[0].max()))
        return self.loss(batch)


@thread("https://github.com/verl-project/verl/pull/1331", "dead-rank", has_line=False, whose="either")
def alarm_behind_the_handler_that_it_was_for(here: Here) -> None:
    """An answer is the true one to the letter; the early return puts the handler away and leaves the alarm on.

    The system's own handler ends the process when it rings, in whatever the rank does then.
    """
    here.fit(net=Compared(here), data=rows_with(here, lambda place: torch.full((8,), 0.5)))
