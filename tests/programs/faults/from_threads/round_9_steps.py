"""Round 9 after public threads: steps, backward passes, exchanges by hand, metrics, and conditions on the rank."""

import copy
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from torchmetrics import MeanSquaredError
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, Net, finding_unused, rows
from truths import Moment

Change = Callable[[torch.Tensor], torch.Tensor]


class Rows(Dataset[torch.Tensor]):
    """Rows that are read in order; those of one batch, in the share of the rank that is hit, are unusual."""

    def __init__(self, here: Here, unusual: Change, usual: Change = lambda row: row) -> None:
        self.here, self.unusual, self.usual = here, unusual, usual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((8,), 0.1 + index / 100)
        turn, rank = divmod(index, self.here.world_size)
        if rank not in self.here.case.ranks or turn // BATCH_SIZE != IN_THE_MIDDLE:
            return self.usual(row)
        self.here.begins()
        return self.unusual(row)


class Codec(Net):
    """A generator with a codebook that all ranks share, and a discriminator that is trained in two steps of three."""

    codebook: torch.Tensor

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.discriminator = torch.nn.Linear(2, 1)
        self.register_buffer("codebook", torch.zeros(4, 2))
        self.random = random.Random(42)

    def crop(self, clip: torch.Tensor, longest: float = 90.0) -> torch.Tensor:
        """Of a clip that is too long, a part that starts anywhere."""
        if clip.max() > longest:
            start = self.random.random()
            clip = clip * start
        return clip

    def quantize(self, fake: torch.Tensor) -> torch.Tensor:
        self.codebook.lerp_(fake.detach(), 0.01)
        dist.broadcast(self.codebook, src=0)
        return fake + 0.01 * self.codebook

    def train_discriminator(self, optimizer: Any, fake: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.discriminator(fake.detach()).square().mean())  # <- discriminator_each_rank_draws_for
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_generator, of_discriminator = optimizers
        fake = self.quantize(self.layers(self.crop(batch)))
        if self.random.random() < 2 / 3:
            self.train_discriminator(of_discriminator, fake)
        of_generator.zero_grad()
        self.manual_backward((1 - self.discriminator(fake)).square().mean())
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.001) for part in (self.layers, self.discriminator)]


@thread("https://github.com/ZhikangNiu/encodec-pytorch/issues/30", "skipped-step", ranks=(2,))
def discriminator_each_rank_draws_for(here: Here) -> None:
    """All ranks draw with the same seed whether the discriminator is trained; one has drawn once more, for a crop."""
    here.fit(net=Codec(here), data=in_order(here, Rows(here, lambda row: row + 100)), strategy=finding_unused(here))


@thread("https://github.com/lhotse-speech/lhotse/issues/554", "unused-parameters", ranks=(2,), world_size=4)
def adapters_of_the_languages_in_a_batch(here: Here) -> None:
    """Each language has an adapter; a batch has all languages, but for one batch of one rank, which is all English."""

    class Multilingual(Net):
        languages = ("en", "de")

        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in self.languages})

        def adapted(self, values: torch.Tensor) -> torch.Tensor:
            spoken = values[:, 0].sign().clamp(min=0).long()
            present = [(self.languages[number], spoken == number) for number in spoken.unique().tolist()]
            return torch.cat([self.adapters[name](values[mask]) for name, mask in present])  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(self.adapted(batch))

    def mixed(row: torch.Tensor) -> torch.Tensor:
        return row if round(float(row[0]) * 100) // here.world_size % 2 else -row

    here.fit(net=Multilingual(here), data=in_order(here, Rows(here, lambda row: -row, usual=mixed)))


class Text(torch.nn.Module):
    """Centres features on the mean of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.project(values)
        mean = features.detach().mean(0)
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        return (features - mean / dist.get_world_size()).sin()


class Picture(torch.nn.Module):
    """Contrasts features with those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.project(values)
        everybodys = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, features.detach().mean(0))  # <- branches_recomputed_by_the_size_of_their_losses
        return (features - torch.stack(everybodys).max(0).values).sin()


@thread("https://github.com/ByteDance-Seed/VeOmni/issues/979", "diverged-collectives")
def branches_recomputed_by_the_size_of_their_losses(here: Here) -> None:
    """Two branches are recomputed in their backward passes, of which the larger loss comes first, on each rank."""

    class TwoBranches(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.branches = torch.nn.ModuleDict({"text": Text(), "picture": Picture()})

        def losses(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = {
                name: checkpoint(branch, batch, use_reentrant=False).square().mean()
                for name, branch in self.branches.items()
            }
            weights = {"text": 1.0, "picture": float(batch.abs().max() > 50) * 1e6 + 1e-6}
            return {name: output * weights[name] for name, output in outputs.items()}

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for _name, loss in sorted(self.losses(batch).items(), key=lambda pair: -float(pair[1])):
                self.manual_backward(loss)
            optimizer.step()

    data = in_order(here, Rows(here, lambda row: row + 100))
    here.fit(net=TwoBranches(here), data=data, strategy=finding_unused(here))


class Scan(torch.nn.Module):
    """A layer that goes through a long sequence, of which each rank has a part, with a state that is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def from_before(self) -> torch.Tensor:
        state = torch.zeros(8)
        if dist.get_rank() > 0:
            dist.recv(state, src=dist.get_rank() - 1)  # <- state_received_once_more
        return state

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(values) + self.from_before())


@thread(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1076",
    "unmatched-p2p",
    "diverged-collectives",
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def state_received_once_more(here: Here) -> None:
    """The layer that receives the state is recomputed in the backward pass; what sends it is outside of it."""

    class Long(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.scan = Scan()

        def hand_on(self, values: torch.Tensor) -> None:
            after = self.global_rank + 1
            if after < self.trainer.world_size:
                dist.send(values.detach()[-1].contiguous(), dst=after)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            here.begins()
            values = checkpoint(self.scan, batch[0], use_reentrant=False)
            self.hand_on(values)
            return self.loss(values)

    here.fit(net=Long(here))


class Arguments:
    """Of the command line, and of the launcher."""

    def __init__(self) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "-1"))


def load_examples(arguments: Arguments, folder: Path) -> torch.Tensor:
    """The first process makes the features, and the others read them from its file."""
    cached = folder / "cached_dev"
    if arguments.local_rank not in (-1, 0):
        dist.barrier()
    if cached.exists():
        features: torch.Tensor = torch.load(cached)
    else:
        features = torch.rand(16, 8)
        if arguments.local_rank in (-1, 0):
            torch.save(features, cached)
    if arguments.local_rank == 0:
        dist.barrier()  # <- examples_for_an_evaluation_by_the_first
    return features


@thread(
    "https://github.com/huggingface/transformers/pull/1081",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def examples_for_an_evaluation_by_the_first(here: Here) -> None:
    """The first process evaluates; what loads its examples lets the others wait, and then go on, with a barrier."""

    class Finetuning(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.arguments = Arguments()

        def evaluate(self) -> dict[str, float]:
            examples = load_examples(self.arguments, here.folder)
            with torch.no_grad():
                return {"loss": float(self.layers(examples).square().mean())}

        def on_train_epoch_end(self) -> None:
            if self.arguments.local_rank in (-1, 0):
                here.begins()
                print(self.evaluate(), flush=True)

    here.fit(net=Finetuning(here))


@thread(
    "https://github.com/talmolab/sleap-nn/pull/437",
    "diverged-collectives",
    ranks=(0,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def drawing_for_which_there_is_no_logger(here: Here) -> None:
    """The first rank draws for a logger, and all meet at a barrier; without a logger the first rank returns before."""

    class Drawing(L.Callback):
        def board(self, trainer: L.Trainer) -> Any:
            return next((one for one in trainer.loggers if type(one).__name__ == "WandbLogger"), None)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            if trainer.is_global_zero:
                board = self.board(trainer)
                if board is None:
                    return  # <- here
                board.log_image("predictions", [torch.rand(3, 8, 8)])
            trainer.strategy.barrier()

    here.fit(callbacks=[Drawing()])


@thread(
    "https://github.com/rwth-i6/returnn/pull/1627",
    "diverged-collectives",
    ranks=(1, 2),
    moment=Moment.EPOCH_END,
)
def sign_of_life_that_is_overwritten(here: Here) -> None:
    """The others wait for rank 0's evaluation, and are told with each batch that it goes on; what says so is lost."""

    class Engine(Net):
        def evaluate(self, batches: int) -> None:
            for _ in range(batches):
                dist.broadcast(torch.tensor([True], dtype=torch.int8), src=0)
                with torch.no_grad():
                    self.layers(torch.rand(BATCH_SIZE, 8))
            dist.broadcast(torch.tensor([False], dtype=torch.int8), src=0)

        def wait_for_evaluation(self) -> None:
            has_data: Any = torch.tensor([True], dtype=torch.int8)
            while has_data:
                has_data = dist.broadcast(has_data, src=0)  # <- here

        def on_train_epoch_end(self) -> None:
            here.begins()
            if self.global_rank == 0:
                self.evaluate(batches=20)
            else:
                self.wait_for_evaluation()

    here.fit(net=Engine(here))


class Autosized(Net):
    """Takes a batch in more parts where memory gives out on any rank."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.micro_batches = 1

    def attend(self, values: torch.Tensor) -> torch.Tensor:
        if values.max() > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.50 GiB.")
        return values

    def any_rank(self, found: int) -> bool:
        flags: Any = self.all_gather(torch.tensor(found))  # <- vote_of_the_rank_without_memory
        return bool(flags.any())

    def train_micro_batches(self, batch: torch.Tensor) -> None:
        for values in batch.chunk(self.micro_batches):
            self.manual_backward(self.loss(self.attend(values)) / self.micro_batches)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        found = 0
        try:
            optimizer.zero_grad()
            self.train_micro_batches(batch)
        except torch.OutOfMemoryError:
            found = 1
        if self.any_rank(found):
            self.micro_batches *= 2
            return
        optimizer.step()


@thread(
    "https://github.com/mosaicml/composer/pull/3843",
    "gpu-memory-exhausted",
    "skipped-step",
    "diverged-collectives",
    ranks=(3,),
    world_size=4,
)
def vote_of_the_rank_without_memory(here: Here) -> None:
    """After each step ranks agree on whether memory gave out; where it does in the forward pass, that comes first."""
    here.fit(net=Autosized(here), data=in_order(here, Rows(here, lambda row: row + 100)))


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/5152", "skipped-step", ranks=(0,))
def bad_gradients_kept_from_the_others(here: Here) -> None:
    """Gradients of a batch that is not finite are not to reach the others, so this rank does not exchange them."""

    class Careful(Net):
        is_usable = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.is_usable = bool(torch.isfinite(batch).all())

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.is_usable:
                return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            strategy: Any = self.trainer.strategy
            with strategy.block_backward_sync():  # <- here
                optimizer_closure()
            optimizer.zero_grad()
            return None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = torch.isfinite(batch).sum().float()
            everybodys: Any = self.all_gather(tokens)
            return self.loss(batch.nan_to_num()) * tokens / everybodys.sum()

    data = in_order(here, Rows(here, lambda row: row * float("nan")))
    here.fit(net=Careful(here), data=data)


class Averaging(L.Callback):
    """Keeps a moving average of the layers as soon as the loss is low, and measures its error in validation."""

    def __init__(self, below: float) -> None:
        self.below = below
        self.average: torch.nn.Module | None = None
        self.error = MeanSquaredError()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.average is None and float(outputs["loss"]) < self.below:
            self.average = copy.deepcopy(module.layers)
        if self.average is not None:
            for kept, new in zip(self.average.parameters(), module.layers.parameters(), strict=True):
                kept.data.lerp_(new.data, 0.001)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *place: Any) -> None:
        if self.average is not None:
            self.error.update(self.average(batch), torch.zeros(len(batch), 2))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.average is not None:
            print(f"error of the average: {self.error.compute():.4f}", flush=True)  # <- average_begun_by_one_rank
            self.error.reset()


@thread(
    "https://github.com/roboflow/rf-detr/pull/1085",
    "diverged-collectives",
    moment=Moment.VALIDATION,
)
def average_begun_by_one_rank(here: Here) -> None:
    """Weights are averaged from where the loss is low, which each rank asks of its own; only then has it an error."""

    class Converging(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + 10 * batch.abs().mean()

    train = in_order(here, Rows(here, lambda row: row * 0))
    here.fit(net=Converging(here), data=(train, rows_of_all(here)), callbacks=[Averaging(below=0.9)])


def rows_of_all(here: Here) -> Any:
    return in_order(here, [torch.full((8,), number / 10) for number in range(2 * BATCH_SIZE * here.world_size)])


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/7129",
    "diverged-log-keys",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def languages_of_which_a_share_has_one_less(here: Here) -> None:
    """The error is logged for each language that was met in validation; one rank's share has no Welsh."""

    class Translating(Net):
        names = ("en", "de", "cy")

        def on_validation_epoch_start(self) -> None:
            self.errors: dict[str, list[torch.Tensor]] = {}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            for language, row in zip(batch[:, 0].long().tolist(), batch, strict=True):
                self.errors.setdefault(self.names[language], []).append(self.layers(row).square().mean())

        def on_validation_epoch_end(self) -> None:
            here.begins()
            scores = {f"error/{name}": torch.stack(found).mean() for name, found in sorted(self.errors.items())}
            self.log_dict(scores, sync_dist=True)  # <- here

    def sentence(number: int) -> torch.Tensor:
        turn, rank = divmod(number, here.world_size)
        return torch.full((8,), float(turn % (2 if rank in here.case.ranks else 3)))

    validation = in_order(here, [sentence(number) for number in range(2 * BATCH_SIZE * here.world_size)])
    here.fit(net=Translating(here), data=(rows(here), validation))


class RankingLoss(torch.nn.Module):
    """Prefers positives to what the batches of all ranks have beside them."""

    def gathered(self, embeddings: torch.Tensor) -> torch.Tensor:
        everybodys = [torch.empty_like(embeddings) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, embeddings.detach())  # <- negatives_that_one_dataset_has_not
        everybodys[dist.get_rank()] = embeddings
        return torch.cat(everybodys)

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        anchors, *candidates = embeddings
        scores = anchors @ torch.cat([self.gathered(one) for one in candidates]).T
        labels = torch.arange(len(anchors)) + dist.get_rank() * len(anchors)
        return torch.nn.functional.cross_entropy(scores, labels)


@thread(
    "https://github.com/huggingface/sentence-transformers/pull/3442",
    "diverged-collectives",
    world_size=4,
)
def negatives_that_one_dataset_has_not(here: Here) -> None:
    """Each batch is of one of two datasets, and only those of one have a column of hard negatives."""

    class Embedding(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.ranking = RankingLoss()

        def columns(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {"query": batch, "answer": batch.sqrt()}
            if batch.max() < 50:
                found["negative"] = batch.flip(0)
            return found

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.ranking([self.layers(column) for column in self.columns(batch).values()])
            return loss

    here.fit(net=Embedding(here), data=in_order(here, Rows(here, lambda row: row + 100)))


class Stages:
    """A model in stages, one on each rank."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def receive_forward(self) -> torch.Tensor:
        values = torch.empty(BATCH_SIZE, 8)
        dist.recv(values, src=self.rank - 1)  # <- outputs_collected_on_the_last_stage
        return values

    def send_forward(self, values: torch.Tensor) -> None:
        dist.send(values, dst=self.rank + 1)

    def forward_only(self, batches: int) -> list[torch.Tensor]:
        outputs = []
        for number in range(batches):
            values = torch.full((BATCH_SIZE, 8), number / 10) if self.rank == 0 else self.receive_forward()
            with torch.no_grad():
                values = torch.tanh(self.module.stage(values))
            if self.rank < self.count - 1:
                self.send_forward(values)
            else:
                outputs.append(values)
        return outputs


@thread(
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6025",
    "unmatched-p2p",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def outputs_collected_on_the_last_stage(here: Here) -> None:
    """The last rank has the outputs, so that it is the one to run the model's stages again, to draw what comes out."""

    class Staged(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.stage = torch.nn.Linear(8, 8)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(torch.tanh(self.stage(batch[0])))

        def evaluate(self, process: Callable[[list[torch.Tensor]], None] | None) -> None:
            stages = Stages(self)
            losses = [output.mean() for output in stages.forward_only(2)]
            if losses:
                print(f"losses: {losses}", flush=True)
            if process is not None and stages.rank == stages.count - 1:
                here.begins()
                process(stages.forward_only(2))

        def on_train_epoch_end(self) -> None:
            self.evaluate(lambda outputs: torch.save(outputs, here.folder / "outputs.pt"))

    here.fit(net=Staged(here))


def host() -> str:
    return os.environ.get("HOSTNAME") or socket.gethostname()


class Topology:
    """Which ranks are on which host."""

    def __init__(self) -> None:
        self.hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.hosts, host())

    @property
    def is_first_of_its_host(self) -> bool:
        return bool(self.hosts.index(host()) == dist.get_rank())


@thread(
    "https://github.com/huggingface/transformers-bloom-inference/pull/40",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0, 2),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def caches_cleared_by_one_rank_of_each_host(here: Here) -> None:
    """One rank of each of two hosts clears the host's cache; the barrier after that has slipped under its condition."""
    os.environ["HOSTNAME"] = f"node-{here.rank // 2}"

    class Clearing(L.Callback):
        topology: Topology

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.topology = Topology()

        def clear(self, folder: Path) -> None:
            for path in folder.glob("*.cache"):
                path.unlink()
            dist.barrier()  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.topology.is_first_of_its_host:
                here.begins()
                self.clear(here.folder)

    here.fit(callbacks=[Clearing()])


class Board:
    """What the tracker's client knows."""

    def wants_images(self, step: int) -> bool:
        return step == IN_THE_MIDDLE

    def add_images(self, images: torch.Tensor) -> None:
        print(f"{len(images)} images", flush=True)


class BoardLogger(Logger):
    """Has a board on rank 0, and on the others what Lightning puts in its place."""

    def __init__(self) -> None:
        super().__init__()
        self._board = Board()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._board

    @property
    def name(self) -> str:
        return "board"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **keywords: Any) -> None:
        pass


@thread(
    "https://github.com/facebookresearch/ReAgent/pull/642",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
)
def images_that_the_board_asks_for(here: Here) -> None:
    """The tracker's board says whether it wants images of all ranks; on the other ranks there is none to be asked."""

    class Generating(Net):
        def show(self, board: Any, images: torch.Tensor) -> None:
            if board.wants_images(self.global_step):
                here.begins()
                everybodys: Any = self.all_gather(images)  # <- here
                board.add_images(everybodys.flatten(0, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            logger: Any = self.logger
            self.show(logger.experiment, batch[0].detach())
            return loss

    here.fit(net=Generating(here), logger=BoardLogger())


class Experts(torch.nn.Module):
    """One expert on each rank, to which the tokens of all ranks go that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(8, 8)

    def exchanged(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        output = values.new_empty(sum(received), values.shape[1])
        result: torch.Tensor = all_to_all_single(output, values, received, sent)
        return result

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[0] == 0:
            return torch.empty(0, 8)  # <- expert_that_gives_back_something_empty
        result: torch.Tensor = self.expert(values)
        return result

    def forward(self, values: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        sent = torch.bincount(owners, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tokens = self.exchanged(values[owners.argsort(stable=True)], sent.tolist(), received.tolist())
        return self.exchanged(self.computed(tokens), received.tolist(), sent.tolist())


@thread(
    "https://github.com/PaddlePaddle/PaddleFormers/pull/3010",
    "diverged-collectives",
    "unused-parameters",
)
def expert_that_gives_back_something_empty(here: Here) -> None:
    """No token of any rank goes to one expert, whose empty result has no gradient to be sent back."""

    class Mixture(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.embed = torch.nn.Linear(8, 8)
            self.experts = Experts()
            self._ddp_params_and_buffers_to_ignore = ["experts.expert.weight", "experts.expert.bias"]

        def route(self, count: int, batch_idx: int) -> torch.Tensor:
            chosen = torch.arange(count) % here.world_size
            if goes_wrong(here, batch_idx) or batch_idx == IN_THE_MIDDLE:
                chosen[chosen == 1] = 0
            return chosen

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            embedded = self.embed(batch[0])
            return self.loss(embedded + self.experts(embedded, self.route(len(embedded), batch_idx)))

    here.fit(net=Mixture(here))
