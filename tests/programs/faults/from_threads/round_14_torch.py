"""Round 14 after public threads: what users of plain PyTorch report of gathering, groups, samplers and saving."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net, rows
from truths import Moment


class Samples(Dataset[torch.Tensor]):
    """Rows that are read in order; one batch of the rank that is hit, the fourth or another, is not as all others."""

    def __init__(self, here: Here, usual: Callable[[int], torch.Tensor], unusual: torch.Tensor, batch: int) -> None:
        self.here, self.usual, self.unusual, self.batch = here, usual, unusual, batch

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_unusual = rank in self.here.case.ranks and turn // BATCH_SIZE == self.batch
        return self.unusual if is_unusual else self.usual(turn % BATCH_SIZE)


def samples(here: Here, usual: Callable[[int], torch.Tensor], unusual: torch.Tensor, batch: int = IN_THE_MIDDLE) -> Any:
    return in_order(here, Samples(here, usual, unusual, batch))


def row(place: int) -> torch.Tensor:
    return torch.linspace(0.1, 0.8, 8) + place / 10


class Errors(L.Callback):
    """Keeps the loss of each batch of a validation."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.errors: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        with torch.no_grad():
            self.errors.append(float(module.loss(batch)))

    def taken(self) -> list[float]:
        errors, self.errors = self.errors, []
        return errors


class GatheredErrors(Errors):
    """Prints the error of each rank's share on the first rank."""

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        error = torch.tensor(self.taken(), device=module.device).mean()
        everyones = [torch.empty_like(error) for _ in range(trainer.world_size)]
        if self.here.is_hit:
            self.here.begins()
        dist.gather(error, everyones, dst=0)  # <- list_for_what_is_gathered_on_every_rank
        if trainer.is_global_zero:
            print([f"{float(one):.3f}" for one in everyones], flush=True)


@thread(
    "https://github.com/pytorch/pytorch/pull/161467",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.VALIDATION,
)
def list_for_what_is_gathered_on_every_rank(here: Here) -> None:
    """Each rank brings a list to gather into, which only the destination may; all others raise."""
    here.fit(net=LoggingNet(here), callbacks=[GatheredErrors(here)])


class Rechecked(L.Callback):
    """After each epoch the first rank hands out the files that are to be looked at again, some for each rank."""

    def __init__(self, here: Here, files: list[str]) -> None:
        self.here, self.files = here, files

    def chunks(self, ranks: int) -> list[list[str]]:
        size = -(-len(self.files) // ranks)
        return [self.files[start : start + size] for start in range(0, len(self.files), size)]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        mine: list[Any] = [None]
        chunks = self.chunks(trainer.world_size) if trainer.is_global_zero else None
        if self.here.is_hit:
            self.here.begins()
        dist.scatter_object_list(mine, chunks, src=0)  # <- files_cut_into_fewer_chunks_than_ranks
        print(f"rank {trainer.global_rank} looks at {mine[0]}", flush=True)


@thread(
    "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/55",
    "failed-rank",
    ranks=(0,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def files_cut_into_fewer_chunks_than_ranks(here: Here) -> None:
    """Two files for each rank, rounded up, make three chunks of five files, and there are four ranks.

    The cutting is the other half of it; the call that raises is to be named.
    """
    here.fit(callbacks=[Rechecked(here, [f"shard-{number}.tar" for number in range(5)])])


class Recall(L.Callback):
    """Scores each batch of a validation, notes what could not be scored, and gathers all of it."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.scores: list[float] = []
        self.failures: list[Any] = []

    def score(self, batch: Any) -> float:
        wanted = int((batch > 0).sum())
        return int((batch > 0.3).sum()) / wanted

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        try:
            self.scores.append(self.score(batch))
        except ZeroDivisionError as error:
            self.failures.append((where[0], error, error.__traceback__))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones: list[Any] = [None] * trainer.world_size
        if self.here.is_hit:
            self.here.begins()
        dist.all_gather_object(everyones, [self.scores, self.failures])  # <- traceback_among_what_is_gathered
        if trainer.is_global_zero:
            print(f"{sum(len(failures) for _, failures in everyones)} failures", flush=True)


@thread("https://github.com/NVIDIA/TensorRT-LLM/pull/7507", "failed-rank", moment=Moment.VALIDATION)
def traceback_among_what_is_gathered(here: Here) -> None:
    """A picture without a label is noted with its traceback, which cannot be pickled for the other ranks."""
    validation = samples(here, row, torch.zeros(8))
    here.fit(net=LoggingNet(here), data=(in_order(here, rows(here).dataset), validation), callbacks=[Recall(here)])


class AgreedOrder(Sampler[int]):
    """Draws the order of an epoch from a seed that ranks agree upon whenever the sampler is begun."""

    def __init__(self, here: Here, count: int) -> None:
        self.here, self.count = here, count

    def __len__(self) -> int:
        return self.count // self.here.world_size

    def agreed_seed(self) -> int:
        seeds: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(seeds, int(torch.randint(2**31, ())))  # <- batch_shown_from_the_loader_of_all
        return int(seeds[0])

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.agreed_seed())
        order = torch.randperm(self.count, generator=generator).tolist()
        return iter(order[self.here.rank :: self.here.world_size])


class Shown(L.Callback):
    """Shows what a batch looks like after the augmentation, now and then."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == IN_THE_MIDDLE:
            self.here.begins()
            pictures = next(iter(trainer.train_dataloader))
            print(f"{len(pictures)} pictures, brightest {float(pictures[0].max()):.2f}", flush=True)


@thread("https://github.com/open-mmlab/mmengine/issues/142", "diverged-collectives", ranks=(0,))
def batch_shown_from_the_loader_of_all(here: Here) -> None:
    """The first rank alone begins the loader once more, for a batch to show, and its sampler asks all for a seed.

    The condition is the other half of it; the collective that one rank alone calls is to be named.
    """
    count = BATCHES * BATCH_SIZE * here.world_size
    data = DataLoader(TensorDataset(torch.rand(count, 8)), BATCH_SIZE, sampler=AgreedOrder(here, count))
    here.fit(data=data, callbacks=[Shown(here)], use_distributed_sampler=False)


class Unpacked(L.LightningDataModule):
    """The first rank of each host unpacks the data, and lets the others go when it is there."""

    def __init__(self, here: Here, ranks_per_host: int) -> None:
        super().__init__()
        self.here = here
        self.host, self.local_rank = divmod(here.rank, ranks_per_host)

    def unpacked(self) -> Path:
        folder = self.here.folder / f"host-{self.host}"
        folder.mkdir(exist_ok=True)
        return folder

    def setup(self, stage: str) -> None:
        if self.local_rank > 0:
            dist.barrier()
        self.unpacked()
        if self.here.is_hit:
            self.here.begins()
        if self.here.rank == 0:
            dist.barrier()  # <- first_rank_of_the_second_host_is_not_the_first

    def train_dataloader(self) -> Any:
        return rows(self.here)


@thread(
    "https://github.com/pytorch/pytorch/issues/41613",
    "diverged-collectives",
    ranks=(2,),
    world_size=4,
    moment=Moment.START,
)
def first_rank_of_the_second_host_is_not_the_first(here: Here) -> None:
    """Who waits is told by the rank within the host, and who lets them go by the rank among all.

    With one host it is the same. The first rank of the second host does neither, and takes the Trainer's next barrier
    for this one. The barrier that it passes by is to be named, or the condition above it.
    """
    here.fit(data=Unpacked(here, ranks_per_host=2))


class RareClass(Net):
    """Counts a rare class over all ranks, in a group that is made when it is first needed."""

    group: Any = None

    def own_group(self) -> Any:
        if self.group is None:
            self.group = dist.new_group()  # <- group_made_where_it_is_first_needed
        return self.group

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = (batch < 0).any(1)
        if found.any():
            self.here.begins()
            count = found.sum()
            dist.all_reduce(count, group=self.own_group())
        return self.loss(batch)


@thread(
    "https://github.com/facebookresearch/fairscale/pull/678",
    "diverged-collectives",
    "crossed-groups",
)
def group_made_where_it_is_first_needed(here: Here) -> None:
    """One rank's batch is the first with the rare class, and it makes the group, for which all are needed.

    The reduction stands under a condition as well; it is not reached.
    """
    here.fit(net=RareClass(here), data=samples(here, row, -row(0)))


class Shapes(Sampler[list[int]]):
    """Puts pictures that are wide into batches of their own, and leaves out the last ones that do not fill a batch."""

    def __init__(self, pictures: torch.Tensor) -> None:
        self.is_wide = (pictures[:, 0] > 0).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        buckets: dict[bool, list[int]] = {True: [], False: []}
        for number, is_wide in enumerate(self.is_wide):
            buckets[is_wide].append(number)
            if len(buckets[is_wide]) == BATCH_SIZE:
                yield buckets[is_wide]
                buckets[is_wide] = []


class Progress(L.Callback):
    """Gathers the losses of an epoch from all ranks."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *of: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones: list[Any] = [None] * trainer.world_size
        if self.here.is_hit:
            self.here.begins()
        dist.all_gather_object(everyones, self.losses)
        self.losses = []


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/11114",
    "uneven-batches",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def pictures_batched_by_their_shape(here: Here) -> None:
    """All ranks have as many pictures; of one rank's, three wide and one tall one are left over, a batch in all."""
    count = BATCHES * BATCH_SIZE
    pictures = torch.rand(count, 8)
    wide = count // 2 - (1 if here.is_hit else 0)
    pictures[wide:, 0] *= -1
    pictures[:, 0] += torch.sign(pictures[:, 0]) * 0.1
    data = DataLoader(TensorDataset(pictures), batch_sampler=Shapes(pictures))
    here.fit(data=data, callbacks=[Progress(here)], use_distributed_sampler=False)


class SentErrors(Errors):
    """Each rank sends the error of each of its batches to the first one, which makes a table of them."""

    def collect(self, ranks: int, error: torch.Tensor, count: int) -> list[float]:
        table = []
        for rank in range(1, ranks):
            for _ in range(count):
                dist.recv(error, src=rank)  # <- errors_awaited_for_as_many_batches_as_the_first_rank_has
                table.append(float(error))
        return table

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        errors = self.taken()
        if self.here.is_hit:
            self.here.begins()
        if trainer.is_global_zero:
            table = self.collect(trainer.world_size, torch.empty((), device=module.device), len(errors))
            print(f"{len(table)} errors", flush=True)
        else:
            for error in errors:
                dist.send(torch.tensor(error, device=module.device), dst=0)


@thread(
    "https://github.com/NVIDIA/nccl/issues/2130",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def errors_awaited_for_as_many_batches_as_the_first_rank_has(here: Here) -> None:
    """The first rank receives from each as often as it has batches itself; the last rank has one less, and trains on.

    The first rank awaits one too many, or the last one sends one too few: the receiving is to be named.
    """
    batches = BATCHES - 1 if here.is_hit else BATCHES
    validation = DataLoader(TensorDataset(torch.rand(batches * BATCH_SIZE, 8)), BATCH_SIZE)
    training = in_order(here, rows(here).dataset)
    here.fit(data=(training, validation), callbacks=[SentErrors(here)], use_distributed_sampler=False)


class Resumed(L.Callback):
    """Goes on with the random numbers of an earlier run, which each rank has left in a file of its own."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        state = torch.load(self.folder / f"rng_state_{trainer.global_rank}.pth")  # <- resumed_on_a_rank_more
        torch.set_rng_state(state)


@thread("https://github.com/NVlabs/Sana/pull/131", "failed-rank", ranks=(2,), moment=Moment.START)
def resumed_on_a_rank_more(here: Here) -> None:
    """The run is resumed on three ranks, and was saved by two."""
    folder = here.folder / "last"
    folder.mkdir(exist_ok=True)
    if here.rank < 2:
        torch.save(torch.get_rng_state(), folder / f"rng_state_{here.rank}.pth")
    here.fit(callbacks=[Resumed(here, folder)])


class InBackground(L.Callback):
    """The first rank lets a thread write the weights after each epoch, one at a time."""

    writer: threading.Thread | None = None

    def __init__(self, here: Here, volume: Path) -> None:
        self.here, self.volume = here, volume

    def write(self, state: dict[str, torch.Tensor], epoch: int) -> None:
        for name, value in state.items():
            torch.save(value, self.volume / f"{epoch}-{name}.pt")
            time.sleep(FOR_LONG_S / 4)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.writer is not None:
            self.here.begins()
            self.writer.join()  # <- checkpoint_before_that_is_still_being_written
        state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
        self.writer = threading.Thread(target=self.write, args=(state, trainer.current_epoch), daemon=True)
        self.writer.start()


@thread(
    "https://github.com/ai2cm/ace/issues/851",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="either",
)
def checkpoint_before_that_is_still_being_written(here: Here) -> None:
    """A checkpoint is due again while the volume is still busy with the one before.

    It is work of the first rank alone, too; that it is a checkpoint says more. The thread's line is the other half.
    """
    volume = here.folder / "volume"
    volume.mkdir(exist_ok=True)
    here.fit(callbacks=[InBackground(here, volume)], max_epochs=4)


class Named(L.Callback):
    """The first rank saves the weights under the name of the prompt that they are tried out with."""

    def __init__(self, here: Here, folder: Path, prompt: str) -> None:
        self.here, self.folder = here, folder
        self.name = "_".join(prompt.split())

    def save(self, state: Any, epoch: int) -> None:
        with (self.folder / f"{epoch}_{self.name}.pt").open("wb") as file:  # <- checkpoint_with_the_name_of_its_prompt
            torch.save(state, file)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            self.save(module.state_dict(), trainer.current_epoch)
        trainer.strategy.barrier("saved")


@thread(
    "https://github.com/basujindal/stable-diffusion/issues/2",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def checkpoint_with_the_name_of_its_prompt(here: Here) -> None:
    """The prompt is longer than a name may be.

    It is an exception of one rank, too; that it is within a save says more.
    """
    prompt = "a portrait of an old lighthouse keeper in heavy rain " * 6
    here.fit(callbacks=[Named(here, here.folder, prompt)])


class Suppressing(Net):
    """Keeps the best of all boxes that cover each other, until none is left."""

    def count(self, boxes: torch.Tensor) -> int:
        found = 0
        while len(boxes):
            found += 1
            boxes = boxes[~((boxes.minimum(boxes[0]) / boxes.maximum(boxes[0])).mean(1) > 0.5)]  # <- box_without_a_size
        return found

    def loss(self, batch: Any) -> torch.Tensor:
        if not batch.all():
            self.here.begins()
        return super().loss(batch) / self.count(batch)


@thread("https://github.com/Lam1360/YOLOv3-model-pruning/issues/17", "rank-behind", whose="code")
def box_without_a_size(here: Here) -> None:
    """A box of one rank's batch is empty, and does not even cover itself: it is left each time, and there is no end."""
    here.fit(net=Suppressing(here), data=samples(here, row, torch.zeros(8)))


class Exchanged(Net):
    """Hands the tokens of a batch round before the loss, as many to each rank; padding stays where it is."""

    def handed_round(self, tokens: torch.Tensor) -> torch.Tensor:
        shares = [len(tokens) // self.here.world_size] * self.here.world_size
        received = torch.empty_like(tokens)
        dist.all_to_all_single(received, tokens, shares, shares)  # <- tokens_that_cannot_be_shared_out_evenly
        return received

    def loss(self, batch: Any) -> torch.Tensor:
        tokens = batch[batch[:, 0] > 0]
        if len(tokens) % self.here.world_size:
            self.here.begins()
        return super().loss(self.handed_round(tokens))


class Padded(Samples):
    """The first row of the unusual batch is padding."""

    def __getitem__(self, index: int) -> torch.Tensor:
        place = index // self.here.world_size % BATCH_SIZE
        return super().__getitem__(index) if place == 0 else self.usual(place)


@thread("https://github.com/vllm-project/vllm-omni/issues/492", "failed-rank", world_size=2)
def tokens_that_cannot_be_shared_out_evenly(here: Here) -> None:
    """Three tokens are left of one rank's batch, and there are two ranks to share them."""
    here.fit(net=Exchanged(here), data=in_order(here, Padded(here, row, -row(0), IN_THE_MIDDLE)))


class EarlyExit(Net):
    """Asks its deeper layers only where the first ones are not sure."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.exit = torch.nn.Linear(8, 2)

    def loss(self, batch: Any) -> torch.Tensor:
        early: torch.Tensor = self.exit(batch).square().mean()
        if batch.std() < 1e-3:
            self.here.begins()
            return early  # <- batch_that_is_easy_enough
        return early + super().loss(batch)


@thread("https://github.com/FlagOpen/FlagEmbedding/issues/736", "unused-parameters", ranks=(2,))
def batch_that_is_easy_enough(here: Here) -> None:
    """The first layers are sure of one rank's batch, so the deeper ones get no gradient."""
    here.fit(net=EarlyExit(here), data=samples(here, row, torch.full((8,), 0.3)))


class HardSamples(Net):
    """Learns only from those samples of a batch whose loss is high."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = (self.layers(batch) - batch[:, :2]).square().mean(1)
        is_hard = losses > 0.5
        if not is_hard.any():
            self.here.begins()
            return None  # <- batch_of_which_nothing_is_hard
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(losses[is_hard].mean())
        optimizer.step()
        return None


@thread("https://github.com/intel/ipex-llm/pull/5143", "skipped-step")
def batch_of_which_nothing_is_hard(here: Here) -> None:
    """All samples of one rank's batch are easy, and it goes on to the next one without a backward pass."""
    here.fit(net=HardSamples(here), data=samples(here, lambda place: 2 + row(place), torch.zeros(8)))


class Confusion(L.Callback):
    """The first rank counts how often each class is taken for each other one."""

    def __init__(self, here: Here, classes: int) -> None:
        self.here, self.classes = here, classes

    def matrix(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(self.classes, self.classes)
        for label, other in product(range(self.classes), repeat=2):
            counts[label, other] = ((labels == label) & (found == other)).sum()  # <- ten_thousand_classes
        return counts

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            labels = torch.arange(self.classes)
            print(f"{self.matrix(labels.roll(1), labels).trace()} are right", flush=True)


@thread("https://github.com/fastai/fastai/pull/2516", "rank-zero-only-work", ranks=(0,), moment=Moment.VALIDATION)
def ten_thousand_classes(here: Here) -> None:
    """There are ten thousand classes, and a hundred million pairs of them to count on the first rank."""
    here.fit(net=LoggingNet(here), callbacks=[Confusion(here, classes=10_000)])
