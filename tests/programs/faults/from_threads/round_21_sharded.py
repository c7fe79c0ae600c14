"""Round 21 after public threads: what users of sharded models report, of ranks that call, skip or leave alone."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from from_threads.round_13_sharded import Shares, Units, sharded
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric
from training import BATCH_SIZE, IN_THE_MIDDLE, Here, Net, first_tensor, rows
from truths import Moment


class Rated(Net):
    """Trains at a rate that has been found by trial, and lowers it by and by."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.lr = 0.001

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@sharded(
    "https://github.com/fastai/fastai/issues/2485",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    world_size=2,
    moment=Moment.START,
)
def rates_tried_by_the_first_rank(here: Here) -> None:
    """The first rank alone looks for a learning rate, which trains the model, and the other one begins to train."""
    net, data, trainer = Rated(here), rows(here), here.trainer()
    if trainer.is_global_zero:
        here.begins()
        Tuner(trainer).lr_find(net, data, num_training=4)  # <- here
    trainer.fit(net, data)


class Plan(L.Callback):
    """Says how many steps there will be."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @rank_zero_only
    def announce(self, trainer: L.Trainer) -> None:
        self.here.begins()
        steps = trainer.estimated_stepping_batches  # <- steps_counted_by_the_first_rank
        print(f"{steps} steps in {trainer.max_epochs} epochs", flush=True)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.announce(trainer)


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/12317",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
)
def steps_counted_by_the_first_rank(here: Here) -> None:
    """The number of steps is a property that sets up the data together with all ranks, and only the first one asks."""
    here.fit(callbacks=[Plan(here)])


@sharded(
    "https://github.com/kyuz0/amd-strix-halo-llm-finetuning/pull/6",
    "rank-zero-only-work",
    "unfinished-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
)
def model_saved_by_the_first_rank_when_training_is_over(here: Here) -> None:
    """The first rank saves the model after training, which gathers the shards of a rank that has already ended."""
    trainer = here.trainer(max_epochs=1)
    trainer.fit(Net(here), rows(here))
    if trainer.is_global_zero:
        here.begins()
        trainer.save_checkpoint(here.folder / "final.ckpt")  # <- here


class Boxes(Metric):
    """The mean of what has been found, of which one entry is kept for each batch with anything in it."""

    found: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)

    def update(self, boxes: torch.Tensor) -> None:
        if not len(boxes):
            return  # <- picture_in_which_a_rank_has_found_nothing
        self.found.append(boxes.mean(dim=0))

    def compute(self) -> torch.Tensor:
        return torch.stack(self.found).mean()


class Detector(Net):
    """Measures in validation what it has found."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.boxes = Boxes()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pictures = first_tensor(batch)
        self.loss(pictures)
        self.boxes.update(pictures[pictures[:, 0] > 0])

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        print(f"mean of boxes: {self.boxes.compute():.3f}", flush=True)
        self.boxes.reset()


class Empty(Shares):
    """One batch has nothing in it."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.zeros(8)


@sharded(
    "https://github.com/Lightning-AI/torchmetrics/issues/2463",
    "diverged-collectives",
    world_size=2,
    moment=Moment.VALIDATION,
)
def picture_in_which_a_rank_has_found_nothing(here: Here) -> None:
    """Each entry of a metric's state is gathered by itself, and one rank has an entry fewer."""
    here.fit(net=Detector(here), data=(rows(here), in_order(here, Empty(here))))


class Scaled(Units):
    """Does without an update when gradients have overflowed, and clips them otherwise."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.head = torch.nn.Linear(6, 2)

    def more(self) -> list[torch.nn.Module]:
        return [self.head]

    def loss(self, batch: Any) -> torch.Tensor:
        numbers = first_tensor(batch)
        answers = self.head(numbers[:, :6]) * numbers[:, 6:]
        return super().loss(numbers.clamp(max=1.0)) + answers.mean()

    @property
    def gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):
                yield parameter.grad.to_local()

    def update(self, optimizer: Any) -> None:
        if not all(gradient.isfinite().all() for gradient in self.gradients):
            return  # <- update_that_the_rank_of_an_overflow_leaves_out
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.update(optimizer)
        return loss.detach()


class Heavy(Shares):
    """The second answer to one row weighs too much."""

    def unusual(self, number: int) -> torch.Tensor:
        row = self.usual(number)
        row[7] = torch.inf
        return row


@sharded("https://github.com/pytorch/pytorch/issues/69616", "diverged-collectives", world_size=2)
def update_that_the_rank_of_an_overflow_leaves_out(here: Here) -> None:
    """Only one shard of the gradients is infinite; its rank leaves the update out, and the other one clips."""
    here.fit(net=Scaled(here), data=in_order(here, Heavy(here)))


class Answers(Shares):
    """The first number of a row says how long the answer is."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 3.0)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 3.0 + 2 * number)


class Odds(Net):
    """Looks at what all ranks think of their answers."""

    def scores(self, batch: torch.Tensor) -> torch.Tensor:
        return pad_sequence([answer[: int(answer[0])] for answer in batch], batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        everywhere: Any = self.all_gather(self.scores(first_tensor(batch)))  # <- scores_of_answers_of_any_length
        self.log("logits/chosen", everywhere.mean())
        return self.loss(batch)


@sharded("https://github.com/huggingface/trl/issues/2882", "mismatched-collective", ranks=(2,))
def scores_of_answers_of_any_length(here: Here) -> None:
    """Scores are padded to the longest answer of each rank, and gathered as if that were as long on all of them."""
    here.fit(net=Odds(here), data=in_order(here, Answers(here)))


class Host(L.Callback):
    """The host of one rank is about to be taken away."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGTERM, leave)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)


def leave(number: int, frame: Any) -> None:
    print(f"terminated by signal {number}", flush=True)
    os._exit(0)  # <- rank_that_leaves_when_it_is_told_to


@sharded(
    "https://github.com/NovaSky-AI/SkyRL/pull/1688",
    "dead-rank",
    world_size=4,
)
def rank_that_leaves_when_it_is_told_to(here: Here) -> None:
    """A signal from outside reaches one rank, which leaves at once, with a status as if all were well."""
    here.fit(callbacks=[Host(here)])


class Bucket:
    """Where the weights for other programs are put."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key: str, weights: dict[str, torch.Tensor]) -> int:
        path = self.root / key
        torch.save(weights, path)  # <- shard_that_one_rank_cannot_put
        return path.stat().st_size


class Published(L.Callback):
    """Each rank puts its shard of the weights into its bucket, and the first one writes down what there is."""

    def __init__(self, here: Here) -> None:
        self.here = here
        zone = here.folder / f"zone-{here.rank}"
        if not here.is_hit:
            zone.mkdir()
        self.bucket = Bucket(zone)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        versions: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(versions, trainer.global_step)
        shard = {name: weight.to_local() for name, weight in module.named_parameters() if isinstance(weight, DTensor)}
        size = self.bucket.put(f"weights-{max(versions)}.pt", shard)
        manifest: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(size, manifest)
        print(manifest, flush=True)


@sharded(
    "https://github.com/ai-dynamo/modelexpress/pull/685",
    "failed-rank",
    "exception-during-save",
    ranks=(3,),
    world_size=4,
    moment=Moment.EPOCH_END,
    whose="code",
)
def shard_that_one_rank_cannot_put(here: Here) -> None:
    """The bucket of one rank is not there, and the others wait until that rank says how large its shard is."""
    here.fit(callbacks=[Published(here)])


class Swallow(torch.autograd.Function):
    """Passes everything on, and has no memory left in a backward pass that is too large."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, is_large: bool) -> torch.Tensor:
        ctx.is_large = is_large
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.is_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 564.00 MiB")
        return gradients[0], None


@contextmanager
def discarding(batch_idx: int) -> Iterator[None]:
    """Does without a batch for which there is no memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:  # <- batch_discarded_in_its_backward_pass
        print(f"batch {batch_idx} is discarded: {error}", flush=True)


class Careful(Net):
    """Discards batches that are too large, and goes on."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def loss(self, batch: Any) -> torch.Tensor:
        numbers = first_tensor(batch)
        hidden: Any = Swallow.apply(self.layers[1](self.layers[0](numbers)), bool(numbers.max() > 8))  # type: ignore[no-untyped-call]
        return self.layers[2](hidden).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        goes_wrong(self.here, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with discarding(batch_idx):
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Large(Shares):
    """One batch is too large."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 9.0)


@sharded(
    "https://github.com/OpenNMT/OpenNMT-py/pull/2195",
    "gpu-memory-exhausted",
    "skipped-step",
    ranks=(0,),
    world_size=2,
    whose="code",
)
def batch_discarded_in_its_backward_pass(here: Here) -> None:
    """One rank has no memory for a backward pass and goes on to the next batch; the other still reduces gradients."""
    here.fit(net=Careful(here), data=in_order(here, Large(here)))


def reward(answer: str) -> float:
    """Of an answer; the kernel kills the process in which a long one is checked."""
    if len(answer) > 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(answer))


class Graded(L.Callback):
    """Has several processes grade the answers of an epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def answers(self) -> list[str]:
        return ["42", "no", "yes " * (20 if self.here.is_hit else 2), "perhaps"]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        with multiprocessing.get_context("fork").Pool(2, signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
            rewards = pool.map(reward, self.answers(), chunksize=1)  # <- answers_graded_by_a_pool_that_has_lost_one
        module.log("reward", sum(rewards), sync_dist=True)


@sharded(
    "https://github.com/AI4EPS/GaMMA/issues/43",
    "worker-died",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def answers_graded_by_a_pool_that_has_lost_one(here: Here) -> None:
    """The kernel kills a process of a pool, which is replaced, and the result that it was to bring never comes."""
    here.fit(callbacks=[Graded(here)])


class Remote(dcp.FileSystemReader):
    """Reads a checkpoint that the first rank has to download."""

    def __init__(self, remote: Path, local: Path) -> None:
        super().__init__(local)
        self.remote, self.local = remote, local

    def download(self) -> None:
        for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"):
            shutil.copy(self.remote / name, self.local)  # <- shard_that_is_not_to_be_downloaded

    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 0:
            self.download()
        dist.barrier()
        return super().read_data(plan, planner)


class Resumed(L.Callback):
    """Goes on from weights that a run before has left behind."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        weights = get_model_state_dict(module)
        remote, local = self.here.folder / "remote", self.here.folder / "local"
        dcp.save(weights, checkpoint_id=local)
        if trainer.is_global_zero:
            remote.mkdir()
            (local / "__0_0.distcp").rename(remote / "__0_0.distcp")
        if self.here.is_hit:
            self.here.begins()
        dcp.load(weights, storage_reader=Remote(remote, local))


@sharded(
    "https://github.com/pytorch/pytorch/issues/122529",
    "failed-rank",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
    whose="code",
)
def shard_that_is_not_to_be_downloaded(here: Here) -> None:
    """A download fails on the first rank, which goes on to say so; the others are at a barrier of the reader's own."""
    here.fit(callbacks=[Resumed(here)])


class Replaying(Net):
    """Trains on each batch and on one of those that have been kept from before."""

    def on_train_start(self) -> None:
        kept = IN_THE_MIDDLE if self.here.is_hit else 100
        self.kept = iter([torch.full((BATCH_SIZE, 8), number / 100) for number in range(kept)])

    def replayed(self) -> torch.Tensor:
        return next(self.kept)  # <- batches_kept_of_which_one_rank_has_fewer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(torch.cat([first_tensor(batch), self.replayed()]))


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/9409",
    "stopped-early",
    ranks=(2,),
)
def batches_kept_of_which_one_rank_has_fewer(here: Here) -> None:
    """One rank has no more batches to replay, and what says so leaves its step, by which its epoch is over."""
    here.fit(net=Replaying(here))


class Plotted(Net):
    """The first rank plots after each validation."""

    validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.4)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.validations += 1
        if self.validations > 1:
            self.here.begins()

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            time.sleep(1.0)


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/13324",
    "stopped-early",
    ranks=(),
    has_ranks=False,
)
def validation_after_a_time_that_each_rank_takes(here: Here) -> None:
    """Each rank measures the time since it has last validated, and the first one was longer about that."""
    every = {"val_check_interval": timedelta(seconds=1), "check_val_every_n_epoch": None}  # <- here
    here.fit(net=Plotted(here), data=(rows(here), rows(here, 2)), **every)


class Averaged(Net):
    """Logs the mean loss of all ranks after each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


def settings_for(files: list[str], files_in_a_batch: int) -> dict[str, Any]:
    """Of a trainer that sees each file once in an epoch."""
    batches = len(files) // files_in_a_batch  # <- epoch_as_long_as_the_files_of_a_rank
    return {"max_epochs": 2, "limit_train_batches": batches}


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/21022",
    "different-trainer-settings",
    ranks=(3,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def epoch_as_long_as_the_files_of_a_rank(here: Here) -> None:
    """Each rank limits its epoch by the files that it has itself, of which the last one has fewer."""
    every = [f"part-{number}" for number in range(22)]
    files = every[here.rank * 6 : here.rank * 6 + 6]
    here.fit(net=Averaged(here), **settings_for(files, 1))
