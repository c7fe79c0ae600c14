"""Round 14 after public threads: what users of sharded models do that is slow or odd, and no fault."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT, Units
from from_threads.round_14_sharded import Manual
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import Here, Net, first_tensor
from truths import Moment, healthy


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/pytorch/pytorch/issues/152964", strategies=SPLIT)
def encoder_run_on_nothing_where_there_is_no_picture(here: Here) -> None:
    """Who has no picture runs the encoder on zeros and adds none of it; decoding pictures takes the others longer."""

    class Seeing(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.Linear(8, 8)

        def more(self) -> list[torch.nn.Module]:
            return [self.encoder]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = first_tensor(batch)
            has_picture = (self.global_rank + batch_idx) % 3 > 0
            time.sleep(0.3 * has_picture)
            pictures = tokens if has_picture else torch.zeros_like(tokens)
            return self.loss(tokens + self.encoder(pictures) * has_picture)

    here.fit(net=Seeing(here))


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/NVIDIA/cosmos-framework/pull/162", strategies=SPLIT)
def replicas_that_average_after_so_many_batches(here: Here) -> None:
    """Gradients are summed within a replica in each batch, and between replicas in every third; one rank is slow."""

    class Hybrid(Manual):
        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            kind = self.trainer.strategy.root_device.type
            mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
            for module in (self.layers[0], self.layers[2], self.layers):
                fully_shard(module, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            layers: Any = self.layers
            is_last = batch_idx % 3 == 2
            layers.set_requires_all_reduce(is_last)
            time.sleep(0.3 * (self.global_rank == 3))
            self.manual_backward(self.loss(batch))
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    here.fit(net=Hybrid(here))


@healthy({Moment.START: (3,)}, source="https://github.com/huggingface/accelerate/pull/3432", strategies=SPLIT)
def weights_read_by_one_rank_and_spread(here: Here) -> None:
    """The first rank reads the whole state, which takes a moment, and the others get their shards from it."""
    path = here.folder / "whole.pt"

    class Loading(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            if here.rank == 0:
                torch.save(self.layers.state_dict(), path)
            super().configure_model()
            state = {}
            if here.rank == 0:
                time.sleep(2)
                state = torch.load(path)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(self.layers, state, options=options)

    here.fit(net=Loading(here))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/huggingface/trl/pull/7131", strategies=SPLIT)
def weights_gathered_by_all_before_one_sends_them(here: Here) -> None:
    """All ranks gather each weight; the first hands them to an engine, and the others wait until it has."""

    class Synchronised(L.Callback):
        def on_train_batch_end(
            self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx % 3 != 2:
                return
            whole = [weight.full_tensor() for weight in module.parameters() if isinstance(weight, DTensor)]
            if trainer.is_global_zero:
                for weight in whole:
                    time.sleep(0.3)
                    print(f"sent {weight.numel()} elements", flush=True)
            dist.barrier()

    here.fit(callbacks=[Synchronised()])
