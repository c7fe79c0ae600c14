"""Round 15 after public threads: what users of sharded models report, with their truths."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, Units, sharded
from samples import Stream, in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, first_tensor
from truths import Moment


class Adapting(torch.optim.SGD):
    """Learns at a rate that follows from the gradients of all ranks."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        group = self.param_groups[0]
        shards = [weight.grad.to_local() for weight in group["params"]]
        mine = [shard for shard in shards if shard.numel()]
        if not mine:
            return loss  # <- step_that_a_rank_with_empty_shards_leaves
        size = torch.stack([shard.square().sum() for shard in mine]).sum()
        dist.all_reduce(size)
        group["lr"] = 0.001 / (1 + size.item())
        return loss


@sharded(
    "https://github.com/konstmish/prodigy/issues/35",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
)
def step_that_a_rank_with_empty_shards_leaves(here: Here) -> None:
    """Only the last layer is trained; it has two rows for three ranks, and who has none leaves the step early.

    The sum that it does not take part in is the other half of it; the early return is the better line.
    """

    class Tuned(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_hit:
                here.begins()
            return self.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Adapting(self.layers[2].parameters(), lr=0.001)

    here.fit(net=Tuned(here))


@sharded(
    "https://github.com/EleutherAI/bergson/pull/380",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def moments_of_the_optimizer_saved_by_the_first_rank(here: Here) -> None:
    """The weights are gathered by all ranks, but the state of the optimizer within the condition for the file."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    class Moved(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.001)

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            state: dict[str, Any] = {"model": get_model_state_dict(module, options=options)}
            if trainer.is_global_zero:
                here.begins()
                optimizer = trainer.optimizers[0]
                state["optimizer"] = get_optimizer_state_dict(module, optimizer, options=options)  # <- here
                torch.save(state, here.folder / "state.pt")

    here.fit(net=Moved(here), callbacks=[Keeping()])


class Media(Shares):
    """Each has a picture; the last number of a row says that it has a clip as well, as in one batch one row does."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.0])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, float(number == 2)])


class Seeing(Units):
    """Sees with an encoder that is a unit of its own, and divides its loss by the tokens that all ranks have."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def more(self) -> list[torch.nn.Module]:
        return [self.encoder]

    def per_token(self, loss: torch.Tensor) -> torch.Tensor:
        tokens = torch.ones((), device=self.device)
        dist.all_reduce(tokens)
        return loss / tokens.item()


@sharded("https://github.com/nvidia-cosmos/cosmos-rl/pull/606", "diverged-collectives")
def encoder_called_once_more_for_a_clip(here: Here) -> None:
    """The encoder runs for pictures and again for clips, which only one rank has, so that it gathers the unit twice."""

    class Watching(Seeing):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = first_tensor(batch)
            goes_wrong(here, batch_idx)
            features = self.encoder(rows)
            is_clip = rows[:, 7] > 0
            if is_clip.any():
                features[is_clip] += self.encoder(rows[is_clip])  # <- here
            scale = self.per_token(torch.ones((), device=self.device))
            return self.loss(features) * scale

    here.fit(net=Watching(here), data=in_order(here, Media(here)))


@sharded("https://github.com/facebookresearch/perception_models/pull/7", "failed-rank")
def layer_called_past_the_forward_of_its_unit(here: Here) -> None:
    """Of clips, what comes before the last layer is taken; no unit is gathered for that, and shards do not fit."""

    class Watching(Seeing):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = first_tensor(batch)
            goes_wrong(here, batch_idx)
            features = self.encoder(rows)
            is_clip = rows[:, 7] > 0
            if is_clip.any():
                features[is_clip] += self.encoder[0](rows[is_clip])  # <- here
            return self.loss(features)

    here.fit(net=Watching(here), data=in_order(here, Media(here)))


@sharded(
    "https://github.com/huggingface/transformers/pull/48237",
    "failed-rank",
    ranks=(2,),
    moment=Moment.START,
)
def rows_of_which_a_rank_reads_none(here: Here) -> None:
    """Each rank reads the rows of its shard and stacks them; the last one has none of the two rows."""

    class Reading(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            super().configure_model()
            if here.is_hit:
                here.begins()
            weight: Any = self.layers[2].weight
            shard = weight.detach().to_local()
            rows = [torch.full((16,), row / 10) for row in range(shard.shape[0])]
            shard.copy_(torch.stack(rows))  # <- here
            dist.barrier()

    here.fit(net=Reading(here))


class Parts(Net):
    """Each rank has parts of each layer, and all need the same rows."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))

    def configure_model(self) -> None:
        if self.is_split:
            return
        self.is_split = True
        kind = self.trainer.strategy.root_device.type
        mesh = init_device_mesh(kind, (self.here.world_size,), mesh_dim_names=("tensor",))
        parallelize_module(self.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@sharded("https://github.com/openai/gpt-oss/issues/270", "diverged-collectives")
def text_of_which_each_part_draws_the_end(here: Here) -> None:
    """Ranks hold parts of each layer, and each draws by its own seed whether the text is over.

    That nobody tells the others what was drawn is the other half; the call that has no partner is the better line.
    """

    class Writing(Parts):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.dice = random.Random(SEED + here.rank)

        @torch.no_grad()
        def text(self, start: torch.Tensor) -> list[torch.Tensor]:
            words = [start]
            while len(words) < 9:
                words.append(self.layers(words[-1]))  # <- here
                chance = words[-1].mean().sigmoid().item() / 5
                if self.dice.random() < chance:
                    break
            return words

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = first_tensor(batch)
            goes_wrong(here, batch_idx)
            if batch_idx == IN_THE_MIDDLE:
                lengths = self.all_gather(torch.tensor([len(self.text(rows))], device=self.device))
                print(f"lengths: {lengths.flatten().tolist()}", flush=True)
            return self.loss(rows)

    here.fit(net=Writing(here), data=DataLoader(Stream(BATCHES), BATCH_SIZE))


SEED = 1005
"""By which the second of three ranks draws the end first."""


class Read(Stream):
    """Is over before the steps that are planned."""

    def __init__(self, here: Here) -> None:
        super().__init__(BATCHES - 2)
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__()
        self.here.begins()


@sharded(
    "https://github.com/modelscope/ms-swift/issues/4644",
    "uneven-batches",
    ranks=(0,),
    has_line=False,
)
def data_of_the_rank_that_reads_for_all_parts(here: Here) -> None:
    """The first rank reads and sends; when its data is over it leaves, and the others wait for the next batch.

    They have placeholders for as many steps as are planned.
    """

    class Fed(Parts):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = first_tensor(batch).clone()
            dist.broadcast(rows, 0)
            return self.loss(rows)

    data = Read(here) if here.rank == 0 else Stream(BATCHES)
    here.fit(net=Fed(here), data=DataLoader(data, BATCH_SIZE), max_epochs=1, max_steps=BATCHES)


class Resumed(IterableDataset[torch.Tensor]):
    """Passes over what was read before the run was interrupted, which a slow volume of one host makes long."""

    passed_over = 4000

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(self.passed_over + BATCHES * BATCH_SIZE):
            values = self.read(row)
            if row >= self.passed_over:
                yield values

    def read(self, row: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
            time.sleep(0.05)  # <- rows_passed_over_until_the_run_goes_on
        return torch.full((8,), row / 10_000 + self.here.rank / 10)


@sharded(
    "https://github.com/huggingface/accelerate/issues/2606",
    "data-stall",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
)
def rows_passed_over_until_the_run_goes_on(here: Here) -> None:
    """A run goes on where it was by reading all rows before; that takes long on one rank, and others gather a unit."""
    here.fit(data=DataLoader(Resumed(here), BATCH_SIZE))


@sharded(
    "https://github.com/meta-pytorch/torchtune/issues/2059",
    "rank-zero-only-work",
    "slow-checkpoint",
    ranks=(0,),
    moment=Moment.END,
)
def weights_converted_before_they_are_written(here: Here) -> None:
    """All ranks gather the weights; the first converts each of them for another program, and the others wait."""

    def converted(weight: torch.Tensor) -> torch.Tensor:
        time.sleep(FOR_LONG_S / 2)  # <- here
        return weight.half()

    class Exporting(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(module, options=options)
            if trainer.is_global_zero:
                here.begins()
                torch.save({name: converted(weight) for name, weight in state.items()}, here.folder / "half.pt")
            dist.barrier()

    here.fit(callbacks=[Exporting()], max_epochs=1)


@sharded(
    "https://github.com/pytorch/pytorch/issues/152310",
    "crossed-groups",
    "diverged-collectives",
    ranks=(0, 1),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def replica_that_waits_for_all_when_it_has_saved(here: Here) -> None:
    """The first of two replicas writes its shards, and waits for all ranks instead of for its own.

    The other replica is in the next step, and waits there for the gradients of the first one.
    """

    class Hybrid(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            kind = self.trainer.strategy.root_device.type
            self.mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
            for module in (self.layers[0], self.layers[2], self.layers):
                fully_shard(module, mesh=self.mesh)

        def on_train_epoch_end(self) -> None:
            if self.mesh["replicate"].get_local_rank() > 0:
                return
            here.begins()
            shard = {name: weight.to_local() for name, weight in self.state_dict().items()}
            torch.save(shard, here.folder / f"shard-{self.global_rank}.pt")
            dist.barrier()  # <- here
            if self.trainer.is_global_zero:
                (here.folder / "complete").touch()

    here.fit(net=Hybrid(here))


class Beside(L.Callback):
    """Writes the shard of each rank in a thread, and looks at the next save whether that has worked."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder
        self.pool = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.pending is not None:
            self.pending.result()
        dist.barrier()
        weights: dict[str, Any] = module.state_dict()
        shard = {name: weight.to_local().clone() for name, weight in weights.items()}
        path = self.folder / f"epoch-{trainer.current_epoch}-{trainer.global_rank}.pt"
        self.pending = self.pool.submit(self.write, shard, path)

    def write(self, shard: dict[str, torch.Tensor], path: Path) -> None:
        if self.here.is_hit:
            self.here.begins()
        torch.save(shard, path)  # <- shard_written_in_a_thread_to_a_folder_that_is_missing


@sharded(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1181",
    "exception-during-save",
    "failed-rank",
    moment=Moment.CHECKPOINT,
)
def shard_written_in_a_thread_to_a_folder_that_is_missing(here: Here) -> None:
    """One host has not mounted the folder; its rank learns that at the next save, where all others are at a barrier.

    The line at which the thread's result is asked for is an answer, too; the one that writes is the better.
    """
    folder = here.folder / "volume" if here.is_hit else here.folder
    here.fit(callbacks=[Beside(here, folder)], max_epochs=3)


@sharded(
    "https://github.com/verl-project/verl/pull/3493",
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    moment=Moment.START,
)
def weights_that_the_first_rank_is_long_in_reading(here: Here) -> None:
    """The first rank reads the whole model from a busy volume, and all others wait for their shards of it."""

    class Loading(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            super().configure_model()
            state = {}
            if here.rank == 0:
                here.begins()
                state = {name: self.read(weight.shape) for name, weight in self.layers.named_parameters()}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(self.layers, state, options=options)

        def read(self, shape: torch.Size) -> torch.Tensor:
            time.sleep(FOR_LONG_S / 2)  # <- here
            return torch.zeros(shape)

    here.fit(net=Loading(here))


class Padded(Shares):
    """Has a batch that is nothing but padding."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.zeros(8)


@sharded("https://github.com/NVIDIA/Megatron-LM/issues/1444", "diverged-collectives")
def balance_of_experts_that_a_rank_has_not_tracked(here: Here) -> None:
    """What has been tracked is averaged over ranks; one that has nothing but padding has tracked nothing."""

    class Tracking(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.tracked: dict[str, torch.Tensor] = {}

        def track(self, tokens: torch.Tensor) -> None:
            is_token = tokens.abs().sum(1) > 0
            if is_token.any():
                self.tracked["balance"] = tokens[is_token, 0].var(correction=0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            self.tracked.clear()
            self.track(first_tensor(batch))
            for name, value in self.tracked.items():
                dist.all_reduce(value)  # <- here
                print(f"{name}: {value.item() / here.world_size:.3f}", flush=True)
            return self.loss(batch)

    here.fit(net=Tracking(here), data=in_order(here, Padded(here)))
