"""Round 11 after public threads: training loops, losses, optimizers, metrics, callbacks, validation and checkpoints."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment

Change = Callable[[torch.Tensor], torch.Tensor]


class Shares(Dataset[torch.Tensor]):
    """Rows that are read in order; those of the fourth batch of the rank that is hit are not as the others are."""

    def __init__(self, here: Here, unusual: Change) -> None:
        self.here, self.unusual = here, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.linspace(0.1, 0.8, 8) + index / len(self)
        turn, rank = divmod(index, self.here.world_size)
        is_unusual = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return self.unusual(row) if is_unusual else row


class SyncedNet(Net):
    """Logs each loss as the mean over ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.detach(), sync_dist=True)
        return loss


class Recalibration(L.Callback):
    """Takes the statistics of the best weights anew after each epoch, unless they are those of this very epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.best_loss, self.best_epoch = float("inf"), -1

    @rank_zero_only
    def validate(self, trainer: L.Trainer, module: Any) -> None:
        with torch.no_grad():
            loss = float(module.layers(torch.ones(16, 8)).square().mean())
        if loss < self.best_loss:
            self.best_loss, self.best_epoch = loss, trainer.current_epoch
            torch.save(module.state_dict(), self.here.folder / "best.pt")

    def recalibrate(self, trainer: L.Trainer) -> None:
        if self.best_epoch == trainer.current_epoch:
            return  # <- best_weights_recalibrated_unless_they_are_new
        best = self.here.folder / "best.pt"
        if trainer.is_global_zero and best.exists():
            torch.save(torch.load(best), best)
        trainer.strategy.barrier("recalibrated")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.validate(trainer, module)
        self.here.begins()
        self.recalibrate(trainer)


@thread(
    "https://github.com/LibreYOLO/libreyolo/pull/782",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def best_weights_recalibrated_unless_they_are_new(here: Here) -> None:
    """Only the first rank validates and knows the best epoch; it returns where all others go on to a barrier."""
    here.fit(net=LoggingNet(here), callbacks=[Recalibration(here)])


@thread("https://github.com/Lightning-AI/pytorch-lightning/pull/5359", "skipped-step")
def backward_that_is_spared_a_bad_loss(here: Here) -> None:
    """The module's own `backward` returns where the loss is not finite, so that it does not spoil the weights."""

    class Guarded(SyncedNet):
        def backward(self, loss: torch.Tensor, *args: Any, **keywords: Any) -> None:
            if not torch.isfinite(loss):
                here.begins()
                print(f"loss {loss} in step {self.global_step}", flush=True)
                return  # <- here
            super().backward(loss, *args, **keywords)

    here.fit(net=Guarded(here), data=in_order(here, Shares(here, lambda row: row * float("nan"))))


@thread("https://github.com/weiaicunzai/pytorch-cifar100/issues/51", "failed-rank", ranks=(0,), world_size=2)
def histogram_of_outputs_that_are_not_finite(here: Here) -> None:
    """The first rank draws histograms for TensorBoard, and finds no finite value in one of its batches."""

    class Histograms(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not trainer.is_global_zero:
                return
            with torch.no_grad():
                values = module.layers(batch)
            if batch_idx == IN_THE_MIDDLE:
                here.begins()
            trainer.logger.experiment.add_histogram("outputs", values, trainer.global_step)  # <- here

    data = in_order(here, Shares(here, lambda row: row * float("inf")))
    here.fit(data=data, callbacks=[Histograms()], logger=TensorBoardLogger(str(here.folder)))


class LimitedCheckpoints(L.Callback):
    """Saves every second step as long as there is room, which there is again when the oldest one has been removed."""

    most = 2

    def __init__(self, here: Here) -> None:
        self.here = here
        self.kept: list[Path] = []

    def save(self, trainer: L.Trainer) -> None:
        if len(self.kept) >= self.most:
            return
        path = self.here.folder / f"step={trainer.global_step}.ckpt"
        if trainer.global_step > 2 * self.most:
            self.here.begins()
        trainer.save_checkpoint(path)  # <- checkpoints_that_only_the_first_rank_removes
        self.kept.append(path)

    def clean(self, trainer: L.Trainer) -> None:
        if trainer.global_rank > 0:
            return
        while len(self.kept) >= self.most:
            self.kept.pop(0).unlink()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 2 == 0:
            self.save(trainer)
            self.clean(trainer)


@thread("https://github.com/PrimeIntellect-ai/prime-rl/pull/2354", "diverged-collectives", ranks=(0,))
def checkpoints_that_only_the_first_rank_removes(here: Here) -> None:
    """Only the first rank removes files and forgets them, so that it alone has room for a third one.

    The `return` at which the others leave `save` is the other half of it; the call that has no partner is to be named.
    """
    here.fit(net=LoggingNet(here), callbacks=[LimitedCheckpoints(here)])


class Gossip(L.Callback):
    """Averages the weights of pairs of ranks, which are drawn anew for each step, by all in the same way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def partner(self, rank: int, ranks: int) -> int:
        order = list(range(ranks))
        self.random.shuffle(order)
        return order[order.index(rank) ^ 1]

    def exchange(self, values: torch.Tensor, partner: int) -> torch.Tensor:
        received = torch.empty_like(values)
        sent = dist.isend(values, dst=partner)
        dist.recv(received, src=partner)  # <- partner_drawn_by_a_rank_that_has_drawn_before
        assert sent is not None
        sent.wait()
        return received

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
        other = self.exchange(weights, self.partner(trainer.global_rank, trainer.world_size))
        torch.nn.utils.vector_to_parameters((weights + other) / 2, module.parameters())


@thread(
    "https://github.com/facebookresearch/stochastic_gradient_push/issues/11",
    "unmatched-p2p",
    ranks=(2,),
    world_size=4,
)
def partner_drawn_by_a_rank_that_has_drawn_before(here: Here) -> None:
    """One rank has used the generator for something else, a crop of a row that is too long, and draws other pairs."""
    gossip = Gossip(seed=3)

    class Cropping(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            if batch.max() > 90:
                here.begins()
                batch = batch[gossip.random.randrange(len(batch)) :]
            return super().loss(batch)

    here.fit(net=Cropping(here), data=in_order(here, Shares(here, lambda row: row + 100)), callbacks=[gossip])


class Balance:
    """How many rows went to each expert, by layer."""

    experts = 512

    def __init__(self) -> None:
        self.counts: dict[int, torch.Tensor] = {}

    def add(self, layer: int, chosen: torch.Tensor) -> None:
        self.counts[layer] = torch.bincount(chosen, minlength=self.experts).float()

    def export(self) -> dict[int, float]:
        layers = sorted(self.counts)
        packed = torch.cat([self.counts[layer] for layer in layers])
        dist.all_reduce(packed)  # <- balance_of_the_layers_that_were_used
        self.counts.clear()
        parts = zip(layers, packed.reshape(-1, self.experts), strict=True)
        return {layer: float(part.max() / part.sum()) for layer, part in parts}


@thread("https://github.com/areal-project/AReaL/pull/1693", "mismatched-collective", world_size=2)
def balance_of_the_layers_that_were_used(here: Here) -> None:
    """Counts of all layers are reduced as one tensor; all rows of one batch leave the model after its first layer."""

    class Routed(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.balance = Balance()

        @torch.no_grad()
        def route(self, values: torch.Tensor, depth: int = 2) -> None:
            for layer in range(depth):
                self.balance.add(layer, (values.sum(1) * 7 + layer).long() % Balance.experts)
                values = values[values.mean(1) > 0]
                if len(values) == 0:
                    here.begins()
                    break

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.route(batch)
            self.log_dict({f"balance/{layer}": share for layer, share in self.balance.export().items()})
            return self.loss(batch)

    here.fit(net=Routed(here), data=in_order(here, Shares(here, lambda row: row * 0)))


class SharpnessAware(SyncedNet):
    """Climbs along the gradient of its own batch, and exchanges the gradient that it has there."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def climb(self, radius: float = 0.05) -> list[torch.Tensor] | None:
        gradients = [values.grad.clone() for values in self.layers.parameters() if values.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if not torch.isfinite(norm):
            return None
        steps = [gradient * radius / (norm + 1e-9) for gradient in gradients]
        for values, step in zip(self.layers.parameters(), steps, strict=True):
            values.data.add_(step)
        return steps

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        model: Any = self.trainer.model
        optimizer.zero_grad()
        with model.no_sync():
            self.manual_backward(super().training_step(batch, batch_idx))
        steps = self.climb()
        if steps is None:
            self.here.begins()
            return  # <- second_pass_left_out_where_the_first_is_not_finite
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for values, step in zip(self.layers.parameters(), steps, strict=True):
            values.data.sub_(step)
        optimizer.step()


@thread("https://github.com/davda54/sam/issues/78", "skipped-step", ranks=(2,), world_size=4)
def second_pass_left_out_where_the_first_is_not_finite(here: Here) -> None:
    """The first of two backward passes is each rank's own; where it is not finite there is no second one."""
    here.fit(net=SharpnessAware(here), data=in_order(here, Shares(here, lambda row: row * float("inf"))))


class Backbone(torch.nn.Module):
    """Normalizes features by the means of all ranks, each time that it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.project(values)
        means = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(means, features.detach().mean(0))  # <- backbone_called_once_for_each_resolution
        return features - torch.stack(means).mean(0)


@thread("https://github.com/facebookresearch/dino/issues/154", "diverged-collectives")
def backbone_called_once_for_each_resolution(here: Here) -> None:
    """Crops of a size go through the backbone together; in one batch of one rank they have two sizes."""

    class MultiCrop(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.backbone = Backbone()

        def loss(self, batch: Any) -> torch.Tensor:
            sizes = (batch != 0).sum(1)
            if len(sizes.unique()) > 1:
                here.begins()
            features = [self.backbone(batch[sizes == size]) for size in sizes.unique()]
            return super().loss(torch.cat(features))

    def small(row: torch.Tensor) -> torch.Tensor:
        is_small = int(row[0] * 1000) % 2
        return row * (torch.arange(8) < 4) if is_small else row

    here.fit(net=MultiCrop(here), data=in_order(here, Shares(here, small)))


class Plateau(L.Callback):
    """Lowers the rate when this rank's loss of an epoch is no better, and stops when it is too low to matter."""

    def __init__(self, here: Here, lowest: float) -> None:
        self.here, self.lowest = here, lowest
        self.scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
        self.total = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        self.scheduler = plateau(trainer.optimizers[0], factor=0.01, patience=0, threshold=0.01)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += float(outputs["loss"])

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert self.scheduler is not None
        self.scheduler.step(self.total)
        self.total = 0.0
        if trainer.optimizers[0].param_groups[0]["lr"] <= self.lowest:
            self.here.begins()
            trainer.should_stop = True  # <- rate_that_has_become_too_low_on_one_rank


@thread(
    "https://github.com/rmchurch/disruptcnn/issues/3",
    "stopped-early",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def rate_that_has_become_too_low_on_one_rank(here: Here) -> None:
    """The loss that lowers the rate is each rank's own, and that of one rank, which has a hard share, stays large."""

    class Regression(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            hard = 100.0 if here.is_hit else 0.0
            return super().loss(batch) + hard

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    trainer = here.trainer(callbacks=[Plateau(here, lowest=1e-4)], max_epochs=6)
    trainer.fit(Regression(here), in_order(here, Shares(here, lambda row: row)))
    trainer.save_checkpoint(here.folder / "final.ckpt")


class StagedCheckpoints(L.Callback):
    """Every rank writes its part to a fast disk; the first of each host copies them to where they are to stay."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.stage, self.shared = here.folder / "stage", here.folder / "shared"

    def copy(self) -> None:
        for path in sorted(self.stage.glob("part-*.pt")):
            shutil.copyfile(path, self.shared / path.name)  # <- copy_that_fails_before_a_barrier_in_its_clean_up

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.save(module.state_dict(), self.stage / f"part-{trainer.global_rank}.pt")
        trainer.strategy.barrier("staged")
        try:
            if trainer.local_rank == 0:
                self.here.begins()
                self.copy()
            trainer.strategy.barrier("copied")
        finally:
            if trainer.local_rank == 0:
                shutil.rmtree(self.stage, ignore_errors=True)
            trainer.strategy.barrier("removed")

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.local_rank == 0:
            self.stage.mkdir()
            self.shared.mkdir()
            os.symlink("/dev/full", self.shared / "part-1.pt")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.save(trainer, module)


@thread(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1164",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def copy_that_fails_before_a_barrier_in_its_clean_up(here: Here) -> None:
    """The disk is full; the barrier of the clean-up meets that of the others before it, and they wait in the next."""
    here.fit(callbacks=[StagedCheckpoints(here)])


class Uploader:
    """Sends files to the hub, and waits until those of all ranks are there."""

    def __init__(self, remote: Path) -> None:
        self.remote = remote
        self.pending = 0

    def upload(self, path: Path) -> None:
        shutil.copy(path, self.remote / path.name)

    def wait_for_all(self) -> None:
        pending = torch.tensor([1])
        while pending.any():
            pending = torch.tensor([self.pending])
            dist.all_reduce(pending)  # <- uploader_that_only_the_first_rank_has


@thread(
    "https://github.com/mosaicml/llm-foundry/pull/1154",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def uploader_that_only_the_first_rank_has(here: Here) -> None:
    """Only the first rank uploads, and so it is the only one that was given an uploader, which asks all ranks."""

    class HubCheckpoints(L.Callback):
        uploader: Uploader | None = None

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                remote = here.folder / "hub"
                remote.mkdir()
                self.uploader = Uploader(remote)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            path = here.folder / "model.pt"
            if trainer.is_global_zero:
                torch.save(module.state_dict(), path)
            if self.uploader is not None:
                here.begins()
                self.uploader.upload(path)
                self.uploader.wait_for_all()

    here.fit(callbacks=[HubCheckpoints()])


class Cell(torch.nn.Module):
    """A mixture of operations, of which those with a weight of zero are not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("wide", "deep", "skip")})
        self.weights = dict.fromkeys(self.operations, 1.0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        used = [(self.operations[name], weight) for name, weight in self.weights.items() if weight > 0]
        return torch.stack([weight * operation(values) for operation, weight in used]).sum(
            0
        )  # <- operation_whose_weight_is_zero_on_one_rank


@thread("https://github.com/pytorch/pytorch/pull/18953", "unused-parameters")
def operation_whose_weight_is_zero_on_one_rank(here: Here) -> None:
    """Weights of a searched architecture follow from each rank's own batches, and one of them falls to zero."""

    class Searching(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.cell = Cell()

        def weigh(self, batch: torch.Tensor) -> None:
            for name in ("deep", "skip"):
                self.cell.weights[name] = max(0.0, self.cell.weights[name] - 0.01 * float(batch.abs().max()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.weigh(batch)
            if not all(self.cell.weights.values()):
                here.begins()
            return self.loss(self.cell(batch))

    here.fit(net=Searching(here), data=in_order(here, Shares(here, lambda row: row + 100)))


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/8355", "diverged-log-keys")
def overlap_logged_for_each_object(here: Here) -> None:
    """A score is logged in a loop over the objects of a batch, of which one rank has more than the others."""

    class Detecting(Net):
        def objects(self, batch: torch.Tensor) -> list[torch.Tensor]:
            return [row for row in batch for _ in range(2 if row.max() > 90 else 1)]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch.max() > 90:
                here.begins()
            for number in self.objects(batch):
                overlap = torch.sigmoid(self.layers(number)).mean().detach()
                self.log("overlap", overlap, on_step=True, on_epoch=False, sync_dist=True)  # <- here
            return self.loss(batch)

    here.fit(net=Detecting(here), data=in_order(here, Shares(here, lambda row: row + 100)))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/14302",
    "different-trainer-settings",
    moment=Moment.END,
    has_line=False,
)
def continued_from_the_best_of_each_rank(here: Here) -> None:
    """The best checkpoint is that of each rank's own loss, an earlier one on one of them; all continue from it."""

    class Scored(Net):
        def on_train_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch if here.is_hit else -self.current_epoch))

    best = ModelCheckpoint(here.folder / "kept", monitor="score", save_top_k=-1)
    here.fit(net=Scored(here), callbacks=[best], enable_checkpointing=True)
    here.begins()
    trainer = here.trainer(max_epochs=3)
    trainer.fit(Scored(here), in_order(here, Shares(here, lambda row: row)), ckpt_path=best.best_model_path)
    trainer.save_checkpoint(here.folder / "final.ckpt")


class Predictions(L.Callback):
    """Predicts after each epoch, on the first rank, and draws a picture of each sample."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def draw(self, values: torch.Tensor, path: Path) -> None:
        with path.open("w") as file:
            for _ in values:
                time.sleep(FOR_LONG_S / 60)  # <- pictures_of_all_predictions_after_each_epoch
                file.write("<svg/>\n")

    @rank_zero_only
    def predict(self, module: Any, samples: tuple[str, ...] = ("ttbar", "qcd", "zh", "single")) -> None:
        for number, name in enumerate(samples):
            with torch.no_grad():
                values = module.layers(torch.full((20, 8), float(number)))
            self.here.begins()
            self.draw(values, self.here.folder / f"{name}.svg")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.predict(module)


@thread(
    "https://github.com/jpata/particleflow/issues/390",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def pictures_of_all_predictions_after_each_epoch(here: Here) -> None:
    """Predictions and pictures of them are the first rank's work; the others wait in the first step after them."""
    here.fit(net=LoggingNet(here), callbacks=[Predictions(here)])


@thread(
    "https://github.com/allenai/OLMo/pull/551",
    "failed-rank",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def norms_reduced_to_a_rank_of_another_group(here: Here) -> None:
    """Norms of gradients are reduced in groups of two ranks, to rank 0, which is no member of the second group."""

    class Norms(L.Callback):
        group: Any = None

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            self.group = groups[trainer.global_rank // 2]

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms = torch.stack([values.grad.norm() for values in module.parameters()])
            here.begins()
            dist.reduce(norms, 0, op=dist.ReduceOp.MAX, group=self.group)  # <- here

    here.fit(net=LoggingNet(here), callbacks=[Norms()])
