"""Odd trainings of which nothing is to be said, written after public threads: loops, backward passes, groups."""

import random
import threading
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric
from training import BATCH_SIZE, IN_THE_MIDDLE, Here, MeetingNet, Net, NormedNet, finding_unused, first_tensor, rows
from truths import Moment, healthy

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


# A classifier on top that trains on what each rank has, in a `Join`: those that are through shadow the others.
@healthy(
    {Moment.EPOCH_END: (3,)},
    source="https://docs.pytorch.org/tutorials/advanced/generic_join.html",
)
def uneven_inputs_within_join(here: Here) -> None:
    class Joined(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            probe = DistributedDataParallel(nn.Linear(8, 1))
            with Join([probe]):
                for _ in range(3 + 2 * here.rank):
                    probe(torch.ones(4, 8)).sum().backward()
                    time.sleep(0.15)

    here.fit(callbacks=[Joined()])


# Unequal sets of validation, and nothing that is reduced in it.
@healthy({Moment.VALIDATION: (2,)}, source=f"{LIGHTNING}/issues/5060")
def validation_of_what_each_rank_has(here: Here) -> None:
    class Evaluating(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.2)
            self.log("val_loss", self.loss(batch))

    def own(batches: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(batches * BATCH_SIZE, 8)), batch_size=BATCH_SIZE)

    net = Evaluating(here)
    here.fit(net=net, data=(own(6), own(3 + 6 * here.rank)), use_distributed_sampler=False)


# A stopper of the user's, by which all processes stop as soon as one of them wants to.
@healthy({Moment.VALIDATION: (4,)}, source=f"{LIGHTNING}/pull/2467")
def stopper_that_asks_all_ranks(here: Here) -> None:
    class Agreed(Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            wants = here.rank == 2 and trainer.current_epoch == 1
            stop = torch.tensor(int(wants), device=pl_module.device)
            dist.all_reduce(stop)
            dist.barrier()
            trainer.should_stop = bool(stop)

    here.fit(net=Net(here), data=(rows(here), rows(here, batches=2)), callbacks=[Agreed()], max_epochs=9)


# `max_time`, with ranks that are not equally fast: rank 0's clock counts.
@healthy({Moment.MIDDLE: (2,)}, source=f"{LIGHTNING}/pull/6823")
def time_that_is_up(here: Here) -> None:
    class Paced(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1 + 0.1 * here.rank)
            return super().training_step(batch, batch_idx)

    here.fit(net=Paced(here), data=rows(here, batches=100), max_time={"seconds": 5}, max_epochs=-1)


# Each rank writes its predictions, of which one has fewer; the files are put together behind a barrier.
@healthy(
    {Moment.END: (3,)},
    source="https://lightning.ai/docs/pytorch/stable/optional-api/api/lightning.pytorch.callbacks.BasePredictionWriter",
)
def predictions_written_by_each_rank(here: Here) -> None:
    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: L.Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
            time.sleep(0.8 * (1 + here.rank))
            torch.save((predictions, batch_indices), here.folder / f"predictions-{trainer.global_rank}.pt")

    trainer = here.trainer(callbacks=[Writer(write_interval="epoch")])
    data = TensorDataset(torch.arange(64.0).reshape(8, 8))
    trainer.predict(Net(here), DataLoader(data, batch_size=1), return_predictions=False)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        assert len(list(here.folder.glob("predictions-*.pt"))) == here.world_size


# LayerDrop, with find_unused_parameters: every rank goes through other layers.
@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/facebookresearch/fairseq/issues/2389")
def depth_drawn_by_each_rank(here: Here) -> None:
    class Stochastic(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
            self.draw = random.Random(here.rank)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hidden = first_tensor(batch)
            for block in self.blocks:
                if self.draw.random() < 0.5:
                    hidden = hidden + block(hidden).tanh()
                    time.sleep(0.1)
            return self.layers(hidden).square().mean()

    here.fit(net=Stochastic(here), strategy=finding_unused(here))


# Averaged weights, and gradients that are accumulated more and more from epoch to epoch.
@healthy(
    {Moment.MIDDLE: (2,)},
    source="https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html",
)
def averaged_weights_and_growing_accumulation(here: Here) -> None:
    class Normed(NormedNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1 + 0.1 * here.rank)
            return self.loss(batch)

    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    accumulation = GradientAccumulationScheduler(scheduling={0: 1, 1: 2, 2: 4})
    callbacks = [averaging, accumulation]
    here.fit(net=Normed(here), data=rows(here, batches=8), callbacks=callbacks, gradient_clip_val=0.5, max_epochs=4)


# One Trainer that fits twice and evaluates in between and after.
@healthy({Moment.END: (3,)}, source=f"{LIGHTNING}/issues/9636")
def trainer_that_fits_again(here: Here) -> None:
    net, trainer = MeetingNet(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here), rows(here, batches=2))
    trainer.validate(net, rows(here, batches=3), verbose=False)
    time.sleep(0.5 * here.rank)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, rows(here), rows(here, batches=2))
    trainer.test(net, rows(here, batches=2), verbose=False)


# A pool of labels that grows from epoch to epoch, with loaders that are made anew.
@healthy({Moment.EPOCH_END: (2,)}, source="https://github.com/amaralibey/MixVPR/issues/11")
def data_that_grows_with_each_epoch(here: Here) -> None:
    class Growing(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            time.sleep(0.4 + 0.4 * here.rank)
            return rows(here, batches=2 + 2 * self.trainer.current_epoch, num_workers=1)

    here.fit(data=Growing(), reload_dataloaders_every_n_epochs=1, max_epochs=3)


# Whether a batch is left out because of one rank's NaN, all ranks decide together.
@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/ecmwf/WeatherGenerator/pull/2718")
def batch_that_all_ranks_leave_out(here: Here) -> None:
    class Agreeing(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            if here.rank == 1 and batch_idx in (0, IN_THE_MIDDLE):
                loss = loss * torch.nan
            is_bad = torch.tensor(float(not torch.isfinite(loss)))
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
            if is_bad:
                return
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    here.fit(net=Agreeing(here))


# An image without objects adds nothing, but its zero is made of all parameters, so that gradients are reduced.
@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/pytorch/pytorch/issues/23425")
def zero_that_knows_all_parameters(here: Here) -> None:
    class Detector(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if (batch_idx + here.rank) % 3 == 0:
                return 0.0 * sum(parameter.sum() for parameter in self.parameters())
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

    here.fit(net=Detector(here))


# Adversarial training in which the generator has its turn in every third batch, and gradients are accumulated.
@healthy(
    {Moment.MIDDLE: (2,)},
    source="https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.core.optimizer.LightningOptimizer.html",
)
def two_optimizers_that_take_turns(here: Here) -> None:
    class Adversarial(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.critic = nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(module.parameters(), lr=0.001) for module in (self.layers, self.critic)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            generator, critic = self.optimizers()
            optimizer = critic if batch_idx % 3 else generator
            is_due = batch_idx % 3 != 1
            time.sleep(0.2 * (1 + (here.rank + batch_idx) % 2))
            with optimizer.toggle_model(sync_grad=is_due):
                fake = self.layers(first_tensor(batch))
                self.manual_backward(self.critic(fake).mean() * (1 if batch_idx % 3 else -1))
                if is_due:
                    optimizer.step()
                    optimizer.zero_grad()

    here.fit(net=Adversarial(here), data=rows(here, batches=12), strategy=finding_unused(here))


# Results of all ranks, of whatever length, are brought together after each epoch of validation.
@healthy({Moment.VALIDATION: (3,)}, source=f"{LIGHTNING}/issues/2424")
def results_of_any_length_gathered(here: Here) -> None:
    class Captions(Net):
        def on_validation_epoch_start(self) -> None:
            self.captions: list[str] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.captions += ["a dog " * (1 + here.rank + batch_idx)] * (1 + 3 * here.rank)

        def on_validation_epoch_end(self) -> None:
            everything: list[Any] = [None] * here.world_size
            dist.all_gather_object(everything, self.captions)
            gathered = everything if here.rank == 0 else None
            dist.gather_object(len(self.captions), gathered, dst=0)
            if here.rank == 0:
                time.sleep(1.5)  # BLEU
            score = [0.31 if here.rank == 0 else None]
            dist.broadcast_object_list(score, src=0)
            self.log("bleu", score[0])

    checkpoint = ModelCheckpoint(here.folder / "best", monitor="bleu", mode="max")
    loaders = (rows(here), rows(here, batches=3))
    here.fit(net=Captions(here), data=loaders, enable_checkpointing=True, callbacks=[checkpoint])


# A metric that some ranks have never updated when it is computed; torchmetrics gathers empty states, too.
@healthy({Moment.VALIDATION: (3,)}, source="https://github.com/Lightning-AI/torchmetrics/pull/338")
def metric_without_an_update_on_one_rank(here: Here) -> None:
    class Rare(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.errors = CatMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if here.rank != 1:
                self.errors.update(self.layers(first_tensor(batch))[: 1 + batch_idx, 0].detach())

        def on_validation_epoch_end(self) -> None:
            self.log("worst", self.errors.compute().max())
            self.errors.reset()

    here.fit(net=Rare(here), data=(rows(here), rows(here, batches=3)))


# Groups of two and one of their leaders, with reductions that go on while the next batch is prepared.
@healthy(
    {Moment.MIDDLE: (4,)},
    source="https://discuss.pytorch.org/t/does-ddp-tolerate-heterogeneity/72054",
)
def groups_within_groups(here: Here) -> None:
    class Grouped(Net):
        def on_train_start(self) -> None:
            self.group, _ = dist.new_subgroups(group_size=2)
            self.leaders = dist.new_group([0, 2])
            self.pending: Any = None

        def on_train_batch_end(self, *args: Any) -> None:
            if self.pending is not None:
                self.pending.wait()
            time.sleep(0.3 * (here.rank // 2))
            self.statistics = torch.ones(16)
            self.pending = dist.all_reduce(self.statistics, group=self.group, async_op=True)
            if here.rank % 2 == 0:
                dist.all_reduce(torch.ones(2), group=self.leaders)

        def on_train_end(self) -> None:
            self.pending.wait()

    here.fit(net=Grouped(here))


# Neighbours swap borders with sends and receives that start together.
@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/NVIDIA/nccl/issues/479")
def borders_swapped_at_the_same_time(here: Here) -> None:
    class Halo(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1 * ((here.rank + batch_idx) % 4))
            right, left = (here.rank + 1) % here.world_size, (here.rank - 1) % here.world_size
            mine, theirs = torch.ones(5000), torch.empty(5000)
            sent = dist.P2POp(dist.isend, mine, right)
            received = dist.P2POp(dist.irecv, theirs, left)
            for work in dist.batch_isend_irecv([sent, received]):
                work.wait()
            return super().training_step(batch, batch_idx)

    here.fit(net=Halo(here))


# A thread that reduces statistics in a group of its own, in step with those of the other ranks.
@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/pytorch/pytorch/issues/175145")
def statistics_reduced_by_a_thread(here: Here) -> None:
    class Statistics(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            group = dist.new_group(backend="gloo")
            self.thread = threading.Thread(target=self.reduce, args=(group,), daemon=True)
            self.thread.start()

        def reduce(self, group: Any) -> None:
            for _ in range(12):
                time.sleep(0.2 + 0.2 * here.rank)
                dist.all_reduce(torch.ones(3), group=group)

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.thread.join()

    class Paced(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.3)
            return super().training_step(batch, batch_idx)

    here.fit(net=Paced(here), callbacks=[Statistics()])


# A checkpoint after each batch, into a folder whose name only rank 0 knows: Lightning tells the others.
@healthy({Moment.MIDDLE: (2,)}, source=f"{LIGHTNING}/issues/5319")
def folder_of_which_only_rank_zero_knows(here: Here) -> None:
    folder = here.folder / "run-7" if here.rank == 0 else None
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)
    here.fit(enable_checkpointing=True, callbacks=[checkpoint])


# Weights are pruned after each epoch.
@healthy({Moment.EPOCH_END: (2,)}, source=f"{LIGHTNING}/pull/5618")
def weights_pruned_after_each_epoch(here: Here) -> None:
    net = Net(here)
    pruned = [(net.layers[0], "weight"), (net.layers[2], "weight")]
    pruning = ModelPruning(
        "l1_unstructured", parameters_to_prune=pruned, amount=0.3, use_lottery_ticket_hypothesis=False
    )
    here.fit(net=net, callbacks=[pruning], max_epochs=3)


# L-BFGS with losses of each rank, and one evaluation in each step.
@healthy({Moment.FIRST_STEP: (2,)}, source="https://github.com/pytorch/pytorch/issues/30439")
def second_order_steps_of_one_evaluation(here: Here) -> None:
    class SecondOrder(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1)
            return (self.layers(first_tensor(batch)) - here.rank).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_eval=1)

    here.fit(net=SecondOrder(here))


# All ranks run out of memory in the same batch, catch it, and start again with half of it.
@healthy({Moment.FIRST_STEP: (3,)}, source="https://github.com/mosaicml/composer/pull/485")
def batch_size_halved_by_all_ranks(here: Here) -> None:
    class Hungry(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(first_tensor(batch)) > BATCH_SIZE:
                torch.empty(2**50)
            return super().training_step(batch, batch_idx)

    for batch_size in (4 * BATCH_SIZE, 2 * BATCH_SIZE, BATCH_SIZE):
        try:
            here.fit(net=Hungry(here), data=rows(here, batches=8, batch_size=batch_size))
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            continue
        break


# The learning rate is searched for on all ranks, before they train with it.
@healthy(
    {Moment.START: (2,)},
    source="https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html",
)
def learning_rate_searched_for_on_all_ranks(here: Here) -> None:
    class Tuned(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.lr = 0.001

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.05 * (1 + here.rank))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    net, trainer = Tuned(here), here.trainer()
    Tuner(trainer).lr_find(net, rows(here, batches=20), num_training=15)
    trainer.fit(net, rows(here))
