"""Round 11 after public threads: how much data a rank has, where it comes from, and who gets it ready."""

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, Net, rows
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Pictures(Dataset[torch.Tensor]):
    """Those of a folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), int(self.paths[index].stem) / 100)


class Album(L.LightningDataModule):
    """Pictures that each host has for itself; Lightning asked for a permission, in case that it has none."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> Any:
        return DataLoader(Pictures(self.folder), batch_size=BATCH_SIZE)


@thread(
    f"{LIGHTNING}/issues/9785",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def pictures_with_another_suffix_on_one_host(here: Here) -> None:
    """The pictures of one host were taken by a camera that calls them JPG: its epochs have no batch at all."""
    folder = here.folder / f"host-{here.rank}"
    folder.mkdir()
    for number in range(BATCHES * BATCH_SIZE):
        (folder / f"{number}.{'JPG' if here.is_hit else 'jpg'}").touch()
    here.begins()
    here.fit(data=Album(folder), use_distributed_sampler=False)


class Documents:
    """Batches of documents that the first rank of a pair reads, and sends to the other one: two ranks have a model."""

    def __init__(self, here: Here, batches: int) -> None:
        self.here, self.batches = here, batches
        self.pairs: list[Any] = []

    def read(self) -> Iterator[torch.Tensor | None]:
        for number in range(self.batches):
            yield torch.full((BATCH_SIZE, 8), number / 10)
        yield None

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.pairs:
            self.pairs = [dist.new_group([first, first + 1]) for first in range(0, self.here.world_size, 2)]
        source = self.here.rank // 2 * 2
        batches = self.read() if self.here.rank == source else cycle([None])
        for batch in batches:
            sent: list[Any] = [batch]
            dist.broadcast_object_list(sent, src=source, group=self.pairs[source // 2])
            if sent[0] is None:
                break
            yield sent[0]
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/sandyresearch/parcae/issues/12",
    "uneven-batches",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.EPOCH_END,
    has_line=False,
)
def pair_whose_documents_end_earlier(here: Here) -> None:
    """Who reads for the second pair has a batch less; both of that pair leave the epoch together."""
    documents = Documents(here, BATCHES - 1 if here.is_hit else BATCHES)
    here.fit(net=LoggingNet(here), data=documents, max_epochs=1, enable_checkpointing=True)


class Weighted(LoggingNet):
    """Weighs classes by how often they are there, in all shares together."""

    def __init__(self, here: Here, labels: list[int]) -> None:
        super().__init__(here)
        self.labels = torch.tensor(labels)

    def on_fit_start(self) -> None:
        counts = torch.bincount(self.labels).float()
        self.here.begins()
        dist.all_reduce(counts)  # <- counts_of_the_classes_that_a_share_has
        self.weights = counts.sum() / counts.clamp(min=1)


@thread(
    "https://github.com/NVIDIA/nccl/issues/1417",
    "mismatched-collective",
    ranks=(1,),
    moment=Moment.START,
)
def counts_of_the_classes_that_a_share_has(here: Here) -> None:
    """There are as many counts as the highest label of a share says, and one share has none of the last classes.

    Whoever mends it does so in the line before, where the number of classes could be said.
    """
    classes = 400 if here.is_hit else 1000
    here.fit(net=Weighted(here, [number % classes for number in range(2 * classes)]))


class Sequences(IterableDataset[torch.Tensor]):
    """Packed sequences without end, from where the run before has stopped."""

    def __init__(self, here: Here, consumed: int) -> None:
        self.here, self.consumed = here, consumed

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = cycle(range(1000))
        if self.here.is_hit:
            self.here.begins()
        next(islice(numbers, self.consumed, self.consumed), None)  # <- sequences_passed_over_by_their_tokens
        for number in numbers:
            yield torch.full((8,), number / 1000)


@thread(
    "https://github.com/python/cpython/issues/75996",
    "gil-held",
    ranks=(1,),
    moment=Moment.FIRST_STEP,
)
def sequences_passed_over_by_their_tokens(here: Here) -> None:
    """One host's state was written by a release that counted tokens, and is read by one that counts sequences."""
    state = {"consumed": 49_152_000_000 if here.is_hit else 12_000}
    data = DataLoader(Sequences(here, state["consumed"]), batch_size=BATCH_SIZE)
    here.fit(data=data, limit_train_batches=BATCHES)


class Archive(L.LightningDataModule):
    """Is unpacked onto the disk of a host."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.prepare_data_per_node = False
        self.scratch = here.folder / f"scratch-of-host-{here.rank // 2}"

    def prepare_data(self) -> None:
        self.scratch.mkdir()
        torch.save(torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8), self.scratch / "digits.pt")

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.digits = torch.load(self.scratch / "digits.pt")  # <- archive_unpacked_on_the_first_host

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.digits), batch_size=BATCH_SIZE)


@thread(
    "https://github.com/pytorch/ignite/issues/1922",
    "failed-rank",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.START,
)
def archive_unpacked_on_the_first_host(here: Here) -> None:
    """``prepare_data_per_node`` was switched off for a file server, and is off on hosts with their own disks."""
    here.fit(data=Archive(here))


class Shards:
    """Of a bucket, some of which are kept on this host until their room is needed."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.kept: dict[int, int] = {}

    def evict(self) -> None:
        if self.kept:
            self.kept.pop(min(self.kept))

    def fetch(self, number: int, size: int) -> None:
        while sum(self.kept.values()) + size > self.room:
            self.evict()
            time.sleep(0.05)  # <- shard_for_which_there_is_no_room
        self.kept[number] = size


class Streamed(Dataset[torch.Tensor]):
    """A shard for each batch."""

    def __init__(self, here: Here, room: int) -> None:
        self.here = here
        self.shards = Shards(room)

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def size(self, index: int) -> int:
        turn, rank = divmod(index, self.here.world_size)
        if rank in self.here.case.ranks and turn == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            return 90
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.shards.fetch(index, self.size(index))
        return torch.full((8,), index / len(self))


@thread("https://github.com/mosaicml/streaming/issues/417", "data-stall", ranks=(1,), whose="code")
def shard_for_which_there_is_no_room(here: Here) -> None:
    """Older shards give way to a new one; this one is larger than all the room that there is."""
    here.fit(data=in_order(here, Streamed(here, room=64), num_workers=1))


class Shared(L.LightningDataModule):
    """The first rank makes a vocabulary, and puts its size into the store for the others."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def count_words(self) -> int:
        time.sleep(5.0)
        return 8

    def setup(self, stage: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.here.begins()
        if self.here.rank == 0:
            store.set("vocabulary", str(self.count_words()))
        else:
            store.wait(["vocabulary"], timedelta(seconds=2))  # <- vocabulary_that_is_not_waited_for
        self.words = int(store.get("vocabulary"))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(BATCHES * BATCH_SIZE * 3, self.words)), batch_size=BATCH_SIZE)


@thread(
    "https://github.com/pytorch/pytorch/issues/107177",
    "timeout-misuse",
    ranks=(),
    moment=Moment.START,
    has_ranks=False,
)
def vocabulary_that_is_not_waited_for(here: Here) -> None:
    """The others wait for two seconds, and it takes five. They raise, too, but what is wrong is how long they wait."""
    here.fit(data=Shared(here))


class Retrieval(L.LightningDataModule):
    """All queries have to be compared to one another, so they are not split."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def train_dataloader(self) -> Any:
        return rows(self.here)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        if not self.trainer.is_global_zero:
            self.here.begins()
            return []
        return DataLoader(TensorDataset(torch.rand(2 * BATCH_SIZE, 8)), batch_size=BATCH_SIZE)


@thread(
    f"{LIGHTNING}/issues/3915",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.START,
    has_line=False,
)
def queries_for_the_first_rank_alone(here: Here) -> None:
    """The others have no loader for validation, and Lightning raises there, as nothing must have no length.

    What is to be mended is `val_dataloader`, which is in no traceback.
    """
    here.fit(net=LoggingNet(here), data=Retrieval(here))


def padded(sentences: list[torch.Tensor], longest: int = 8) -> torch.Tensor:
    short = [sentence for sentence in sentences if len(sentence) <= longest]
    batch = torch.zeros(len(short), longest)
    for row, sentence in zip(batch, short, strict=True):
        row[: len(sentence)] = sentence
    return torch.stack(list(batch))  # <- sentences_all_of_which_are_too_long


class Sentences(Dataset[torch.Tensor]):
    """Of some words, except in one batch of the rank that is hit."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_long = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        if is_long:
            self.here.begins()
        return torch.rand(12 if is_long else 2 + index % 6)


@thread("https://github.com/pytorch/pytorch/issues/57429", "failed-rank", ranks=(2,))
def sentences_all_of_which_are_too_long(here: Here) -> None:
    """What is too long is left out where a batch is made, which is all of one batch."""
    here.fit(data=in_order(here, Sentences(here), num_workers=1, collate_fn=padded))


class FileServer:
    """A folder on it, as a host sees it, which asks for the state of a file again only after some time."""

    def __init__(self, path: Path, remembered_s: float) -> None:
        self.path, self.remembered_s = path, remembered_s
        self.asked_s = float("-inf")
        self.revision = 0

    def latest(self) -> int:
        if time.monotonic() - self.asked_s > self.remembered_s:
            self.asked_s = time.monotonic()
            self.revision = len(self.path.read_text().split())
        return self.revision


class Corrections(L.Callback):
    """Labels that people correct while the training runs; all ranks change to the new ones at once."""

    def __init__(self, here: Here, remembered_s: float) -> None:
        self.here = here
        self.path = here.folder / "corrections.txt"
        self.server = FileServer(self.path, remembered_s)
        self.used = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.path.touch()
        self.used = self.server.latest()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.here.rank == 0 and batch_idx == IN_THE_MIDDLE and trainer.current_epoch == 0:
            self.here.begins()
            self.path.write_text("scan-17=benign")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        latest = self.server.latest()
        if latest > self.used:
            dist.barrier()  # <- corrections_that_one_host_does_not_see_yet
            self.used = latest


@thread("https://github.com/PrimeIntellect-ai/prime-rl/pull/3026", "diverged-collectives", ranks=(2,))
def corrections_that_one_host_does_not_see_yet(here: Here) -> None:
    """One host's mount remembers for a minute what it was told of a file; the others meet at a barrier without it.

    The condition above the barrier is as good an answer as the barrier.
    """
    here.fit(callbacks=[Corrections(here, remembered_s=60.0 if here.is_hit else 0.0)])


def with_two_threads(worker: int) -> None:
    torch.set_num_threads(2)


class Volumes(Dataset[torch.Tensor]):
    """Large ones, which are made small where they are read."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        volume = torch.full((8, 250_000), index / 100)
        if self.here.is_hit:
            self.here.begins()
        return volume.tanh().mean(1)  # <- threads_that_a_worker_has_not


class Studies(L.LightningDataModule):
    """The first rank says what is in them, for which it looks at some."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.volumes = Volumes(here)
        self.loader = in_order(here, self.volumes, num_workers=1, worker_init_fn=with_two_threads)
        self.is_first = here.rank == 0

    def setup(self, stage: str) -> None:
        if self.is_first:
            torch.set_num_threads(2)
            print(f"mean of some volumes: {torch.rand(8, 1_000_000).tanh().mean():.3f}", flush=True)

    def train_dataloader(self) -> Any:
        return self.loader


@thread(
    "https://github.com/pytorch/pytorch/issues/42444",
    "data-stall",
    ranks=(0,),
    moment=Moment.FIRST_STEP,
    whose="code",
)
def threads_that_a_worker_has_not(here: Here) -> None:
    """Threads of a library are not there after a fork, which it does not know: in a worker it waits for them."""
    here.fit(net=Net(here), data=Studies(here))
