"""Round 17 after public threads: what users of sharded models do that looks odd, and of which nothing is to be said."""

import gc
import shutil
import socket
import threading
import time
import urllib.request
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from from_threads.round_14_sharded import Manual
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import BATCHES, Here, Net, first_tensor
from truths import Moment, healthy


class Cyclic:
    """Is part of a cycle, and takes a moment to go."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.8)


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/marin-community/marin/issues/9205", strategies=SPLIT)
def garbage_collected_by_each_rank_in_another_step(here: Here) -> None:
    """Each rank collects its garbage by itself, and is nearly a second late in another step than the others."""

    class Collecting(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            gc.disable()

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % trainer.world_size == trainer.global_rank:
                Cyclic()
                gc.collect()

    here.fit(callbacks=[Collecting()])


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/huggingface/accelerate/pull/3762", strategies=SPLIT)
def gradients_exchanged_with_the_last_of_some_micro_batches(here: Here) -> None:
    """All ranks exchange gradients with the third micro-batch only; each is slow in another one."""

    class Accumulating(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            layers: Any = self.layers
            parts = first_tensor(batch).tensor_split(3)
            for number, part in enumerate(parts):
                layers.set_requires_gradient_sync(number == len(parts) - 1)
                time.sleep(0.3 * (number == self.global_rank))
                self.manual_backward(self.loss(part) / len(parts))
            optimizer.step()
            optimizer.zero_grad()

    here.fit(net=Accumulating(here))


class Heartbeat(L.Callback):
    """Tells a server after each step that the run is alive, in threads, and does not wait for what it says."""

    def __init__(self, address: str) -> None:
        self.address = address

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            threading.Thread(target=urllib.request.urlopen, args=(self.address,), daemon=True).start()
        time.sleep(0.3 * trainer.global_rank)


@healthy({Moment.END: (2,)}, source="https://github.com/PrimeIntellect-ai/prime-rl/pull/1353", strategies=SPLIT)
def heartbeats_that_are_never_answered(here: Here) -> None:
    """Threads of the first rank wait for a server that never answers, and nothing waits for the threads."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        here.fit(callbacks=[Heartbeat(f"http://127.0.0.1:{server.getsockname()[1]}/beat")])


class FannedOut(L.Callback):
    """Copies each shard in a thread, and asks all ranks after each step whether they have; the group is its own."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.copying = threading.Thread()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group()
        self.is_running = False

    def copy(self, rank: int) -> None:
        folder = self.here.folder
        shard = folder / f"shard-{rank}.pt"
        time.sleep(2.0 * (rank == 1))
        shutil.copy(shard, folder / f"kept-{rank}.pt")

    def is_done_everywhere(self) -> bool:
        is_done = torch.tensor(int(not self.copying.is_alive()))
        dist.all_reduce(is_done, dist.ReduceOp.MIN, group=self.group)
        return bool(is_done)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_running:
            self.is_running = not self.is_done_everywhere()
        elif batch_idx == 1:
            weights: dict[str, Any] = dict(module.named_parameters())
            shard = {name: weight.detach().to_local() for name, weight in weights.items()}
            torch.save(shard, self.here.folder / f"shard-{trainer.global_rank}.pt")
            self.copying = threading.Thread(target=self.copy, args=(trainer.global_rank,))
            self.copying.start()
            self.is_running = True

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        while self.is_running:
            time.sleep(0.1)
            self.is_running = not self.is_done_everywhere()


@healthy({Moment.CHECKPOINT: (3,)}, source="https://github.com/saforem2/ezpz/pull/197", strategies=SPLIT)
def shards_copied_in_threads_that_all_ranks_ask_about(here: Here) -> None:
    """The copy of one rank takes seconds, and all ranks ask each other in every step whether theirs is done."""
    here.fit(callbacks=[FannedOut(here)])


@healthy({Moment.START: (4,)}, source="https://github.com/mosaicml/composer/pull/3313", strategies=SPLIT)
def checkpoint_sent_to_the_first_rank_of_each_replica(here: Here) -> None:
    """The first rank of each replica takes part in a broadcast, and the others of a replica wait for theirs."""

    class Replicated(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for module in (self.layers[0], self.layers[2], self.layers):
                fully_shard(module, mesh=self.mesh)

        def on_fit_start(self) -> None:
            replicate, shard = (self.mesh.get_group(name) for name in ("replicate", "shard"))
            found: list[Any] = [None]
            if self.mesh.get_local_rank("shard") == 0:
                if self.global_rank == 0:
                    time.sleep(1.5)
                    found = [{"steps": BATCHES}]
                dist.broadcast_object_list(found, group=replicate, group_src=0)
            dist.broadcast_object_list(found, group=shard, group_src=0)
            self.steps_before = found[0]["steps"]

    here.fit(net=Replicated(here))
