"""Round 12 after public threads: what users of plain PyTorch report of norms, groups, data, evaluation and saving."""

import logging
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment

LOG = logging.getLogger(__name__)


class Pictures(Dataset[torch.Tensor]):
    """Rows that are read in order; in the fourth batch of the rank that is hit they are not as all others are."""

    def __init__(self, here: Here, unusual: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self.here, self.unusual = here, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.linspace(0.1, 0.8, 8) + index / len(self)
        turn, rank = divmod(index, self.here.world_size)
        is_unusual = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return self.unusual(row, turn % BATCH_SIZE) if is_unusual else row


class SharedNorm(torch.nn.Module):
    """Normalizes by the statistics of all ranks, as SyncBatchNorm does."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not len(values):
            return values  # <- norm_of_which_one_batch_is_empty
        own = torch.cat([values.mean(0), values.var(0, unbiased=False)]).detach()
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, own)
        mean, variance = torch.stack(everyones).mean(0).chunk(2)
        return (values - mean) / (variance + 1e-5).sqrt()


class Detector(Net):
    """Has a head for what lies within boxes, with a norm in it."""

    def __init__(self, here: Here, norm: torch.nn.Module) -> None:
        super().__init__(here)
        self.norm, self.head = norm, torch.nn.Linear(8, 2)

    def scores(self, boxes: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(boxes))
        return found

    def loss(self, batch: Any) -> torch.Tensor:
        boxes = batch[batch[:, 0] > 0]
        if len(boxes) < len(batch):
            self.here.begins()
        return super().loss(batch) + self.scores(boxes).square().sum()


@thread("https://github.com/facebookresearch/detectron2/issues/366", "diverged-collectives")
def norm_of_which_one_batch_is_empty(here: Here) -> None:
    """The norm gathers statistics, and leaves out what is empty, which the boxes of one rank's batch are.

    The gathering that this rank leaves out is the other half of it; the way out of it is to be named.
    """
    here.fit(net=Detector(here, SharedNorm()), data=in_order(here, Pictures(here, lambda row, _: -row)))


@thread("https://github.com/bubbliiiing/deeplabv3-plus-pytorch/issues/1", "failed-rank", world_size=2)
def norm_of_a_single_box(here: Here) -> None:
    """The norm of each rank raises where there is a single value to be normalized: one batch of one rank has a box."""

    class Single(Detector):
        def scores(self, boxes: torch.Tensor) -> torch.Tensor:
            normal = self.norm(boxes)  # <- here
            found: torch.Tensor = self.head(normal)
            return found

    data = Pictures(here, lambda row, place: -row if place else row)
    here.fit(net=Single(here, torch.nn.BatchNorm1d(8)), data=in_order(here, data))


class Weighted(L.Callback):
    """The first rank draws the pictures of an epoch by their weights, and sends their numbers to all others."""

    def __init__(self, readable: list[int]) -> None:
        self.weights = torch.ones(len(readable))

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        count = len(self.weights)
        numbers = torch.zeros(count, dtype=torch.long)
        if trainer.is_global_zero:
            numbers = torch.multinomial(self.weights, count, replacement=True)
        dist.broadcast(numbers, src=0)  # <- pictures_drawn_from_a_cache_that_lacks_some
        self.weights = 1 + torch.bincount(numbers, minlength=count).float()


@thread(
    "https://github.com/ultralytics/yolov3/issues/1820",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
)
def pictures_drawn_from_a_cache_that_lacks_some(here: Here) -> None:
    """Each rank makes room for as many numbers as its host's cache has pictures; one host could not read some."""
    broken = {7, 27, 47} if here.is_hit else set()
    here.begins()
    here.fit(callbacks=[Weighted([number for number in range(64) if number not in broken])])


class Scores(L.Callback):
    """Collects what all ranks have found through files: each writes a part, and the first one reads them all."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder
        self.found: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        with torch.no_grad():
            self.found += module.predict_step(batch, where[0]).mean(1).tolist()

    def collected(self, rank: int, ranks: int) -> list[float]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"part_{rank}.pkl").open("wb") as file:
            pickle.dump(self.found, file)
        dist.barrier()
        if rank:
            return []
        everything: list[float] = []
        for number in range(ranks):
            with (self.folder / f"part_{number}.pkl").open("rb") as file:  # <- parts_on_the_disk_of_each_host
                everything += pickle.load(file)
        return everything

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.here.begins()
        if found := self.collected(trainer.global_rank, trainer.world_size):
            print(f"score {sum(found) / len(found):.3f}", flush=True)


@thread(
    "https://github.com/open-mmlab/mmengine/issues/557",
    "failed-rank",
    ranks=(0,),
    world_size=4,
    moment=Moment.VALIDATION,
)
def parts_on_the_disk_of_each_host(here: Here) -> None:
    """The folder for the parts has the same name on two hosts, and is not the same folder."""
    disk = here.folder / f"host-{here.rank // 2}"
    here.fit(net=LoggingNet(here), callbacks=[Scores(here, disk / ".dist_test")])


class Shuffled(IterableDataset[torch.Tensor]):
    """Draws from a buffer, which is full before the first row is drawn."""

    def __init__(self, here: Here, size: int = 400) -> None:
        self.here, self.size = here, size

    def read(self, row: int) -> torch.Tensor:
        if self.here.is_hit:
            time.sleep(0.3)  # <- buffer_filled_from_a_slow_disk
        return torch.full((8,), row / 100)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.here.is_hit:
            self.here.begins()
        buffer: list[torch.Tensor] = []
        for row in range(self.size + BATCHES * BATCH_SIZE):
            buffer.append(self.read(row))
            if len(buffer) > self.size:
                yield buffer.pop(random.randrange(self.size))


@thread(
    "https://github.com/mlfoundations/open_clip/issues/703",
    "data-stall",
    moment=Moment.FIRST_STEP,
    whose="either",
)
def buffer_filled_from_a_slow_disk(here: Here) -> None:
    """Four hundred rows are read before a batch comes, each in a third of a second on one host."""
    here.fit(data=DataLoader(Shuffled(here), BATCH_SIZE, num_workers=1))


@thread("https://github.com/pytorch/pytorch/pull/84881", "failed-rank", ranks=(2,), moment=Moment.START)
def weights_removed_before_all_have_read_them(here: Here) -> None:
    """All wait until the first rank has written the weights, and nobody until all have read them."""

    class Shared(L.Callback):
        def read(self, path: Path) -> Any:
            if here.is_hit:
                time.sleep(2.0)
                here.begins()
            return torch.load(path)  # <- here

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            path = here.folder / "initial.pt"
            if trainer.is_global_zero:
                torch.save(module.state_dict(), path)
            dist.barrier()
            module.load_state_dict(self.read(path))
            if trainer.is_global_zero:
                path.unlink()

    here.fit(callbacks=[Shared()])


class PatientCheckpoints(L.Callback):
    """The first rank writes the weights after each epoch, and tries again where it could not."""

    def __init__(self, here: Here, volume: Path, wait_s: float) -> None:
        self.here, self.volume, self.wait_s = here, volume, wait_s

    def save(self, state: Any, path: Path) -> None:
        for attempt in range(20):
            try:
                torch.save(state, path)
            except (OSError, RuntimeError) as error:
                LOG.warning("attempt %d to write %s: %s", attempt, path.name, error)
                time.sleep(self.wait_s)  # <- save_tried_again_on_a_full_disk
            else:
                return

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            self.save(module.state_dict(), self.volume / "last.pt")
        trainer.strategy.barrier("saved")


@thread(
    "https://github.com/rwth-i6/returnn/issues/1829",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="either",
)
def save_tried_again_on_a_full_disk(here: Here) -> None:
    """The disk is full and stays so: the first rank waits for half a minute between attempts to save.

    It is work of the first rank alone, too; that it is a checkpoint says more.
    """
    volume = here.folder / "volume"
    volume.mkdir(exist_ok=True)
    if here.rank == 0:
        (volume / "last.pt").symlink_to("/dev/full")
    here.fit(callbacks=[PatientCheckpoints(here, volume, FOR_LONG_S / 4)])


@contextmanager
def first_rank_first(rank: int) -> Iterator[None]:
    if rank:
        dist.barrier()
    yield
    if not rank:
        dist.barrier()


class Cached(L.LightningDataModule):
    """Keeps all pictures in memory; the first rank reads them first, so that the others find them in memory, too."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.pictures: list[torch.Tensor] = []

    def decode(self, number: int) -> torch.Tensor:
        if self.here.is_hit:
            time.sleep(0.4)  # <- pictures_cached_in_memory_by_the_first_rank_first
        return torch.full((8,), number / 100)

    def setup(self, stage: str) -> None:
        self.here.begins()
        count = BATCHES * BATCH_SIZE * self.here.world_size * 5
        with first_rank_first(self.here.rank):
            self.pictures = [self.decode(number) for number in range(count)]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.stack(self.pictures)), BATCH_SIZE)


@thread(
    "https://github.com/ultralytics/yolov5/issues/7481",
    "late-at-init",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.START,
    whose="either",
)
def pictures_cached_in_memory_by_the_first_rank_first(here: Here) -> None:
    """The first rank decodes all pictures while the others wait for their turn to do the same.

    A condition on the rank decides whose turn it is; but each would do it, and nothing has begun yet.
    """
    here.fit(data=Cached(here))


class Target(L.Callback):
    """Ends the training where the loss in validation is as low as it has to be."""

    def __init__(self, here: Here, target: float) -> None:
        self.here, self.target = here, target
        self.losses: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        with torch.no_grad():
            self.losses.append(float(module.loss(batch)))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        if loss <= self.target:
            self.here.begins()
            trainer.should_stop = True  # <- target_reached_by_the_share_of_one_rank


class Shares(Dataset[torch.Tensor]):
    """Rows to validate on, those of one rank as the model has learnt them, and those of the others far from it."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        is_easy = index % self.here.world_size in self.here.case.ranks
        return torch.full((8,), 0.0 if is_easy else 1000.0)


@thread(
    "https://github.com/AMD-AGI/Primus/pull/854",
    "stopped-early",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def target_reached_by_the_share_of_one_rank(here: Here) -> None:
    """Each rank compares the loss of its own share with the target, and one share is easy."""
    data = (in_order(here, Pictures(here, lambda row, _: row)), in_order(here, Shares(here)))
    here.fit(data=data, callbacks=[Target(here, target=10.0)])


class PairedNorm(torch.nn.Module):
    """Normalizes by the statistics of the two ranks of a host."""

    group: Any = None

    def make_group(self, rank: int, ranks: int, size: int = 2) -> None:
        for first in range(0, ranks, size):
            members = [*range(first, first + size)]
            self.group = dist.new_group(members)
            if rank in members:
                break  # <- group_of_a_norm_that_is_looked_for_until_it_is_found

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.detach().mean(0)
        dist.all_reduce(mean, group=self.group)
        return values - mean / 2


@thread(
    "https://github.com/pytorch/pytorch/issues/48804",
    "crossed-groups",
    ranks=(0, 1),
    world_size=4,
    moment=Moment.START,
)
def group_of_a_norm_that_is_looked_for_until_it_is_found(here: Here) -> None:
    """Ranks make one group after the other until they are in one, so that those of the second have made one more.

    The next group, which is for all of them, has one number on some ranks and another one on others, and never comes
    about. It is where they wait; the way out of the loop is to be named.
    """

    class Paired(LoggingNet):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm = PairedNorm()

        def on_fit_start(self) -> None:
            self.norm.make_group(self.global_rank, self.trainer.world_size)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(self.norm(batch[0]))

    class Gathered(L.Callback):
        group: Any = None

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            self.group = dist.new_group(backend="gloo")

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            losses = [0.0] * trainer.world_size
            dist.all_gather_object(losses, float(trainer.callback_metrics["loss"]), group=self.group)

    here.fit(net=Paired(here), callbacks=[Gathered()])


class Speech(Net):
    """Learns to fill in frames of an utterance that are masked by what is learnt for that, too."""

    span = 4

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.masked = torch.nn.Parameter(torch.rand(8))

    def spans(self, values: torch.Tensor) -> torch.Tensor:
        lengths = (values != 0).sum(1, keepdim=True)
        return (torch.arange(8) < self.span) & (lengths > 2 * self.span - 1)

    def loss(self, batch: Any) -> torch.Tensor:
        spans = self.spans(batch)
        if spans.any():
            batch = torch.where(spans, self.masked, batch)  # <- utterances_too_short_to_be_masked
        else:
            self.here.begins()
        return super().loss(batch)


@thread("https://github.com/speechbrain/speechbrain/pull/713", "unused-parameters", ranks=(2,))
def utterances_too_short_to_be_masked(here: Here) -> None:
    """No span fits into any utterance of one rank's batch, and so nothing takes the place of what is masked."""

    def short(row: torch.Tensor, place: int) -> torch.Tensor:
        return row * (torch.arange(8) < 3)

    here.fit(net=Speech(here), data=in_order(here, Pictures(here, short)))


class Evaluation(L.Callback):
    """Gathers what all ranks have predicted on the first one, and compares it with what is true, by category."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.predicted: list[list[float]] = []

    def gathered(self, rank: int, ranks: int) -> list[Any]:
        everyones: list[Any] | None = [None] * ranks if rank == 0 else None
        dist.gather_object(self.predicted, everyones)
        return everyones or []

    def accumulate(self, category: int, boxes: list[float]) -> float:
        time.sleep(FOR_LONG_S / 80)  # <- predictions_compared_where_they_are_gathered
        return sum(boxes) / (1 + category)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        with torch.no_grad():
            self.predicted += module.predict_step(batch, where[0]).tolist()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones = self.gathered(trainer.global_rank, trainer.world_size)
        self.predicted.clear()
        if not everyones:
            return
        self.here.begins()
        boxes = [box for predicted in everyones for boxes in predicted for box in boxes]
        recalls = [self.accumulate(category, boxes) for category in range(80)]
        print(f"recall {max(recalls):.3f}", flush=True)


@thread(
    "https://github.com/facebookresearch/detectron2/issues/3886",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def predictions_compared_where_they_are_gathered(here: Here) -> None:
    """Who has got nothing goes on to the next epoch; the first rank has eighty categories to go through."""
    here.fit(net=LoggingNet(here), callbacks=[Evaluation(here)])


class Partition(L.LightningDataModule):
    """The nodes of a graph that are stored with this rank, as many as the program that divides it has left there."""

    def __init__(self, here: Here, nodes: list[int]) -> None:
        super().__init__()
        self.nodes = torch.rand(nodes[here.rank], 8)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.nodes), BATCH_SIZE, shuffle=True, drop_last=True)


@thread(
    "https://github.com/dmlc/dgl/issues/3538",
    "uneven-batches",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def partitions_of_a_graph_of_unequal_size(here: Here) -> None:
    """Each rank learns from the nodes of its own partition, and one has two batches less; all meet after an epoch."""

    class Graph(Net):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen += len(batch[0])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            seen = [0] * here.world_size
            dist.all_gather_object(seen, self.seen)
            print(f"{sum(seen)} nodes", flush=True)

    here.fit(net=Graph(here), data=Partition(here, [26, 18, 27]), use_distributed_sampler=False)
