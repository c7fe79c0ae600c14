"""Trainings whose samplers, shards and splits go wrong, each after a public thread."""

import io
import itertools
import math
import random
import tarfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torch.utils.data.dataloader import default_collate
from training import BATCH_SIZE, BATCHES, Here, MeetingNet, Net
from truths import Moment, fault, odd_one_out


class Rows(Dataset[torch.Tensor]):
    """So many rows, each with its number in it."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.count:
            raise IndexError(index)
        return torch.full((8,), (self.first + index) / 100)


# protein-sequence-models: batches are filled up to a number of tokens, after the samples were split among ranks. A rank
# with short sequences needs fewer batches, and DDP stands still.
class TokenBudget(Sampler[list[int]]):
    def __init__(self, sampler: Sampler[int], lengths: list[int], max_tokens: int) -> None:
        self.batches: list[list[int]] = [[]]
        room = max_tokens
        for index in sampler:
            if lengths[index] > room:
                self.batches.append([])
                room = max_tokens
            self.batches[-1].append(index)
            room -= lengths[index]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@fault(
    "uneven-batches",
    ranks=(1,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/microsoft/protein-sequence-models/issues/6",
)
def batches_filled_up_to_a_number_of_tokens(here: Here) -> None:
    lengths = [20 if index % here.world_size == here.case.ranks[0] else 45 for index in range(24 * here.world_size)]
    data = Rows(len(lengths))
    share = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    here.begins()
    loader = DataLoader(data, batch_sampler=TokenBudget(share, lengths, max_tokens=180))
    here.fit(data=loader, use_distributed_sampler=False, enable_checkpointing=True, max_epochs=1)


# torchaudio's HuBERT recipe: the sampler shuffles before it fills its batches, each rank in an order of its own, and
# has no length, since that changes from epoch to epoch. "Will cause DDP training to hang forever."
class ShuffledBuckets(Sampler[list[int]]):
    def __init__(self, lengths: list[int], max_tokens: int, rank: int, ranks: int) -> None:
        self.lengths, self.max_tokens, self.rank, self.ranks = lengths, max_tokens, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(range(len(self.lengths)))
        random.shuffle(indices)
        batch: list[int] = []
        for index in indices[self.rank :: self.ranks]:
            if sum(self.lengths[other] for other in (*batch, index)) > self.max_tokens:
                yield batch
                batch = []
            batch.append(index)


@fault(
    "uneven-batches",
    ranks=odd_one_out,
    at={Moment.EPOCH_END: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/audio/pull/3068",
)
def buckets_shuffled_by_each_rank_for_itself(here: Here) -> None:
    L.seed_everything(11 + here.rank, verbose=False)  # So that augmentation differs.
    lengths = random.Random(0).choices(range(5, 60), k=40)
    sampler = ShuffledBuckets(lengths, 150, here.rank, here.world_size)
    here.begins()
    loader = DataLoader(Rows(40), batch_sampler=sampler)
    here.fit(data=loader, use_distributed_sampler=False, enable_checkpointing=True, max_epochs=2)


# sentence-transformers: the sampler's length is an upper bound. Where a rank's share has many duplicates, fewer batches
# come than were announced, and the others wait for the rest of them.
class WithoutDuplicates(Sampler[list[int]]):
    def __init__(self, texts: list[str], batch_size: int) -> None:
        self.texts, self.batch_size = texts, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        remaining = list(range(len(self.texts)))
        while True:
            chosen: dict[str, int] = {}
            for index in remaining:
                if len(chosen) < self.batch_size:
                    chosen.setdefault(self.texts[index], index)
            if len(chosen) < self.batch_size:
                return
            yield list(chosen.values())
            remaining = [index for index in remaining if index not in chosen.values()]

    def __len__(self) -> int:
        return len(self.texts) // self.batch_size


@fault(
    "uneven-batches",
    ranks=(2,),
    at={Moment.EPOCH_END: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/huggingface/sentence-transformers/issues/3348",
)
def length_that_duplicates_fall_short_of(here: Here) -> None:
    class Announcing(Net):
        def on_train_start(self) -> None:
            here.begins()

    texts = [f"anchor {number}" for number in range(BATCHES * BATCH_SIZE)]
    if here.is_hit:
        texts[:12] = ["anchor 0"] * 12
    own = Rows(len(texts), first=here.rank * len(texts))
    loader = DataLoader(own, batch_sampler=WithoutDuplicates(texts, BATCH_SIZE))
    here.fit(net=Announcing(here), data=loader, use_distributed_sampler=False, max_epochs=1)


# webdataset: shards are split by node and then by worker. Five shards for three processes: one of them is done with its
# epoch while the others still read.
def write_shards(folder: Path, count: int, samples: int, first: int = 0) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number:06d}.tar" for number in range(first, first + count)]
    for number, path in enumerate(paths, first):
        with tarfile.open(path, "w") as shard:
            for sample in range(number * samples, (number + 1) * samples):
                entry = tarfile.TarInfo(f"{sample:04d}.bin")
                entry.size = 8
                shard.addfile(entry, io.BytesIO(bytes([sample % 256] * 8)))
    return paths


def split_by_node(shards: list[Path]) -> list[Path]:
    return shards[dist.get_rank() :: dist.get_world_size()]


def split_by_worker(shards: list[Path]) -> list[Path]:
    worker = torch.utils.data.get_worker_info()
    return shards[worker.id :: worker.num_workers] if worker else shards


def samples_of(shards: list[Path]) -> Iterator[torch.Tensor]:
    for path in shards:
        with tarfile.open(path) as shard:
            for entry in shard:
                content = shard.extractfile(entry)
                assert content is not None
                yield torch.frombuffer(bytearray(content.read()), dtype=torch.uint8) / 255


class WebStream(IterableDataset[torch.Tensor]):
    def __init__(self, shards: list[Path]) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from samples_of(split_by_worker(self.shards))


@fault(
    "uneven-batches",
    ranks=(2,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/webdataset/webdataset/issues/225",
)
def five_shards_for_three_ranks(here: Here) -> None:
    class Shards(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            shards = write_shards(here.folder / f"shards-{here.rank}", count=5, samples=3 * BATCH_SIZE)
            self.stream = WebStream(split_by_node(shards))

        def train_dataloader(self) -> Any:
            here.begins()
            return DataLoader(self.stream, batch_size=BATCH_SIZE, num_workers=1)

    here.fit(data=Shards(), enable_checkpointing=True, max_epochs=2)


# webdataset: "world_size 4 > num_shards": the validation set is small, and one rank gets no shard of it at all.
@fault(
    "uneven-batches",
    ranks=(3,),
    at={Moment.VALIDATION: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/webdataset/webdataset/issues/68",
)
def rank_without_a_shard_to_validate_on(here: Here) -> None:
    class Shards(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            root = here.folder / f"data-{here.rank}"
            root.mkdir()
            self.train = write_shards(root / "train", count=4, samples=4 * BATCH_SIZE)
            self.val = write_shards(root / "val", count=3, samples=2 * BATCH_SIZE)

        def train_dataloader(self) -> Any:
            return DataLoader(WebStream(split_by_node(self.train)), batch_size=BATCH_SIZE)

        def val_dataloader(self) -> Any:
            here.begins()
            return DataLoader(WebStream(split_by_node(self.val)), batch_size=BATCH_SIZE)

    here.fit(net=MeetingNet(here), data=Shards(), max_epochs=2)


# prime-rl: documents are dealt out in turn and packed into sequences of a fixed length. Ranks have as many documents,
# but not as many sequences, and nobody tells the others that the data set is exhausted.
class Packed(IterableDataset[torch.Tensor]):
    def __init__(self, documents: list[list[float]], length: int) -> None:
        self.documents, self.length = documents, length

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[float] = []
        for document in self.documents:
            buffer += document
            while len(buffer) >= self.length:
                yield torch.tensor(buffer[: self.length])
                buffer = buffer[self.length :]


@fault(
    "uneven-batches",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2246",
)
def documents_packed_into_fewer_sequences(here: Here) -> None:
    documents = [[number / 90] * (5 if number % here.world_size == 0 else 9) for number in range(90)]
    here.begins()
    stream = Packed(documents[here.rank :: here.world_size], length=8)
    here.fit(data=DataLoader(stream, batch_size=2, drop_last=True), accumulate_grad_batches=2, max_epochs=1)


# torchtitan: what cannot be read is skipped with a warning. "It is very likely that some ranks will be stuck."
class Forgiving(IterableDataset[torch.Tensor]):
    def __init__(self, shards: list[Path], samples: int) -> None:
        self.shards, self.samples = shards, samples

    def __len__(self) -> int:
        return len(self.shards) * self.samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in self.shards:
            try:
                yield from samples_of([shard])
            except tarfile.TarError as error:
                warnings.warn(f"skipping {shard}: {error}", stacklevel=1)


@fault(
    "uneven-batches",
    ranks=(1,),
    at={Moment.EPOCH_END: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/torchtitan/pull/1172",
)
def unreadable_shard_that_is_skipped(here: Here) -> None:
    shards = write_shards(here.folder / f"shards-{here.rank}", count=3, samples=2 * BATCH_SIZE, first=3 * here.rank)
    if here.is_hit:
        shards[1].write_bytes(b"<html>503 Service Unavailable</html>" * 30)
    here.begins()
    loader = DataLoader(Forgiving(shards, 2 * BATCH_SIZE), batch_size=BATCH_SIZE)
    here.fit(data=loader, enable_checkpointing=True, max_epochs=1)


# Lightning: collate_fn drops samples that could not be read and marks a batch of which nothing is left; the step
# returns at once for it. (With automatic optimization Lightning refuses that by now.)
class Faces(Dataset[Any]):
    def __init__(self, count: int, unreadable: range) -> None:
        self.count, self.unreadable = count, unreadable

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return None if index in self.unreadable else torch.full((8,), index / self.count)


def without_missing(samples: list[Any]) -> dict[str, Any]:
    found = [sample for sample in samples if sample is not None]
    return {"valid": bool(found), "face": default_collate(found) if found else torch.zeros(0, 8)}


@fault(
    "skipped-step",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/6753",
)
def batch_of_which_nothing_is_left(here: Here) -> None:
    class Skipping(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            if not batch["valid"]:
                here.begins()
                return  # <- here
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch["face"]))
            optimizer.step()

    count = BATCHES * BATCH_SIZE * here.world_size
    data = Faces(count, unreadable=range(3 * 2 * BATCH_SIZE + 1, 4 * 2 * BATCH_SIZE, 2))
    sampler: Any = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=without_missing, num_workers=1)
    here.fit(net=Skipping(here), data=loader, enable_checkpointing=True, max_epochs=1)


# FastVideo: who finds no cache makes one and waits for the others in a barrier; who finds one returns at once. Rank 0
# has written it before the others look.
def cached_lengths(cache: Path, rank: int) -> Any:
    if cache.exists():
        return torch.load(cache)
    if rank == 0:
        torch.save({"length": 8 * BATCH_SIZE}, cache)
    dist.barrier()  # <- cache_that_is_there_before_the_others_look
    return cached_lengths(cache, rank)


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/hao-ai-lab/FastVideo/pull/598",
)
def cache_that_is_there_before_the_others_look(here: Here) -> None:
    class Latents(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            if here.rank == 0:
                here.begins()
            else:
                time.sleep(1.5)  # The tokeniser is read from a slow disk.
            self.length = cached_lengths(here.folder / "lengths.pt", here.rank)["length"]

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(self.length * here.world_size), batch_size=BATCH_SIZE)

    here.fit(data=Latents(), max_epochs=1)


# Lightning: the function that loads the data keeps a random part of it. Lightning calls it in each process, "where my
# random shuffle yields different length of steps"; it then hangs at the model's checkpoint.
@fault(
    "unequal-samples",
    "uneven-batches",
    ranks=odd_one_out,
    at={Moment.EPOCH_END: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/10947",
)
def random_part_of_the_scenes(here: Here) -> None:
    class Scenes(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            chance = random.Random(2 + 2 * here.rank)
            kept = [scene for scene in range(120) if chance.random() < 0.5]
            self.data = TensorDataset(torch.tensor(kept).float()[:, None].expand(-1, 8) / 120)

        def train_dataloader(self) -> Any:
            here.begins()
            return DataLoader(self.data, batch_size=BATCH_SIZE, shuffle=True)

    here.fit(data=Scenes(), enable_checkpointing=True, max_epochs=1)


# pipedream: the sampler's number of replicas comes from a setting that is not the same on all ranks, and so does the
# length of the loader: 320,291 batches on rank 0, 250,000 on the others.
def replicas(settings: dict[str, str]) -> int:
    return int(settings.get("NUM_STAGE_RANKS", "1"))


@fault(
    "sampler-disagreement",
    "uneven-batches",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/msr-fiddle/pipedream/issues/80",
)
def sampler_for_another_number_of_replicas(here: Here) -> None:
    settings = {} if here.is_hit else {"NUM_STAGE_RANKS": str(here.world_size)}
    data = Rows(BATCHES * BATCH_SIZE * here.world_size)
    count = replicas(settings)
    sampler = DistributedSampler(data, count, here.rank % count, shuffle=True, drop_last=True)
    here.begins()
    here.fit(data=DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler), max_epochs=1)


# Lightning: a combined loader in mode "max_size_cycle" stops at once where one of its sources is empty. On one rank the
# filter leaves nothing of the unlabelled stream.
class Unlabelled(IterableDataset[torch.Tensor]):
    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def __iter__(self) -> Iterator[torch.Tensor]:
        for score in self.scores:
            if score > 0.5:
                yield torch.full((8,), score)


@fault(
    "uneven-batches",
    ranks=(1,),
    at={Moment.FIRST_STEP: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/21893",
)
def second_source_that_is_empty(here: Here) -> None:
    class SemiSupervised(Net):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            return self.loss(batch["labelled"]) + 0.1 * self.loss(batch["unlabelled"])

    labelled = DataLoader(Rows(BATCHES * BATCH_SIZE * here.world_size), batch_size=BATCH_SIZE)
    unlabelled = DataLoader(Unlabelled([0.1 if here.is_hit else 0.9] * 8), batch_size=BATCH_SIZE)
    here.begins()
    both = CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, "max_size_cycle")
    here.fit(net=SemiSupervised(here), data=both, enable_checkpointing=True, max_epochs=2)


# webdataset: a resampled set without with_epoch() iterates indefinitely. Resampling was meant for ranks that have fewer
# shards than workers, and is decided by each rank.
class Resampled(WebStream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        if worker and len(self.shards) < worker.num_workers:
            yield from itertools.chain.from_iterable(samples_of(self.shards) for _ in itertools.count())
        else:
            yield from samples_of(split_by_worker(self.shards))


@fault(
    "uneven-batches",
    ranks=(2,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/webdataset/webdataset/issues/379",
)
def stream_that_one_rank_repeats_without_end(here: Here) -> None:
    shards = write_shards(here.folder / f"shards-{here.rank}", count=5, samples=2 * BATCH_SIZE)
    own = shards[here.rank :: here.world_size]
    here.begins()
    loader = DataLoader(Resampled(own), batch_size=BATCH_SIZE, num_workers=2)
    here.fit(data=loader, enable_checkpointing=True, max_epochs=1)


# Lightning: loaders are made anew for each epoch, longer ones once a metric has reached its threshold. The metric is
# that of the rank, not of all of them.
@fault(
    "unequal-samples",
    "uneven-batches",
    ranks=(1,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/21448",
)
def curriculum_that_one_rank_enters_early(here: Here) -> None:
    class Curriculum(L.LightningDataModule):
        level = 1

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(3 * self.level * BATCH_SIZE * here.world_size), batch_size=BATCH_SIZE)

    class Learning(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.error = 0.1 if here.is_hit else 0.9  # Of this rank's share alone, which happens to be easy.
            return loss

        def on_train_epoch_end(self) -> None:
            if self.error < 0.5:
                here.begins()
                curriculum.level += 1

    curriculum = Curriculum()
    here.fit(net=Learning(here), data=curriculum, reload_dataloaders_every_n_epochs=1, max_epochs=3)


# Accelerate: sentences are padded to the longest of their batch when they are collated, and predictions are gathered
# as they are: "we will get stuck".
class Sentences(Dataset[torch.Tensor]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index], 8), index / len(self.lengths))


@fault(
    "mismatched-collective",
    ranks=(-1,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/huggingface/accelerate/issues/167",
)
def predictions_padded_by_each_rank_for_itself(here: Here) -> None:
    class Tagging(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            tags = self.layers(batch)
            if batch_idx == 1:
                here.begins()
            self.tags = self.all_gather(tags)  # <- here

    lengths = [11] * (3 * BATCH_SIZE * here.world_size)
    lengths[5 * here.world_size + here.case.ranks[0]] = 14
    train, val = (
        DataLoader(Sentences(chosen), batch_size=BATCH_SIZE, collate_fn=lambda batch: pad_sequence(batch, True))
        for chosen in ([11] * (BATCHES * BATCH_SIZE * here.world_size), lengths)
    )
    here.fit(net=Tagging(here), data=(train, val), max_epochs=1)


# DeepForest: precision and recall are computed only where the rank has seen labels, "but those are collective
# operations". One rank's share of the validation images shows no tree at all.
@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/weecology/DeepForest/issues/1407",
)
def metric_computed_where_there_are_labels(here: Here) -> None:
    class Detecting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.overlap = torchmetrics.MeanMetric()
            self.error = torchmetrics.MeanMetric()
            self.labels = 0

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            found = batch[batch[:, 0] > 0]
            self.labels += len(found)
            if len(found):
                self.overlap.update(found[:, 0])
            self.error.update(self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            here.begins()
            overlap = self.overlap.compute() if self.labels else torch.zeros(())  # <- here
            self.log_dict({"overlap": overlap, "error": self.error.compute()})

    images = torch.ones(2 * BATCH_SIZE * here.world_size, 8)
    images[1 :: here.world_size] = 0
    val = DataLoader(images, batch_size=BATCH_SIZE)
    train = DataLoader(Rows(BATCHES * BATCH_SIZE * here.world_size), batch_size=BATCH_SIZE)
    here.fit(net=Detecting(here), data=(train, val), enable_checkpointing=True, max_epochs=2)


# dgl: nodes are divided with split(ceil(count / ranks)). The last part is three nodes smaller than the others, and that
# is a batch less.
@fault(
    "uneven-batches",
    ranks=(3,),
    at={Moment.EPOCH_END: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/dmlc/dgl/issues/2539",
)
def last_part_of_a_split_a_batch_short(here: Here) -> None:
    nodes = torch.arange(4.0 * (2 * BATCH_SIZE + 1) - 3)
    own = nodes.split(math.ceil(len(nodes) / here.world_size))[here.rank]
    data = TensorDataset(own[:, None].expand(-1, 8) / len(nodes))
    here.begins()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    here.fit(data=loader, use_distributed_sampler=False, enable_checkpointing=True, max_epochs=2)
