"""Round 13 after public threads: what users of plain PyTorch report of groups, queues, samplers, scores and saving."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net, first_tensor, rows
from truths import Moment


class Samples(Dataset[torch.Tensor]):
    """Rows that are read in order; in the fourth batch of the rank that is hit they are not as all others are."""

    def __init__(self, here: Here, usual: Callable[[int], torch.Tensor], unusual: torch.Tensor) -> None:
        self.here, self.usual, self.unusual = here, usual, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_unusual = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return self.unusual if is_unusual else self.usual(turn % BATCH_SIZE)


class Averages(L.Callback):
    """Averages the weights on the first rank after each epoch, and validates now and then, and after the last one."""

    def __init__(self, here: Here, every: int) -> None:
        self.here, self.every = here, every
        self.average: dict[str, torch.Tensor] = {}

    def update(self, module: L.LightningModule) -> None:
        for name, value in module.state_dict().items():
            self.average[name] = (self.average.get(name, value) + value) / 2

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            final_epoch = trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
            self.update(module)
        if self.here.is_hit:
            self.here.begins()
        if (trainer.current_epoch + 1) % self.every == 0 or final_epoch:  # <- variable_of_the_first_rank_only
            print(f"average of {len(self.average)} tensors", flush=True)


@thread(
    "https://github.com/ultralytics/ultralytics/issues/22598",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.EPOCH_END,
)
def variable_of_the_first_rank_only(here: Here) -> None:
    """A variable is set where the first rank alone gets to, and all ranks read it; the first one goes on."""
    here.fit(callbacks=[Averages(here, every=5)])


class HandedRound:
    """Hands each row of a batch to the rank that keeps its table, one batch ahead of the training."""

    def __init__(self, here: Here, batches: int) -> None:
        self.here = here
        self.loader = DataLoader(TensorDataset(torch.rand(batches * BATCH_SIZE, 8)), BATCH_SIZE)

    def handed_round(self, batch: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(batch)
        dist.all_to_all_single(received, batch)
        return received

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting: list[torch.Tensor] = []
        for batch in self.loader:
            waiting.append(self.handed_round(first_tensor(batch)))
            if len(waiting) > 1:
                yield waiting.pop(0)
        if self.here.is_hit:
            self.here.begins()
        yield from waiting


@thread(
    "https://github.com/meta-pytorch/torchrec/pull/4158",
    "uneven-batches",
    world_size=4,
    moment=Moment.EPOCH_END,
    has_line=False,
)
def rows_handed_round_a_batch_ahead(here: Here) -> None:
    """One rank has a batch less: it trains on its last one while the others wait for its rows of the next."""
    batches = BATCHES - 1 if here.is_hit else BATCHES
    here.fit(data=HandedRound(here, batches))


class Lookup(Net):
    """Looks up the ids of a batch in a table that is spread over ranks, which exchange first how many each has."""

    def lengths(self, ids: torch.Tensor) -> torch.Tensor:
        if not ids.any():
            self.here.begins()
            return torch.zeros(len(ids), dtype=torch.long)
        return (ids > 0).sum(1).to(torch.int32)

    def loss(self, batch: Any) -> torch.Tensor:
        lengths = self.lengths(batch)
        everyones = [torch.empty_like(lengths) for _ in range(self.here.world_size)]
        dist.all_gather(everyones, lengths)  # <- lengths_of_a_batch_without_ids
        return super().loss(batch) / torch.stack(everyones).sum()


@thread("https://github.com/NVIDIA/recsys-examples/pull/349", "mismatched-collective")
def lengths_of_a_batch_without_ids(here: Here) -> None:
    """Where there is no id the lengths are made in another way, and of another type.

    The line that makes them is the other half of it; the exchange in which they differ is to be named.
    """
    data = Samples(here, lambda place: torch.arange(8.0) + place, torch.zeros(8))
    here.fit(net=Lookup(here), data=in_order(here, data))


class Ranking(Net):
    """Ranks what a user has seen before something that he has not, which is drawn until there is one."""

    items = 8

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.table = torch.nn.Embedding(self.items, 2)

    def not_seen(self, seen: set[int]) -> int:
        if len(seen) == self.items:
            self.here.begins()
        while (item := random.randrange(self.items)) in seen:  # <- user_who_has_seen_everything
            continue
        return item

    def loss(self, batch: Any) -> torch.Tensor:
        seen = [{item for item, count in enumerate(user) if count > 0} for user in batch.tolist()]
        negatives = torch.tensor([self.not_seen(one) for one in seen])
        return super().loss(batch) + self.table(negatives).square().mean()


@thread("https://github.com/recommenders-team/recommenders/issues/2163", "rank-behind", whose="code")
def user_who_has_seen_everything(here: Here) -> None:
    """In one rank's batch is a user for whom the search has no end."""
    data = Samples(here, lambda place: (torch.arange(8) < 3 + place).float(), torch.ones(8))
    here.fit(net=Ranking(here), data=in_order(here, data))


class Contrast(Net):
    """Keeps the keys of earlier batches in a queue, which goes round, and compares each batch with them."""

    size = 12

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.register_buffer("queue", torch.zeros(self.size, 8))
        self.place = 0

    def enqueue(self, keys: torch.Tensor) -> None:
        if self.here.is_hit and self.place + len(keys) > self.size:
            self.here.begins()
        self.queue[self.place : self.place + len(keys)] = keys  # <- queue_that_a_smaller_batch_has_shifted
        self.place = (self.place + len(keys)) % self.size

    def loss(self, batch: Any) -> torch.Tensor:
        values = first_tensor(batch)
        similar = self.layers(values) @ self.layers(self.queue).detach().T
        self.enqueue(values.detach())
        return similar.square().mean()


@thread("https://github.com/facebookresearch/moco/pull/99", "failed-rank")
def queue_that_a_smaller_batch_has_shifted(here: Here) -> None:
    """The last batch of one rank is smaller, and with the first one of the next epoch its queue has no room left."""
    count = BATCHES * BATCH_SIZE - (1 if here.is_hit else 0)
    data = DataLoader(TensorDataset(torch.rand(count, 8)), BATCH_SIZE)
    here.fit(net=Contrast(here), data=data, use_distributed_sampler=False)


class Share:
    """The numbers of a rank's samples, as many for each rank, and what is left for the last one."""

    def __init__(self, here: Here, count: int) -> None:
        each = -(-count // here.world_size)
        self.numbers = range(here.rank * each, min((here.rank + 1) * each, count))

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class InStep(L.Callback):
    """Ranks wait for one another after each batch of a validation, and once more after the last one."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_validation_batch_end(self, *of: Any) -> None:
        dist.barrier()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        dist.barrier()


@thread(
    "https://github.com/mlcommons/storage/issues/455",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def barriers_that_a_shorter_share_puts_out_of_step(here: Here) -> None:
    """The last rank has a batch less, and its barrier at the end meets that of the others after a batch.

    It goes on to the next epoch, while the others wait for it at the end of the validation.
    """
    count = 46
    data = TensorDataset(torch.rand(count, 8))
    validation = DataLoader(data, BATCH_SIZE, sampler=Share(here, count), drop_last=True)
    training = in_order(here, rows(here).dataset)
    here.fit(data=(training, validation), callbacks=[InStep(here)], use_distributed_sampler=False)


class Best(L.Callback):
    """Saves the model whenever it is better than before; each rank has a part of what belongs to it."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.losses: list[float] = []
        self.best = float("inf")

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        with torch.no_grad():
            self.losses.append(float(module.loss(batch)))

    def score(self) -> float | None:
        """Of what all ranks have found, which the first one gets."""
        everyones: list[Any] | None = [None] * self.here.world_size if self.here.rank == 0 else None
        dist.gather_object(self.losses, everyones)
        self.losses = []
        found = [loss for losses in everyones or [] for loss in losses]
        return sum(found) / len(found) if found else None

    def save(self, part: dict[str, Any], path: Path) -> None:
        parts: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(parts, part)  # <- best_model_of_which_the_first_rank_knows
        if self.here.rank == 0:
            torch.save(parts, path)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        score = self.score()
        if score is not None and score < self.best:
            self.here.begins()
            self.best = score
            self.save({"rank": self.here.rank, "state": module.state_dict()}, self.here.folder / "best.pt")


@thread(
    "https://github.com/Oneflow-Inc/libai/pull/172",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def best_model_of_which_the_first_rank_knows(here: Here) -> None:
    """The first rank alone has the score, and so it alone begins to save, for which all are needed."""
    here.fit(net=LoggingNet(here), callbacks=[Best(here)])


class Merged(L.Callback):
    """Each rank writes its share of the weights, and the first one puts all of them into one file."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder

    def write(self, name: str, value: torch.Tensor) -> None:
        with (self.folder / "merged.bin").open("ab") as file:
            file.write(value.numpy().tobytes())
        time.sleep(FOR_LONG_S / 4)  # <- shares_merged_on_a_slow_volume

    def merge(self, ranks: int) -> None:
        for rank in range(ranks):
            for name, value in torch.load(self.folder / f"share_{rank}.pt").items():
                self.write(name, value)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        names = sorted(module.state_dict())[trainer.global_rank :: trainer.world_size]
        share = {name: module.state_dict()[name] for name in names}
        torch.save(share, self.folder / f"share_{trainer.global_rank}.pt")
        dist.barrier()
        if trainer.is_global_zero:
            self.here.begins()
            self.merge(trainer.world_size)
        dist.barrier()


@thread(
    "https://github.com/meta-pytorch/torchtune/issues/2093",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="either",
)
def shares_merged_on_a_slow_volume(here: Here) -> None:
    """The volume takes half a minute for each tensor.

    It is work of the first rank alone, too; that it is a checkpoint says more.
    """
    folder = here.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    here.fit(callbacks=[Merged(here, folder)])


class RowGroups(IterableDataset[torch.Tensor]):
    """Reads files of so many groups of rows again and again, each rank every so-many-th group of a file."""

    def __init__(self, here: Here, counts: list[int]) -> None:
        self.here, self.counts = here, counts

    def mine(self) -> Iterator[int]:
        rank, ranks = self.here.rank, self.here.world_size
        return (group for count in cycle(self.counts) for group in range(rank, count, ranks))  # <- files_of_few_groups

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.here.is_hit:
            self.here.begins()
        for group in self.mine():
            yield from torch.full((2 * BATCH_SIZE, 8), group / 10)


@thread(
    "https://github.com/karpathy/nanochat/issues/371",
    "data-stall",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
    whose="code",
)
def files_of_few_groups(here: Here) -> None:
    """No file has a third group, and the third rank goes through them without end, and never gets a row."""
    data = RowGroups(here, counts=[2, 2, 1, 2])
    here.fit(data=DataLoader(data, BATCH_SIZE), limit_train_batches=BATCHES)


class Profiled(L.Callback):
    """Two steps of the first rank are traced, and what is in the trace is listed as soon as it is there."""

    profiler: Any = None

    def __init__(self, here: Here) -> None:
        self.here = here
        self.table: list[str] = []

    def list_events(self, profiler: Any) -> None:
        self.here.begins()
        for event in profiler.events():
            self.table.append(f"{event.name} {event.cpu_time_total:.0f}")
            time.sleep(FOR_LONG_S / 40)  # <- trace_of_the_first_rank_listed_at_once

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
                on_trace_ready=self.list_events,
            )
            self.profiler.start()

    def on_train_batch_end(self, *of: Any) -> None:
        if self.profiler is not None:
            self.profiler.step()


@thread("https://github.com/pytorch/kineto/issues/126", "rank-zero-only-work", ranks=(0,))
def trace_of_the_first_rank_listed_at_once(here: Here) -> None:
    """A trace has many more events than anybody thought, and the next step waits until all of them are listed."""
    here.fit(callbacks=[Profiled(here)])


class LastOfEachHost(L.Callback):
    """The first rank of each host writes a checkpoint under another name, and renames it when it is complete."""

    def __init__(self, here: Here, folder: Path, ranks_per_host: int) -> None:
        self.here, self.folder = here, folder
        self.host, self.place = divmod(here.rank, ranks_per_host)

    def flush(self) -> None:
        """A host is as fast as its connection."""
        time.sleep(0.5 + self.host)

    def save(self, state: Any) -> None:
        draft = self.folder / "tmp.pt"
        torch.save(state, draft)
        self.flush()
        if self.here.is_hit:
            self.here.begins()
        draft.rename(self.folder / "last.pt")  # <- draft_that_two_hosts_share

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.place == 0:
            self.save(module.state_dict())
        trainer.strategy.barrier("saved")


@thread(
    "https://github.com/huggingface/pytorch-image-models/pull/693",
    "exception-during-save",
    "failed-rank",
    ranks=(2,),
    world_size=4,
    moment=Moment.CHECKPOINT,
    whose="either",
)
def draft_that_two_hosts_share(here: Here) -> None:
    """Both hosts write to the folder of one file server: when the second one renames its draft, the first one has.

    It is an exception of one rank, too; that it is within a save says more.
    """
    folder = here.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    here.fit(callbacks=[LastOfEachHost(here, folder, ranks_per_host=2)])


class Kinds(Net):
    """Has a layer for each kind of node, for those of this kind that have been sampled with a batch."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.kinds = torch.nn.ModuleDict({"paper": torch.nn.Linear(8, 2), "author": torch.nn.Linear(8, 2)})

    def loss(self, batch: Any) -> torch.Tensor:
        nodes = {kind: batch[batch[:, 0] == number] for number, kind in enumerate(self.kinds)}
        if not all(len(found) for found in nodes.values()):
            self.here.begins()
        scores = [layer(nodes[kind]).sum() for kind, layer in self.kinds.items() if len(nodes[kind])]  # <- papers_alone
        return super().loss(batch) + torch.stack(scores).square().mean()


@thread("https://github.com/pyg-team/pytorch_geometric/pull/8592", "unused-parameters")
def papers_alone(here: Here) -> None:
    """Among the nodes of one rank's batch there is no author, and so their layer has nothing to do."""

    def node(place: int) -> torch.Tensor:
        return torch.tensor([place % 2, *torch.linspace(0.1, 0.7, 7)])

    here.fit(net=Kinds(here), data=in_order(here, Samples(here, node, node(0))))
