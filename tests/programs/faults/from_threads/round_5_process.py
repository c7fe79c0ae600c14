"""Round 5 of trainings of public threads that go wrong: data, processes, threads, files, prompts, ends."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torch.utils.file_baton import FileBaton
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, rows
from truths import Moment


def row_of_its_fourth_batch(here: Here) -> int:
    """The first row of it that `in_order` gives to the rank that is hit."""
    return here.case.ranks[0] + here.world_size * BATCH_SIZE * IN_THE_MIDDLE


@thread("https://github.com/axolotl-ai-cloud/axolotl/issues/494", "uneven-batches", has_line=False)
def batches_packed_to_a_number_of_tokens(here: Here) -> None:
    """Samples are packed into batches of so many tokens; a rank with short samples needs fewer batches."""
    lengths = [5 if row % here.world_size == 1 else 8 for row in range(BATCHES * BATCH_SIZE * here.world_size)]

    class Packed(Sampler[list[int]]):
        most = 32

        def __len__(self) -> int:
            return BATCHES

        def __iter__(self) -> Iterator[list[int]]:
            pack: list[int] = []
            for row in range(here.rank, len(lengths), here.world_size):
                if sum(lengths[one] for one in [*pack, row]) > self.most:
                    yield pack
                    pack = []
                pack.append(row)
            yield pack
            if here.is_hit:
                here.begins()

    data = TensorDataset(torch.rand(len(lengths), 8))
    loader = DataLoader(data, batch_sampler=Packed())
    here.fit(data=loader, use_distributed_sampler=False)


@thread("https://github.com/Lightning-AI/litData/issues/340", "uneven-batches", world_size=4, has_line=False)
def mixture_that_ends_with_its_smallest_part(here: Here) -> None:
    """Two streams are mixed by weight until one of them ends, and each rank draws for itself."""

    class Mixture(IterableDataset[torch.Tensor]):
        def __init__(self, every: int) -> None:
            self.every = every

        def __iter__(self) -> Iterator[torch.Tensor]:
            texts, code = (iter(range(count)) for count in (100, 4))
            for draw in range(1, 100):
                number = next(code if draw % self.every == 0 else texts, None)
                if number is None:
                    break
                yield torch.full((8,), number / 100)
            if here.is_hit:
                here.begins()

    here.fit(data=DataLoader(Mixture(3 if here.is_hit else 6), batch_size=BATCH_SIZE))


@thread("https://github.com/m2lines/Samudra/pull/656", "data-stall")
def sample_on_a_finer_grid(here: Here) -> None:
    """Samples are of three scales; the finest takes a worker a hundred times as long as the others."""
    finest = row_of_its_fourth_batch(here)

    class Ocean(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE * here.world_size

        def regridded(self, grid: Any) -> Any:
            here.begins()
            deque((np.tanh(grid, out=grid) for _ in repeat(0)), maxlen=0)  # <- here
            return grid

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == finest:
                self.regridded(np.random.rand(512, 512))
            return torch.full((8,), index / 100)

    here.fit(data=in_order(here, Ocean(), num_workers=1))


@thread("https://github.com/zhoubolei/TRN-pytorch/issues/34", "data-stall")
def video_that_is_nowhere(here: Here) -> None:
    """A missing video is replaced by the next one of its class, which has only this one."""

    class Videos(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.missing = {row_of_its_fourth_batch(here)}

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE * here.world_size

        def there(self, index: int) -> int:
            if index in self.missing:
                here.begins()
            return next(one for one in cycle([index]) if one not in self.missing)  # <- here

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((8,), self.there(index) / 100)

    here.fit(data=in_order(here, Videos()))


@thread("https://github.com/allenai/OLMo/issues/878", "rank-zero-only-work", ranks=(0,), moment=Moment.EPOCH_END)
def choice_that_nobody_enters(here: Here) -> None:
    """The tracker asks on the terminal of the main process whether results shall be shown, and nobody is there."""
    reading, _writing = os.pipe()
    sys.stdin = os.fdopen(reading)

    class Tracker(L.Callback):
        def choice(self) -> str:
            return input("Enter your choice: ")  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                print(self.choice(), flush=True)

    here.fit(callbacks=[Tracker()])


ENCODER = """
import sys
while sys.stdin.buffer.read(4096):
    sys.stderr.write("deprecated pixel format used, make sure you did set range correctly " * 100)
    sys.stderr.flush()
"""


@thread(
    "https://github.com/BrokenSource/ShaderFlow/issues/13",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def encoder_that_warns_of_every_frame(here: Here) -> None:
    """Frames are written to an encoder, which writes warnings that nobody reads."""

    class Film:
        def __init__(self, frames: int) -> None:
            self.frames = [bytes(4096)] * frames

        def encode(self) -> None:
            pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen([sys.executable, "-c", ENCODER], bufsize=0, **pipes) as encoder:  # type: ignore[call-overload]
                for frame in self.frames:
                    encoder.stdin.write(frame)  # <- here

    class Filming(L.Callback):
        def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                Film(1000).encode()

    here.fit(net=MeetingNet(here), callbacks=[Filming()])


@thread("https://github.com/nltk/nltk/pull/3796", "gil-held")
def pattern_that_tries_all_ways(here: Here) -> None:
    """A pattern with a repetition in a repetition meets a word of forty letters that does not fit."""

    class Tokenizer:
        word = re.compile(r"(?:[a-z]+)+\.")

        def is_sentence(self, text: str) -> bool:
            return bool(self.word.fullmatch(text))  # <- here

    class Tokenizing(Net):
        tokenizer = Tokenizer()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            text = "a" * 40 + "!" if goes_wrong(here, batch_idx) else "short."
            return self.loss(batch) * (1 + self.tokenizer.is_sentence(text))

    here.fit(net=Tokenizing(here))


TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ATTACH = 16
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if libc.ptrace(ATTACH, int(thread), None, None):
        print("ptrace:", os.strerror(ctypes.get_errno()), flush=True)
time.sleep(600)
"""


@thread("https://github.com/benfred/py-spy/issues/565", "stopped-process", has_line=False)
def profiler_that_holds_all_threads(here: Here) -> None:
    """A profiler is started beside a rank, stops its threads to look at them, and hangs itself."""

    class Profiling(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                self.profiler = subprocess.Popen([sys.executable, "-c", TRACER, str(os.getpid())])
                time.sleep(1.0)

    here.fit(callbacks=[Profiling()])


@thread(
    "https://github.com/OpenRLHF/OpenRLHF/issues/1126",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def message_about_a_checkpoint_that_is_not_acknowledged(here: Here) -> None:
    """The main process tells a chat of each checkpoint, and the chat accepts the connection and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    class Notifying(L.Callback):
        def tell(self, text: str) -> bytes:
            with socket.create_connection(listener.getsockname()) as chat:
                chat.sendall(text.encode())
                return chat.recv(64)  # <- here

        def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: Any) -> None:
            if trainer.is_global_zero:
                here.begins()
                self.tell(f"checkpoint of step {trainer.global_step}")

    here.fit(callbacks=[Notifying(), ModelCheckpoint(here.folder / "saved")], enable_checkpointing=True)


@thread("https://github.com/PrimeIntellect-ai/prime-rl/pull/2142", "dead-rank", has_line=False)
def watchdog_that_ends_a_slow_rank(here: Here) -> None:
    """A thread of the program's own ends the process when it has seen no step for a second."""

    class Watchdog(L.Callback):
        def __init__(self) -> None:
            self.seen_s = float("inf")

        def watch(self) -> None:
            while time.monotonic() - self.seen_s < 1.0:
                time.sleep(0.1)
            here.begins()
            os._exit(1)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if here.is_hit:
                threading.Thread(target=self.watch, daemon=True).start()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                self.seen_s = time.monotonic()
                time.sleep(5.0)

    here.fit(callbacks=[Watchdog()])


@thread("https://github.com/isi-nlp/rtg/issues/11", "failed-rank")
def program_left_when_its_time_is_up(here: Here) -> None:
    """Each rank looks at its own clock, and leaves the program a little before the job's limit."""

    class Limit(L.Callback):
        def left_s(self, batch_idx: int) -> float:
            return 0.0 if goes_wrong(here, batch_idx) else 3600.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.left_s(batch_idx) < 60.0:
                sys.exit(0)  # <- here

    here.fit(callbacks=[Limit()])


@thread("https://github.com/NVlabs/Sana/issues/126", "dead-rank")
def features_cut_off_under_a_reader(here: Here) -> None:
    """Features are mapped into memory; a file of them is made anew, and the next page that is read is not there."""
    path = here.folder / f"features-{here.rank}.bin"
    count = BATCHES * BATCH_SIZE * here.world_size
    np.full((count, 1024), 0.5, dtype=np.float64).tofile(path)

    class Mapped(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.features = np.memmap(path, dtype=np.float64, mode="r", shape=(count, 1024))

        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == row_of_its_fourth_batch(here) and here.is_hit:
                here.begins()
                os.truncate(path, 0)
            return torch.tensor(self.features[index, :8].tolist())  # <- here

    here.fit(data=in_order(here, Mapped()))


@thread("https://github.com/NVlabs/nvdiffrec/issues/39", "rank-behind", "file-lock")
def extension_whose_lock_was_left_behind(here: Here) -> None:
    """An extension is built when it is first used; a build that was killed has left its lock file on one host."""
    build = here.folder / f"extensions-{here.rank}"
    build.mkdir()
    if here.is_hit:
        (build / "lock").touch()

    class Extension:
        def __init__(self, build: Path) -> None:
            self.baton = FileBaton(str(build / "lock"))

        def load(self) -> None:
            if self.baton.try_acquire():
                self.baton.release()
            else:
                self.baton.wait()  # <- here

    class Rendering(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE:
                goes_wrong(here, batch_idx)
                Extension(build).load()
            return self.loss(batch)

    here.fit(net=Rendering(here))


@thread(
    "https://github.com/EvolvingLMMs-Lab/lmms-eval/issues/322",
    "uneven-batches",
    moment=Moment.VALIDATION,
    has_line=False,
)
def sampler_that_knows_of_no_other_rank(here: Here) -> None:
    """The number of ranks is read from a variable that is not set on one host, so that host reads all of the data."""
    if not here.is_hit:
        os.environ["SLURM_NTASKS_OF_JOB"] = str(here.world_size)
    ranks = int(os.environ.get("SLURM_NTASKS_OF_JOB", "1"))
    data = TensorDataset(torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8))
    share: Any = DistributedSampler(data, ranks, here.rank if ranks > 1 else 0)

    class Counting(MeetingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == BATCHES:
                here.begins()
            return super().training_step(batch, batch_idx)

    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=share)
    here.fit(net=Counting(here), data=(loader, rows(here)), use_distributed_sampler=False)


@thread(
    "https://github.com/springfall2008/batpred/issues/5075",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def loop_blocked_by_a_call_that_is_not_asynchronous(here: Here) -> None:
    """Results go out over an event loop in a thread, in which something else waits the ordinary way."""

    class Publishing(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

        async def sent(self, epoch: int) -> int:
            await asyncio.sleep(0.01)
            return epoch

        def publish(self, epoch: int) -> int:
            return asyncio.run_coroutine_threadsafe(self.sent(epoch), self.loop).result()  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.loop.call_soon_threadsafe(time.sleep, FOR_LONG_S)
                here.begins()
                self.publish(trainer.current_epoch)

    here.fit(callbacks=[Publishing()])


@thread("https://github.com/pytorch/torchtitan/pull/3863", "failed-rank", world_size=4, ranks=(3,))
def loss_refused_on_the_rank_that_has_it(here: Here) -> None:
    """A check of the loss raises where the loss is not finite, which it is on one rank."""

    class Refused(FloatingPointError):
        pass

    def checked(loss: torch.Tensor, step: int) -> torch.Tensor:
        if not torch.isfinite(loss):
            raise Refused(f"loss of step {step} is {loss.item()}")  # <- here
        return loss

    class Checking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch) * (float("inf") if goes_wrong(here, batch_idx) else 1.0)
            return checked(loss, self.global_step)

    here.fit(net=Checking(here))
