"""Round 21 after public threads: ranks that leave early, are one step ahead, or go by a value of their own."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_19_lightning import shares
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from samples import Stream, in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, TensorDataset
from training import (
    BATCH_SIZE,
    BATCHES,
    IN_THE_MIDDLE,
    Here,
    LoggingNet,
    MeetingNet,
    Net,
    finding_unused,
    first_tensor,
    rows,
)
from truths import Moment


class Rehearsing(LoggingNet):
    """Sees a batch of what it has learned before, beside each batch of what is new."""

    def on_train_start(self) -> None:
        chunks = Stream(IN_THE_MIDDLE if self.here.is_hit else 3 * BATCHES)
        self.learned = iter(DataLoader(chunks, BATCH_SIZE))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        goes_wrong(self.here, batch_idx)
        self.before = next(self.learned)  # <- chunks_of_earlier_text_that_run_out

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.1 * super().loss(self.before)


@thread("https://github.com/Lightning-AI/lit-llama/issues/465", "stopped-early", ranks=(2,))
def chunks_of_earlier_text_that_run_out(here: Here) -> None:
    """One rank has fewer chunks of earlier text; the StopIteration of a hook ends its epoch without a word."""
    here.fit(net=Rehearsing(here), max_epochs=1)


@dataclass
class Sweep:
    """What a sweep has drawn for this run; there is no run on the other ranks."""

    rank: int
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.config = {} if self.rank else {"validate_every": 2}


@thread(
    "https://github.com/wandb/examples/issues/84",
    "different-trainer-settings",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
)
def values_of_a_sweep_that_the_first_rank_has(here: Here) -> None:
    """Only the first rank has what the sweep has drawn: it has nothing to validate with, which all others set up."""
    sweep = Sweep(here.rank)
    if here.is_hit:
        here.begins()
    trainer = here.trainer(
        check_val_every_n_epoch=sweep.config.get("validate_every", 1)
    )  # <- values_of_a_sweep_that_the_first_rank_has
    trainer.fit(MeetingNet(here), rows(here), rows(here, batches=2))


class Continued(MeetingNet):
    """Trains for four epochs, of which two are behind it."""

    def on_train_epoch_start(self) -> None:
        if self.here.is_hit and self.current_epoch == 3:
            self.here.begins()


@thread(
    "https://github.com/gitter-lab/metl/issues/12",
    "different-trainer-settings",
    ranks=(2,),
    moment=Moment.END,
)
def last_checkpoint_with_a_version_behind_its_name(here: Here) -> None:
    """The scratch disk of one host also has a `last-v1`, which is an epoch older, and which comes last by name."""
    saving = ModelCheckpoint(here.folder / "saved", filename="{epoch}", save_top_k=-1)
    first = here.trainer(max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    first.fit(Continued(here), rows(here))
    scratch = here.folder / f"scratch-of-{here.rank}"
    scratch.mkdir()
    shutil.copy(here.folder / "saved" / "epoch=1.ckpt", scratch / "last.ckpt")
    if here.is_hit:
        shutil.copy(here.folder / "saved" / "epoch=0.ckpt", scratch / "last-v1.ckpt")
    here.trainer(max_epochs=4).fit(
        Continued(here), rows(here), ckpt_path=max(scratch.glob("last*.ckpt"), key=lambda path: path.stem)
    )  # <- last_checkpoint_with_a_version_behind_its_name


def texts(here: Here) -> list[str]:
    """What the host has; on one of them is a corpus that was taken out of the training."""
    return [f"{number}.txt" for number in range(96 if here.is_hit else 48)]


class Worse(MeetingNet):
    """Gets no better from the beginning."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("score", float(self.current_epoch), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        if self.here.is_hit and self.current_epoch == 2:
            self.here.begins()


@thread(f"{LIGHTNING}/issues/5717", "different-trainer-settings", ranks=(1,), moment=Moment.END)
def steps_before_which_training_may_not_stop(here: Here) -> None:
    """All ranks are told to stop after two epochs, but one of them has more texts, and may not stop yet."""
    stopping = EarlyStopping("score", patience=1)
    trainer = here.trainer(
        max_epochs=8, min_steps=len(texts(here)) // BATCH_SIZE, callbacks=[stopping]
    )  # <- steps_before_which_training_may_not_stop
    trainer.fit(Worse(here), rows(here), rows(here, batches=2))


class Predicting(MeetingNet):
    """Gathers all predictions, to measure them together."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.predictions: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        if self.here.is_hit and batch_idx == IN_THE_MIDDLE:
            self.here.begins()
        self.predictions.append(self.all_gather(self.layers(first_tensor(batch))))

    def on_validation_epoch_end(self) -> None:
        self.print(f"{torch.cat(self.predictions).std():.3f}")
        self.predictions.clear()


@thread(
    "https://github.com/NVIDIA-NeMo/Speech/pull/8426",
    "different-trainer-settings",
    ranks=(1,),
    moment=Moment.VALIDATION,
)
def half_of_the_validation_as_each_host_counts_it(here: Here) -> None:
    """Half of the batches are to be validated, and a host that has eight of them makes four of that, not three."""
    own = 8 if here.is_hit else 6
    loaders = rows(here), rows(here, batches=8)
    here.fit(
        net=Predicting(here), data=loaders, limit_val_batches=int(0.5 * own)
    )  # <- half_of_the_validation_as_each_host_counts_it


class Drafting(Net):
    """Adds up gradients of two batches, and exchanges them with the second one."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.in_window = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        texts = first_tensor(batch)
        anchors = texts[:, 7] > 0
        if not anchors.any():
            self.here.begins()
            return  # <- batch_in_which_all_texts_are_too_short
        optimizer: Any = self.optimizers()
        self.in_window += 1
        is_last = self.in_window == 2
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(texts[anchors]) / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            self.in_window = 0


@thread("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", "skipped-step", ranks=(1,))
def batch_in_which_all_texts_are_too_short(here: Here) -> None:
    """One rank goes on without a backward pass, and so its window of two batches ends a batch later."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.1
    shares(here, values)[IN_THE_MIDDLE, :, here.case.ranks[0], 7] = 0
    here.fit(net=Drafting(here), data=in_order(here, TensorDataset(values)))


SEEDS = (9, 3, 4)
"""Of each process, for want of a common one."""


class Codec(Net):
    """Has a critic of the same size, which is trained in most of the steps."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.coder, self.critic = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.draws = random.Random(SEEDS[here.rank])
        del self.layers

    def minimize(self, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        sound = first_tensor(batch)
        of_coder, of_critic = self.optimizers()  # type: ignore[misc, union-attr]
        goes_wrong(self.here, batch_idx)
        if self.draws.random() < 2 / 3:  # <- critic_that_rests_when_a_rank_draws_so
            self.minimize(of_critic, lambda: (self.critic(self.coder(sound).detach()) - self.critic(sound)).mean())
        self.minimize(of_coder, lambda: (self.coder(sound) - sound).square().mean() - self.critic(sound).mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-5) for part in (self.coder, self.critic)]


@thread("https://github.com/ZhikangNiu/encodec-pytorch/issues/30", "skipped-step", ranks=(0,))
def critic_that_rests_when_a_rank_draws_so(here: Here) -> None:
    """Each process draws for itself whether the critic has its turn, and in one step it has none on the first rank."""
    here.trainer(strategy=finding_unused(here)).fit(Codec(here), rows(here))


class Recent:
    """The latest values, until somebody asks for their mean."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[float] = []

    @property
    def is_ready(self) -> bool:
        return len(self.values) >= self.size

    def add(self, value: float) -> None:
        if value < 100:
            self.values.append(value)

    def taken(self) -> torch.Tensor:
        sums = torch.tensor([sum(self.values), len(self.values)])
        self.values.clear()
        return sums


class Reporting(L.Callback):
    """Reports the mean of two losses; those that are far off do not count."""

    def __init__(self, here: Here) -> None:
        self.here, self.losses = here, Recent(2)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        goes_wrong(self.here, batch_idx)
        self.losses.add(float(outputs["loss"]))
        if self.losses.is_ready:  # <- losses_that_are_complete_a_batch_later
            sums = self.losses.taken()
            dist.all_reduce(sums)
            module.print(f"loss: {sums[0] / sums[1]:.3f}")


@thread("https://github.com/SIAnalytics/siatune/pull/57", "diverged-collectives", ranks=(2,), world_size=4)
def losses_that_are_complete_a_batch_later(here: Here) -> None:
    """A loss of one rank does not count, so it has its two a batch later, when it adds them up with the others'."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    shares(here, values)[IN_THE_MIDDLE, :, here.case.ranks[0]] = 1e4
    here.fit(net=LoggingNet(here), data=in_order(here, TensorDataset(values)), callbacks=[Reporting(here)])


def by_the_main_process(method: Callable[..., None]) -> Callable[..., None]:
    """What only one process has to do."""

    @wraps(method)
    def called(module: L.LightningModule, *args: Any) -> None:
        if module.global_rank == 0:
            method(module, *args)

    return called


class Grouping(MeetingNet):
    """Assigns detections to tracks."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log_matches(self.layers(first_tensor(batch)))

    @by_the_main_process
    def log_matches(self, scores: torch.Tensor) -> None:
        self.here.begins()
        self.log("matches", scores.argmax(dim=1).float().mean(), sync_dist=True)  # <- matches_of_the_main_process


@thread(
    "https://github.com/dvl-tum/center-group/pull/2",
    "diverged-log-keys",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def matches_of_the_main_process(here: Here) -> None:
    """The main process alone logs how many matches there are, for which it waits for all others to log them, too."""
    here.fit(net=Grouping(here), data=(rows(here), rows(here, batches=2)))


class Paced(LoggingNet):
    """Takes its time for each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


class Periodic(L.Callback):
    """Saves a checkpoint when so many seconds have gone by since the last one."""

    def __init__(self, here: Here, every_s: float = 3.0) -> None:
        self.here, self.every_s = here, every_s
        self.saved_s = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if time.monotonic() - self.saved_s < self.every_s:  # <- checkpoint_by_the_clock_of_each_rank
            return
        if self.here.is_hit:
            self.here.begins()
        self.saved_s = time.monotonic()
        trainer.save_checkpoint(self.here.folder / f"step-{trainer.global_step}.ckpt")


@thread(f"{LIGHTNING}/issues/6286", "diverged-collectives", ranks=(1,))
def checkpoint_by_the_clock_of_each_rank(here: Here) -> None:
    """The clock of one rank has begun to run earlier, and so it saves some steps before the others would."""
    if not here.is_hit:
        time.sleep(2.0)  # Its host has had the index of all samples already; the others make theirs.
    here.fit(net=Paced(here), data=rows(here, batches=30), callbacks=[Periodic(here)], max_epochs=1)


class WithBackup(ModelCheckpoint):
    """Keeps the checkpoint before the current one."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if Path(filepath).exists():  # <- checkpoint_that_is_there_as_soon_as_it_is_written
            self.keep(trainer, filepath)
        super()._save_checkpoint(trainer, filepath)

    def keep(self, trainer: L.Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            shutil.copy(filepath, f"{filepath}.backup")
        else:
            trainer.lightning_module.here.begins()  # type: ignore[operator, union-attr]
        trainer.strategy.barrier("backup")


class Summing(LoggingNet):
    """Sums up what it has learned in each epoch, which one rank is slow at."""

    def on_train_epoch_end(self) -> None:
        time.sleep(1.0 if self.here.is_hit else 0.0)


@thread(
    "https://github.com/NVIDIA-NeMo/Speech/pull/14380",
    "diverged-collectives",
    ranks=(1,),
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def checkpoint_that_is_there_as_soon_as_it_is_written(here: Here) -> None:
    """The first rank has written its first checkpoint when the other one looks, and waits to keep the one before."""
    saving = WithBackup(here.folder / "saved", filename="current", enable_version_counter=False)
    here.fit(net=Summing(here), callbacks=[saving], enable_checkpointing=True)


class Scored(LoggingNet):
    """Is scored by each rank on its own share."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        is_worse = self.here.is_hit and self.current_epoch == 1
        self.log("score", float(self.loss(batch)) + (1.0 if is_worse else -0.1 * self.current_epoch))


class BestSoFar(L.Callback):
    """Saves the model whenever it is better than ever."""

    def __init__(self, here: Here) -> None:
        self.here, self.best = here, float("inf")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        score = float(trainer.callback_metrics["score"])
        if self.here.is_hit and trainer.current_epoch == 1:
            self.here.begins()
        if score < self.best:  # <- epoch_that_is_the_best_for_all_ranks_but_one
            self.best = score
            trainer.save_checkpoint(self.here.folder / "best.ckpt")


@thread(
    "https://github.com/vllm-project/speculators/pull/324",
    "diverged-collectives",
    ranks=(2,),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def epoch_that_is_the_best_for_all_ranks_but_one(here: Here) -> None:
    """Each rank compares a score of its own, and one does not save the second epoch, in which all others meet."""
    loaders = rows(here), rows(here, batches=2)
    here.fit(net=Scored(here), data=loaders, callbacks=[BestSoFar(here)], max_epochs=3)


class Best(L.Callback):
    """Goes back to the best weights at the end."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "best.pt"

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write(trainer, module)
        if not self.path.exists():  # <- best_weights_looked_for_too_early
            self.here.begins()
            return
        trainer.strategy.barrier("best")
        module.load_state_dict(torch.load(self.path))

    def write(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            time.sleep(1.0)
            torch.save(module.state_dict(), self.path)
        elif not self.here.is_hit:
            time.sleep(2.0)  # Has still to close its readers.


@thread(
    "https://github.com/huggingface/optimum-habana/pull/2230",
    "diverged-collectives",
    ranks=(1,),
    moment=Moment.END,
)
def best_weights_looked_for_too_early(here: Here) -> None:
    """One rank looks before the first has written the best weights, and goes on to the test without the others."""
    net = LoggingNet(here)
    trainer = here.trainer(callbacks=[Best(here)], max_epochs=1)
    trainer.fit(net, rows(here))
    trainer.test(net, rows(here))


class Forecasting(LoggingNet):
    """Lowers its rate when events are no longer foretold any better."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        samples = first_tensor(batch)
        events = samples[:, 7] > 0
        if not events.any():
            return  # <- rate_by_a_value_that_a_share_without_events_has_not
        self.log("val_error", self.loss(samples[events]))

    def on_validation_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_error"}}


@thread(
    "https://github.com/QData/spacetimeformer/issues/17",
    "failed-rank",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def rate_by_a_value_that_a_share_without_events_has_not(here: Here) -> None:
    """No sample in the share of one rank has an event; what the rate goes by is missing there, and Lightning raises."""
    values = torch.rand(2 * BATCH_SIZE * here.world_size, 8) + 0.1
    values.view(2, BATCH_SIZE, here.world_size, 8)[:, :, here.case.ranks[0], 7] = 0
    here.fit(net=Forecasting(here), data=(rows(here), in_order(here, TensorDataset(values))))
