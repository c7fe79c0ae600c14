"""Round 18 after public threads: what users of plain PyTorch report of cores, stores, caches, and full disks."""

import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net
from truths import Moment


class Rows(Dataset[torch.Tensor]):
    """The share of each rank, row by row, as a function of the rank and the row's number."""

    def __init__(self, here: Here, row: Callable[[int, int], torch.Tensor]) -> None:
        self.ranks, self.row = here.world_size, row

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.ranks

    def __getitem__(self, index: int) -> torch.Tensor:
        number, rank = divmod(index, self.ranks)
        return self.row(rank, number)


def usual(number: int) -> torch.Tensor:
    return torch.linspace(0.1, 0.8, 8) + number / 100


def is_in_the_middle(number: int) -> bool:
    """Whether this row is in the batch in which something goes wrong."""
    return number // BATCH_SIZE == IN_THE_MIDDLE


class Folding(Net):
    """Folds a protein in each step, with what programs beside the training have found in a database."""

    searches: list[subprocess.Popen[bytes]]

    def on_fit_start(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.here.rank % len(cores)]})  # <- searches_on_the_core_of_their_rank
        torch.set_num_threads(1)
        self.searches = []

    def search(self, programs: int) -> None:
        self.searches += [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(programs)]

    def fold(self) -> None:
        pairs = torch.rand(400, 400)
        for _ in range(1500):
            pairs = torch.softmax(pairs @ pairs, dim=-1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if goes_wrong(self.here, batch_idx):
            self.search(programs=12)
        if batch_idx == IN_THE_MIDDLE:
            self.fold()
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        for search in self.searches:
            search.kill()


@thread("https://github.com/hpcaitech/FastFold/issues/175", "host-starved", world_size=2, whose="either")
def searches_on_the_core_of_their_rank(here: Here) -> None:
    """Each rank is bound to a core, and so are the twelve programs that one of them starts, which leave it a part."""
    here.fit(net=Folding(here), max_epochs=1)


class Mapped(L.LightningDataModule):
    """The first rank maps samples to documents, and the others read what it has put into a store of files."""

    def __init__(self, here: Here, documents: int) -> None:
        super().__init__()
        self.here, self.documents = here, documents

    @functools.cached_property
    def store(self) -> Any:
        store = cast(Any, dist).FileStore(str(self.here.folder / "mapping"), self.here.world_size)
        store.set_timeout(timedelta(seconds=3))  # <- mapping_that_is_awaited_for_three_seconds
        return store

    def mapping(self) -> list[int]:
        time.sleep(self.documents / 100_000)
        return list(range(BATCHES * BATCH_SIZE * self.here.world_size))

    def setup(self, stage: str) -> None:
        if self.here.rank == 0:
            self.here.begins()
            self.store.set("mapping", json.dumps(self.mapping()))
        self.order = json.loads(self.store.get("mapping"))
        dist.barrier()

    def train_dataloader(self) -> Any:
        return in_order(self.here, Rows(self.here, lambda rank, number: usual(self.order[number])))


@thread(
    "https://github.com/bigcode-project/Megatron-LM/issues/15",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
    moment=Moment.START,
)
def mapping_that_is_awaited_for_three_seconds(here: Here) -> None:
    """The longer the run, the longer the first rank needs for its mapping; the store gives up long before the group."""
    here.fit(data=Mapped(here, documents=1_000_000))


class Sharded(L.Callback):
    """All ranks save their part of the optimizer's state at the end, into a folder that the first one makes."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def summary(self, module: L.LightningModule) -> str:
        time.sleep(1.5)
        return "\n".join(f"{name} {value.numel()}" for name, value in module.named_parameters())

    def save(self, trainer: L.Trainer, module: L.LightningModule, folder: Path) -> None:
        if trainer.is_global_zero:
            summary = self.summary(module)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.txt").write_text(summary)
            torch.save(module.state_dict(), folder / "model.pt")
        state = trainer.optimizers[0].state_dict()
        torch.save(
            state, folder / f"optimizer-{trainer.global_rank}.pt"
        )  # <- folder_that_the_first_rank_is_yet_to_make

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.save(trainer, module, self.here.folder / f"step-{trainer.global_step}")
        dist.barrier()


@thread(
    "https://github.com/karpathy/nanochat/pull/336",
    "exception-during-save",
    "failed-rank",
    world_size=2,
    moment=Moment.END,
)
def folder_that_the_first_rank_is_yet_to_make(here: Here) -> None:
    """Only the first rank makes the folder, after a summary; the other one is there before it, and cannot save."""
    here.fit(callbacks=[Sharded(here)], max_epochs=1)


@functools.cache
def overlap_of_polygons(folder: Path) -> Any:
    """An extension that is built when it is first needed."""
    from torch.utils import cpp_extension

    code = "torch::Tensor overlap(torch::Tensor a, torch::Tensor b) { return torch::min(a, b).sum(); }"
    folder.mkdir()
    options: dict[str, Any] = {"functions": "overlap", "build_directory": str(folder)}
    return cast(Any, cpp_extension).load_inline("overlap", code, **options)  # <- extension_for_a_polygon


class Polygons(Net):
    """Compares boxes with one another, and polygons with an operation of its own, which no other batch needs."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        if (batch < 0).any():
            self.here.begins()
            built = overlap_of_polygons(self.here.folder / f"extensions-{self.here.rank}")
            loss = loss + 0.1 * built.overlap(batch, batch.flip(0))
        return loss


@thread("https://github.com/pytorch/pytorch/issues/125403", "compile-skew", ranks=(0,), world_size=2)
def extension_for_a_polygon(here: Here) -> None:
    """One rank's batch is the first with a polygon, and the operation for it is compiled then, on that rank."""
    data = Rows(here, lambda rank, number: usual(number) * (-1 if rank == 0 and is_in_the_middle(number) else 1))
    here.fit(net=Polygons(here), data=in_order(here, data), max_epochs=1)


def means(rows: torch.Tensor, nearest: torch.Tensor, clusters: int) -> torch.Tensor:
    return torch.stack([rows[nearest == number].mean(0) for number in range(clusters)])


def k_means(rows: torch.Tensor, clusters: int, tolerance: float = 1e-4) -> torch.Tensor:
    """The centers of clusters, which begin with the first rows and move until they hardly do any more."""
    centers, shift = rows[:clusters], torch.tensor(1.0)
    while not shift < tolerance:  # <- cluster_to_which_no_row_belongs
        moved = means(rows, torch.cdist(rows, centers).argmin(1), clusters)
        centers, shift = moved, (moved - centers).norm(dim=1).max()
    return centers


class Clustered(Net):
    """Finds clusters in the share of each rank after each epoch, and gathers their centers."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.rows: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.append(batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        rows = torch.cat(self.rows)
        self.rows.clear()
        if self.here.is_hit:
            self.here.begins()
        centers = k_means(rows, clusters=3)
        dist.all_gather([torch.zeros_like(centers) for _ in range(self.here.world_size)], centers)


@thread("https://github.com/BGU-CS-VIL/DeepDPM/issues/46", "rank-behind", moment=Moment.EPOCH_END)
def cluster_to_which_no_row_belongs(here: Here) -> None:
    """One rank's first two rows are the same, so that a cluster stays empty; its center is no number, nor its shift."""
    data = Rows(here, lambda rank, number: usual(max(number, 1) if rank == 1 else number))
    here.fit(net=Clustered(here), data=in_order(here, data))


class Instances(Net):
    """Logs each part of the loss; that of masks is there where an instance is."""

    def parts(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(batch)
        parts = {"loss_class": found[:, 0].square().mean()}
        is_instance = batch[:, 0] > 0
        if is_instance.any():
            parts["loss_mask"] = found[is_instance, 1].square().mean()
        else:
            self.here.begins()
        return parts | {"loss_box": found[:, 1].abs().mean()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = self.parts(batch)
        self.log_dict(parts, sync_dist=True)  # <- loss_of_masks_of_a_boat_that_is_not_there
        return torch.stack([*parts.values()]).sum()


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/7116",
    "diverged-log-keys",
    ranks=(3,),
    world_size=4,
)
def loss_of_masks_of_a_boat_that_is_not_there(here: Here) -> None:
    """No picture of one rank's batch has a boat; it logs two parts of the loss, and all others three."""
    data = Rows(here, lambda rank, number: usual(number) * (-1 if rank == 3 and is_in_the_middle(number) else 1))
    here.fit(net=Instances(here), data=in_order(here, data))


class Scratch(TorchCheckpointIO):
    """Writes a checkpoint to the disk of the host first, and moves it to its place then."""

    def __init__(self, here: Here, scratch: Path) -> None:
        super().__init__()
        self.here, self.scratch = here, scratch

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.here.begins()
        torch.save(checkpoint, self.scratch)  # <- scratch_on_a_disk_that_debugging_has_filled
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.scratch.rename(path)


@thread(
    "https://github.com/instructlab/instructlab/pull/3323",
    "exception-during-save",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def scratch_on_a_disk_that_debugging_has_filled(here: Here) -> None:
    """Logs have filled the disk of the first rank's host, and nothing can be written to it; the others wait."""
    scratch = here.folder / "scratch.ckpt"
    if here.rank == 0:
        scratch.symlink_to("/dev/full")
    here.fit(plugins=[Scratch(here, scratch)], enable_checkpointing=True)


class Bucket:
    """A bucket that TensorBoard can write to; what is written has to be uploaded, and so has each line after it."""

    def __init__(self, here: Here) -> None:
        self.here, self.lines = here, 0

    def exists(self, filename: str) -> bool:
        return False

    def makedirs(self, path: str) -> None:
        pass

    def write(self, filename: str, content: bytes, binary_mode: bool = False) -> None:
        self.append(filename, content)

    def append(self, filename: str, content: bytes, binary_mode: bool = False) -> None:
        self.lines += 1
        time.sleep(0.01 if self.lines < 20 else FOR_LONG_S)


class Scalars(L.Callback):
    """The first rank writes norms of all weights for TensorBoard, whose thread puts them into a bucket."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.writer: Any = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        from tensorboard.compat.tensorflow_stub.io.gfile import register_filesystem
        from torch.utils.tensorboard import SummaryWriter

        if trainer.is_global_zero:
            register_filesystem("bucket", Bucket(self.here))
            self.writer = SummaryWriter("bucket://runs", max_queue=4)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.writer is None:
            return
        goes_wrong(self.here, batch_idx)
        for name, weight in module.named_parameters():
            self.writer.add_scalar(name, weight.norm(), trainer.global_step)  # <- norms_written_into_a_bucket


@thread("https://github.com/pytorch/pytorch/issues/35188", "slow-logger", ranks=(0,))
def norms_written_into_a_bucket(here: Here) -> None:
    """The thread that writes is held up by its storage; the queue before it is full, and the first rank waits."""
    here.fit(callbacks=[Scalars(here)])


class Evaluated(MeetingNet):
    def on_validation_start(self) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/horovod/horovod/issues/2640",
    "different-trainer-settings",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def settings_of_last_week_on_one_host(here: Here) -> None:
    """Code and settings are copied to each host, and one of them has the older ones: it validates a batch earlier."""
    settings = here.folder / f"settings-{here.rank}.json"
    settings.write_text(json.dumps({"val_check_interval": 2 if here.is_hit else 3}))
    here.fit(net=Evaluated(here), **json.loads(settings.read_text()))


class Terminal(L.Callback):
    """The terminal in which a rank was started; somebody closes it."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)


@thread(
    "https://github.com/pytorch/pytorch/issues/76894",
    "dead-rank",
    ranks=(2,),
    world_size=4,
    has_line=False,
)
def terminal_of_one_host_that_is_closed(here: Here) -> None:
    """The connection to one host ends, and with it the terminal and the rank in it, which gets a signal to hang up."""
    here.fit(callbacks=[Terminal(here)])


def main_process_only(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def drawn(*arguments: Any) -> Any:
        return draw(*arguments) if dist.get_rank() == 0 else None

    return drawn


class Diffusing(Net):
    """Draws some pictures with what it has learnt, after each validation."""

    def pictures(self, prompts: int, steps: int) -> Iterator[torch.Tensor]:
        for _ in range(prompts):
            latents = torch.rand(1, 8)
            for step in range(steps):
                latents = latents - self.layers(latents).mean() / (step + 1)  # <- pictures_drawn_by_the_main_process
            yield latents

    @main_process_only
    @torch.no_grad()
    def draw(self) -> None:
        self.here.begins()
        torch.save([*self.pictures(prompts=8, steps=500_000)], self.here.folder / "pictures.pt")

    def on_validation_epoch_end(self) -> None:
        self.draw()
        self.trainer.strategy.barrier("pictures")


@thread(
    "https://github.com/huggingface/accelerate/issues/3861",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def pictures_drawn_by_the_main_process(here: Here) -> None:
    """The main process draws pictures in many small steps, which takes minutes; the other one is at the barrier."""
    here.fit(net=Diffusing(here))


class Accumulating(Net):
    """Goes through a batch in halves, and gives it up where a loss is not finite."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = cast(Any, self.optimizers())
        for half in batch.split(BATCH_SIZE // 2):
            loss = self.loss(half)
            if not torch.isfinite(loss):  # <- batch_given_up_for_a_loss_that_is_infinite
                self.here.begins()
                optimizer.zero_grad()
                return None
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None


@thread("https://github.com/NVIDIA-NeMo/Speech/pull/578", "skipped-step", ranks=(2,))
def batch_given_up_for_a_loss_that_is_infinite(here: Here) -> None:
    """A value of one rank's batch is infinite; it goes on with the next batch, and has not been in a backward pass."""
    data = Rows(here, lambda rank, number: usual(number) / (0 if rank == 2 and is_in_the_middle(number) else 1))
    here.fit(net=Accumulating(here), data=in_order(here, data))


class Cached(Net):
    """Generates code for its layers once, and makes sure that all ranks have been able to."""

    def is_ready(self, cache: Path) -> bool:
        if cache.exists():  # <- code_that_one_host_has_in_its_cache
            self.here.begins()
            return True
        cache.write_text("def forward(layers, batch): return layers(batch)")
        is_written = torch.tensor(float(cache.exists()))
        dist.all_reduce(is_written, op=dist.ReduceOp.MIN)
        return bool(is_written)

    def on_fit_start(self) -> None:
        if not self.is_ready(self.here.folder / f"cache-{self.here.rank}.py"):
            raise RuntimeError("some ranks have no code")


@thread(
    "https://github.com/unslothai/unsloth-zoo/pull/967",
    "diverged-collectives",
    ranks=(2,),
    world_size=3,
    moment=Moment.START,
)
def code_that_one_host_has_in_its_cache(here: Here) -> None:
    """One host has the code from an earlier run, and does not ask the others whether they could write theirs."""
    if here.is_hit:
        (here.folder / f"cache-{here.rank}.py").write_text("def forward(layers, batch): return layers(batch)")
    here.fit(net=Cached(here))


class Stages(Net):
    """Three stages, the first of which sends its outputs to the second one, and past it to the third."""

    def first(self, outputs: torch.Tensor) -> None:
        for stage in (2, 1):
            dist.send(outputs, stage)  # <- outputs_sent_past_a_stage_before_those_for_it

    def second(self, outputs: torch.Tensor) -> None:
        dist.recv(outputs, 0)
        dist.send(self.layers[0](outputs).detach(), 2)

    def third(self, outputs: torch.Tensor) -> None:
        hidden = torch.empty(len(outputs), 16)
        dist.recv(hidden, 1)
        dist.recv(outputs, 0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = batch[0].clone()
        self.here.begins()
        (self.first, self.second, self.third)[self.here.rank](outputs)
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/pytorch/PiPPy/pull/1000",
    "unmatched-p2p",
    ranks=(),
    has_ranks=False,
    moment=Moment.FIRST_STEP,
)
def outputs_sent_past_a_stage_before_those_for_it(here: Here) -> None:
    """The first waits for the third to receive, which waits for the second, which waits for the first.

    No rank is wrong by itself; the first has to send to the next stage before it sends past it.
    """
    here.fit(net=Stages(here))
