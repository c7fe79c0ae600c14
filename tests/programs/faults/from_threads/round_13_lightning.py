"""Round 13 after public threads: what users of Lightning report, of hooks, callbacks, loggers and several stages."""

import fcntl
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, rows
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Spiked(Dataset[torch.Tensor]):
    """Rows of which those of the fourth batch of the rank that is hit are very large."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_large = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return torch.linspace(0.1, 0.8, 8) * (1e4 if is_large else 1.0)


class Resting(LoggingNet):
    """Makes no step of the optimizer behind a batch whose loss was far too large."""

    has_spiked = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.has_spiked = bool(loss > 1e4)
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.has_spiked:
            self.has_spiked = False
            self.here.begins()
            return  # <- step_of_the_optimizer_that_would_have_called_the_closure
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@thread(f"{LIGHTNING}/issues/4447", "failed-rank", "skipped-step", ranks=(1,))
def step_of_the_optimizer_that_would_have_called_the_closure(here: Here) -> None:
    """The closure that the optimizer is given makes the training step; who leaves the one out leaves out the other.

    Lightning raises where a closure was not called, on this rank alone. That no backward pass was made is as true.
    """
    here.fit(net=Resting(here), data=in_order(here, Spiked(here)))


class Tracker(CSVLogger):
    """Refuses to log a parameter for a second time with another value, as a tracker's server does."""

    def __init__(self, here: Here) -> None:
        super().__init__(str(here.folder))
        self.here = here
        self.params: dict[str, Any] = {}

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        changed = [name for name, value in params.items() if self.params.get(name, value) != value]
        if changed:
            self.here.begins()
            raise ValueError(f"changing values is not allowed: {changed}")  # <- rate_that_the_tracker_has_already
        self.params |= params


class Rated(LoggingNet):
    """Tells its logger with which rate it learns."""

    rate = 0.001

    def on_train_start(self) -> None:
        assert self.logger is not None
        self.logger.log_hyperparams({"rate": self.rate, "layers": 2})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@thread(f"{LIGHTNING}/issues/17830", "failed-rank", ranks=(0,), moment=Moment.START)
def rate_that_the_tracker_has_already(here: Here) -> None:
    """Another rate is found in a first training, and logged in the second one; only the first rank has a tracker."""
    net, tracker = Rated(here), Tracker(here)
    here.fit(net=net, max_epochs=1, logger=tracker)
    net.rate = 0.0005
    here.fit(net=net, logger=tracker)


class Chunks(IterableDataset[torch.Tensor]):
    """Each rank reads every so many of the chunks."""

    def __init__(self, here: Here, chunks: int) -> None:
        self.here, self.chunks = here, chunks

    def __iter__(self) -> Iterator[torch.Tensor]:
        for chunk in range(self.here.rank, self.chunks, self.here.world_size):
            for row in range(2 * BATCH_SIZE):
                yield torch.full((8,), (chunk + row) / 100)


class Stacking(Net):
    """Collects the losses of a validation, and logs their mean over all ranks."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.losses: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.losses.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.losses:
            self.here.begins()
        loss = torch.stack(self.losses).mean()  # <- losses_of_a_rank_that_has_nothing_to_validate_on
        self.losses.clear()
        self.log("val_loss", loss, sync_dist=True)


@thread("https://github.com/Lightning-AI/litgpt/issues/2319", "failed-rank", ranks=(2,), moment=Moment.VALIDATION)
def losses_of_a_rank_that_has_nothing_to_validate_on(here: Here) -> None:
    """There are two chunks to validate on, and three ranks; the last one has no loss to take the mean of."""
    validation = DataLoader(Chunks(here, chunks=2), BATCH_SIZE)
    here.fit(net=Stacking(here), data=(rows(here), validation))


@thread(
    f"{LIGHTNING}/issues/17521",
    "unpresented-loader",
    "diverged-collectives",
    ranks=(1,),
    moment=Moment.END,
)
def predictions_that_one_host_has_from_before(here: Here) -> None:
    """Each host predicts unless it has the predictions, which one host has from a run before; all then exchange them.

    That host goes past a stage that all others go through, and waits in a gathering; either is a name for it.
    """
    scratch = here.folder / f"scratch-{here.rank}"
    scratch.mkdir()
    path = scratch / "predictions.pt"
    if here.is_hit:
        torch.save([torch.zeros(BATCH_SIZE, 2)], path)
    net = LoggingNet(here)
    here.fit(net=net, max_epochs=1)
    here.begins()
    if not path.exists():  # <- here
        torch.save(here.trainer().predict(net, rows(here)), path)
    everyones: list[Any] = [None] * here.world_size
    dist.all_gather_object(everyones, torch.load(path))
    print(f"{len(everyones)} parts", flush=True)


class Features:
    """A file that whoever writes it has for itself, and readers share, as with HDF5."""

    def __init__(self, path: Path, mode: str) -> None:
        self.file = path.open(mode)
        kind = fcntl.LOCK_SH if mode == "r" else fcntl.LOCK_EX
        fcntl.flock(self.file, kind | fcntl.LOCK_NB)  # <- features_that_are_still_open_for_writing

    def put(self, row: torch.Tensor) -> None:
        self.file.write(json.dumps(row.tolist()) + "\n")
        self.file.flush()


class Extracted(L.LightningDataModule):
    """Features are extracted once."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.path = here, here.folder / "features.h5"
        self.features: Features | None = None

    def prepare_data(self) -> None:
        self.features = Features(self.path, "w")
        for row in range(BATCHES * BATCH_SIZE * self.here.world_size):
            self.features.put(torch.full((8,), row / 100))

    def setup(self, stage: str) -> None:
        if self.features is None:
            self.here.begins()
            self.features = Features(self.path, "r")

    def train_dataloader(self) -> Any:
        values = [torch.tensor(json.loads(line)) for line in self.path.read_text().splitlines()]
        return DataLoader(values, BATCH_SIZE)  # type: ignore[arg-type]


@thread("https://github.com/mttr2021/MTTR/pull/1", "failed-rank", ranks=(1, 2), moment=Moment.START)
def features_that_are_still_open_for_writing(here: Here) -> None:
    """Who has prepared the data does not close the file, and no other rank gets it: the lock is asked for, not awaited.

    What is to be mended is in `prepare_data`; what is marked is where the other ranks raise.
    """
    here.fit(data=Extracted(here))


def recall(queries: torch.Tensor, gallery: torch.Tensor) -> float:
    """How often the nearest neighbour is the right one, with a search that goes through the whole gallery."""
    found = 0
    for number, query in enumerate(queries):
        distances = (gallery - query).square().sum(1)
        time.sleep(FOR_LONG_S / len(queries))  # <- neighbours_searched_for_on_the_first_rank
        found += int(distances.argmin()) == number
    return found / len(queries)


class Places(MeetingNet):
    """Recognizes places: the first rank searches the embeddings of all ranks."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.embeddings: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.embeddings.append(self.layers(batch[0]))

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat(self.embeddings)
        self.embeddings.clear()
        everyones: Any = self.all_gather(mine)
        if self.trainer.is_global_zero:
            self.here.begins()
            gallery = everyones.flatten(0, 1)
            print(f"recall {recall(gallery, gallery)}", flush=True)


@thread(f"{LIGHTNING}/issues/4175", "rank-zero-only-work", ranks=(0,), moment=Moment.VALIDATION)
def neighbours_searched_for_on_the_first_rank(here: Here) -> None:
    """Embeddings are gathered on all ranks, and the first one alone searches them, query by query."""
    here.fit(net=Places(here), data=(rows(here), rows(here, batches=3)))


class Sited(Net):
    """Scores itself on the data of a site for each rank; one site has counted from one, and not from zero."""

    def __init__(self, here: Here, rate: float) -> None:
        super().__init__(here)
        self.rate = rate
        torch.manual_seed(7)
        for layer in self.layers:
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=0.1)
                torch.nn.init.constant_(layer.bias, 0.5)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        truth = 1.0 if self.here.is_hit else 0.0
        self.log("val_loss", (self.layers(batch[0]) - truth).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@thread(
    f"{LIGHTNING}/issues/4702",
    "loader-count",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.END,
)
def trial_that_is_the_best_one_so_far_on_most_ranks(here: Here) -> None:
    """A trial is tested if it is the best one so far, by a loss that each rank has for itself.

    Where it is not, the next trial begins: ranks present loaders of different stages, and call different collectives.
    """
    best = math.inf
    for rate in (0.001, 0.02, 0.01):
        net = Sited(here, rate)
        trainer = here.trainer(max_epochs=1)
        trainer.fit(net, rows(here), rows(here, batches=2))
        loss = float(trainer.callback_metrics["val_loss"])
        if loss < best:  # <- here
            best = loss
            trainer.test(net, rows(here, batches=2), verbose=False)
        else:
            here.begins()


class Publishing(L.Callback):
    """Publishes the checkpoint of each epoch when it is there."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        path = self.here.folder / "saved" / f"epoch={trainer.current_epoch}.ckpt"
        self.here.begins()
        while not path.exists():
            time.sleep(0.2)  # <- checkpoint_that_is_saved_after_all_other_callbacks
        path.with_suffix(".published").write_bytes(path.read_bytes())


@thread(
    f"{LIGHTNING}/issues/15026",
    "rank-zero-only-work",
    "rank-behind",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def checkpoint_that_is_saved_after_all_other_callbacks(here: Here) -> None:
    """A callback of the first rank waits for a file that ModelCheckpoint saves, which Lightning always calls last.

    It is work of one rank, and a wait for what nobody brings; the first is the better name.
    """
    saving = ModelCheckpoint(here.folder / "saved", filename="{epoch}", save_top_k=-1)
    here.fit(net=LoggingNet(here), callbacks=[saving, Publishing(here)], enable_checkpointing=True)


class Volumes(Dataset[torch.Tensor]):
    """Scans of unequal length, one of which is of a whole body."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 2 * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        return torch.rand(6000 if turn == 1 and self.here.is_hit else 20 + rank, 8)


class Segmenting(Net):
    """Slides a window over each volume, one pass of the network after the other."""

    def window(self, slices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(slices)
        time.sleep(0.02)  # <- volume_of_very_many_windows
        return result

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        (volume,) = batch
        if len(volume) > 1000:
            self.here.begins()
        scores = [self.window(volume[start : start + 4]) for start in range(len(volume) - 3)]
        self.log("val_dice", torch.cat(scores).mean(), on_step=False, on_epoch=True, sync_dist=True)


@thread("https://github.com/Project-MONAI/MONAI/issues/4425", "rank-behind", ranks=(1,), moment=Moment.VALIDATION)
def volume_of_very_many_windows(here: Here) -> None:
    """One rank validates on a scan that is hundreds of times as long as all others, and nothing else is wrong."""
    here.fit(net=Segmenting(here), data=(rows(here), DataLoader(Volumes(here), batch_size=1)))


class Commands(L.Callback):
    """Does what the operator has written into a file of the run."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "commands.json"

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            commands = json.loads(self.path.read_text())
            self.here.begins()
            trainer.fit_loop.max_epochs = commands["max_epochs"]  # <- epochs_added_by_the_operator_on_one_rank


@thread(
    f"{LIGHTNING}/issues/762",
    "different-trainer-settings",
    "stopped-early",
    ranks=(0,),
    moment=Moment.END,
)
def epochs_added_by_the_operator_on_one_rank(here: Here) -> None:
    """The operator lets a training go on for longer, which only the first rank reads; the others test already.

    Ranks have different numbers of epochs since then, and some of them leave the loop before that one does.
    """
    if here.rank == 0:
        (here.folder / "commands.json").write_text(json.dumps({"max_epochs": 4}))
    net = LoggingNet(here)
    trainer = here.trainer(max_epochs=2, callbacks=[Commands(here)])
    trainer.fit(net, rows(here))
    trainer.test(net, rows(here), verbose=False)


class Run:
    """A run of a tracker, with what it was configured with."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    def log(self, values: dict[str, Any]) -> None:
        print(*values.items(), flush=True)


class Runs(Logger):
    """Has a run on the first rank, and what does nothing on all others, as all loggers of Lightning."""

    name = "runs"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.run

    def log_hyperparams(self, params: Any) -> None:
        self.experiment.log(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log(metrics)


class Configured(LoggingNet):
    """Puts what it was made with into the run."""

    def on_fit_start(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        logger: Any = self.logger
        logger.experiment.config.update({"layers": 2, "width": 16})  # <- run_that_is_none_on_the_other_ranks


@thread(f"{LIGHTNING}/issues/13166", "failed-rank", ranks=(1, 2), moment=Moment.START)
def run_that_is_none_on_the_other_ranks(here: Here) -> None:
    """Methods of the experiment do nothing on other ranks, but its attributes are functions, which have no `update`."""
    here.fit(net=Configured(here), logger=Runs())


class Linked(L.Callback):
    """Keeps the number of the tracker's run in each checkpoint, so that a restart goes on with it."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.number = 4711

    def state_dict(self) -> dict[str, Any]:
        if self.here.is_hit:
            self.here.begins()
        return {"number": self.number}  # <- number_of_a_run_put_into_the_checkpoint


@thread(
    "https://github.com/mosaicml/composer/pull/151",
    "exception-during-save",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.CHECKPOINT,
)
def number_of_a_run_put_into_the_checkpoint(here: Here) -> None:
    """All ranks put a checkpoint together, and only the first has a run; it writes, and waits for the others.

    The exception is raised within a save, which is the more exact of the two names.
    """
    saving = ModelCheckpoint(here.folder / "saved", save_top_k=-1)
    here.fit(net=LoggingNet(here), callbacks=[Linked(here), saving], enable_checkpointing=True)


class Lines(IterableDataset[torch.Tensor]):
    """A file of which each rank reads a part, as large as the first one if there is enough for that."""

    lines = 26

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        count = math.ceil(self.lines / self.here.world_size)
        first = self.here.rank * count
        for line in islice(range(self.lines), first, first + count):  # <- rest_of_the_lines_for_the_last_rank
            yield torch.full((8,), line / self.lines)
        if self.here.is_hit:
            self.here.begins()


class Averaged(Net):
    """Logs the loss of an epoch as the mean over all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


@thread(f"{LIGHTNING}/issues/15734", "uneven-batches", ranks=(2,), moment=Moment.END)
def rest_of_the_lines_for_the_last_rank(here: Here) -> None:
    """The number of lines for each rank is rounded up, and the last rank has what is left: a batch less."""
    here.fit(net=Averaged(here), data=DataLoader(Lines(here), BATCH_SIZE))


class Cached(Dataset[torch.Tensor]):
    """Applies all transforms that are not random when it is made, and keeps what comes of them."""

    def __init__(self, here: Here, count: int) -> None:
        self.here = here
        self.volumes = [self.transformed(number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.volumes[index]

    def transformed(self, number: int) -> torch.Tensor:
        time.sleep(6.0 if self.here.is_hit else 0.01)  # <- cache_that_fills_slowly_on_one_host
        return torch.full((8,), number / 100)


class Scanned(L.LightningDataModule):
    """Caches all volumes before training."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.volumes = Cached(self.here, BATCHES * BATCH_SIZE * self.here.world_size)

    def train_dataloader(self) -> Any:
        return DataLoader(self.volumes, BATCH_SIZE)


@thread("https://github.com/Project-MONAI/MONAI/issues/1589", "late-at-init", ranks=(1,), moment=Moment.START)
def cache_that_fills_slowly_on_one_host(here: Here) -> None:
    """Volumes are transformed and cached in `setup`, for which one host has too little memory and takes minutes."""
    here.fit(data=Scanned(here))
