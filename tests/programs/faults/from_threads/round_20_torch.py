"""Round 20 after public threads: what users of plain PyTorch report of patterns, shards, games, files, and pipes."""

import ctypes
import importlib
import itertools
import math
import multiprocessing
import re
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, Net, first_tensor, rows
from truths import Moment


class Signed(Dataset[torch.Tensor]):
    """Rows of all ranks with a sign; in one batch of the rank that is hit, all rows have the sign that is given."""

    def __init__(self, here: Here, sign: float, batch: int = IN_THE_MIDDLE) -> None:
        self.here, self.sign, self.batch = here, sign, batch

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        number, rank = divmod(index, self.here.world_size)
        is_odd = rank in self.here.case.ranks and number // BATCH_SIZE == self.batch
        return torch.linspace(0.1, 0.8, 8) * (self.sign if is_odd else 1 - 2 * (number % 2))


STATUTE = re.compile(r"([A-Z]+[a-z]{0,1}\.*\s*,*)*((A|a)(c|C)(t|T))*\s*")


def is_acronym(statute: str) -> bool:
    return STATUTE.fullmatch(statute) is not None  # <- heading_in_capitals_taken_for_an_acronym


class Entities(Net):
    """Looks at the names of statutes that it has found in a judgment."""

    def found(self, judgment: torch.Tensor) -> str:
        return "I.P.C." if judgment[0] > 0 else "Motor Vehicles Act"

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        statutes = [self.found(judgment) for judgment in batch]
        if len({*statutes}) == 1:
            self.here.begins()
            statutes.append("INTHEHIGHCOURTOFJUDICATUREATBOMBAYCRIMINALAPPELLATEJURISDICTION 4711")
        self.log("acronyms", float(sum(map(is_acronym, statutes))), sync_dist=True)


@thread(
    "https://github.com/OpenNyAI/Opennyai/issues/16",
    "gil-held",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
    whose="code",
)
def heading_in_capitals_taken_for_an_acronym(here: Here) -> None:
    """A pattern goes through all ways to divide a long heading in capitals, and lets no other thread run meanwhile."""
    here.fit(net=Entities(here), data=(rows(here), in_order(here, Signed(here, -1, batch=1))))


def pyarrow() -> Any:
    """Imported by those who need it, and without types."""
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


class Documents(IterableDataset[torch.Tensor]):
    """Documents in row groups of files, which ranks take turns with, again and again."""

    def __init__(self, here: Here) -> None:
        self.here = here
        folder = here.folder / f"documents-{here.rank}"
        folder.mkdir()
        self.paths = [self.written(folder / f"{number}.parquet", groups) for number, groups in enumerate((3, 2))]

    def written(self, path: Path, groups: int) -> Path:
        pa, pq = pyarrow()
        documents = [[number / 100] * 8 for number in range(groups * 2 * BATCH_SIZE)]
        pq.write_table(pa.table({"document": documents}), path, row_group_size=2 * BATCH_SIZE)
        return path

    def groups(self) -> Iterator[list[list[float]]]:
        _, pq = pyarrow()
        number = 0
        while True:
            while number < len(self.paths):  # <- files_that_are_not_begun_anew
                file = pq.ParquetFile(self.paths[number])
                for group in range(self.here.rank, file.num_row_groups, self.here.world_size):
                    yield file.read_row_group(group)["document"].to_pylist()
                number += 1
                if self.here.is_hit and number == len(self.paths):
                    self.here.begins()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for group in self.groups():
            yield from map(torch.tensor, group)


@thread("https://github.com/karpathy/nanochat/issues/360", "data-stall", ranks=(2,), whose="code")
def files_that_are_not_begun_anew(here: Here) -> None:
    """Data is to begin anew when it ends, and does not; one rank has a row group less and looks for more for ever."""
    here.fit(data=DataLoader(Documents(here), BATCH_SIZE), max_steps=20, max_epochs=1)


def play(here: Here, remote: Any) -> None:
    """Answers moves with what is to be seen after them."""
    velocity = 1.0
    for number in itertools.count():
        velocity *= remote.recv()
        if here.is_hit and number == IN_THE_MIDDLE:
            time.sleep(0.5)
            here.begins()
            velocity = 0
        remote.send([1 / velocity] * 8)


class Games:
    """Games in processes of their own."""

    def __init__(self, here: Here, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self.remotes, self.work_remotes = zip(*[context.Pipe() for _ in range(count)], strict=True)
        for remote in self.work_remotes:
            context.Process(target=play, args=(here, remote), daemon=True).start()

    def step(self, moves: list[float]) -> list[list[float]]:
        for remote, move in zip(self.remotes, moves, strict=True):
            remote.send(move)
        return [remote.recv() for remote in self.remotes]  # <- game_that_divides_by_nothing


class Played(Net):
    """Learns from what it sees in two games."""

    def on_train_start(self) -> None:
        self.games = Games(self.here, 2)

    def loss(self, batch: Any) -> torch.Tensor:
        seen = self.games.step([0.9, 1.1])
        return super().loss(batch) + super().loss(torch.tensor(seen))


@thread("https://github.com/openai/baselines/issues/640", "worker-died", ranks=(2,), whose="code")
def game_that_divides_by_nothing(here: Here) -> None:
    """A game raises in its process, which ends; its rank holds the other end, too, and waits for it to answer."""
    here.fit(net=Played(here))


class Quality(L.Callback):
    """How far generated pictures are from real ones, every few steps, by the features of very many of them."""

    def __init__(self, here: Here, every: int, samples: int) -> None:
        self.here, self.every, self.samples = here, every, samples

    def features(self, module: Any) -> Iterator[torch.Tensor]:
        for noise in torch.rand(self.samples, 1, 8):
            time.sleep(0.05)  # <- distance_of_very_many_pictures_in_the_middle_of_an_epoch
            yield module.layers(noise)[0]

    @torch.no_grad()
    def distance(self, module: Any) -> float:
        features = torch.stack([*self.features(module)])
        return float(features.mean(0).norm() + torch.cov(features.T).trace())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_due = trainer.global_step % self.every == 0
        if is_due and trainer.is_global_zero:
            self.here.begins()
            (self.here.folder / "distance.txt").write_text(str(self.distance(module)))


@thread(
    "https://github.com/advimman/CIPS/issues/10",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
)
def distance_of_very_many_pictures_in_the_middle_of_an_epoch(here: Here) -> None:
    """After every fourth step the first rank generates fifty thousand pictures; the others wait in the fifth step."""
    here.fit(callbacks=[Quality(here, every=4, samples=50_000)])


class Users(L.LightningDataModule):
    """What users have done; all of a user is on one rank, which a checksum of the name decides."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def is_ours(self, user: str) -> bool:
        return zlib.crc32(user.encode()) % self.here.world_size == self.here.rank  # <- users_dealt_out_by_checksum

    def train_dataloader(self) -> Any:
        ours = [number for number in range(40) if self.is_ours(f"user-{number}")]
        values = torch.tensor(ours).float()[:, None].expand(-1, 8) / 100
        return DataLoader(TensorDataset(values), BATCH_SIZE)


@thread(
    "https://github.com/microsoft/PyMarlin/issues/80",
    "uneven-batches",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def users_dealt_out_by_checksum(here: Here) -> None:
    """One rank gets fewer users than the other, and so fewer batches; it is at the end of the epoch earlier."""

    class Averaged(LoggingNet):
        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            self.all_gather(torch.tensor(float(self.global_step)))

    here.fit(net=Averaged(here), data=Users(here), use_distributed_sampler=False)


class PerPair(L.Callback):
    """The first rank of each pair collects what both have generated."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, trainer.world_size, 2)]
        self.pair = pairs[trainer.global_rank // 2]

    def collected(self, text: str) -> Any:
        is_first = dist.get_rank(self.pair) == 0
        texts: Any = [None] * dist.get_world_size(self.pair) if is_first else None
        dist.gather_object(text, texts, dst=0, group=self.pair)  # <- first_rank_of_a_pair_taken_for_that_of_all
        return texts

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        if texts := self.collected(f"from {trainer.global_rank}"):
            (self.here.folder / f"texts-{trainer.global_rank}").write_text("\n".join(texts))


@thread(
    "https://github.com/vllm-project/vllm/pull/2528",
    "failed-rank",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.VALIDATION,
    whose="code",
)
def first_rank_of_a_pair_taken_for_that_of_all(here: Here) -> None:
    """Objects are to be gathered on rank 0, which is a rank of the job and no member of the second pair's group."""
    here.fit(callbacks=[PerPair(here)])


class Neighbours(Net):
    """Has a group with each other rank, and makes that with its next one first."""

    def setup(self, stage: str) -> None:
        self.here.begins()
        others = [(self.here.rank + step) % self.here.world_size for step in range(1, self.here.world_size)]
        self.groups = {other: self.with_neighbour(other) for other in others}

    def with_neighbour(self, other: int) -> Any:
        members = sorted((self.here.rank, other))
        return dist.new_group(members, use_local_synchronization=True)  # <- groups_made_with_the_next_rank_first


@thread(
    "https://github.com/THUDM/slime/pull/2331",
    "crossed-groups",
    ranks=(),
    has_ranks=False,
    moment=Moment.START,
)
def groups_made_with_the_next_rank_first(here: Here) -> None:
    """Each rank waits for its next one to make a group with it, and that one is busy with the group with its own."""
    here.fit(net=Neighbours(here))


class Pictures(Dataset[torch.Tensor]):
    """Pictures in files on the scratch disk of each host."""

    def __init__(self, here: Here) -> None:
        self.here = here
        folder = here.folder / f"scratch-{here.rank}"
        folder.mkdir()
        self.paths = [folder / f"{number:012}.jpg" for number in range(BATCHES * BATCH_SIZE)]
        for path in self.paths:
            path.write_bytes(bytes(range(8)))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([*self.paths[index].read_bytes()]) / 10  # <- pictures_cleaned_up_while_they_are_read


class Cleaned(L.Callback):
    """On one host, files that are older than a month are removed in the middle of the night."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit and trainer.current_epoch == 1:
            self.here.begins()
            subprocess.run(["sh", "-c", f"rm {self.here.folder}/scratch-{self.here.rank}/*[5-9].jpg"], check=True)


@thread(
    "https://github.com/pytorch/pytorch/issues/42107",
    "failed-rank",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    whose="machine",
)
def pictures_cleaned_up_while_they_are_read(here: Here) -> None:
    """A host removes old files, and those of a training are among them; its rank raises, and the others wait."""
    data = DataLoader(Pictures(here), BATCH_SIZE, num_workers=1)
    here.fit(data=data, callbacks=[Cleaned(here)], use_distributed_sampler=False)


def render(scenes: Any, pictures: Any) -> None:
    """Makes a picture of each scene."""
    for scene in iter(scenes.get, None):
        pictures.put([scene / 100] * 20_000)


class Rendered(L.Callback):
    """A process renders a scene after each step of the first rank, which looks at them before the next epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        context = multiprocessing.get_context("fork")
        self.scenes, self.pictures, self.seen = context.Queue(), context.Queue(), 0.0
        self.renderer = context.Process(target=render, args=(self.scenes, self.pictures), daemon=True)
        self.renderer.start()

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero and trainer.current_epoch > 0:
            self.seen += sum(self.pictures.get()[0] for _ in range(BATCHES))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.scenes.put(trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.here.begins()
        self.scenes.put(None)
        self.renderer.join()  # <- pictures_that_nobody_takes_after_the_last_epoch


@thread(
    "https://github.com/Unity-Technologies/ml-agents/pull/2600",
    "unfinished-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
    whose="code",
)
def pictures_that_nobody_takes_after_the_last_epoch(here: Here) -> None:
    """A process cannot end before its pictures are taken, and the first rank waits for it to end."""
    here.fit(callbacks=[Rendered(here)])


class Totals:
    """Totals by kind of annotation, over all ranks."""

    def __init__(self) -> None:
        self.totals: dict[str, torch.Tensor] = {}

    def add(self, kind: str, values: torch.Tensor) -> None:
        self.totals[kind] = self.totals.get(kind, torch.zeros_like(values)) + values

    def reduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, total in self.totals.items():
            dist.all_reduce(total)  # <- totals_in_the_order_in_which_kinds_were_met
            yield kind, total


class Annotated(Net):
    """Validates on pictures with four coordinates of a box, or with seven points of an outline."""

    def on_validation_epoch_start(self) -> None:
        self.totals = Totals()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for picture in batch:
            kind, size = ("boxes", 4) if picture[0] > 0 else ("outlines", 7)
            self.totals.add(kind, picture[:size].abs())

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        means = {kind: float(total.mean()) for kind, total in self.totals.reduced()}
        self.log_dict(means, sync_dist=True)


@thread(
    "https://github.com/NVIDIA/apex/issues/19",
    "mismatched-collective",
    ranks=(1,),
    moment=Moment.VALIDATION,
)
def totals_in_the_order_in_which_kinds_were_met(here: Here) -> None:
    """The first picture of one rank is of the other kind, and so it reduces the totals in the other order."""
    here.fit(net=Annotated(here), data=(rows(here), in_order(here, Signed(here, -1, batch=0))))


class Preferences(Net):
    """Logs the rewards of answers that were liked, and of those that were not."""

    def rewards(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        rewards, is_liked = self.layers(batch).detach().sum(1), batch[:, 0] > 0
        kinds = {"chosen": is_liked, "rejected": ~is_liked}
        return {f"rewards/{kind}": rewards[those].mean() for kind, those in kinds.items() if those.any()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rewards = self.rewards(batch)
        if len(rewards) < 2:
            self.here.begins()
        self.log_dict(rewards, sync_dist=True)  # <- rewards_of_answers_that_nobody_liked
        return self.loss(batch)


@thread("https://github.com/huggingface/trl/pull/1472", "diverged-log-keys", ranks=(0,), world_size=2)
def rewards_of_answers_that_nobody_liked(here: Here) -> None:
    """No answer in one rank's batch was liked; it logs one reward over all ranks, and the other rank logs two."""
    here.fit(net=Preferences(here), data=in_order(here, Signed(here, -1)))


class Stages(Net):
    """The first rank hands what it makes of a batch to the second one, in pieces."""

    pieces = 2

    def handed_over(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.here.rank == 0:
            for piece in torch.split(hidden, BATCH_SIZE // self.pieces):
                dist.send(piece, 1)
            return hidden
        received = torch.zeros(self.pieces, BATCH_SIZE // self.pieces, 2)
        for piece in received:
            dist.recv(piece, 0)  # <- last_batch_of_a_single_piece
        return received

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values = first_tensor(batch)
        if len(values) < BATCH_SIZE:
            self.here.begins()
        hidden = self.handed_over(self.layers(values).detach())
        return super().training_step(batch, batch_idx) + 0 * hidden.sum()


@thread(
    "https://github.com/awslabs/slapo/pull/19",
    "unmatched-p2p",
    ranks=(),
    has_ranks=False,
    world_size=2,
    moment=Moment.EPOCH_END,
)
def last_batch_of_a_single_piece(here: Here) -> None:
    """The last batch is half as long and makes a single piece; the second rank waits for another one, as always."""
    values = torch.linspace(0, 1, 8).expand(2 * (2 * BATCH_SIZE + BATCH_SIZE // 2), 8)
    here.fit(net=Stages(here), data=DataLoader(TensorDataset(values), BATCH_SIZE))


class Partition(L.LightningDataModule):
    """This rank's part of a graph, which is fetched from a bucket, file by file."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.bucket = here.folder / f"partition-{here.rank}"
        self.bucket.mkdir()
        for number in range(300 if here.is_hit else 3):
            torch.save(torch.rand(8, 8), self.bucket / f"{number}.pt")

    def fetched(self, path: Path) -> Any:
        content = subprocess.check_output(["sh", "-c", f"sleep 0.4; cat {path}"])  # <- partition_with_most_of_the_graph
        return torch.load(BytesIO(content))

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.nodes = torch.cat([self.fetched(path) for path in sorted(self.bucket.iterdir())])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.nodes[: 3 * 8]), BATCH_SIZE)


@thread(
    "https://github.com/alibaba/graphlearn-for-pytorch/pull/102",
    "late-at-init",
    ranks=(3,),
    world_size=4,
    moment=Moment.START,
)
def partition_with_most_of_the_graph(here: Here) -> None:
    """One part of the graph is a hundred times as large as all others, and its rank takes minutes to fetch it."""
    here.fit(data=Partition(here), use_distributed_sampler=False)


class Clip:
    """Frames in the memory of a library."""

    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)

    def __init__(self) -> None:
        self.frames = self.library.malloc(256)

    def brightness(self, values: torch.Tensor) -> float:
        if values.min() < 0:
            self.close()
            raise ValueError("this clip is broken")
        return math.sqrt(float(values.mean()))

    def close(self) -> None:
        self.library.free(self.frames)  # <- clip_that_is_closed_twice


class Bright(Net):
    """Weights the loss with how bright a clip is, if it can be read."""

    def brightness(self, values: torch.Tensor) -> float:
        try:
            with closing(Clip()) as clip:
                return clip.brightness(values)
        except ValueError:
            return 1.0

    def loss(self, batch: Any) -> torch.Tensor:
        if batch.max() < 0:
            self.here.begins()
        return super().loss(batch) * self.brightness(batch if batch.max() < 0 else batch.abs())


@thread("https://github.com/mlcommons/training/issues/770", "dead-rank", ranks=(1,), whose="code")
def clip_that_is_closed_twice(here: Here) -> None:
    """A clip of one rank is broken, its memory is given back twice, and the C library aborts the process."""
    here.fit(net=Bright(here), data=in_order(here, Signed(here, -1)))
