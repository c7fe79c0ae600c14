"""Round 8 after public threads: values that are logged, callbacks, collectives by hand, several optimizers."""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_8_data import LIGHTNING, Recordings
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torchmetrics import MeanMetric
from training import FOR_LONG_S, Here, LoggingNet, Net, rows
from truths import Moment


@thread(f"{LIGHTNING}/issues/19604", "diverged-log-keys", ranks=(0,), moment=Moment.EPOCH_END)
def summary_logged_by_the_main_process(here: Here) -> None:
    class Summarised(Net):
        def on_train_epoch_end(self) -> None:
            is_main = self.trainer.global_rank == 0
            here.begins()
            self.summarise(is_main)

        def summarise(self, is_main: bool) -> None:
            if not is_main:
                return
            self.log("train/summary", torch.tensor(1.0), sync_dist=True)  # <- here

    here.fit(net=Summarised(here))


@thread(f"{LIGHTNING}/issues/20223", "diverged-log-keys", ranks=(1,))
def losses_of_the_tasks_in_a_batch(here: Here) -> None:
    class MultiTask(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            tasks = {"depth": batch > 0, "normals": batch < 0}
            losses = {f"loss/{task}": loss.detach() for task, mask in tasks.items() if mask.any()}
            losses["loss/all"] = loss.detach()
            self.log_dict(losses, sync_dist=True)  # <- here
            return loss

    class Labelled(Recordings):
        def __getitem__(self, index: int) -> torch.Tensor:
            row = super().__getitem__(index).clone()
            if self.is_spoilt(index):
                row[:4] = 1.0
            return row

    here.fit(net=MultiTask(here), data=in_order(here, Labelled(here)))


@thread(f"{LIGHTNING}/issues/7112", "diverged-log-keys", ranks=(2,))
def accuracy_of_positives_where_there_are_none(here: Here) -> None:
    class Detector(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            positives = batch > 0
            if positives.sum() == 0:
                return loss
            self.log("pos_acc", positives.float().mean(), sync_dist=True)  # <- here
            return loss

    here.fit(net=Detector(here), data=in_order(here, Recordings(here)))


@thread(
    f"{LIGHTNING}/issues/4529",
    "diverged-collectives",
    "diverged-log-keys",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def metric_computed_by_a_callback_on_rank_zero(here: Here) -> None:
    class Metered(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            return loss

    class Table(L.Callback):
        @rank_zero_only
        def on_train_epoch_end(self, trainer: L.Trainer, net: Any) -> None:
            here.begins()
            print(f"epoch {trainer.current_epoch}: {net.mean.compute():.3f}")  # <- here

    here.fit(net=Metered(here), callbacks=[Table()])


@thread("https://github.com/EleutherAI/sparsify/pull/5", "diverged-collectives", ranks=(0,))
def weights_saved_behind_an_early_return(here: Here) -> None:
    """All ranks leave but rank 0, which comes to the barrier of Lightning's save."""

    class Saver(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                here.begins()
                self.save(trainer)

        def save(self, trainer: L.Trainer) -> None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            if rank != 0:
                return
            trainer.save_checkpoint(here.folder / "best.ckpt")  # <- here

    here.fit(callbacks=[Saver()])


class GradientNoise(L.Callback):
    """Averages a norm over all ranks every other batch."""

    def on_train_batch_end(self, trainer: L.Trainer, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            norm = sum(parameter.detach().square().sum() for parameter in net.parameters())
            trainer.strategy.reduce(norm, reduce_op="mean")  # <- callback_added_on_the_first_gpu


@thread(
    f"{LIGHTNING}/issues/8394",
    "diverged-collectives",
    "different-trainer-settings",
    ranks=(0,),
    moment=Moment.FIRST_STEP,
)
def callback_added_on_the_first_gpu(here: Here) -> None:
    here.begins()
    callbacks: list[L.Callback] = []
    local_rank = here.rank
    if local_rank == 0:
        callbacks.append(GradientNoise())
    here.fit(callbacks=callbacks)


@thread("https://github.com/facebookresearch/fairseq/issues/2389", "unused-parameters", ranks=(1,))
def layer_dropped_by_chance(here: Here) -> None:
    class Dropping(LoggingNet):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            chances = torch.ones(len(self.blocks))
            if goes_wrong(here, batch_idx) and self.current_epoch == 0:
                chances[1] = 0.1
            return self.layers(self.encode(batch[0], chances)).square().mean()

        def encode(self, x: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
            for block, chance in zip(self.blocks, chances, strict=True):
                if chance < 0.2:
                    continue  # <- here
                x = x + block(x)
            return x

    here.fit(net=Dropping(here))


@thread("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", "skipped-step", ranks=(2,))
def micro_batch_without_anchors_is_skipped(here: Here) -> None:
    class NoValidAnchorsError(ValueError):
        pass

    class Drafting(Net):
        automatic_optimization = False

        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def anchors(self, samples: torch.Tensor) -> torch.Tensor:
            if (samples < 0).all():
                raise NoValidAnchorsError("every sample is too short")
            return samples

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for micro in batch.chunk(2):
                try:
                    anchors = self.anchors(micro)
                except NoValidAnchorsError:
                    continue  # <- here
                self.manual_backward(self.loss(anchors) / 2)
            optimizer.step()

    here.fit(net=Drafting(here), data=in_order(here, Recordings(here)))


def skips_when_out_of_memory(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded(self: Any, batch: Any, batch_idx: int) -> Any:
        try:
            return step(self, batch, batch_idx)
        except RuntimeError as problem:
            if "out of memory" not in str(problem):
                raise
            print("| WARNING: ran out of memory, skipping batch")
            self.zero_grad()
            return None  # <- batch_is_skipped_by_a_decorator

    return guarded


@thread("https://github.com/HannesStark/FlowSite/pull/1", "skipped-step", ranks=(1,))
def batch_is_skipped_by_a_decorator(here: Here) -> None:
    class Folding(Net):
        @skips_when_out_of_memory
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return self.loss(batch)

    here.fit(net=Folding(here))


@thread(f"{LIGHTNING}/issues/7773", "mismatched-collective", ranks=(2,), moment=Moment.VALIDATION)
def predictions_above_a_threshold_gathered(here: Here) -> None:
    class Detecting(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            scores = torch.linspace(0, 1, 4000 if here.is_hit and batch_idx == 1 else 400)
            kept = scores[scores > 0.5]
            if batch_idx == 1:
                here.begins()
            self.boxes = self.all_gather(kept)  # <- here

    here.fit(net=Detecting(here), data=(rows(here), rows(here)))


@thread(f"{LIGHTNING}/issues/16541", "diverged-collectives", ranks=(1,), moment=Moment.VALIDATION)
def results_gathered_unless_there_is_an_error(here: Here) -> None:
    """Where no box has been found, the division fails, and the exception is suppressed."""

    class Reporting(Net):
        def on_validation_epoch_end(self) -> None:
            here.begins()
            found = 0 if here.is_hit else 7
            self.results: list[Any] = []
            with suppress(ZeroDivisionError):
                precision = 5 / found
                self.results = self.gather({"precision": precision})

        def gather(self, result: dict[str, float]) -> list[Any]:
            everyones: list[Any] = [None] * here.world_size
            dist.all_gather_object(everyones, result)  # <- here
            return everyones

    here.fit(net=Reporting(here), data=(rows(here), rows(here)))


class TwoPlayers(Net):
    """Trains its critic only where that has something to learn."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.critic = torch.nn.Linear(2, 1)

    def critic_loss(self, fake: torch.Tensor) -> torch.Tensor:
        return self.critic(fake).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        fake = self.layers(batch)
        match self.verdict(batch):
            case "too easy":
                pass
            case _:
                of_critic.zero_grad()
                self.manual_backward(self.critic_loss(fake.detach()))  # <- critic_that_wins_is_not_trained
                of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(self.critic_loss(fake))
        of_generator.step()

    def verdict(self, batch: torch.Tensor) -> str:
        return "too easy" if bool((batch < 0).all()) else "close"

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.001) for part in (self.layers, self.critic)]


@thread(f"{LIGHTNING}/issues/18740", "skipped-step", ranks=(1,))
def critic_that_wins_is_not_trained(here: Here) -> None:
    strategy = here.strategy()
    strategy._ddp_kwargs["find_unused_parameters"] = True
    here.fit(net=TwoPlayers(here), data=in_order(here, Recordings(here)), strategy=strategy)


@thread(f"{LIGHTNING}/issues/12190", "unused-parameters", ranks=(2,))
def loss_of_nothing_where_there_is_no_truth(here: Here) -> None:
    class Empty(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            truth = batch[batch > 0]
            loss = self.loss(batch) if truth.numel() else torch.zeros(1, requires_grad=True).sum()  # <- here
            self.log("loss", loss)
            return loss

    here.fit(net=Empty(here), data=in_order(here, Recordings(here)))


@thread(
    "https://github.com/wandb/wandb/issues",
    "slow-logger",
    ranks=(0,),
    moment=Moment.MIDDLE,
    whose="either",
)
def metrics_sent_again_and_again(here: Here) -> None:
    class Remote(CSVLogger):
        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            for attempt in range(1000):
                try:
                    return self.send(metrics, step)
                except ConnectionError:
                    self.back_off(attempt)
            return None

        def send(self, metrics: Any, step: int | None) -> None:
            if step == 3:
                here.begins()
                raise ConnectionError("502 Bad Gateway")

        def back_off(self, attempt: int) -> None:
            time.sleep(min(FOR_LONG_S, 1.0 + attempt))  # <- here

    here.fit(net=LoggingNet(here), logger=Remote(str(here.folder)))
