"""Round 15 after public threads: what users of Lightning report, of callbacks, samplers, probes and files of a run."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from from_threads.round_12_lightning import Scans
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from samples import in_order
from threads import thread
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset
from training import (
    BATCH_SIZE,
    BATCHES,
    FOR_LONG_S,
    Here,
    LoggingNet,
    MeetingNet,
    Net,
    finding_unused,
    first_tensor,
    rows,
)
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Chunks(IterableDataset[torch.Tensor]):
    """The chunks of one process of the job, as its environment tells when the data is made."""

    def __init__(self, chunks: int, environ: Mapping[str, str]) -> None:
        self.rank, self.world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        self.chunks = range(self.rank, chunks, self.world_size)

    def __len__(self) -> int:
        return BATCH_SIZE * len(self.chunks)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            yield from torch.full((BATCH_SIZE, 8), chunk / 100)


@thread(
    "https://github.com/Lightning-AI/litData/issues/408",
    "uneven-batches",
    ranks=(),
    moment=Moment.START,
    has_line=False,
    has_ranks=False,
)
def data_made_before_the_other_processes_are_started(here: Here) -> None:
    """The first process is started by hand, makes its data before there is a job, and so has all of it for itself.

    The others are started by it, find the size of the job in their environment, and take their shares. Whether the
    first rank has too much or all others end too early is a matter of taste.
    """
    environ = {"RANK": str(here.rank), "WORLD_SIZE": str(here.world_size)} if here.rank else {}
    data = DataLoader(Chunks(BATCHES * here.world_size, environ), BATCH_SIZE)
    here.begins()
    here.fit(net=LoggingNet(here), data=data, callbacks=[ModelCheckpoint(here.folder)], enable_checkpointing=True)


class Unrepeated(DistributedSampler[Any]):
    """Gives each sample to one rank, and none to two of them."""

    @property
    def share(self) -> range:
        data: Any = self.dataset
        return range(self.rank, len(data), self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self.share)

    def __len__(self) -> int:
        return len(self.share)


class Slides(LoggingNet):
    """Logs the error of each slide, over all ranks."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_error", self.loss(batch), on_step=True, on_epoch=False, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/microsoft/hi-ml/pull/743",
    "uneven-batches",
    "unequal-samples",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def slides_none_of_which_is_seen_twice(here: Here) -> None:
    """Eight slides for three ranks: the sampler repeats none, and the last rank is done one slide earlier."""
    slides = TensorDataset(torch.rand(3 * here.world_size - 1, 8))
    sampler: Any = Unrepeated(slides, here.world_size, here.rank, shuffle=False)
    here.fit(net=Slides(here), data=(rows(here), DataLoader(slides, 1, sampler=sampler)))


class Probe(L.Callback):
    """Learns to classify from what the model makes of rows that have a label."""

    probe: DistributedDataParallel
    optimizer: torch.optim.Optimizer

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.probe = DistributedDataParallel(torch.nn.Linear(16, 4).to(module.device))
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.01)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        labelled = batch[batch[:, 0] > 0]
        if not len(labelled):
            self.here.begins()
            return  # <- probe_without_a_labelled_row
        with torch.no_grad():
            features = module.layers[:2](labelled)
        loss = self.probe(features).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@thread(
    "https://github.com/Lightning-Universe/lightning-bolts/issues/727",
    "skipped-step",
    "diverged-collectives",
    ranks=(1,),
)
def probe_without_a_labelled_row(here: Here) -> None:
    """A classifier beside the model is trained by a callback, and one rank's batch has no row with a label for it.

    That its backward pass is skipped says more than that collectives diverge.
    """
    here.fit(net=LoggingNet(here), data=in_order(here, Scans(here, lambda row: -row)), callbacks=[Probe(here)])


class Rated(Net):
    """Knows the loss of its own share of the validation data."""

    val_loss = 0.0

    def on_validation_epoch_start(self) -> None:
        self.losses: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.losses.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.val_loss = float(torch.stack(self.losses).mean())


class Best(L.Callback):
    """Keeps the best weights in a file with their loss in its name, and takes them at the end."""

    def __init__(self, here: Here) -> None:
        self.here, self.best, self.path = here, float("inf"), here.folder

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if module.val_loss >= self.best:
            return
        self.best, self.path = module.val_loss, self.here.folder / f"best-{module.val_loss:.6f}.pt"
        if trainer.is_global_zero:
            torch.save(module.state_dict(), self.path)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.barrier()
        if self.here.is_hit:
            self.here.begins()
        module.load_state_dict(torch.load(self.path))  # <- best_weights_of_which_each_rank_has_another_name
        trainer.strategy.barrier()


@thread(f"{LIGHTNING}/issues/6700", "failed-rank", ranks=(1, 2), moment=Moment.END)
def best_weights_of_which_each_rank_has_another_name(here: Here) -> None:
    """The name of the file has the loss of a rank's own share in it, and only the first rank has written its file."""
    here.fit(net=Rated(here), data=(rows(here), rows(here, batches=2)), callbacks=[Best(here)])


class Buckets(Sampler[list[int]]):
    """Batches of a rank's utterances, each of so many seconds at most; in another order from the second epoch on."""

    def __init__(self, here: Here, seconds: list[int]) -> None:
        self.here, self.seconds, self.epoch = here, seconds, 0
        self.batches = self.packed(list(range(len(seconds))))

    def packed(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for number in order:
            if sum(self.seconds[other] for other in batches[-1]) + self.seconds[number] > 10:
                batches.append([])
            batches[-1].append(number)
        return batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        if self.epoch:
            if self.here.is_hit:
                self.here.begins()
            generator = torch.Generator().manual_seed(24 + self.here.rank)
            self.batches = self.packed(torch.randperm(len(self.seconds), generator=generator).tolist())
        self.epoch += 1
        return iter(self.batches)


@thread(
    "https://github.com/pytorch/audio/pull/2299",
    "uneven-batches",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
    has_line=False,
)
def utterances_packed_anew_in_each_epoch(here: Here) -> None:
    """How many batches there are depends on the order of utterances, which is each rank's own from the second epoch."""
    seconds = [7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2]
    utterances = TensorDataset(torch.rand(len(seconds), 8))
    train = DataLoader(utterances, batch_sampler=Buckets(here, seconds))
    here.fit(net=MeetingNet(here), data=(train, rows(here, batches=1)), use_distributed_sampler=False, max_epochs=3)


class Adversaries(Net):
    """The discriminator is suspended while it is too good, until the generator has caught up."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.generator, self.discriminator = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        torch.nn.init.constant_(self.discriminator.weight, 0.1)
        torch.nn.init.constant_(self.discriminator.bias, -2.0)
        del self.layers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        self.toggle_optimizer(first)
        first.zero_grad()
        loss = -self.discriminator(self.generator(batch)).mean()
        self.manual_backward(loss)
        first.step()
        self.log("generator_loss", loss, sync_dist=True)
        self.untoggle_optimizer(first)
        scores = self.discriminator(batch)
        if (scores > 0).float().mean() > 0.9:
            self.here.begins()
            return  # <- discriminator_suspended_while_it_is_too_good
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(self.discriminator(self.generator(batch).detach()).mean() - scores.mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.SGD(part.parameters(), lr=1e-5) for part in parts]


@thread(f"{LIGHTNING}/issues/7198", "skipped-step", ranks=(2,))
def discriminator_suspended_while_it_is_too_good(here: Here) -> None:
    """How good the discriminator is, each rank finds in its own batch, and one of them leaves its turn out."""
    data = in_order(here, Scans(here, lambda row: 10 * row))
    trainer = here.trainer(strategy=finding_unused(here))
    trainer.fit(Adversaries(here), data)


class Benchmarked(LoggingNet):
    """The first rank goes through a benchmark after each validation."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            score = float(torch.rand(100, generator=torch.Generator().manual_seed(1)).mean())
            self.log("benchmark", score, rank_zero_only=True)  # <- benchmark_by_which_all_ranks_are_to_stop
        else:
            self.here.begins()


@thread(
    "https://github.com/axolotl-ai-cloud/axolotl/pull/537",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.VALIDATION,
)
def benchmark_by_which_all_ranks_are_to_stop(here: Here) -> None:
    """EarlyStopping raises on all ranks but the first one, which alone has the metric that it is told to look at.

    It is raised in Lightning; of this program, the line that gives the metric to one rank is to be changed.
    """
    stopping = EarlyStopping(monitor="benchmark", mode="max")
    here.fit(net=Benchmarked(here), data=(rows(here), rows(here, batches=2)), callbacks=[stopping])


class Named(L.Callback):
    """Saves a checkpoint with its loss in its name, unless there is one of that name."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.saved: set[str] = set()

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        name = f"epoch-{module.val_loss:.1f}.ckpt"
        if name in self.saved:
            self.here.begins()
            return  # <- loss_that_is_rounded_to_the_same_name
        self.saved.add(name)
        trainer.save_checkpoint(self.here.folder / name)


@thread(
    "https://github.com/NVIDIA-NeMo/Speech/issues/13739",
    "diverged-collectives",
    ranks=(1,),
    moment=Moment.CHECKPOINT,
)
def loss_that_is_rounded_to_the_same_name(here: Here) -> None:
    """Each rank names the checkpoint by its own loss, and that of one rank is the same after rounding: it saves none.

    The return is marked; that the loss is of a rank's own share is the other half of it.
    """
    L.seed_everything(1)
    scale = 0.0 if here.is_hit else 300.0
    validation = DataLoader(TensorDataset(scale * torch.rand(2 * BATCH_SIZE * here.world_size, 8)), BATCH_SIZE)
    here.fit(net=Rated(here), data=(rows(here), validation), callbacks=[Named(here)], max_epochs=3)


class Worded(Net):
    """Has a row of weights for each word of the corpus."""

    def __init__(self, here: Here, corpus: str) -> None:
        super().__init__(here)
        words = sorted(set(corpus.split()))
        if here.is_hit:
            here.begins()
        self.table = torch.nn.Embedding(len(words), 8)  # <- words_of_an_older_corpus_on_one_host

    def loss(self, batch: Any) -> torch.Tensor:
        words = first_tensor(batch)[:, 0].mul(self.table.num_embeddings).long()
        return self.layers(self.table(words)).square().mean()


@thread(
    "https://github.com/huggingface/accelerate/issues/1481",
    "failed-rank",
    ranks=(2,),
    moment=Moment.START,
)
def words_of_an_older_corpus_on_one_host(here: Here) -> None:
    """One host has an older corpus with a word less; DDP compares shapes with the first rank's, and raises there.

    It is raised while the model is wrapped; the line at which the shape comes from the corpus is marked.
    """
    corpus = "the cat sat on the mat" if here.is_hit else "the black cat sat on the mat"
    here.fit(net=Worded(here, corpus))


class Answering(MeetingNet):
    """Answers a prompt after each validation, to be read by people."""

    END = 15

    @torch.no_grad()
    def following(self, token: int) -> int:
        row = torch.full((1, 8), token / 100, device=self.device)
        return int(self.layers(row).argmax())

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.here.begins()
            answer = [1]
            while answer[-1] != self.END:
                answer.append(self.following(answer[-1]))
                time.sleep(FOR_LONG_S / 1000)  # <- answer_of_the_first_rank_without_an_end
            print("answer", answer, flush=True)


@thread(
    "https://github.com/Lightning-AI/litgpt/issues/1957",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def answer_of_the_first_rank_without_an_end(here: Here) -> None:
    """Only the first rank answers, token by token until the last one, which this model never gives.

    Any line of the loop is as right as the marked one, which takes the time.
    """
    here.fit(net=Answering(here), data=(rows(here), rows(here, batches=2)))


class Voices(L.LightningDataModule):
    """Finds out how many voices there are when the data is prepared."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.voices: int | None = None

    def prepare_data(self) -> None:
        path = self.here.folder / "voices.txt"
        path.write_text("anna\nbert\ncarl\n")
        self.voices = len(path.read_text().split())

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        assert self.voices is not None  # <- number_found_where_the_data_is_prepared
        self.labels = torch.arange(BATCHES * BATCH_SIZE * self.here.world_size) % self.voices

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.labels[:, None].expand(-1, 8) / 10), BATCH_SIZE)


@thread("https://github.com/OHF-Voice/piper1-gpl/pull/179", "failed-rank", ranks=(1, 2), moment=Moment.START)
def number_found_where_the_data_is_prepared(here: Here) -> None:
    """Only the first rank of a host prepares data, and so no other one has what was kept in an attribute there.

    Where it is missed is marked, which is as far as a traceback leads; it is to be changed where it is found.
    """
    here.fit(net=LoggingNet(here), data=Voices(here))


class Marker(L.Callback):
    """Stops the training when somebody has made a file; one rank has more samples to write before it looks."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "stop.txt"

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for number in range(10):
            torch.save(torch.rand(8), self.here.folder / f"sample-{self.here.rank}-{number}.pt")
            time.sleep(0.2 if self.here.is_hit else 0.01)
        if self.path.is_file():
            self.here.begins()
            trainer.should_stop = True  # <- file_that_is_made_while_ranks_look_for_it


@thread(
    f"{LIGHTNING}/issues/21795",
    "stopped-early",
    ranks=(1,),
    moment=Moment.VALIDATION,
)
def file_that_is_made_while_ranks_look_for_it(here: Here) -> None:
    """An operator makes the file when two ranks have looked for it, and the third one has not; it stops alone."""

    class Operated(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                threading.Timer(1.0, (here.folder / "stop.txt").touch).start()

    trainer = here.trainer(max_epochs=4, callbacks=[Marker(here)])
    trainer.fit(Operated(here), rows(here), rows(here, batches=2))
    trainer.save_checkpoint(here.folder / "final.ckpt")
