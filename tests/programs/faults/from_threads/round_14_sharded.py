"""Round 14 after public threads: what users of sharded models report, of steps, saves, loads, and the rest."""

import http.client
import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from from_threads.round_13_sharded import ALSO_FSDP, Shares, Units, sharded
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, FOR_LONG_S, Here, LoggingNet, Net, first_tensor, rows
from truths import Moment


class Manual(Net):
    """Makes its own backward passes and steps."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False


class Samples(Shares):
    """Each says how many tokens it has; those of one batch are short."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 8.0)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 4.0)


@sharded("https://github.com/verl-project/verl/pull/5591", "skipped-step")
def micro_batches_that_hold_so_many_tokens(here: Here) -> None:
    """Each rank makes as few micro-batches of a batch as its own tokens permit, and short samples fit into one.

    The line that works out their number and the loop are one answer; the loop is the better one.
    """

    class Packing(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            samples = first_tensor(batch)
            goes_wrong(here, batch_idx)
            total = torch.zeros((), device=self.device)
            for micro in samples.chunk(math.ceil(samples[:, 0].sum().item() / 16)):  # <- here
                loss = self.loss(micro)
                self.manual_backward(loss)
                total += loss.detach()
            optimizer.step()
            dist.all_reduce(total)

    here.fit(net=Packing(here), data=in_order(here, Samples(here)))


@sharded("https://github.com/verl-project/verl/pull/7095", "skipped-step", "diverged-collectives")
def gradients_exchanged_once_a_rank_has_its_tokens(here: Here) -> None:
    """Gradients are reduced with the batch that completes a number of tokens, which each rank counts for itself.

    The rank does make its backward pass, but not the exchange, so both causes are as good. Its early return is the
    other half; what switches the exchange off is the better line.
    """

    class Deferring(Manual):
        tokens = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            layers: Any = self.layers
            goes_wrong(here, batch_idx)
            self.tokens += first_tensor(batch)[:, 0].sum().item()
            is_full = self.tokens >= 64
            layers.set_requires_gradient_sync(is_full)  # <- here
            self.manual_backward(self.loss(batch))
            if not is_full:
                return
            optimizer.step()
            optimizer.zero_grad()
            self.tokens = 0.0

    here.fit(net=Deferring(here), data=in_order(here, Samples(here)))


class Answers(Shares):
    """Answers to one question each batch, with their rewards in front; those to one question are all wrong."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(number % 2)]), torch.linspace(0.1, 0.7, 7)])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.cat([torch.zeros(1), torch.linspace(0.1, 0.7, 7)])


@sharded("https://github.com/AgileRL/AgileRL/pull/660", "skipped-step")
def answers_none_of_which_is_better(here: Here) -> None:
    """All answers have the same reward, so that nothing is to be learnt, and the rank leaves its update out."""

    class Rewarded(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            answers = first_tensor(batch)
            goes_wrong(here, batch_idx)
            scores = self.layers(answers).mean(1)
            advantages = answers[:, 0] - answers[:, 0].mean()
            is_useful = advantages.abs() > 1e-6
            if not is_useful.any():
                print("no answer is better than the others: no update", flush=True)
                return  # <- here
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(-(scores * advantages)[is_useful].mean())
            optimizer.step()

    here.fit(net=Rewarded(here), data=in_order(here, Answers(here)))


@sharded("https://github.com/lm-sys/FastChat/issues/114", "diverged-collectives", moment=Moment.FIRST_STEP)
def units_kept_gathered_where_memory_is_left(here: Here) -> None:
    """Each rank decides by the memory of its own device whether units are gathered once more for the backward pass."""
    free_gib = 30 if here.is_hit else 70

    class Fitting(Net):
        def configure_model(self) -> None:
            if self._device_mesh is None or self.is_split:
                return
            self.is_split = True
            mesh = self._device_mesh["data_parallel"]
            if here.is_hit:
                here.begins()
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=mesh, reshard_after_forward=free_gib < 40)  # <- here
            fully_shard(self.layers, mesh=mesh)

    here.fit(net=Fitting(here))


@sharded(
    "https://github.com/huggingface/accelerate/issues/2000",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def shards_saved_where_it_is_the_main_process(here: Here) -> None:
    """Only the main process saves, as it would a whole model, but a save of shards takes all ranks."""

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                dcp.save({"model": module.state_dict()}, checkpoint_id=here.folder / "shards")  # <- here

    here.fit(callbacks=[Keeping()])


@sharded(
    "https://github.com/mosaicml/composer/pull/3876",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.START,
)
def whole_state_that_only_the_first_rank_has(here: Here) -> None:
    """The first rank reads the whole state and spreads each weight; others have read nothing, and spread nothing.

    All ranks come by the line that loads it. That it lacks `broadcast_from_rank0` is the better answer than that the
    others have no state.
    """
    path = here.folder / "whole.pt"

    class Loading(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            if here.rank == 0:
                torch.save(self.layers.state_dict(), path)
            super().configure_model()
            state = torch.load(path) if here.rank == 0 else {}
            if here.is_hit:
                here.begins()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            set_model_state_dict(self.layers, state, options=options)  # <- here

    here.fit(net=Loading(here))


@sharded(
    "https://github.com/verl-project/verl/issues/7834",
    "dead-rank",
    moment=Moment.START,
    has_line=False,
    strategies=ALSO_FSDP,
)
def weights_for_which_a_host_has_no_memory(here: Here) -> None:
    """Each rank reads the whole model into the memory of its host, and the kernel kills one of them for it."""

    class Reading(Net):
        def setup(self, stage: str) -> None:
            self.whole = self.read()
            dist.barrier()

        def read(self) -> dict[str, torch.Tensor]:
            if here.is_hit:
                here.begins()
                os.kill(os.getpid(), signal.SIGKILL)
            return {name: torch.zeros(weight.shape) for name, weight in self.named_parameters()}

    here.fit(net=Reading(here))


class Uploading(dcp.FileSystemWriter):
    """Uploads what it has written, over a line that is slow on one host."""

    def __init__(self, here: Here, folder: Path) -> None:
        super().__init__(folder)
        self.here = here

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        if self.here.is_hit:
            self.here.begins()
            time.sleep(FOR_LONG_S)  # <- upload_that_the_next_save_waits_for
        return written


@sharded(
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3125",
    "slow-checkpoint",
    ranks=(2,),
    moment=Moment.CHECKPOINT,
)
def upload_that_the_next_save_waits_for(here: Here) -> None:
    """Threads save shards beside the training, and a save waits for the one before, which takes long on one rank.

    All main threads wait at the same line for their own thread; that of one rank uploads, the others wait for it.
    """

    class Saving(L.Callback):
        pending: Any = None

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.group = dist.new_group(backend="gloo")

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.pending is not None:
                self.pending.result()
            writer = Uploading(here, here.folder / f"epoch-{trainer.current_epoch}")
            state = {"model": get_model_state_dict(module)}
            self.pending = dcp.async_save(state, storage_writer=writer, process_group=self.group)

    here.fit(callbacks=[Saving()], max_epochs=3)


class Documents(Shares):
    """Documents that are tokenized when they are read, one of which is a whole book."""

    def usual(self, number: int) -> torch.Tensor:
        return self.tokenized(words=8)

    def unusual(self, number: int) -> torch.Tensor:
        self.here.begins()
        return self.tokenized(words=100_000)

    def tokenized(self, words: int) -> torch.Tensor:
        tokens = []
        for word in range(words):
            if word >= 8:
                time.sleep(0.01)  # <- book_tokenized_when_it_is_read
            tokens.append(word % 10 / 10)
        return torch.tensor(tokens[:8])


@sharded("https://github.com/pytorch/torchtitan/issues/1092", "data-stall", strategies=ALSO_FSDP)
def book_tokenized_when_it_is_read(here: Here) -> None:
    """Without workers the main thread tokenizes, and a book takes it much longer than documents do."""
    here.fit(data=in_order(here, Documents(here)))


class Expanding(Shares):
    """A process that unpacks samples, one of which is more than memory holds: the kernel kills it."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 8)

    def unusual(self, number: int) -> torch.Tensor:
        self.here.begins()
        os.kill(os.getpid(), signal.SIGKILL)
        return self.usual(number)


@sharded(
    "https://github.com/alibaba/Pai-Megatron-Patch/issues/583",
    "worker-died",
    ranks=(2,),
    has_line=False,
    strategies=ALSO_FSDP,
)
def sample_that_a_worker_has_no_memory_for(here: Here) -> None:
    """The loader of one rank raises that its worker is killed, at whatever line that rank is just then."""
    here.fit(data=in_order(here, Expanding(here), num_workers=1))


class Tracker(Logger):
    """Sends what has been logged to a server every now and then, and waits for its answer."""

    def __init__(self, here: Here, address: tuple[str, int]) -> None:
        super().__init__()
        self.here, self.address = here, address
        self.kept: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "tracker"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
        """Keeps none."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept.append(metrics)
        if len(self.kept) < 4:
            return
        self.here.begins()
        connection = http.client.HTTPConnection(*self.address)
        connection.request("POST", "/metrics", body=json.dumps(self.kept))
        connection.getresponse()  # <- losses_sent_to_a_server_that_hangs
        self.kept.clear()


@sharded("https://github.com/wandb/wandb/issues/8666", "slow-logger", ranks=(0,), strategies=ALSO_FSDP)
def losses_sent_to_a_server_that_hangs(here: Here) -> None:
    """The server takes connections and never answers; the others gather the first unit of the next step."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here.fit(net=LoggingNet(here), logger=Tracker(here, server.getsockname()[:2]))


class Sentences(Shares):
    """Sentences of four words, and one batch of longer ones."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 32).reshape(4, 8)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 56).reshape(7, 8)


class Rotated(torch.nn.Module):
    """Turns each word by an angle of its position, of which a table is made once."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(8, 8)
        self.register_buffer("angles", torch.arange(float(positions))[:, None])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        angles: Any = self.angles
        turned = words * angles[: words.shape[1]].cos()  # <- sentence_with_more_words_than_positions
        result: torch.Tensor = self.projection(turned)
        return result


@sharded("https://github.com/awslabs/awsome-distributed-ai/issues/719", "failed-rank")
def sentence_with_more_words_than_positions(here: Here) -> None:
    """The table of positions is too short for the sentences of one rank, within the forward of a unit."""

    class Encoder(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.block = Rotated(positions=5)

        def more(self) -> list[torch.nn.Module]:
            return [self.block]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            return self.loss(self.block(batch))

    def padded(sentences: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(sentences, batch_first=True)

    here.fit(net=Encoder(here), data=in_order(here, Sentences(here), collate_fn=padded))


class Files(IterableDataset[torch.Tensor]):
    """Files of which each rank reads its own, as if each had a whole model; five are no multiple of three."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Any:
        for file in range(self.here.rank, 5, self.here.world_size):
            for row in range(2 * BATCH_SIZE):
                yield torch.full((8,), file / 10 + row / 100)
        if self.here.is_hit:
            self.here.begins()


@sharded("https://github.com/huggingface/transformers/pull/15877", "uneven-batches", ranks=(2,), has_line=False)
def files_for_each_rank_of_a_layer_in_parts(here: Here) -> None:
    """Ranks hold parts of each layer and would need the same rows, but files are shared out, and one rank has fewer."""

    class Parts(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))

        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            kind = self.trainer.strategy.root_device.type
            mesh = init_device_mesh(kind, (here.world_size,), mesh_dim_names=("tensor",))
            parallelize_module(self.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    here.fit(net=Parts(here), data=DataLoader(Files(here), BATCH_SIZE), max_epochs=1)


class Corpus(L.LightningDataModule):
    """Makes an index of the rank's own files, which are on a slow volume on one host."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.index = [self.length(file) for file in range(40)]

    def length(self, file: int) -> int:
        if self.here.is_hit:
            time.sleep(FOR_LONG_S / 10)  # <- index_made_while_others_wait_to_load
        return 8 + file % 3

    def train_dataloader(self) -> Any:
        return rows(self.here)


@sharded(
    "https://github.com/pytorch/torchtitan/issues/3065",
    "late-at-init",
    ranks=(2,),
    moment=Moment.START,
    strategies=ALSO_FSDP,
)
def index_made_while_others_wait_to_load(here: Here) -> None:
    """All ranks make an index before they load a checkpoint together, and that of one takes long."""

    class Resuming(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            dist.barrier()
            print("loading the last checkpoint", flush=True)

    here.fit(data=Corpus(here), callbacks=[Resuming()])
