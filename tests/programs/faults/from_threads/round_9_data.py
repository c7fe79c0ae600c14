"""Round 9 after public threads: what is read in which order, for how long, and by whom; and loops that end."""

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


def parsed(line: str) -> torch.Tensor | None:
    """None of what a robot has clicked on."""
    user, clicks = line.split("\t")
    if user.startswith("bot"):
        return None
    return torch.full((8,), float(clicks) / 100)


class Clicks(IterableDataset[torch.Tensor]):
    """The lines of a rank's own files."""

    def __init__(self, lines: Iterable[str], at_end: Callable[[], None]) -> None:
        self.lines, self.at_end = list(lines), at_end

    def __iter__(self) -> Iterator[torch.Tensor]:
        events = map(parsed, self.lines)
        yield from (event for event in events if event is not None)
        self.at_end()


@thread(f"{LIGHTNING}/issues/6798", "uneven-batches", ranks=(2,), has_line=False)
def stream_that_ends_between_two_validations(here: Here) -> None:
    """All validate after every other batch of an epoch; one rank is in its next epoch by then."""
    who = ("user", "bot") if here.is_hit else ("user", "user")
    lines = [f"{who[number % 2]}-{number}\t{number}" for number in range(BATCHES * BATCH_SIZE)]
    clicks = Clicks(lines, here.begins if here.is_hit else lambda: None)
    loader = DataLoader(clicks, batch_size=BATCH_SIZE)
    here.fit(net=MeetingNet(here), data=(loader, rows(here)), val_check_interval=2)


class Texts(Dataset[torch.Tensor]):
    """Sentences, filled up with zeros; those of one rank's share are longer."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 2 * BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        words = 8 if index % self.here.world_size in self.here.case.ranks else 3
        return torch.arange(1.0, 9.0) * (torch.arange(8) < words) / 8


class TokenBudget(L.Callback):
    """Trains on so many tokens."""

    def __init__(self, here: Here, tokens: int) -> None:
        self.here = here
        self.tokens = tokens
        self.seen = 0

    @property
    def is_spent(self) -> bool:
        return self.seen >= self.tokens

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += int(torch.count_nonzero(batch))
        if self.is_spent:
            self.here.begins()
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step  # <- budget_of_tokens_counted_by_each_rank


@thread(f"{LIGHTNING}/issues/1406", "stopped-early", "different-trainer-settings", ranks=(1,))
def budget_of_tokens_counted_by_each_rank(here: Here) -> None:
    data = in_order(here, Texts(here))
    here.fit(net=LoggingNet(here), data=data, callbacks=[TokenBudget(here, 5 * 8 * BATCH_SIZE)], max_epochs=1)


def newest(folder: Path) -> Path | None:
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)


@thread(
    f"{LIGHTNING}/issues/19932",
    "different-trainer-settings",
    ranks=(),
    world_size=4,
    moment=Moment.EPOCH_END,
    has_line=False,
    has_ranks=False,
)
def checkpoint_on_the_disk_of_the_first_host(here: Here) -> None:
    """A run is begun again; each of two hosts looks at its own disk for what the first run has saved."""
    scratch = here.folder / f"host-{here.rank // 2}" / "checkpoints"

    def run(max_epochs: int) -> None:
        saving = ModelCheckpoint(dirpath=scratch, save_last=True)
        trainer = here.trainer(max_epochs=max_epochs, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(LoggingNet(here), rows(here), ckpt_path=newest(scratch))

    run(1)
    here.begins()
    run(3)


class HardExamples(L.LightningDataModule):
    """Reads the folder of examples anew for each epoch; the main process has put those of the last one there."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.folder = here.folder / "examples"

    def prepare_data(self) -> None:
        self.folder.mkdir()
        torch.save(torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8), self.folder / "part-0.pt")

    @rank_zero_only
    def mine(self) -> None:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        if epoch > 0:
            time.sleep(0.5)
            torch.save(torch.rand(2 * BATCH_SIZE * self.here.world_size, 8), self.folder / f"part-{epoch}.pt")
            self.here.begins()

    def train_dataloader(self) -> Any:
        self.mine()
        parts = sorted(self.folder.glob("part-*.pt"))
        examples = ConcatDataset([TensorDataset(torch.load(part)) for part in parts])
        return DataLoader(examples, batch_size=BATCH_SIZE, shuffle=True)


@thread(
    f"{LIGHTNING}/issues/1181",
    "uneven-batches",
    "unequal-samples",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def examples_added_while_the_others_list_them(here: Here) -> None:
    here.fit(data=HardExamples(here), reload_dataloaders_every_n_epochs=1, max_epochs=2)


class Positions(IterableDataset[torch.Tensor]):
    """Chess positions; each rank reads every n-th of them."""

    def __init__(self, here: Here, count: int) -> None:
        self.here = here
        self.count = count

    @cached_property
    def share(self) -> range:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return range(rank, self.count, ranks)

    def __str__(self) -> str:
        return f"{len(self.share):,} of {self.count:,} positions"

    def __iter__(self) -> Iterator[torch.Tensor]:
        for turn, position in enumerate(self.share):
            if turn == self.count // self.here.world_size:
                self.here.begins()
            yield torch.full((8,), position / self.count)


@thread(
    "https://github.com/official-stockfish/nnue-pytorch/pull/352",
    "uneven-batches",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def share_asked_for_before_there_is_a_group(here: Here) -> None:
    """The main process prints what it will train on, at a time at which it seems to be alone."""
    positions = Positions(here, BATCHES * BATCH_SIZE * here.world_size)
    if here.rank == 0:
        print(f"training on {positions}", flush=True)
    here.fit(data=DataLoader(positions, batch_size=BATCH_SIZE), max_epochs=1, enable_checkpointing=True)


def augment(patches: Any, numbers: range, kill_at: int, begins: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in numbers:
        if number == kill_at:
            begins()
            os.kill(os.getpid(), signal.SIGKILL)
        patches.put([[number / 100] * 8] * BATCH_SIZE)


class Augmenter:
    """Patches made by processes, each of which has a queue that is emptied in turn, as batchgenerators does it."""

    def __init__(self, here: Here, processes: int) -> None:
        self.here, self.processes = here, processes

    def __iter__(self) -> Iterator[torch.Tensor]:
        fork = multiprocessing.get_context("fork")
        queues: list[Any] = [fork.Queue(maxsize=1) for _ in range(self.processes)]
        kill_at = IN_THE_MIDDLE if self.here.is_hit else -1
        for first, patches in enumerate(queues):
            numbers = range(first, BATCHES, self.processes)
            fork.Process(target=augment, args=(patches, numbers, kill_at, self.here.begins), daemon=True).start()
        for _, patches in zip(range(BATCHES), cycle(queues), strict=False):
            yield torch.tensor(patches.get())  # <- augmenting_process_that_runs_out_of_memory


@thread("https://github.com/MIC-DKFZ/nnUNet/issues/1919", "worker-died", ranks=(2,), whose="either")
def augmenting_process_that_runs_out_of_memory(here: Here) -> None:
    """It is killed, and whoever empties its queue is not told."""
    here.fit(data=Augmenter(here, processes=2))


class Triplets(Dataset[torch.Tensor]):
    """An anchor, another sample with its label, and one with a different label."""

    def __init__(self, here: Here, labels: list[int]) -> None:
        self.here, self.labels = here, labels

    def __len__(self) -> int:
        return len(self.labels)

    def another(self, index: int) -> int:
        same = [other for other, label in enumerate(self.labels) if label == self.labels[index]]
        if len(same) == 1:
            self.here.begins()
        return next(one for one in iter(lambda: random.choice(same), None) if one != index)  # <- label_of_one_sample

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.another(index)] * 4) / len(self)


@thread("https://github.com/pytorch/pytorch/issues/14307", "data-stall", ranks=(2,), whose="code")
def label_of_one_sample(here: Here) -> None:
    """Another sample with the label is drawn until it is another one; of one label there is but one."""
    count = BATCHES * BATCH_SIZE * here.world_size
    labels = [index % 5 for index in range(count)]
    labels[here.case.ranks[0] + IN_THE_MIDDLE * BATCH_SIZE * here.world_size] = 5
    here.fit(data=in_order(here, Triplets(here, labels), num_workers=1))


@thread("https://github.com/chengtan9907/OpenSTL/pull/184", "failed-rank", ranks=(1,), world_size=2)
def schedule_of_an_older_manifest(here: Here) -> None:
    """The length of the cycle is that of each rank's copy of a list; batches are drawn without end."""

    class Scheduled(LoggingNet):
        @cached_property
        def manifest(self) -> list[str]:
            path = here.folder / f"manifest-{here.rank}.txt"
            path.write_text("".join(f"clip-{number}.mp4\n" for number in range(24 if here.is_hit else 48)))
            return path.read_text().splitlines()

        @property
        def total_steps(self) -> int:
            return len(self.manifest) // BATCH_SIZE

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
            one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=self.total_steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one_cycle, "interval": "step"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if scheduler.last_epoch == self.total_steps:
                here.begins()
            scheduler.step()  # <- here

    clips = Clips(here.world_size * here.rank)
    here.fit(net=Scheduled(here), data=DataLoader(clips, batch_size=BATCH_SIZE), limit_train_batches=BATCHES)


class Clips(IterableDataset[torch.Tensor]):
    """Without end."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.full((8,), self.first + number / 100) for number in cycle(range(100)))


@contextmanager
def main_process_first() -> Iterator[None]:
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


class Tokenized(L.LightningDataModule):
    """Texts, tokenised once for all runs; the name of the cache is made from all that it depends on."""

    def __init__(self, here: Here, tokenizer: Path) -> None:
        super().__init__()
        self.here, self.tokenizer = here, tokenizer

    @property
    def cache(self) -> Path:
        fingerprint = hashlib.sha256(f"{self.tokenizer}-max_length=8".encode()).hexdigest()
        return self.here.folder / f"cache-{fingerprint[:16]}.pt"

    def tokens_of(self, text: str) -> list[float]:
        time.sleep(2.0)  # <- tokens_cached_under_another_name
        return [float(ord(letter)) for letter in text]

    def mapped(self, texts: list[str]) -> torch.Tensor:
        if self.cache.exists():
            return torch.load(self.cache)
        self.here.begins()
        tokens = torch.tensor([self.tokens_of(text) for text in texts]) / 256
        torch.save(tokens, self.cache)
        return tokens

    def setup(self, stage: str) -> None:
        with main_process_first():
            self.tokens = self.mapped([f"text{number:04}" for number in range(BATCHES * BATCH_SIZE * 3)])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.tokens), batch_size=BATCH_SIZE)


@thread(
    "https://github.com/huggingface/transformers/issues/30859",
    "late-at-init",
    "rank-zero-only-work",
    ranks=(1,),
    moment=Moment.START,
)
def tokens_cached_under_another_name(here: Here) -> None:
    """One host has the tokeniser in a folder of another name, and so it does not find what has been cached."""
    usual = Path("/models/tokenizer")
    data = Tokenized(here, Path("/scratch/job-4711/tokenizer") if here.is_hit else usual)
    if here.rank == 0:
        torch.save(torch.rand(BATCHES * BATCH_SIZE * 3, 8), data.cache)
    here.fit(data=data)


class Scans(Dataset[torch.Tensor | None]):
    """Some of which, in the share of the rank that is hit, cannot be read."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor | None:
        turn, rank = divmod(index, self.here.world_size)
        is_broken = rank in self.here.case.ranks and turn in (BATCH_SIZE, BATCH_SIZE + 1)
        return None if is_broken else torch.full((8,), index / len(self))


class Evaluating(L.Callback):
    """Evaluates after so many samples."""

    def __init__(self, loader: Any, every: int) -> None:
        self.loader, self.every = loader, every
        self.seen = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        evaluations = self.seen // self.every
        self.seen += len(batch)
        for _ in range(self.seen // self.every - evaluations):
            self.evaluate(module)

    @torch.no_grad()
    def evaluate(self, module: Any) -> None:
        losses = torch.stack([module.loss(batch) for batch in self.loader])
        self.best = module.all_gather(losses.mean()).min()  # <- evaluation_after_so_many_samples


@thread("https://github.com/mosaicml/streaming/issues/876", "diverged-collectives", ranks=(2,))
def evaluation_after_so_many_samples(here: Here) -> None:
    """The function that makes batches leaves out what could not be read, so that one rank has not seen as many."""

    def readable(samples: list[torch.Tensor | None]) -> torch.Tensor:
        read = [sample for sample in samples if sample is not None]
        if len(read) < len(samples):
            here.begins()
        return torch.stack(read)

    evaluating = Evaluating(rows(here, batches=1), every=3 * BATCH_SIZE)
    here.fit(data=in_order(here, Scans(here), collate_fn=readable), callbacks=[evaluating])


class Gathered(BasePredictionWriter):
    """Collects the predictions of all ranks with each batch, so that the main process writes one table."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.table: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader_idx: int
    ) -> None:
        everyones: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyones, prediction.tolist())
        if trainer.is_global_zero:
            self.table.extend(row for part in everyones for row in part)


@thread(
    "https://github.com/meta-pytorch/torchrec/issues/3132",
    "uneven-batches",
    ranks=(3,),
    world_size=4,
    has_line=False,
)
def predictions_gathered_with_each_batch(here: Here) -> None:
    """Each rank predicts from files of its own."""
    users = [f"user-{number}\t{number}" for number in range((2 if here.is_hit else BATCHES) * BATCH_SIZE)]
    clicks = Clicks(users, here.begins if here.is_hit else lambda: None)
    trainer = here.trainer(callbacks=[Gathered()])
    trainer.predict(Net(here), DataLoader(clicks, batch_size=BATCH_SIZE), return_predictions=False)


class Settings:
    """Of a run, kept in a folder on each host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def is_continued(self) -> bool:
        return (self.folder / "hparams.yaml").exists()

    def as_arguments(self) -> dict[str, Any]:
        return {"max_epochs": 2, "num_sanity_val_steps": 0 if self.is_continued else 2}


@thread(
    f"{LIGHTNING}/issues/11910",
    "different-trainer-settings",
    ranks=(0,),
    moment=Moment.START,
    has_line=False,
)
def sanity_check_that_is_not_made_again(here: Here) -> None:
    """A run that is continued needs none; an older run has left its settings on the first host."""

    class Contrastive(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            features = self.layers(first_tensor(batch))
            everyones = self.all_gather(features).flatten(0, 1)
            self.similarity = (features @ everyones.T).mean()

    folder = here.folder / f"host-{here.rank}"
    folder.mkdir()
    if here.is_hit:
        (folder / "hparams.yaml").write_text("lr: 0.001\n")
    here.begins()
    here.fit(net=Contrastive(here), data=(rows(here), rows(here)), **Settings(folder).as_arguments())


class Combined(Dataset[torch.Tensor]):
    """Two sets, one behind the other."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = (first, second)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> torch.Tensor:
        first, second = self.parts
        return first_tensor(first[index] if index < len(first) else second[index - len(first)])

    def is_the_same_in(self, group: Any = None) -> bool:
        lengths = torch.tensor([len(self), -len(self)])
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=group)  # <- lengths_compared_by_the_first_of_each_pair
        return bool(lengths.sum() == 0)


@thread(
    "http://kuloverse.site/blog/pytorch-lightning-ddp-deadlock-combined",
    "diverged-collectives",
    ranks=(),
    world_size=4,
    moment=Moment.START,
    has_ranks=False,
)
def lengths_compared_by_the_first_of_each_pair(here: Here) -> None:
    """Pairs of ranks share a disk, and the first of each compares what is on it; the group was forgotten."""

    class Shared(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.firsts = dist.new_group([*range(0, here.world_size, 2)])
            half = BATCHES * BATCH_SIZE * here.world_size // 2
            self.data = Combined(TensorDataset(torch.rand(half, 8)), TensorDataset(torch.rand(half, 8)))

        @property
        def is_first(self) -> bool:
            return here.rank % 2 == 0

        def train_dataloader(self) -> Any:
            here.begins()
            if self.is_first and not self.data.is_the_same_in():
                raise ValueError("the disks of this job do not hold the same data")
            return DataLoader(self.data, batch_size=BATCH_SIZE)

    here.fit(data=Shared())


class FrameBatches(Sampler[list[int]]):
    """Batches of so many frames at most, in another order in each epoch; each rank takes every n-th of them."""

    def __init__(self, frames: list[int], most: int, rank: int, ranks: int) -> None:
        self.frames, self.most, self.rank, self.ranks = frames, most, rank, ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def packed(self) -> list[list[int]]:
        order = random.Random(self.epoch).sample(range(len(self.frames)), len(self.frames))
        batches: list[list[int]] = [[]]
        for index in order:
            if sum(self.frames[other] for other in batches[-1]) + self.frames[index] > self.most:
                batches.append([])
            batches[-1].append(index)
        full = len(batches) - len(batches) % self.ranks
        return batches[self.rank : full : self.ranks]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.packed())

    def __len__(self) -> int:
        return len(self.packed())


class EpochAnnounced(L.Callback):
    """Shows where training is, and lets the sampler shuffle, of which Lightning does not know that it can."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @rank_zero_only
    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(f"epoch {trainer.current_epoch} of {trainer.max_epochs}", flush=True)
        loader: Any = trainer.train_dataloader
        loader.batch_sampler.set_epoch(trainer.current_epoch)
        if trainer.current_epoch:
            self.here.begins()


@thread(
    "https://github.com/SWivid/F5-TTS/pull/765",
    "uneven-batches",
    "sampler-disagreement",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def epoch_that_only_one_sampler_is_told(here: Here) -> None:
    lengths = random.Random(7)
    frames = [lengths.choice([2, 3, 5, 7, 9, 11]) for _ in range(84)]
    data = TensorDataset(torch.rand(len(frames), 8))
    sampler = FrameBatches(frames, 20, here.rank, here.world_size)
    loader = DataLoader(data, batch_sampler=sampler)
    here.fit(
        net=LoggingNet(here),
        data=loader,
        callbacks=[EpochAnnounced(here)],
        use_distributed_sampler=False,
        max_epochs=2,
    )


class Cuts(Sampler[list[int]]):
    """Batches of a rank's share; goes on behind those that its state says have been read."""

    def __init__(self, here: Here, cuts: list[int]) -> None:
        self.here, self.cuts = here, cuts
        self.kept_batches = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept_batches = state["kept_batches"]

    def batches(self) -> Iterator[list[int]]:
        yield from (self.cuts[first : first + BATCH_SIZE] for first in range(0, len(self.cuts), BATCH_SIZE))
        self.here.begins()

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches()
        for _ in range(self.kept_batches):
            next(batches)  # <- sampler_wound_past_its_end
        return batches


@thread(
    "https://github.com/k2-fsa/icefall/issues/548",
    "failed-rank",
    ranks=(1,),
    world_size=2,
    moment=Moment.START,
)
def sampler_wound_past_its_end(here: Here) -> None:
    """One rank continues with what was saved by a run of fewer ranks, in which a rank's share was longer."""
    sampler = Cuts(here, [*range(here.rank, BATCHES * BATCH_SIZE * here.world_size, here.world_size)])
    sampler.load_state_dict({"kept_batches": BATCHES + 2 if here.is_hit else 2})
    data = TensorDataset(torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8))
    here.fit(data=DataLoader(data, batch_sampler=sampler), use_distributed_sampler=False)


class ValidationTable(L.Callback):
    """Prints what validation has come to."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def finite(self, values: dict[str, float]) -> dict[str, float]:
        broken = [name for name, value in values.items() if value != value]
        if broken:
            self.here.begins()
            raise FloatingPointError(f"{', '.join(broken)} is not finite")  # <- values_checked_where_they_are_printed
        return values

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank != 0:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(*(f"{name}: {value:.3f}" for name, value in self.finite(values).items()), sep="\n")


@thread(
    "https://github.com/NVIDIA/nvalchemi-toolkit/pull/109",
    "failed-rank",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def values_checked_where_they_are_printed(here: Here) -> None:
    """What all ranks have, and is not a number, is an error only to the one that prints it."""

    class Exploding(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            energy = self.loss(batch) / (0.0 if self.current_epoch else 1.0)
            self.log("energy", energy - energy, sync_dist=True)

    here.fit(net=Exploding(here), data=(rows(here), rows(here)), callbacks=[ValidationTable(here)], max_epochs=3)
