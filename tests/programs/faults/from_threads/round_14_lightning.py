"""Round 14 after public threads: what users of Lightning report, of metrics, samplers, callbacks and files of a run."""

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from from_threads.round_12_lightning import Scans
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torchmetrics import MeanMetric, Metric
from training import (
    BATCH_SIZE,
    BATCHES,
    FOR_LONG_S,
    IN_THE_MIDDLE,
    Here,
    LoggingNet,
    MeetingNet,
    Net,
    first_tensor,
    rows,
)
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Configuration(L.Callback):
    """Writes the settings of a run into its folder, and never over those of another run."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "config.json"

    def composed(self) -> str:
        time.sleep(0.2 if self.here.rank == 0 else 1.2)
        return json.dumps({"layers": 2, "width": 16})

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        text = self.composed()
        if self.path.exists():
            self.here.begins()
            raise RuntimeError(f"{self.path} exists")  # <- settings_that_the_first_rank_has_just_written
        if trainer.is_global_zero:
            self.path.write_text(text)


@thread(f"{LIGHTNING}/issues/11158", "failed-rank", ranks=(1, 2), moment=Moment.START)
def settings_that_the_first_rank_has_just_written(here: Here) -> None:
    """All ranks look for an older file, and only the first one writes; whoever looks later finds this run's own."""
    here.fit(net=LoggingNet(here), callbacks=[Configuration(here)])


class Worded(LoggingNet):
    """Puts its vocabulary into each checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.4)
        checkpoint["vocabulary"] = [f"word-{number}" for number in range(1000)]


class Milestone(L.Callback):
    """Saves one checkpoint early in the training, if there is none yet."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "milestone.ckpt"

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch or batch_idx != IN_THE_MIDDLE:
            return
        if self.here.is_hit:
            time.sleep(1.2)
            self.here.begins()
        if not self.path.exists():  # <- milestone_that_is_there_when_the_last_rank_looks
            trainer.save_checkpoint(self.path)


@thread(f"{LIGHTNING}/pull/5155", "diverged-collectives", ranks=(2,))
def milestone_that_is_there_when_the_last_rank_looks(here: Here) -> None:
    """Each rank looks for the file, and one comes so late that it finds what the others are about to save.

    They wait for it in the barrier of the save, and it waits for them in its next backward pass.
    """
    here.fit(net=Worded(here), callbacks=[Milestone(here)])


class Foreground(LoggingNet):
    """Has no loss where nothing is in the foreground."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not (batch > 0).any():
            self.here.begins()
            return 0.0  # <- number_given_back_in_place_of_a_loss
        return super().training_step(batch, batch_idx)


@thread(f"{LIGHTNING}/issues/9303", "failed-rank", ranks=(1,))
def number_given_back_in_place_of_a_loss(here: Here) -> None:
    """Lightning raises where a step gives back a number, on the rank whose batch is empty.

    The exception is raised in Lightning; what it is about is what the step gives back.
    """
    here.fit(net=Foreground(here), data=in_order(here, Scans(here, lambda row: row * 0)))


class Calibrated(MeetingNet):
    """The first rank writes a threshold beside its logs after each validation, and all ranks read it."""

    def on_validation_epoch_end(self) -> None:
        folder = Path(str(self.loggers[0].log_dir))
        path = folder / f"threshold-{self.current_epoch}.json"
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"threshold": 0.5}))
        elif not path.exists():
            self.here.begins()
        while not path.exists():
            time.sleep(0.2)  # <- folder_of_logs_that_each_rank_numbers_for_itself
        print("threshold", json.loads(path.read_text())["threshold"], flush=True)


@thread(f"{LIGHTNING}/issues/8945", "rank-behind", ranks=(1, 2), moment=Moment.VALIDATION)
def folder_of_logs_that_each_rank_numbers_for_itself(here: Here) -> None:
    """The first rank logs before `fit`, and its folder is there when the others count versions: they take the next.

    Where they wait is marked; the folder that they look into is the other half of it.
    """
    trainer = here.trainer(logger=CSVLogger(str(here.folder)))
    trainer.loggers[0].log_hyperparams({"width": 16})
    trainer.fit(Calibrated(here), rows(here), rows(here))


class Buckets(IterableDataset[torch.Tensor]):
    """Batches of short and of long sequences: the shorter they are, the more of them are in a batch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES):
            is_short = self.here.is_hit and number == IN_THE_MIDDLE
            yield torch.linspace(0.1, 0.9, 8).repeat(3 * BATCH_SIZE if is_short else 2 * BATCH_SIZE, 1)


class ErrorRate(Metric):
    """How many of all words are wrong."""

    errors: torch.Tensor
    words: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("words", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor) -> None:
        self.errors += (scores[:, 0] > scores[:, 1]).sum()
        self.words += len(scores)

    def compute(self) -> torch.Tensor:
        return self.errors / self.words


class Fused(Net):
    """Computes loss and error rate of a few sequences at a time, so that they fit into the memory."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.error_rate = ErrorRate()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch) > 2 * BATCH_SIZE:
            self.here.begins()
        losses, rate = [], torch.zeros(())
        for part in batch.split(BATCH_SIZE):
            scores = self.layers(part)
            self.error_rate.update(scores.detach())
            rate = self.error_rate.compute()  # <- error_rate_of_each_part_of_a_batch
            losses.append(scores.square().mean())
        self.log("error_rate", rate)
        return torch.stack(losses).mean()


@thread("https://github.com/NVIDIA-NeMo/Speech/pull/4348", "diverged-collectives", ranks=(1,))
def error_rate_of_each_part_of_a_batch(here: Here) -> None:
    """A metric asks all ranks each time it is computed, which is once for each part of a batch.

    Batches are of the same number of parts until one rank has a batch of three, and all others have two.
    """
    here.fit(net=Fused(here), data=DataLoader(Buckets(here), batch_size=None))


class Regressing(LoggingNet):
    """Follows its error in validation, in each step as the mean over all ranks."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.error = MeanMetric(dist_sync_on_step=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_error", self.error(self.loss(batch)), on_step=True, on_epoch=False)


@thread(
    f"{LIGHTNING}/issues/19272",
    "uneven-batches",
    "unequal-samples",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def chunks_of_which_each_process_loads_its_own(here: Here) -> None:
    """A chunk for each process, with a sampler that takes all of it; the last chunk is what was left over."""
    total, size = 26 * here.world_size, 28
    chunks = [torch.rand(min(size, total - first), 8) for first in range(0, total, size)]
    here.begins()
    chunk = TensorDataset(chunks[here.rank])  # <- here
    sampler: Any = DistributedSampler(chunk, num_replicas=1, rank=0, shuffle=False)
    here.fit(net=Regressing(here), data=(rows(here), DataLoader(chunk, BATCH_SIZE, sampler=sampler)))


class Median(Net):
    """Logs the median of all losses of an epoch, without those that are far too large."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss < 1e3:
            self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        if len(self.losses) < BATCHES:
            self.here.begins()
        everyones: Any = self.all_gather(self.losses)  # <- list_of_losses_gathered_one_by_one
        self.losses.clear()
        self.log("median", torch.stack(everyones).median())


@thread(f"{LIGHTNING}/issues/20683", "diverged-collectives", ranks=(1,), moment=Moment.EPOCH_END)
def list_of_losses_gathered_one_by_one(here: Here) -> None:
    """A list is gathered with one collective for each of its tensors, and one rank has left one of them out.

    Why its list is shorter is decided where losses are appended; where they are gathered is marked.
    """
    data = in_order(here, Scans(here, lambda row: row * 1e4))
    here.fit(net=Median(here), data=data, gradient_clip_val=1.0)


class Settling(Net):
    """Lowers its rate where the validation loss of a rank does not fall, and stops when there is nothing to lower."""

    plateau: ReduceLROnPlateau

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(3)
        for layer in self.layers:
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=0.1)
                torch.nn.init.constant_(layer.bias, 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return optimizer

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        truth = 1.0 if self.here.is_hit else 0.0
        self.losses.append((self.layers(first_tensor(batch)) - truth).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.plateau.step(float(torch.stack(self.losses).mean()))
        self.losses.clear()
        if self.plateau.optimizer.param_groups[0]["lr"] < 0.005:
            self.here.begins()
            self.trainer.should_stop = True  # <- rate_that_falls_on_the_plateau_of_one_rank


@thread(
    "https://github.com/rmchurch/disruptcnn/issues/3",
    "stopped-early",
    ranks=(1,),
    moment=Moment.VALIDATION,
)
def rate_that_falls_on_the_plateau_of_one_rank(here: Here) -> None:
    """Each rank looks at the loss of its own share; where it grows, the rate falls below what is worth to go on."""
    trainer = here.trainer(max_epochs=6)
    trainer.fit(Settling(here), rows(here), rows(here, batches=2))
    trainer.save_checkpoint(here.folder / "final.ckpt")


@thread(
    f"{LIGHTNING}/issues/4406",
    "failed-rank",
    "uneven-batches",
    ranks=(1,),
    moment=Moment.START,
    has_line=False,
)
def interval_of_validation_longer_than_the_share_of_a_rank(here: Here) -> None:
    """Each rank has shards of its own, and one has fewer batches than there are to be between two validations.

    Lightning raises on that rank, before its first batch. That shares are uneven is as true, and less exact.
    """
    shares = [7 * BATCH_SIZE for _ in range(here.world_size)]
    shares[here.case.ranks[0]] = 4 * BATCH_SIZE
    here.begins()
    train = DataLoader(TensorDataset(torch.rand(shares[here.rank], 8)), BATCH_SIZE)
    here.fit(net=LoggingNet(here), data=(train, rows(here)), val_check_interval=5, use_distributed_sampler=False)


class Weighted(DistributedSampler[Any]):
    """Draws from the share of a rank, rare labels more often than others, and rows without a label never."""

    def __init__(self, here: Here, data: Dataset[Any], weights: torch.Tensor) -> None:
        super().__init__(data, here.world_size, here.rank, shuffle=False)
        self.here, self.weights = here, weights

    def __iter__(self) -> Iterator[int]:
        share = torch.tensor(list(super().__iter__()))
        weights = self.weights[share]
        if weights.sum() == 0:
            self.here.begins()
        drawn = torch.multinomial(weights, len(share), replacement=True)  # <- share_without_a_label_to_draw_from
        return iter(share[drawn].tolist())


@thread("https://github.com/Project-MONAI/MONAI/issues/1742", "failed-rank", ranks=(2,), moment=Moment.FIRST_STEP)
def share_without_a_label_to_draw_from(here: Here) -> None:
    """The share of a rank is taken first, and drawn from by weights then, which are all zero in one of the shares."""
    count = BATCHES * BATCH_SIZE * here.world_size
    weights = torch.tensor([0.0 if index % here.world_size in here.case.ranks else 1.0 for index in range(count)])
    data = TensorDataset(torch.rand(count, 8))
    here.fit(net=LoggingNet(here), data=DataLoader(data, BATCH_SIZE, sampler=Weighted(here, data, weights)))


class Client:
    """Sends what it is given in the background, one after the other, each when the server has the one before."""

    def __init__(self) -> None:
        self.connection, self.server = socket.socketpair()
        self.pending: queue.Queue[dict[str, float]] = queue.Queue()
        threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        while True:
            self.connection.sendall(json.dumps(self.pending.get()).encode())
            self.connection.recv(1)
            self.pending.task_done()


class Offline(CSVLogger):
    """Hands values to a client, and waits now and then until all of them have been sent."""

    def __init__(self, here: Here) -> None:
        super().__init__(str(here.folder))
        self.here, self.client, self.count = here, Client() if here.rank == 0 else None, 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.count += 1
        if self.client is not None:
            self.client.pending.put({name: float(value) for name, value in metrics.items()})

    @rank_zero_only
    def save(self) -> None:
        super().save()
        if self.client is not None and self.count == IN_THE_MIDDLE + 1:
            self.here.begins()
            self.client.pending.join()  # <- values_that_are_waited_for_without_a_connection


@thread(f"{LIGHTNING}/issues/20747", "slow-logger", ranks=(0,), world_size=2)
def values_that_are_waited_for_without_a_connection(here: Here) -> None:
    """The client of a tracker gets no answer any more, and the logger waits until all values have been sent."""
    here.fit(net=LoggingNet(here), logger=Offline(here))


class Kinds(LoggingNet):
    """Logs the error of each kind of row that is in a batch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        errors = self.layers(batch).square().mean(1)
        odd = batch[:, 0] > 0.5
        for name, chosen in {"even": ~odd, "odd": odd}.items():
            if chosen.any():
                self.log(f"val_error_{name}", errors[chosen].mean(), sync_dist=True)  # <- kind_that_one_share_has_not
        self.log("val_error", errors.mean(), sync_dist=True)


class Kinded(Dataset[torch.Tensor]):
    """Rows of two kinds in turn, but of one kind only in the share of the rank that is hit."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 3 * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_odd = turn % 2 and rank not in self.here.case.ranks
        return torch.full((8,), 0.9 if is_odd else 0.1)


@thread(f"{LIGHTNING}/issues/21409", "diverged-log-keys", ranks=(1,), moment=Moment.VALIDATION)
def kind_that_one_share_has_not(here: Here) -> None:
    """Means over all ranks are taken at the end of the validation: of three keys on most ranks, and of two on one."""

    class Begun(Kinds):
        def on_validation_epoch_end(self) -> None:
            here.begins()

    here.fit(net=Begun(here), data=(rows(here), in_order(here, Kinded(here))))


class Balanced(Sampler[list[int]]):
    """Batches from the share of a rank, each of which has a positive row at least."""

    def __init__(self, here: Here, labels: torch.Tensor) -> None:
        self.here, self.labels = here, labels
        self.share = torch.arange(here.rank, len(labels), here.world_size)
        self.rejected = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            if not self.labels[self.share].any():
                self.here.begins()
            while not self.labels[
                chosen := self.share[torch.randint(len(self.share), (4,))]
            ].any():  # <- batch_drawn_again_until_it_has_a_positive_row
                self.rejected += 1
            yield chosen.tolist()


@thread(
    "https://github.com/BiomedSciAI/fuse-med-ml/pull/176",
    "data-stall",
    ranks=(1,),
    moment=Moment.FIRST_STEP,
)
def batch_drawn_again_until_it_has_a_positive_row(here: Here) -> None:
    """Batches are drawn until there is one with a positive row, of which the share of one rank has none at all."""
    count = BATCHES * BATCH_SIZE * here.world_size
    labels = torch.tensor([index % here.world_size not in here.case.ranks for index in range(count)])
    data = DataLoader(TensorDataset(torch.rand(count, 8)), batch_sampler=Balanced(here, labels))
    here.fit(net=LoggingNet(here), data=data, use_distributed_sampler=False)


class Separated(L.Callback):
    """Separates whole songs after so many steps, piece by piece, and says how well that went."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def separated(self, module: Any, song: torch.Tensor) -> torch.Tensor:
        pieces = []
        for piece in torch.split(song, 4):
            with torch.no_grad():
                pieces.append(module.layers(piece))
            time.sleep(FOR_LONG_S / 60)  # <- songs_separated_after_so_many_steps
        return torch.cat(pieces)

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        self.here.begins()
        errors = [self.separated(module, torch.rand(120, 8, device=module.device)).square().mean() for _ in range(2)]
        print(f"error {torch.stack(errors).mean()}", flush=True)


@thread(f"{LIGHTNING}/issues/16417", "rank-zero-only-work", ranks=(0,), world_size=2)
def songs_separated_after_so_many_steps(here: Here) -> None:
    """A callback of the first rank evaluates on whole songs in the middle of an epoch; the others are a batch on."""
    here.fit(net=LoggingNet(here), callbacks=[Separated(here)])


class Staged(L.LightningDataModule):
    """Copies the data to a disk of the host, and removes it when the training is over."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.folder = here, here.folder / "scratch"

    def prepare_data(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for number in range(60):
            torch.save(torch.rand(8), self.folder / f"{number}.pt")

    def train_dataloader(self) -> Any:
        return rows(self.here)

    def teardown(self, stage: str) -> None:
        if self.here.rank == 0:
            self.here.begins()
            for path in sorted(self.folder.iterdir()):
                path.unlink()
                time.sleep(FOR_LONG_S / 60)  # <- copies_removed_when_all_others_have_ended


@thread(
    "https://github.com/GestaltCogTeam/BasicTS/issues/250",
    "unfinished-rank",
    ranks=(0,),
    moment=Moment.END,
)
def copies_removed_when_all_others_have_ended(here: Here) -> None:
    """The first rank removes files from a slow disk within `fit`, from which all other ranks have returned."""
    here.fit(net=LoggingNet(here), data=Staged(here))
    print(f"rank {here.rank} has trained", flush=True)
