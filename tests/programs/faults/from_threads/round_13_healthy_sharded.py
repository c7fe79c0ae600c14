"""Round 13 after public threads: what users of sharded models do that looks odd, and of which nothing is to be said."""

import random
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from from_threads.round_13_sharded import SPLIT, Chunks, Units
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from training import BATCH_SIZE, Here, Net, first_tensor
from truths import Moment, healthy


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/huggingface/accelerate/issues/3793", strategies=SPLIT)
def evaluation_by_the_first_of_two_replicas(here: Here) -> None:
    """With hybrid sharding the ranks of one replica have all that it takes; those of the other one wait for them."""

    class Hybrid(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            self.hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for module in (self.layers[0], self.layers[2], self.layers):
                fully_shard(module, mesh=self.hybrid)

        def on_train_epoch_end(self) -> None:
            if self.hybrid.get_local_rank("replicate") > 0:
                return
            self.eval()
            with torch.no_grad():
                for _ in range(3):
                    self.layers(torch.rand(BATCH_SIZE, 8))
                    time.sleep(0.4)
            self.train()

    here.fit(net=Hybrid(here))


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/Lightning-AI/litgpt/pull/2321", strategies=SPLIT)
def validation_while_all_ranks_have_a_batch(here: Here) -> None:
    """Ranks have four, two and two batches, and tell one another before each whether they have one."""

    class Lockstep(Net):
        def batches(self) -> Iterator[Any]:
            loader = iter(DataLoader(Chunks(here, 4), BATCH_SIZE))
            while True:
                batch = next(loader, None)
                has_one = torch.tensor(int(batch is not None))
                dist.all_reduce(has_one, op=dist.ReduceOp.MIN)
                if not has_one:
                    return
                yield batch

        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                losses = [self.loss(batch) for batch in self.batches()]
            time.sleep(0.5 * self.global_rank)
            print(f"{len(losses)} batches: {torch.stack(losses).mean():.3f}", flush=True)

    here.fit(net=Lockstep(here))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/facebookresearch/fairseq2/pull/484", strategies=SPLIT)
def layers_that_all_ranks_drop_alike(here: Here) -> None:
    """Units are left out at random, by a generator that all ranks seed alike; one rank is slower than the others."""

    class Dropping(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.coin = random.Random(1)

        def more(self) -> list[torch.nn.Module]:
            return [*self.encoder]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = first_tensor(batch)
            time.sleep(0.2 * (self.global_rank == 1))
            for layer in self.encoder:
                if self.coin.random() < 0.4:
                    continue
                values = values + torch.relu(layer(values))
            return self.loss(values)

    here.fit(net=Dropping(here))


class Slow(dcp.FileSystemWriter):
    """Takes a moment."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(0.7 * dist.get_rank())
        return super().write_data(plan, planner)


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/pytorch/torchtitan/pull/313", strategies=SPLIT)
def shards_saved_beside_the_next_epoch(here: Here) -> None:
    """A thread of each rank saves its shard, and has a group of its own for what it tells those of other ranks."""

    class Saving(L.Callback):
        pending: Any = None

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.group = dist.new_group(backend="gloo")

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.on_train_end(trainer, module)
            writer = Slow(here.folder / f"epoch-{trainer.current_epoch}")
            state = {"model": get_model_state_dict(module)}
            self.pending = dcp.async_save(state, storage_writer=writer, process_group=self.group)

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.pending is not None:
                self.pending.result()

    here.fit(callbacks=[Saving()], max_epochs=3)
