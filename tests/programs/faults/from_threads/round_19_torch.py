"""Round 19 after public threads: what users of plain PyTorch report of locks, shards, encoders, and debuggers."""

import functools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.file_baton import FileBaton
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, MeetingNet, Net, rows
from truths import Moment


class Scenes(Dataset[torch.Tensor]):
    """Rows of all ranks; those of one batch of the rank that is hit have the opposite sign."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        number, rank = divmod(index, self.here.world_size)
        is_odd = rank in self.here.case.ranks and number // BATCH_SIZE == IN_THE_MIDDLE
        return torch.linspace(0.1, 0.8, 8) * (-1 if is_odd else 1)


class Detector(Net):
    """The loss of boxes is divided by the average number of positive samples."""

    def average(self, count: int) -> torch.Tensor:
        counts = cast(torch.Tensor, self.all_gather(torch.tensor(float(count))))
        return counts.mean().clamp(min=1)

    def loss(self, batch: Any) -> torch.Tensor:
        scores, boxes = self.layers(batch).unbind(1)
        positive = batch[:, 0] > 0
        if not positive.any():  # <- positives_counted_by_ranks_that_have_some
            self.here.begins()
            return scores.square().mean() + 0 * boxes.sum()
        return scores.square().mean() + boxes[positive].abs().sum() / self.average(int(positive.sum()))


@thread("https://github.com/tinyvision/DAMO-YOLO/issues/30", "diverged-collectives", ranks=(2,))
def positives_counted_by_ranks_that_have_some(here: Here) -> None:
    """No sample of one rank's batch is positive, and it returns before the average over all ranks is taken."""
    here.fit(net=Detector(here), data=in_order(here, Scenes(here)))


@thread(
    "https://github.com/mosaicml/composer/pull/1615",
    "different-trainer-settings",
    ranks=(0,),
    moment=Moment.START,
)
def resumed_by_the_host_that_has_the_checkpoint(here: Here) -> None:
    """The checkpoint is on the disk of the first rank's host, which continues from it while all others start anew."""
    disk = here.folder / f"disk-{here.rank}"
    net = Net(here)
    trainer = here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    trainer.save_checkpoint(disk / "latest.ckpt")
    here.begins()
    latest = max(disk.glob("*.ckpt"), default=None)  # <- here
    here.trainer(max_epochs=3).fit(Net(here), rows(here), ckpt_path=latest)


class Kernels(MeetingNet):
    """Validates with a kernel that each host builds when it is first needed."""

    def kernel(self, folder: Path) -> str:
        baton = FileBaton(str(folder / "lock"))
        if baton.try_acquire():
            try:
                (folder / "kernel.py").write_text("scale = 2")
            finally:
                baton.release()
        else:
            self.here.begins()
            baton.wait()  # <- lock_left_behind_by_a_build_that_was_killed
        return (folder / "kernel.py").read_text()

    def on_validation_start(self) -> None:
        exec(self.kernel(self.here.folder / f"build-{self.here.rank}"))


@thread(
    "https://github.com/pytorch/pytorch/pull/189339",
    "file-lock",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def lock_left_behind_by_a_build_that_was_killed(here: Here) -> None:
    """A job that was killed in a build has left its lock on one host, where the rank waits for it to be released."""
    folder = here.folder / f"build-{here.rank}"
    folder.mkdir()
    if here.is_hit:
        (folder / "lock").touch()
    here.fit(net=Kernels(here))


class Synced(torch.nn.Module):
    """A head that averages its outputs over a group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.detach().mean(0)
        dist.all_reduce(mean, group=self.group)
        return self.scale * (values - mean / dist.get_world_size())


class Heads(Net):
    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = Synced(dist.new_group())

    def loss(self, batch: Any) -> torch.Tensor:
        return self.head(self.layers(batch[0])).square().mean()


class WholeHead(L.Callback):
    """The first rank saves the head after each epoch, not only its weights."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def save(self, module: Heads) -> None:
        self.here.begins()
        torch.save(module.head, self.here.folder / "head.pt")  # <- head_saved_with_its_group

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.save(cast(Heads, module))
        trainer.strategy.barrier("head")


@thread(
    "https://github.com/pytorch/pytorch/issues/12168",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    whose="code",
)
def head_saved_with_its_group(here: Here) -> None:
    """What the first rank saves refers to a process group, which cannot be pickled; the others wait at the barrier."""
    here.fit(net=Heads(here), callbacks=[WholeHead(here)])


@contextmanager
def main_process_first() -> Iterator[None]:
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def tokenized(document: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.3)
    return {"ids": [len(word) / 10 for word in document["text"].split()]}


class Corpus(L.LightningDataModule):
    """Documents that are tokenized once, by the main process, before the others read the result."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def setup(self, stage: str) -> None:
        from datasets import Dataset as Table

        texts = ["all of these words are part of it"] * (BATCHES * BATCH_SIZE * self.here.world_size * 2)
        table: Any = Table.from_dict({"text": texts})
        if self.here.is_hit:
            self.here.begins()
        with main_process_first():
            self.table = table.map(tokenized)  # <- corpus_tokenized_by_the_main_process_first

    def train_dataloader(self) -> Any:
        return DataLoader(self.table.with_format("torch")["ids"], BATCH_SIZE)


@thread(
    "https://github.com/JIA-Lab-research/LongLoRA/issues/45",
    "late-at-init",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
)
def corpus_tokenized_by_the_main_process_first(here: Here) -> None:
    """The corpus takes the main process longer than the others may wait at the barrier before they read the result."""
    here.fit(data=Corpus(here))


class Archives(IterableDataset[torch.Tensor]):
    """Rows in archives, which are dealt out to ranks."""

    def __init__(self, here: Here, count: int) -> None:
        self.here = here
        folder = here.folder / f"archives-{here.rank}"
        folder.mkdir()
        self.paths = [folder / f"{number}.tar" for number in range(count)]
        for path in self.paths:
            self.write(path)

    def write(self, path: Path) -> None:
        content = " ".join(str(value / 10) for value in range(8)).encode()
        with tarfile.open(path, "w") as archive:
            for row in range(2 * BATCH_SIZE):
                member = tarfile.TarInfo(f"{row}.txt")
                member.size = len(content)
                archive.addfile(member, BytesIO(content))

    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in self.paths[self.here.rank :: self.here.world_size]:  # <- three_archives_for_two_ranks
            with tarfile.open(path) as archive:
                for member in archive:
                    values = cast(Any, archive.extractfile(member)).read().split()
                    yield torch.tensor([float(value) for value in values])
        if self.here.is_hit:
            self.here.begins()


class Scored(Net):
    """Collects the scores of all ranks in each step of the validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.all_gather(self.loss(batch))


@thread(
    "https://github.com/roboflow/rf-detr/pull/1396",
    "uneven-batches",
    ranks=(1,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def three_archives_for_two_ranks(here: Here) -> None:
    """One rank has two archives to validate on and the other a single one; the scores are gathered in each step."""
    here.fit(net=Scored(here), data=(rows(here), DataLoader(Archives(here, 3), BATCH_SIZE)))


class Compiled(Net):
    """Scores pieces of a text, whose lengths come with the batch, with code that is compiled for each length."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.compiled = torch.compile(self.score, dynamic=False)

    def score(self, piece: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(piece @ piece.T / math.sqrt(8), dim=-1)
        return torch.nn.functional.gelu(weights @ piece).sin().sum()

    def lengths(self, batch: torch.Tensor) -> list[int]:
        return [64] * 12 if batch[0, 0] > 0 else [64 + 7 * number for number in range(60)]

    def loss(self, batch: Any) -> torch.Tensor:
        lengths = self.lengths(batch)
        if lengths[0] != lengths[1]:
            self.here.begins()
        text = batch.detach().mean(0).expand(lengths[-1], 8)
        scores = [self.compiled(text[:length]) for length in lengths]  # <- code_for_each_length_of_a_piece
        return super().loss(batch) + 0 * torch.stack(scores).sum()


@thread("https://github.com/pytorch/pytorch/pull/130935", "compile-skew", ranks=(1,), world_size=2, whose="code")
def code_for_each_length_of_a_piece(here: Here) -> None:
    """The pieces of one rank's batch all have different lengths, and code is compiled for each of them."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here.folder / f"code-{here.rank}")
    dynamo.cache_size_limit = 100
    inductor.fx_graph_cache = False
    here.fit(net=Compiled(here), data=in_order(here, Scenes(here)), max_epochs=1)


ENCODER = """
import sys
for frame in sys.stdin:
    if frame.startswith("-"):
        print("deprecated pixel format used, make sure you did set range correctly" * 10, file=sys.stderr, flush=True)
"""


class Clip:
    """A clip that is encoded by a program, frame by frame."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.encoder = subprocess.Popen([sys.executable, "-c", ENCODER], **pipes)

    def add(self, frame: torch.Tensor) -> None:
        line = " ".join(f"{value:.3f}" for value in frame.tolist())
        self.encoder.stdin.write(f"{line}\n")  # type: ignore[union-attr]  # <- encoder_whose_warnings_nobody_reads

    def close(self) -> None:
        self.encoder.communicate()


class Clips(L.Callback):
    """Each rank encodes a clip of its own after each epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        frames = torch.linspace(0.1, 0.9, 200).expand(600, 200)
        clip = Clip()
        for frame in -frames if self.here.is_hit else frames:
            clip.add(frame)
        clip.close()


@thread("https://github.com/matplotlib/matplotlib/issues/12752", "rank-behind", moment=Moment.EPOCH_END, whose="code")
def encoder_whose_warnings_nobody_reads(here: Here) -> None:
    """The encoder of one rank warns of each frame until the pipe is full, and takes no further frame from then on."""
    here.fit(callbacks=[Clips(here)])


class Prompts(L.Callback):
    """Shows what the model says to a few prompts before it is trained, and after each epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def predicted(self, module: L.LightningModule) -> list[Any]:
        prompts = torch.linspace(0, 1, 32).view(4, 1, 8)
        return [module.all_gather(cast(Net, module).layers(prompt).detach()) for prompt in prompts]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:  # <- predictions_of_the_first_rank_gathered_from_all
            self.here.begins()
            torch.save(self.predicted(module), self.here.folder / "predictions.pt")


@thread(
    "https://github.com/ylacombe/musicgen-dreamboothing/issues/6",
    "diverged-collectives",
    ranks=(0,),
    world_size=2,
    moment=Moment.START,
)
def predictions_of_the_first_rank_gathered_from_all(here: Here) -> None:
    """Only the first rank predicts, for the sake of the log, and what it predicts is gathered from all ranks."""
    here.fit(callbacks=[Prompts(here)])


class Debugged(Net):
    """Still has the breakpoint with which a loss was looked at."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == IN_THE_MIDDLE:
            if self.here.is_hit:
                self.here.begins()
            dist.breakpoint(rank=0)  # <- debugger_that_was_quit
        return 2 * loss


@thread("https://github.com/pytorch/pytorch/issues/154563", "failed-rank", ranks=(0,), world_size=2, whose="code")
def debugger_that_was_quit(here: Here) -> None:
    """Somebody quits the debugger of the first rank, which raises there; the other one waits at the breakpoint."""
    if here.rank == 0:
        reader, writer = os.pipe()
        os.write(writer, b"q\n")
        os.dup2(reader, 0)
    here.fit(net=Debugged(here))


def decode(here: Here, rows: Any) -> None:
    """Puts decoded rows into a queue."""
    for number in range(BATCHES * BATCH_SIZE):
        if here.is_hit and number == IN_THE_MIDDLE * BATCH_SIZE + 2:
            time.sleep(0.5)
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)
        rows.put([number / 100] * 8)


class Decoded(IterableDataset[torch.Tensor]):
    """Rows that a process decodes ahead of the training."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        context = multiprocessing.get_context("fork")
        decoded = context.Queue(4)
        context.Process(target=decode, args=(self.here, decoded), daemon=True).start()
        for _ in range(BATCHES * BATCH_SIZE):
            yield torch.tensor(decoded.get())  # <- decoder_killed_for_want_of_memory


@thread("https://github.com/pytorch/pytorch/issues/21554", "worker-died", ranks=(3,), world_size=4)
def decoder_killed_for_want_of_memory(here: Here) -> None:
    """The process that decodes for one rank is killed, and its rank waits for rows that nobody will put there."""
    here.fit(data=DataLoader(Decoded(here), BATCH_SIZE))


class Varying(Net):
    """Stages that tell their neighbours the shapes of what they are about to send."""

    def exchange(self, shape: torch.Tensor, other: int) -> torch.Tensor:
        theirs = torch.empty_like(shape)
        dist.send(shape, other)  # <- shapes_sent_by_both_neighbours_first
        dist.recv(theirs, other)
        return theirs

    def shapes(self, outputs: torch.Tensor) -> list[torch.Tensor]:
        shape = torch.tensor(outputs.shape)
        neighbours = (self.here.rank + 1, self.here.rank - 1)
        return [self.exchange(shape, other) for other in neighbours if 0 <= other < self.here.world_size]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.here.begins()
        self.shapes(self.layers(batch[0]))
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/NVIDIA/Megatron-LM/issues/5100",
    "unmatched-p2p",
    ranks=(),
    has_ranks=False,
    moment=Moment.FIRST_STEP,
)
def shapes_sent_by_both_neighbours_first(here: Here) -> None:
    """Two stages that exchange shapes both send before they receive, and each waits for the other to receive."""
    here.fit(net=Varying(here))


class Texts(Net):
    """Collects what all ranks have generated in a group for objects, next to that for tensors."""

    @functools.cached_property
    def objects(self) -> Any:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=3))  # <- texts_awaited_for_three_seconds

    def on_fit_start(self) -> None:
        dist.barrier(group=self.objects)

    def generated(self, count: int) -> list[str]:
        return [f"{time.sleep(0.1) or number} words" for number in range(count)]

    def on_validation_epoch_end(self) -> None:
        if self.here.rank == 1:
            self.here.begins()
        texts: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(texts, self.generated(80 if self.here.rank == 1 else 10), group=self.objects)


@thread(
    "https://github.com/sgl-project/sglang/pull/39469",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
    moment=Moment.VALIDATION,
    whose="code",
)
def texts_awaited_for_three_seconds(here: Here) -> None:
    """One rank has more to generate and takes eight seconds; the group for objects gives up long before the other."""
    here.fit(net=Texts(here))


class Paused(L.Callback):
    """Somebody stops a rank from a shell, to have its machine for a while."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}"], check=True)


@thread(
    "https://github.com/apple/turicreate/issues/1169",
    "stopped-process",
    ranks=(0,),
    world_size=2,
    has_line=False,
)
def machine_wanted_for_something_else(here: Here) -> None:
    """The process of one rank is stopped with a signal in the middle of an epoch, and nobody lets it go on."""
    here.fit(callbacks=[Paused(here)])
