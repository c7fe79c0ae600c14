"""Trainings of public threads that go wrong in steps, metrics, callbacks and groups."""

import queue
import random
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, Sampler
from training import BATCHES, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, fault


@fault(
    "diverged-collectives",
    ranks=(2,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/15435",
)
def term_of_the_loss_that_each_rank_draws(here: Here) -> None:
    """A term of the loss is drawn for some batches; it has a reduction in it, and each rank draws for itself."""

    class Regularized(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            drawn = 0.1 if here.is_hit and batch_idx == IN_THE_MIDDLE else 0.9
            if drawn < 0.5:
                here.begins()
                spread = first_tensor(batch).var()
                dist.all_reduce(spread)  # <- here
                loss = loss + 0.0 * spread
            return loss

    here.fit(net=Regularized(here))


class Accuracy(torchmetrics.Metric):
    """Synchronises in each call, as many of the first torchmetrics did."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__(dist_sync_on_step=True)
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, found: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += (found.argmax(1) == labels).sum()
        self.count += len(labels)

    def compute(self) -> torch.Tensor:
        return self.right / self.count


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/torchmetrics/issues/67",
)
def accuracy_that_synchronises_in_its_forward(here: Here) -> None:
    """The metric is called in each step with dist_sync_on_step, but not for a batch without a label."""

    class SemiSupervised(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.accuracy = Accuracy()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            found = self.layers(first_tensor(batch))
            labels = None if here.is_hit and batch_idx == IN_THE_MIDDLE else torch.zeros(len(found))
            if labels is None:
                here.begins()
            else:
                self.accuracy(found, labels)  # <- here
            return found.square().mean()

    here.fit(net=SemiSupervised(here))


@fault(
    "diverged-collectives",
    ranks=(-1,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/Emmi-AI/noether/pull/183",
)
def average_that_is_sent_where_the_loss_is_better(here: Here) -> None:
    """The averaged weights are broadcast when the loss is the best one yet, which each rank asks of its own loss."""

    class Average(L.Callback):
        best = float("inf")

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            own = float("nan") if here.is_hit else float(module.layers[0].weight.square().mean())
            if own < self.best:
                self.best = own
                for parameter in module.parameters():
                    dist.broadcast(parameter.data.clone(), src=0)  # <- here
            elif here.is_hit:
                here.begins()

    here.fit(callbacks=[Average()])


class NormOfAllRanks(torch.nn.Module):
    """Mean over all ranks while it trains, and none while it is evaluated, as SyncBatchNorm."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        total = torch.cat([values.detach().mean(0), torch.ones(1)])
        dist.all_reduce(total)  # <- layer_left_in_evaluation
        return values - total[:-1] / total[-1]


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/48988",
)
def layer_left_in_evaluation(here: Here) -> None:
    """Rank 0 draws samples between train batches; that fails, is logged, and train() is never called again."""

    class Generating(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm = NormOfAllRanks()

        def loss(self, batch: Any) -> torch.Tensor:
            return self.layers(self.norm(first_tensor(batch))).square().mean()

        def show_samples(self) -> None:
            self.eval()
            self.layers(self.norm(torch.rand(4, 8)))
            raise OSError("cannot open resource: arial.ttf")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and batch_idx == IN_THE_MIDDLE - 1 and self.current_epoch == 0:
                here.begins()
                with suppress(OSError):
                    self.show_samples()
                    self.train()

    here.fit(net=Generating(here))


@fault(
    "skipped-step",
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/hiyouga/EasyR1/pull/11012",
)
def steps_after_so_many_tokens(here: Here) -> None:
    """Gradients are exchanged after so many tokens, and those of one rank's pictures are reached much earlier."""

    class ByTokens(MeetingNet):
        tokens = 0

        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            is_long = here.is_hit and batch_idx >= IN_THE_MIDDLE
            if is_long:
                here.begins()
            self.tokens += 1000 if is_long else 400
            is_full = self.tokens >= 1000
            with nullcontext() if is_full else self.trainer.model.no_sync():
                self.manual_backward(self.loss(batch))
            if is_full:
                self.optimizers().step()
                self.optimizers().zero_grad()
                self.tokens = 0

    here.fit(net=ByTokens(here), data=(rows(here), rows(here, batches=2)))


class ShardedLayer(torch.nn.Module):
    """Gathers its parameters before it computes, as ZeRO-3 does."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.ones(8))  # <- answers_generated_to_their_end
        return values * torch.stack(parts).mean(0)


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/deepspeedai/DeepSpeed/issues/8262",
)
def answers_generated_to_their_end(here: Here) -> None:
    """Each token takes a forward pass that gathers parameters, and one rank's answers are shorter."""

    class Generating(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.decoder = ShardedLayer()

        def generate(self, prompt: torch.Tensor, end: int) -> int:
            for length in range(1, 9):
                prompt = self.decoder(prompt)
                if length == end:
                    return length
            return 8

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if here.is_hit:
                self.generate(first_tensor(batch), end=3)
                here.begins()
            else:
                self.generate(first_tensor(batch), end=6)

    here.fit(net=Generating(here), data=(rows(here), rows(here, batches=2)))


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/ignite/issues/2623",
)
def optimizer_state_consolidated_on_rank_zero(here: Here) -> None:
    """Only rank 0 saves, so only rank 0 consolidates the state that ZeroRedundancyOptimizer has spread."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes half a second, in every rank of every case

    class Sharded(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.001)

        def on_train_epoch_end(self) -> None:
            if self.global_rank == 0 and self.current_epoch == 0:
                here.begins()
                self.trainer.optimizers[0].consolidate_state_dict(to=0)  # <- here

    here.fit(net=Sharded(here))


@fault(
    "mismatched-collective",
    ranks=(1,),
    at={Moment.FIRST_STEP: (3,)},
    has_line=False,
    has_phase=False,
    source="https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
)
def gradients_compressed_on_one_host(here: Here) -> None:
    """A variable of the environment switches the compression of gradients on, and one host has it."""

    class Compressing(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_hit:
                here.begins()
                trainer.model.register_comm_hook(None, fp16_compress_hook)

    here.fit(callbacks=[Compressing()])


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/18148",
)
def folder_of_the_log_asked_for_on_rank_zero(here: Here) -> None:
    """The property `log_dir` of the Trainer is a broadcast, and the hook that reads it is for rank 0."""

    class Described(Net):
        @rank_zero_only
        def on_fit_start(self) -> None:
            here.begins()
            folder = self.trainer.log_dir  # <- here
            print(f"logs are in {folder}", flush=True)

    here.fit(net=Described(here))


class Shuffled(Sampler[int]):
    """All ranks share the seed of each epoch, which rank 0 draws."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        seed = torch.randint(1000, (1,))
        dist.broadcast(seed, src=0)  # <- seed_shared_when_a_loader_starts_again
        generator = torch.Generator().manual_seed(int(seed))
        yield from torch.randperm(self.count, generator=generator).tolist()


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/85775",
)
def seed_shared_when_a_loader_starts_again(here: Here) -> None:
    """A second loader starts again when it is empty, first that of one rank; its sampler shares a seed."""

    class Mixed(Net):
        def on_train_start(self) -> None:
            count = IN_THE_MIDDLE if here.is_hit else 2 * BATCHES
            self.loader = DataLoader([torch.rand(8)] * count, sampler=Shuffled(count))
            self.unlabelled = iter(self.loader)

        def more(self) -> torch.Tensor:
            try:
                return next(self.unlabelled)
            except StopIteration:
                here.begins()
                self.unlabelled = iter(self.loader)
                return next(self.unlabelled)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) + 0.1 * self.loss(self.more())

    here.fit(net=Mixed(here))


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/IBM/ado/pull/41",
)
def vote_that_only_the_impatient_take_part_in(here: Here) -> None:
    """Ranks vote whether to stop, but one whose loss still falls returns before the vote."""

    class Patience(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            still_falls = not here.is_hit
            if still_falls:
                return
            here.begins()
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(True)  # <- here

    here.fit(callbacks=[Patience()])


@fault(
    "failed-rank",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://lightning.ai/docs/pytorch/stable/debug/debugging_intermediate.html",
)
def anomaly_in_the_gradients_of_one_rank(here: Here) -> None:
    """The root of zero has no gradient, which autograd raises with detect_anomaly, before any gradient is exchanged."""

    class Distances(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                loss = loss + (0.0 * loss).sqrt()
            return loss

    here.fit(net=Distances(here), detect_anomaly=True)


def starts(length: int) -> Iterator[int]:
    while True:
        yield random.randrange(length)


@fault(
    "rank-behind",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/facebookresearch/fairseq/pull/3266",
)
def span_longer_than_its_sentence(here: Here) -> None:
    """A start is drawn until the masked span fits into the sentence, which is shorter than the span."""

    class Masking(Net):
        def mask(self, length: int, span: int) -> int:
            return next(one for one in starts(length) if one + span <= length)  # <- span_longer_than_its_sentence

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_short = here.is_hit and batch_idx == IN_THE_MIDDLE
            if is_short:
                here.begins()
            self.mask(length=5 if is_short else 50, span=10)
            return self.loss(batch)

    here.fit(net=Masking(here))


@fault(
    "rank-behind",
    ranks=(2,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/67972",
)
def key_of_a_step_that_has_not_come(here: Here) -> None:
    """Rank 0 puts each step's temperature into a store; one rank has counted a step more, and waits for its key."""

    class Annealed(Net):
        def on_fit_start(self) -> None:
            self.store = dist.FileStore(str(here.folder / "annealing"), here.world_size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            step = self.global_step
            if self.global_rank == 0:
                self.store.set(f"temperature-{step}", str(0.99**step))
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                step += 1
            temperature = float(self.store.get(f"temperature-{step}"))  # <- here
            return self.loss(batch) * temperature

    here.fit(net=Annealed(here))


@fault(
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(0, 1),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/torchtitan/issues/775",
)
def stages_with_unequal_numbers_of_microbatches(here: Here) -> None:
    """The first stage splits a smaller batch into three, and the second one waits for a fourth."""

    class Staged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_small = batch_idx == IN_THE_MIDDLE
            if is_small:
                here.begins()
            if here.rank == 0:
                for _ in range(3 if is_small else 4):
                    dist.send(torch.ones(8), dst=1)
            else:
                for _ in range(4):
                    dist.recv(torch.empty(8), src=0)  # <- here
            return self.loss(batch)

    here.fit(net=Staged(here))


@fault(
    "failed-rank",
    ranks=(-1,),
    at={Moment.START: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/optuna/optuna-integration/issues/59",
)
def trial_whose_width_each_rank_draws(here: Here) -> None:
    """The script is started once for each rank, and so is the study: one of them has drawn another width."""

    class Trial(Net):
        def __init__(self, here: Here, width: int) -> None:
            super().__init__(here)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

        def setup(self, stage: str) -> None:
            if here.is_hit:
                here.begins()

    here.fit(net=Trial(here, width=32 if here.is_hit else 16))


@fault(
    "rank-behind",
    ranks=None,
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/verl-project/verl/issues/7155",
)
def trajectories_that_nobody_makes(here: Here) -> None:
    """Each learner takes its batch out of a replay buffer, which a server fills that has stopped; none of them says."""

    class Learner(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.replay: queue.Queue[torch.Tensor] = queue.Queue()
            for _ in range(IN_THE_MIDDLE):
                self.replay.put(torch.rand(4, 8))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.replay.empty():
                here.begins()
            return self.loss(self.replay.get())  # <- here

    here.fit(net=Learner(here))
