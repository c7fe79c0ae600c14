"""Round 13 after public threads: what users of sharded models report, of units, shards and gathers."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from samples import in_order
from threads import goes_wrong, thread
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, Run

SPLIT = ("SafeModelParallel",)
ALSO_FSDP = ("SafeModelParallel", "SafeFSDP")


def sharded(address: str, *causes: str, **more: Any) -> Callable[[Run], Run]:
    """A training of a sharded model that goes wrong, after the thread at this address."""
    return thread(address, *causes, **({"strategies": SPLIT} | more))


class Units(Net):
    """Has more layers, each of which is a unit of its own, as are those of `Net`."""

    def more(self) -> list[torch.nn.Module]:
        """The layers that it has beside those of `Net`."""
        return []

    def configure_model(self) -> None:
        if self._device_mesh is not None and not self.is_split:
            for module in self.more():
                fully_shard(module, mesh=self._device_mesh["data_parallel"], reshard_after_forward=True)
        super().configure_model()


class Shares(Dataset[torch.Tensor]):
    """Rows in order; `usual` makes those of each batch, and `unusual` those of one batch of the rank that is hit."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        batch, number = divmod(turn, BATCH_SIZE)
        is_unusual = rank in self.here.case.ranks and batch == IN_THE_MIDDLE
        return self.unusual(number) if is_unusual else self.usual(number)

    def usual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 8) + number / 100

    def unusual(self, number: int) -> torch.Tensor:
        raise NotImplementedError


class Prompts(Shares):
    """Each says how long its answer becomes."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 3.0)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 9.0)


@sharded("https://github.com/Lightning-AI/litgpt/issues/1202", "diverged-collectives")
def answers_that_end_earlier_on_other_ranks(here: Here) -> None:
    """Each further word of an answer gathers the model; ranks that are done with theirs compare their scores.

    The condition of the loop is the other half of it; the call that has no partner is the better answer.
    """

    class Answering(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.decoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

        def more(self) -> list[torch.nn.Module]:
            return [self.decoder]

        @torch.no_grad()
        def answer(self, prompts: torch.Tensor) -> list[torch.Tensor]:
            words = [prompts]
            while len(words) < prompts.max():
                words.append(self.decoder(words[-1]))  # <- answers_that_end_earlier_on_other_ranks
            return words

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            prompts = first_tensor(batch)
            goes_wrong(here, batch_idx)
            words = self.answer(prompts)
            score: Any = self.trainer.strategy.reduce(torch.stack(words).mean())
            return self.loss(self.decoder(prompts)) * (1 + score.abs())

    here.fit(net=Answering(here), data=in_order(here, Prompts(here)))


class Examiner(L.Callback):
    """Computes the loss of some rows now and then, which the first rank does alone."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.rows = torch.linspace(0.0, 1.0, 40).reshape(5, 8)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == IN_THE_MIDDLE and trainer.is_global_zero:
            self.here.begins()
            for number, row in enumerate(self.rows):
                loss = module.layers(row).square().mean()  # <- loss_of_some_rows_that_the_first_rank_prints
                print(f"row {number}: {loss:.3f}", flush=True)


@sharded(
    "https://github.com/Lightning-AI/lit-llama/pull/89",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
)
def loss_of_some_rows_that_the_first_rank_prints(here: Here) -> None:
    """The first rank evaluates by hand, and gathers units for it, which meets what the next step of others gathers."""
    here.fit(callbacks=[Examiner(here)])


class Routed(Shares):
    """Tokens for each of four experts; none for the third of them in one batch."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), number % 4 / 4 + 0.1)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), (0, 1, 3)[number % 3] / 4 + 0.1)


@sharded("https://github.com/pytorch/pytorch/issues/126616", "unused-parameters", "diverged-collectives")
def expert_without_a_token_on_one_rank(here: Here) -> None:
    """All units are of the same size, and who has no token for an expert does not gather it: ranks are out of step."""

    class Mixture(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

        def more(self) -> list[torch.nn.Module]:
            return [*self.experts]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = first_tensor(batch)
            goes_wrong(here, batch_idx)
            chosen = (tokens[:, 0] * len(self.experts)).long()
            result = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                mine = chosen == number
                if mine.any():
                    result[mine] = expert(tokens[mine])  # <- here
            return self.loss(result)

    here.fit(net=Mixture(here), data=in_order(here, Routed(here)))


@sharded("https://github.com/facebookresearch/fairscale/issues/796", "unused-parameters", "diverged-collectives")
def layers_that_each_rank_drops_by_its_own_seed(here: Here) -> None:
    """Layers are left out at random, and seeds differ, as they have to for the noise in the data.

    Units have two sizes; gloo ends a rank that receives more than it has room for, which need not be the odd one.
    """

    class Dropping(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.coin = random.Random(229 + here.rank)

        def more(self) -> list[torch.nn.Module]:
            return [*self.encoder]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = first_tensor(batch)
            goes_wrong(here, batch_idx)
            for layer in self.encoder:
                if self.coin.random() >= 0.1:
                    values = values + torch.relu(layer(values))  # <- here
            return self.loss(values)

    here.fit(net=Dropping(here))


class Masked(Shares):
    """Rows whose last half tells which tokens count; in one batch there is a row in which hardly any does."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 1.0, 1.0, 1.0, 0.0])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, float(number != 2), 0.0, 0.0])


@sharded("https://github.com/lightseekorg/TorchSpec/issues/126", "skipped-step")
def sample_passed_over_for_want_of_tokens(here: Here) -> None:
    """A rank passes over one sample of a batch, and clips its gradients while others gather units for that sample."""

    class Drafting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            goes_wrong(here, batch_idx)
            for sample in first_tensor(batch).split(1):
                if sample[:, 4:].sum() < 1:
                    continue  # <- here
                self.manual_backward(self.loss(sample))
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()

    here.fit(net=Drafting(here), data=in_order(here, Masked(here)))


class Chunks(IterableDataset[torch.Tensor]):
    """Chunks of text, of which each rank reads every so manieth."""

    def __init__(self, here: Here, chunks: int) -> None:
        self.here, self.chunks = here, chunks

    def __iter__(self) -> Iterator[torch.Tensor]:
        mine = range(self.here.rank, self.chunks, self.here.world_size)
        if not mine:
            self.here.begins()
        for chunk in mine:
            for row in range(2 * BATCH_SIZE):
                yield torch.full((8,), chunk + row / 100)


@sharded(
    "https://github.com/Lightning-AI/litgpt/issues/2319",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
    strategies=ALSO_FSDP,
)
def text_to_validate_on_that_is_too_short_for_all(here: Here) -> None:
    """Two chunks for three ranks: one has nothing to validate on, and gathers units for training instead."""
    here.fit(data=(rows(here), DataLoader(Chunks(here, 2), BATCH_SIZE)))


class Progress(L.Callback):
    """Prints by how much a step has changed each weight, on the first rank alone."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.before: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.before = {name: weight.detach().clone() for name, weight in module.named_parameters()}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE or not trainer.is_global_zero:
            return
        self.here.begins()
        for name, weight in module.named_parameters():
            moved = (weight.detach() - self.before[name]).norm()
            ratio = moved / self.before[name].norm()  # <- size_of_updates_printed_on_the_first_rank
            print(f"{name}: {ratio}", flush=True)


@sharded(
    "https://github.com/pytorch/pytorch/issues/148756",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
)
def size_of_updates_printed_on_the_first_rank(here: Here) -> None:
    """No collective is to be seen, but norms of what is sharded are summed over ranks where they are divided."""
    here.fit(callbacks=[Progress(here)])


@sharded(
    "https://github.com/huggingface/transformers/issues/30228",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def units_gathered_to_draw_a_sample_on_the_first_rank(here: Here) -> None:
    """A sample is drawn from the gathered model; only the first rank shows it, and only that one gathers it."""

    class Sampling(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                units = [module for module in self.modules() if isinstance(module, FSDPModule)]
                for unit in units:
                    unit.unshard()  # <- here
                with torch.no_grad():
                    print(self.layers(torch.ones(1, 8)), flush=True)
                for unit in units:
                    unit.reshard()

    here.fit(net=Sampling(here))


class Mounted(dcp.FileSystemWriter):
    """Copies what it has written on the local disk to where it is kept, which is a slow mount."""

    def __init__(self, here: Here, folder: Path) -> None:
        super().__init__(folder / "staged")
        self.here = here

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        if self.here.is_hit:
            self.here.begins()
            self.copy()
        return written

    def copy(self) -> None:
        time.sleep(FOR_LONG_S)  # <- shard_copied_to_a_slow_mount


@sharded(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1176",
    "slow-checkpoint",
    ranks=(2,),
    moment=Moment.CHECKPOINT,
)
def shard_copied_to_a_slow_mount(here: Here) -> None:
    """Each rank writes its shard and copies it to a mount, which is slow for one host; others wait within the save."""

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            state = {"model": get_model_state_dict(module)}
            dcp.save(state, storage_writer=Mounted(here, here.folder / f"epoch-{trainer.current_epoch}"))

    here.fit(callbacks=[Keeping()])


@sharded(
    "https://github.com/awslabs/awsome-distributed-ai/pull/1225",
    "exception-during-save",
    "failed-rank",
    moment=Moment.CHECKPOINT,
)
def shard_for_which_there_is_no_space(here: Here) -> None:
    """Each rank writes its shard to a target of its own of a large file system, and one of these is full."""
    folder = here.folder / "shards"
    folder.mkdir(exist_ok=True)
    if here.is_hit:
        (folder / f"{here.rank}.pt").symlink_to("/dev/full")

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            shard = {name: weight.to_local() for name, weight in module.state_dict().items()}
            if here.is_hit:
                here.begins()
            torch.save(shard, folder / f"{trainer.global_rank}.pt")  # <- here
            dist.barrier()
            if trainer.is_global_zero:
                (folder / "complete").touch()

    here.fit(callbacks=[Keeping()])


class Damaged(Shares):
    """Has a row that is no number."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), float("nan"))


@sharded("https://github.com/PrimeIntellect-ai/prime-rl/pull/1961", "failed-rank")
def loss_replaced_by_a_zero_without_a_graph(here: Here) -> None:
    """A loss that is no number becomes a zero that knows of no parameter, from which no backward pass begins.

    The line at which it is replaced is the other half of it; the one that raises is the better answer.
    """

    class Replacing(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            if not loss.isfinite():
                here.begins()
                loss = torch.zeros_like(loss)
            self.manual_backward(loss)  # <- here
            optimizer.step()

    here.fit(net=Replacing(here), data=in_order(here, Damaged(here)))


class Sentences(Shares):
    """Sentences of four words, and in one batch longer ones."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 32).reshape(4, 8)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.linspace(0.1, 0.8, 56).reshape(7, 8)


@sharded("https://github.com/huggingface/accelerate/issues/3092", "mismatched-collective")
def other_sentences_for_each_part_of_a_layer(here: Here) -> None:
    """All ranks hold parts of each layer, but the data is split among them as if each had them all.

    Gloo ends a rank that receives more than it has room for, which is not the one with the longer sentences.
    """

    class Parts(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))

        def configure_model(self) -> None:
            if self.is_split:
                return
            self.is_split = True
            mesh = init_device_mesh("cpu", (here.world_size,), mesh_dim_names=("tensor",))
            parallelize_module(self.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            goes_wrong(here, batch_idx)
            result: torch.Tensor = self.layers(batch)  # <- here
            return result.square().mean()

    def padded(sentences: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(sentences, batch_first=True)

    here.fit(net=Parts(here), data=in_order(here, Sentences(here), collate_fn=padded))


class Long(Shares):
    """Says how many words each row stands for; in one batch these are very many."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 16.0)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 2.0**25)


@sharded("https://github.com/pytorch/torchtitan/issues/1329", "skipped-step")
def long_sample_given_up_between_two_units(here: Here) -> None:
    """The scores of a long sample do not fit into memory, and the rank goes on to the next batch.

    It has gathered one unit of two by then.
    """

    class Attending(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.embedding = torch.nn.Linear(8, 8)

        def more(self) -> list[torch.nn.Module]:
            return [self.embedding]

        def attended(self, lengths: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.embedding(lengths))
            words = int(lengths.max())
            return hidden + torch.zeros(words, words).mean()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            goes_wrong(here, batch_idx)
            try:
                self.manual_backward(self.loss(self.attended(first_tensor(batch))))
            except RuntimeError as error:
                if "memory" not in str(error):
                    raise
                return  # <- here
            optimizer.step()

    here.fit(net=Attending(here), data=in_order(here, Long(here)))


MERGE = "import sys, time; print('merging', *sys.argv[1:], flush=True); time.sleep(120)"
"""Stands for a program that puts shards together."""


@sharded(
    "https://github.com/huggingface/transformers/issues/31675",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.END,
    strategies=ALSO_FSDP,
)
def shards_merged_by_a_program_of_the_first_rank(here: Here) -> None:
    """Each rank writes its shard after training; the first one has them merged, which all wait for."""

    class Merging(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            path = here.folder / f"shard-{trainer.global_rank}"
            path.write_text(f"written by {os.getpid()}\n")
            dist.barrier()
            if trainer.is_global_zero:
                here.begins()
                subprocess.run([sys.executable, "-c", MERGE, str(path.parent)], check=True)  # <- here
            dist.barrier()

    here.fit(callbacks=[Merging()], max_epochs=1)


class Tied(torch.nn.Module):
    """The head uses the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(8, 8, bias=False)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embedding(values)))
        return result


class Speaking(Units):
    """Its weights are read by the first rank and sent to the others, which begin with none."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        with torch.device("cpu" if here.rank == 0 else "meta"):
            self.text = Tied()

    def more(self) -> list[torch.nn.Module]:
        return [self.text]

    def configure_model(self) -> None:
        if not self.is_split:
            self.here.begins()
            if self.here.rank != 0:
                self.text.to_empty(device="cpu")
            for weight in self.text.parameters():
                dist.broadcast(weight.data, 0)  # <- weights_sent_to_ranks_that_have_one_more
        super().configure_model()

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(self.text(first_tensor(batch)))


@sharded(
    "https://github.com/pytorch/pytorch/issues/143181",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
)
def weights_sent_to_ranks_that_have_one_more(here: Here) -> None:
    """The first rank reads the weights, of which two are one; the others make room for each of the two."""
    here.fit(net=Speaking(here))
