"""Round 6 of trainings of public threads that go wrong: models, collectives, groups, callbacks and settings."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import goes_wrong, on_split_model, thread
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import IN_THE_MIDDLE, Here, Net, first_tensor
from truths import Moment


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/17600",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
)
def norm_of_gradients_that_the_first_rank_logs(here: Here) -> None:
    """Gradients of a split model are put together for a log, which only the first rank writes."""

    class Watched(Net):
        def norm(self) -> float:
            return sum(float(one.grad.full_tensor().norm()) for one in self.parameters())  # <- here

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.is_global_zero and self.trainer.global_step == IN_THE_MIDDLE:
                here.begins()
                print(self.norm(), flush=True)

    split = on_split_model(here)
    split.fit(net=Watched(split))


@thread("https://github.com/pytorch/pytorch/issues/72434", "unused-parameters")
def graph_that_was_said_to_be_static(here: Here) -> None:
    """DDP was told that all steps use the same parameters; a batch without labels has no auxiliary loss."""

    class Auxiliary(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.auxiliary = torch.nn.Linear(8, 2)

        def auxiliary_loss(self, values: torch.Tensor) -> torch.Tensor:
            return self.auxiliary(values).square().mean()  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if not goes_wrong(here, batch_idx):
                loss = loss + self.auxiliary_loss(first_tensor(batch))
            return loss

    here.fit(net=Auxiliary(here), strategy=here.strategy(static_graph=True))


@thread("https://github.com/pytorch/pytorch/pull/160602", "diverged-collectives", moment=Moment.EPOCH_END)
def losses_gathered_within_a_join(here: Here) -> None:
    """A rank with fewer batches shadows what DDP does, and not what the loop gathers by itself."""

    class Joined(L.Callback):
        def mean(self, loss: torch.Tensor) -> torch.Tensor:
            parts = [torch.zeros(()) for _ in range(here.world_size)]
            dist.all_gather(parts, loss.detach())  # <- here
            return torch.stack(parts).mean()

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            probe = DistributedDataParallel(torch.nn.Linear(8, 1))
            with Join([probe]):
                for _ in range(2 if here.is_hit else 5):
                    loss = probe(torch.ones(4, 8)).sum()
                    loss.backward()
                    self.mean(loss)
                if here.is_hit:
                    here.begins()

    here.fit(callbacks=[Joined()])


def on_main_only(work: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        work()
    dist.barrier()  # <- preparation_within_a_preparation


@thread(
    "https://github.com/speechbrain/speechbrain/pull/2268",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
)
def preparation_within_a_preparation(here: Here) -> None:
    """What is run on the main process ends in a barrier; one such thing is run from within another."""

    def tokenizer() -> None:
        (here.folder / "tokenizer").touch()

    def manifests() -> None:
        here.begins()
        on_main_only(tokenizer)

    class Prepared(Net):
        def setup(self, stage: str) -> None:
            on_main_only(manifests)

    here.fit(net=Prepared(here))


@thread(
    "https://github.com/cornstarch-org/Cornstarch/pull/76",
    "crossed-groups",
    "diverged-collectives",
    ranks=(),
    has_ranks=False,
)
def mesh_of_those_that_see_pictures(here: Here) -> None:
    """The mesh of each part of the model is made by the ranks that have it: who has both counts one more."""

    class Modal(Net):
        parts = ((0, 1), (1, 2))

        def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
            return DeviceMesh("cpu", [*ranks])  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE:
                here.begins()
                self.meshes = [self.mesh(ranks) for ranks in self.parts if self.global_rank in ranks]
            return self.loss(batch)

    here.fit(net=Modal(here))


@thread("https://github.com/huggingface/trl/pull/6862", "diverged-collectives")
def vote_on_a_forward_pass_that_failed(here: Here) -> None:
    """Ranks vote on whether the forward pass failed anywhere, and it has a gathering in it that was not reached."""

    class Voting(Net):
        def contrast(self, features: torch.Tensor) -> torch.Tensor:
            others = [torch.empty_like(features) for _ in range(here.world_size)]
            dist.all_gather(others, features.detach())  # <- here
            return (features - torch.stack(others).mean(0)).square().mean()

        def features(self, values: torch.Tensor, pictures: int) -> torch.Tensor:
            if pictures != len(values):
                raise ValueError(f"{pictures} pictures for {len(values)} texts")
            return self.layers(values)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values, failed, loss = first_tensor(batch), torch.zeros(()), torch.zeros(())
            with suppress(ValueError):
                loss = self.contrast(self.features(values, len(values) - goes_wrong(here, batch_idx)))
            failed += float(not loss.requires_grad)
            dist.all_reduce(failed)
            if failed:
                raise RuntimeError("the forward pass failed on some rank")
            return loss

    here.fit(net=Voting(here))


@thread("https://github.com/areal-project/AReaL/pull/1139", "diverged-collectives")
def norm_of_adapters_that_got_no_gradient(here: Here) -> None:
    """The norm over all ranks' adapters is 0 where this rank has trained none of them, and no sum is needed."""

    class Adapters(Net):
        trained = 1

        def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
            if not gradients:
                return torch.zeros(())  # <- here
            total = torch.stack([one.square().sum() for one in gradients]).sum()
            dist.all_reduce(total)
            return total.sqrt()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained = 0 if goes_wrong(here, batch_idx) else 1
            return self.loss(batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            adapters = [one.grad for one in self.parameters()][: self.trained]
            print(self.norm(adapters), flush=True)

    here.fit(net=Adapters(here))


def share_statistics(model: torch.nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer)  # <- statistics_of_a_layer_that_was_folded
            buffer /= dist.get_world_size()


@thread(
    "https://github.com/huggingface/pytorch-image-models/pull/62",
    "diverged-collectives",
    "mismatched-collective",
    moment=Moment.EPOCH_END,
)
def statistics_of_a_layer_that_was_folded(here: Here) -> None:
    """Statistics of all norms are averaged after each epoch; one rank has folded a norm into the layer before it."""

    class Normed(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(2)])

        def loss(self, batch: Any) -> torch.Tensor:
            return self.norms[1](self.layers(self.norms[0](first_tensor(batch)))).square().mean()

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
                self.norms[1] = torch.nn.Identity()
            share_statistics(self)

    here.fit(net=Normed(here))


@thread(
    "https://github.com/logix-project/logix/pull/68",
    "mismatched-collective",
    moment=Moment.EPOCH_END,
)
def states_in_the_order_of_a_set(here: Here) -> None:
    """States are added up in the order in which a set of their names is iterated: by hashes, which differ."""

    class Statistics(L.Callback):
        def __init__(self) -> None:
            self.states = {"counter": torch.zeros(1), "covariance": torch.zeros(8, 8)}

        def names(self) -> list[str]:
            return sorted(self.states, reverse=here.is_hit)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            for name in self.names():
                dist.all_reduce(self.states[name])  # <- here

    here.fit(callbacks=[Statistics()])


@thread("https://github.com/pytorch/pytorch/pull/74894", "diverged-collectives", "mismatched-collective")
def averager_behind_a_step_that_was_left_out(here: Here) -> None:
    """The averager counts the steps; a step whose gradients overflowed on this rank is none."""

    class Averaged(Net):
        averager: PeriodicModelAverager
        overflowed = False

        def on_train_start(self) -> None:
            self.averager = PeriodicModelAverager(period=2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.overflowed = goes_wrong(here, batch_idx)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not self.overflowed:
                self.averager.average_parameters(self.layers[0].parameters())  # <- here

    here.fit(net=Averaged(here))


@thread("https://github.com/pytorch/pytorch/issues/117486", "mismatched-collective")
def tokens_sent_by_other_shares_than_agreed(here: Here) -> None:
    """Each rank sends four tokens to each expert; one sends five to the first and three to the last."""

    class Experts(Net):
        def exchanged(self, tokens: torch.Tensor, shares: list[int]) -> torch.Tensor:
            received = torch.empty_like(tokens)
            expected = [4] * here.world_size
            dist.all_to_all_single(received, tokens, expected, shares)  # <- here
            return received

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            shares = [4] * here.world_size
            if goes_wrong(here, batch_idx):
                shares = [5, 4, 3]
            tokens = torch.ones(4 * here.world_size, 8)
            return self.loss(batch) + self.exchanged(tokens, shares).mean()

    here.fit(net=Experts(here))


class Shared:
    """Memory that all ranks have made together, and have to give up together."""

    def __del__(self) -> None:
        with suppress(ValueError):
            dist.barrier()  # <- memory_given_up_by_the_garbage_collector


@thread("https://github.com/pytorch/pytorch/issues/195500", "diverged-collectives")
def memory_given_up_by_the_garbage_collector(here: Here) -> None:
    """The last reference to what all ranks have to give up together goes away earlier on one of them."""

    class Sharing(Net):
        shared: Shared | None = None

        def on_train_start(self) -> None:
            self.shared = Shared()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                self.shared = None
            return self.loss(batch)

    here.fit(net=Sharing(here))


@thread("https://github.com/ByteDance-Seed/VeOmni/issues/637", "diverged-collectives")
def prototype_of_a_class_that_one_rank_sees(here: Here) -> None:
    """A prototype is made when its class is first seen, and comes from the first rank of the mesh."""

    class Prototypes(Net):
        def on_train_start(self) -> None:
            self.mesh = init_device_mesh("cpu", (here.world_size,))
            self.known: dict[int, torch.Tensor] = {}

        def prototype(self, label: int) -> torch.Tensor:
            if label not in self.known:
                made = distribute_tensor(torch.zeros(2), self.mesh, [Replicate()])  # <- here
                self.known[label] = made.to_local()
            return self.known[label]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            label = int(goes_wrong(here, batch_idx))
            return (self.layers(first_tensor(batch)) - self.prototype(label)).square().mean()

    here.fit(net=Prototypes(here))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/16729",
    "different-trainer-settings",
    "skipped-step",
)
def accumulation_raised_during_the_epoch(here: Here) -> None:
    """A callback adds up more gradients from here on, where a rank's own loss has become noisy."""

    class Steadier(L.Callback):
        def is_noisy(self, batch_idx: int) -> bool:
            return goes_wrong(here, batch_idx)

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if self.is_noisy(batch_idx):
                trainer.accumulate_grad_batches = 2  # <- here

    here.fit(callbacks=[Steadier()])


@thread(
    "https://lightning.ai/docs/pytorch/stable/common/trainer.html#reload-dataloaders-every-n-epochs",
    "different-trainer-settings",
    "unpresented-loader",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def loaders_made_anew_on_one_rank(here: Here) -> None:
    """One host's configuration says that loaders are made anew for each epoch."""

    class Ending(Net):
        def on_train_epoch_end(self) -> None:
            here.begins()

    here.fit(net=Ending(here), reload_dataloaders_every_n_epochs=int(here.is_hit))


@thread(
    "https://github.com/pytorch/pytorch/pull/49383",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def results_from_whoever_comes_first(here: Here) -> None:
    """The first rank receives from anybody until it has heard from all; one has no result, and sends nothing."""

    class Collecting(L.Callback):
        def collect(self, trainer: L.Trainer, results: list[float]) -> None:
            if trainer.is_global_zero:
                for _ in range(trainer.world_size - 1):
                    dist.recv(torch.zeros(1))
            elif results:
                dist.send(torch.tensor(results), dst=0)  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_hit:
                here.begins()
            self.collect(trainer, [] if here.is_hit else [0.5])

    here.fit(callbacks=[Collecting()])


@thread("https://github.com/dylanyunlon/Neuron_SP/issues/154", "diverged-collectives")
def spike_after_which_the_optimizer_rests(here: Here) -> None:
    """The optimizer's state is spread, and its step sends parameters; a rank with a spike in its loss makes none."""

    class Steady(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            is_spike = goes_wrong(here, batch_idx)
            loss = self.loss(batch) * (100.0 if is_spike else 1.0)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if not is_spike:
                optimizer.step()  # <- here

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.001)

    here.fit(net=Steady(here))


@thread("https://github.com/sgl-project/sglang/pull/26923", "diverged-collectives")
def writes_that_one_rank_has_finished(here: Here) -> None:
    """Ranks agree on how many of their writes are done, unless there are none to be asked about."""

    class Writing(L.Callback):
        pending = 2

        def check(self) -> None:
            if not self.pending:
                return  # <- here
            done = torch.tensor(self.pending)
            dist.all_reduce(done, op=dist.ReduceOp.MIN)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                self.pending = 0
            self.check()

    here.fit(callbacks=[Writing()])


@thread(
    "https://github.com/marin-community/marin/issues/9213",
    "diverged-collectives",
    "checkpoint-skipped-barrier",
    moment=Moment.EPOCH_END,
)
def part_of_a_checkpoint_that_was_not_accepted(here: Here) -> None:
    """Each rank uploads its part, and waits for the others; a failed upload is counted, and training goes on."""

    class Uploading(L.Callback):
        failures = 0

        def upload(self, path: Path) -> None:
            if here.is_hit:
                here.begins()
                raise OSError("SlowDown: please reduce your request rate")
            path.write_bytes(b"part")

        def save(self, path: Path) -> None:
            self.upload(path)
            dist.barrier()  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            try:
                self.save(here.folder / f"part-{here.rank}")
            except OSError:
                self.failures += 1

    here.fit(callbacks=[Uploading()])
