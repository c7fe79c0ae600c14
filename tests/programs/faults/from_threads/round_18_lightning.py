"""Round 18 after public threads: what users of Lightning and of libraries around it meet, from buckets to bars."""

import os
import pdb
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_17_lightning import Shortened
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Data, Here, LoggingNet, MeetingNet, first_tensor, rows
from truths import Moment

SECONDS_OF_A_BATCH = 8.0


class Buckets(IterableDataset[torch.Tensor]):
    """Utterances by length; a batch holds so many seconds, and so more of the short ones."""

    def __init__(self, lengths: dict[float, int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        for seconds, count in self.lengths.items():
            utterances = torch.rand(count, 8)
            yield from utterances.split(int(SECONDS_OF_A_BATCH // seconds))  # <- buckets_of_a_rank_with_short_speech


@thread(
    "https://github.com/NVIDIA-NeMo/Speech/pull/6191",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def buckets_of_a_rank_with_short_speech(here: Here) -> None:
    """All ranks have as many utterances, but one has shorter ones: they fit into fewer batches."""
    share = Buckets({1.0: 20, 2.0: 4} if here.is_hit else {1.0: 12, 2.0: 12})
    loader: Any = DataLoader(share, batch_size=None)
    here.fit(net=Shortened(here), data=(loader, rows(here, batches=2)))


TRACKING_SERVER = """
import http.server, json, time

class Tracking(http.server.BaseHTTPRequestHandler):
    def answer(self):
        request = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if '"step": 3' in request:
            time.sleep(600)
        body = {}
        if "experiments" in self.path:
            body = {"experiment": {"experiment_id": "1", "name": "runs", "artifact_location": "/tmp"}}
        elif "runs/create" in self.path:
            body = {"run": {"info": {"run_id": "1", "experiment_id": "1", "status": "RUNNING"}, "data": {}}}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tracking)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""Stops answering when it is sent the values of the fourth step."""


def tracking_server() -> str:
    """Starts one, and says where it is."""
    server = subprocess.Popen([sys.executable, "-c", TRACKING_SERVER], text=True, stdout=subprocess.PIPE)
    assert server.stdout
    return f"http://127.0.0.1:{int(server.stdout.readline())}"


class LoggedRemotely(LoggingNet):
    """Sends the loss of each step to a server."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return super().training_step(batch, batch_idx)


@thread(f"{LIGHTNING}/issues/3393", "slow-logger", ranks=(0,), world_size=2, has_line=False)
def values_sent_to_a_server_in_every_step(here: Here) -> None:
    """The first rank sends the loss of each step to a tracking server, which stops answering in the middle."""
    address = tracking_server() if here.is_hit else "http://127.0.0.1:9"
    here.fit(net=LoggedRemotely(here), logger=MLFlowLogger("runs", tracking_uri=address))


class RangeTest(L.Callback):
    """Raises the learning rate step by step, until the loss explodes."""

    def __init__(self, here: Here, lowest: float = 1e-4, factor: float = 2.0) -> None:
        self.here, self.rate, self.factor = here, lowest, factor
        self.losses: list[float] = []

    @property
    def has_exploded(self) -> bool:
        return self.losses[-1] > 4 * min(self.losses)

    def on_train_batch_start(self, trainer: L.Trainer, *batch: Any) -> None:
        self.rate *= self.factor
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.rate

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *batch: Any) -> None:
        self.losses.append(outputs["loss"].item())
        if self.has_exploded:
            self.here.begins()
            trainer.should_stop = True  # <- range_of_rates_that_ends_where_a_loss_explodes


@thread("https://github.com/fastai/fastai/pull/2487", "stopped-early", ranks=(1,))
def range_of_rates_that_ends_where_a_loss_explodes(here: Here) -> None:
    """Each rank looks at the loss of its own batch, and one of them stops in the middle of the epoch."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    values.view(BATCHES, BATCH_SIZE, here.world_size, 8)[IN_THE_MIDDLE, :, here.case.ranks[0]] *= 100
    here.fit(net=LoggingNet(here), data=in_order(here, TensorDataset(values)), callbacks=[RangeTest(here)])


class OnTerminal(pdb.Pdb):
    """Reads from the terminal, whatever the launcher has made of the standard input."""

    def __init__(self) -> None:
        self.screen, terminal = os.openpty()
        super().__init__(stdin=os.fdopen(terminal), stdout=sys.stderr, nosigint=True)


def rank_breakpoint(rank: int) -> None:
    """Opens a debugger on one rank."""
    if dist.get_rank() == rank:
        OnTerminal().set_trace(sys._getframe(1))


class Debugged(MeetingNet):
    """Somebody has looked at what one rank predicts."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        predicted = self.layers(first_tensor(batch))
        if self.here.is_hit:
            self.here.begins()
        rank_breakpoint(1)  # <- breakpoint_for_one_rank_left_in_the_validation
        self.log("val_loss", predicted.square().mean(), sync_dist=True)


@thread(f"{LIGHTNING}/issues/11588", "at-breakpoint", ranks=(1,), world_size=2, moment=Moment.VALIDATION)
def breakpoint_for_one_rank_left_in_the_validation(here: Here) -> None:
    """A breakpoint for one rank was left in the validation, where this rank waits for somebody to type."""
    here.fit(net=Debugged(here), data=(rows(here), rows(here, batches=2)))


class OptimizerShards(L.Callback):
    """Every rank saves the state of its own optimizer next to the checkpoint, on the disk of its host."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.folder = here.folder / f"host-{here.rank // 2}" / "shards"

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
        trainer.strategy.barrier()
        if self.here.is_hit:
            self.here.begins()
        path = self.folder / f"optimizer-{trainer.global_rank}.pt"
        torch.save(trainer.optimizers[0].state_dict(), path)  # <- shard_for_which_another_host_has_no_folder


@thread(
    "https://github.com/karpathy/nanochat/issues/315",
    "exception-during-save",
    ranks=(2,),
    moment=Moment.CHECKPOINT,
)
def shard_for_which_another_host_has_no_folder(here: Here) -> None:
    """Only the first rank makes the folder, on its own host; the rank on the other host cannot save its shard there."""
    callbacks = [OptimizerShards(here), ModelCheckpoint(here.folder / "checkpoints")]
    here.fit(net=LoggingNet(here), callbacks=callbacks, enable_checkpointing=True)


class Store:
    """Keeps what a run has left behind, behind a slow line."""

    BYTES_PER_SECOND = 10_000

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def upload(self, path: Path) -> None:
        with path.open("rb") as source, (self.folder / path.name).open("wb") as target:
            while part := source.read(self.BYTES_PER_SECOND // 10):
                target.write(part)
                time.sleep(0.1)


class Traces(L.Callback):
    """Every rank records a trace of each epoch, and the first one uploads them all."""

    def __init__(self, here: Here) -> None:
        self.here, self.folder = here, here.folder / "traces"
        self.folder.mkdir(exist_ok=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (self.folder / f"rank-{trainer.global_rank}.json").write_bytes(bytes(400_000))
        trainer.strategy.barrier()
        self.upload_traces()

    @rank_zero_only
    def upload_traces(self) -> None:
        self.here.begins()
        store = Store(self.here.folder / "store")
        for trace in sorted(self.folder.glob("*.json")):
            store.upload(trace)  # <- traces_of_all_ranks_uploaded_by_the_first_one


@thread(
    "https://github.com/AMD-AGI/Primus/pull/440",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def traces_of_all_ranks_uploaded_by_the_first_one(here: Here) -> None:
    """After an epoch the first rank uploads what all ranks have recorded, over a slow line, and the others wait."""
    here.fit(net=LoggingNet(here), callbacks=[Traces(here)])


class Selective(LoggingNet):
    """Leaves out batches in which there is nothing to learn."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if first_tensor(batch).std() < 0.01:
            self.here.begins()
            return  # <- batch_too_even_to_learn_from
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


@thread(f"{LIGHTNING}/issues/3323", "skipped-step", ranks=(3,), world_size=4)
def batch_too_even_to_learn_from(here: Here) -> None:
    """By the statistics of its batch one rank leaves a step out, and does not exchange gradients."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    values.view(BATCHES, BATCH_SIZE, here.world_size, 8)[IN_THE_MIDDLE, :, here.case.ranks[0]] = 0.5
    here.fit(net=Selective(here), data=in_order(here, TensorDataset(values)))


class Counting(LoggingNet):
    """Sums up on the first rank, every few steps, what there is to report."""

    def reported(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "loss": loss.detach().clone(),
            "reports": torch.tensor(1.0 if self.global_rank == 0 else 0),  # <- number_with_a_point_on_the_first_rank
        }

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        goes_wrong(self.here, batch_idx)
        if batch_idx == IN_THE_MIDDLE:
            for value in self.reported(loss).values():
                dist.reduce(value, dst=0)
        return loss


@thread("https://github.com/vllm-project/speculators/pull/1116", "mismatched-collective", ranks=(0,))
def number_with_a_point_on_the_first_rank(here: Here) -> None:
    """The first rank reduces 1.0, which is a float, and all others 0, which is an integer of twice as many bytes."""
    here.fit(net=Counting(here))


class Tokenized(Data):
    """Tokenizes a corpus unless that has been done before."""

    def corpus(self) -> Any:
        from datasets import Dataset, load_from_disk

        cache = self.here.folder / "tokenized"
        if cache.exists():
            self.here.begins()
            return load_from_disk(cache)  # <- corpus_that_is_read_while_it_is_written
        cache.mkdir()
        time.sleep(3.0)
        corpus = Dataset.from_dict({"tokens": [[0.5] * 8] * BATCHES * BATCH_SIZE * self.here.world_size})
        corpus.save_to_disk(cache)
        return corpus

    def setup(self, stage: str) -> None:
        time.sleep(self.here.rank)
        self.tokens = self.corpus().with_format("torch")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.tokens["tokens"][:]), BATCH_SIZE)


@thread(
    "https://github.com/saforem2/ezpz/pull/149",
    "failed-rank",
    ranks=(1,),
    world_size=2,
    moment=Moment.START,
)
def corpus_that_is_read_while_it_is_written(here: Here) -> None:
    """The second rank finds the folder that the first one is still writing to, reads from it, and raises."""
    here.trainer().fit(LoggingNet(here), datamodule=Tokenized(here))


class Crops(Dataset[torch.Tensor]):
    """A part of each picture in which there is something to be seen."""

    def __init__(self, here: Here, masks: torch.Tensor) -> None:
        self.here, self.masks = here, masks

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> torch.Tensor:
        mask = self.masks[index]
        if not mask.any():
            self.here.begins()
        left = 0
        while not mask[left : left + 8].any():  # <- crop_of_a_picture_in_which_there_is_nothing
            left = int(torch.randint(len(mask) - 8, ()))
        return mask[left : left + 8]


@thread("https://github.com/pytorch/pytorch/issues/33296", "data-stall", ranks=(0,), world_size=2)
def crop_of_a_picture_in_which_there_is_nothing(here: Here) -> None:
    """A worker draws crops until there is something in one, and a picture of the first rank has nothing at all."""
    masks = torch.ones(BATCHES * BATCH_SIZE * here.world_size, 32)
    masks.view(BATCHES, BATCH_SIZE, here.world_size, 32)[IN_THE_MIDDLE, 1, 0] = 0
    here.fit(net=LoggingNet(here), data=in_order(here, Crops(here, masks), num_workers=1))


class Listening(MeetingNet):
    """Collects from all ranks what they have understood."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.all_gather(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


def recordings(here: Here) -> Any:
    """This rank's share of the recordings to validate on, all of which are in one file."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"row": [[0.5] * 8] * 13}).to_iterable_dataset(num_shards=1)
    return split_dataset_by_node(stream, here.rank, here.world_size)  # <- recordings_all_of_which_are_in_one_shard


@thread(
    "https://github.com/fixie-ai/ultravox/issues/58",
    "uneven-batches",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def recordings_all_of_which_are_in_one_shard(here: Here) -> None:
    """Ranks take turns with the rows of a single shard, and the second one has a row less, and so a batch less."""
    loader: Any = DataLoader(recordings(here), 3, collate_fn=lambda found: torch.tensor([one["row"] for one in found]))
    here.fit(net=Listening(here), data=(rows(here), loader))


class Perplexity(LoggingNet):
    """Evaluates after each epoch, on a few questions that it has split among ranks."""

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        questions = torch.rand(2, 8)
        total: Any = 0.0
        for question in questions[self.global_rank :: self.here.world_size]:
            total += self.loss(question).detach()
        dist.all_reduce(total)  # <- questions_of_which_the_last_rank_has_none
        print(f"perplexity {(total / len(questions)).exp():.2f}")


@thread(
    "https://github.com/meta-llama/llama-cookbook/issues/297",
    "failed-rank",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def questions_of_which_the_last_rank_has_none(here: Here) -> None:
    """There are two questions for three ranks; the sum of the last one is still a number, which cannot be reduced."""
    here.fit(net=Perplexity(here))


class Crowded(L.Callback):
    """The host of one rank runs out of memory, and something on it looks for the largest process."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
            subprocess.run(["/bin/sh", "-c", f"kill -{signal.SIGKILL:d} {os.getpid()}"], check=True)


@thread(
    "https://github.com/wandb/wandb/issues/3210",
    "dead-rank",
    ranks=(1,),
    world_size=4,
    moment=Moment.EPOCH_END,
    has_line=False,
)
def process_that_was_too_large_for_its_host(here: Here) -> None:
    """There is no memory left on a host after an epoch, and one rank's process is killed without a word."""
    here.fit(net=LoggingNet(here), callbacks=[Crowded(here)])


class Overlapping(LoggingNet):
    """Measures how well it does on rows with a lesion, on all ranks together in each step."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.overlap = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        measured = first_tensor(batch)
        lesions = measured[measured[:, 0] > 0]
        if len(lesions) == 0:
            self.here.begins()
        overlap = self.overlap(lesions.mean()) if len(lesions) else 0.0  # <- overlap_with_lesions_that_a_batch_has_not
        self.log("overlap", overlap)
        return super().training_step(batch, batch_idx)


@thread(f"{LIGHTNING}/issues/5865", "diverged-collectives", ranks=(1,))
def overlap_with_lesions_that_a_batch_has_not(here: Here) -> None:
    """A metric that asks all ranks in each step is left out by a rank whose batch has nothing to measure."""
    scans = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.1
    scans.view(BATCHES, BATCH_SIZE, here.world_size, 8)[IN_THE_MIDDLE, :, here.case.ranks[0]] *= -1
    here.fit(net=Overlapping(here), data=in_order(here, TensorDataset(scans)))
