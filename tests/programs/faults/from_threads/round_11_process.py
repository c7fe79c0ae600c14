"""Round 11 after public threads: processes beside a rank, signals, limits of a host, groups, and who meets whom."""

import ctypes
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment

FORK = multiprocessing.get_context("fork")


@thread(
    "https://github.com/pytorch/pytorch/pull/99931",
    "crossed-groups",
    ranks=None,
    world_size=4,
    moment=Moment.START,
)
def links_made_from_neighbour_to_neighbour(here: Here) -> None:
    """Each rank makes a group with the next one, then one with the one before, and only members wait for a group.

    All ranks do the same, and none of them more wrongly than another.
    """

    class Linked(Net):
        def link(self, first: int) -> Any:
            members = [first % self.trainer.world_size, (first + 1) % self.trainer.world_size]
            return dist.new_group(members, use_local_synchronization=True)  # <- here

        def on_fit_start(self) -> None:
            here.begins()
            self.links = [self.link(self.global_rank), self.link(self.global_rank - 1)]

    here.fit(net=Linked(here))


class Embeddings(L.Callback):
    """Writes the embeddings of an epoch in shards of eight; all ranks finish a shard before any begins the next."""

    size = 8

    def __init__(self, here: Here) -> None:
        self.here = here
        self.kept: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.extend(module.layers(batch[batch[:, 0] >= 0]).detach())

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        for shard, first in enumerate(range(0, len(self.kept), self.size)):
            path = self.here.folder / f"epoch-{trainer.current_epoch}-rank-{trainer.global_rank}-{shard}.pt"
            torch.save(torch.stack(self.kept[first : first + self.size]), path)
            dist.barrier()  # <- shards_after_each_of_which_all_meet
        self.kept.clear()


class Crops(Dataset[torch.Tensor]):
    """Some of which, in the share of the rank that is hit, show nothing."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_empty = rank in self.here.case.ranks and turn % 3 == 0
        return torch.full((8,), -1.0 if is_empty else index / len(self))


@thread(
    "https://github.com/OPM/opm-simulators/pull/6769",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def shards_after_each_of_which_all_meet(here: Here) -> None:
    """One rank has a shard less than the others."""
    here.fit(net=LoggingNet(here), data=in_order(here, Crops(here)), callbacks=[Embeddings(here)])


NO_MORE = -1


class Relabelling(L.Callback):
    """After an epoch the first rank hands out the hard samples, one at a time, and the others label them anew."""

    def __init__(self, here: Here, hard: int) -> None:
        self.here, self.hard = here, hard

    def hand_out(self, samples: list[int]) -> None:
        busy = 0
        for worker in range(1, self.here.world_size):
            if samples:
                dist.send(torch.tensor([samples.pop()]), dst=worker)
                busy += 1
        while busy:
            label = torch.zeros(1)
            worker = dist.recv(label)
            if samples:
                dist.send(torch.tensor([samples.pop()]), dst=worker)
            else:
                dist.send(torch.tensor([NO_MORE]), dst=worker)
                busy -= 1

    def label_some(self) -> None:
        sample = torch.zeros(1, dtype=torch.long)
        while True:
            dist.recv(sample, src=0)  # <- hard_samples_fewer_than_ranks
            if sample.item() == NO_MORE:
                break
            dist.send(sample.float() / 100, dst=0)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.here.begins()
        if trainer.is_global_zero:
            self.hand_out([*range(self.hard)])
        else:
            self.label_some()


@thread(
    "https://github.com/keichi/mpEDM/pull/64",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(),
    world_size=4,
    moment=Moment.EPOCH_END,
    has_ranks=False,
)
def hard_samples_fewer_than_ranks(here: Here) -> None:
    """Whoever was given no sample is never told that there are no more.

    The last rank waits, and the first one has left it out: none of the two may be called wrong.
    """
    here.fit(net=LoggingNet(here), callbacks=[Relabelling(here, hard=2)])


@thread("https://github.com/opsengine/cpulimit/issues/123", "stopped-process", ranks=(2,), has_line=False)
def limiter_that_is_gone(here: Here) -> None:
    """A tool keeps one host cool by stopping the process again and again; it is ended while that one is stopped."""
    limiter = "for turn in 1 2 3; do kill -STOP {0}; sleep 0.05; kill -CONT {0}; sleep 0.05; done; kill -STOP {0}"

    class Cooled(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx) and trainer.current_epoch == 0:
                subprocess.Popen(["sh", "-c", limiter.format(os.getpid())], start_new_session=True)

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.3)
            return super().training_step(batch, batch_idx)

    here.fit(net=Slow(here), callbacks=[Cooled()])


def render(frames: Any) -> None:
    """Ends with the process that has started it."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    for number in count():
        frames.put([number / 100] * 8)


class Renderer:
    """A process that renders ahead, and can be started in the background, as its first frame takes long."""

    def __init__(self, here: Here, in_background: bool) -> None:
        self.here = here
        self.frames: Any = FORK.Queue(maxsize=2)
        self.first: list[float] = []
        self.starting = threading.Thread(target=self.start, daemon=True)
        self.starting.run() if not in_background else self.starting.start()

    def start(self) -> None:
        FORK.Process(target=render, args=(self.frames,), daemon=True).start()
        self.first = self.frames.get()
        if self.here.is_hit:
            self.here.begins()

    def frame(self) -> torch.Tensor:
        return torch.tensor(self.frames.get())  # <- renderer_started_in_the_background


@thread("https://github.com/Tencent-Hunyuan/UniRL/pull/276", "worker-died", ranks=(1,), whose="either")
def renderer_started_in_the_background(here: Here) -> None:
    """What counts as a parent is the thread that has started it, and on one host that thread ends.

    The line is where the rank waits for frames; whoever names the one that starts the thread is right as well.
    """

    class Rendered(Net):
        def on_fit_start(self) -> None:
            self.renderer = Renderer(here, in_background=here.is_hit)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1)
            return self.loss([self.renderer.frame().expand(BATCH_SIZE, 8)])

    here.fit(net=Rendered(here))


def play(played: Any, most: int) -> None:
    """Until there is no memory left for another episode."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        with played.get_lock():
            played.value += 1
            if played.value == most:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


@thread("https://github.com/python/cpython/issues/88304", "worker-died", ranks=(2,))
def number_of_games_that_stays_locked(here: Here) -> None:
    """A process plays and counts; it is killed where it counts, and nobody lets go of the lock."""

    class Playing(Net):
        def on_fit_start(self) -> None:
            self.played = FORK.Value("i", 0)

        def begin_to_play(self) -> None:
            FORK.Process(target=play, args=(self.played, 60 if here.is_hit else 10**9), daemon=True).start()

        def games(self) -> int:
            with self.played.get_lock():  # <- here
                return int(self.played.value)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2 and self.current_epoch == 0:
                self.begin_to_play()
            if goes_wrong(here, batch_idx):
                time.sleep(2.0)
            return self.loss(batch).div(1 + self.games())

    here.fit(net=Playing(here))


def view() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FOR_LONG_S)


class Pairs:
    """Hard pairs that ranks have found: in one file, whose lock is given back when the file is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pair: str, then: Callable[[], None]) -> None:
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # <- lock_that_a_process_has_inherited
            file.write(f"{pair}\n")
            then()


@thread(
    "https://github.com/zopefoundation/zc.lockfile/pull/8",
    "file-lock",
    ranks=(2,),
    world_size=4,
)
def lock_that_a_process_has_inherited(here: Here) -> None:
    """A rank starts a viewer before it closes the file, and has thus two that must close it.

    The rank that waits is not to blame for the other one's process; it is where one finds it.
    """

    viewer = FORK.Process(target=view, daemon=True)

    class Mining(Net):
        pairs = Pairs(here.folder / "pairs.txt")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 1 and batch_idx == 1 and self.current_epoch == 0:
                self.pairs.add("scan-3 scan-8", then=viewer.start)
            if goes_wrong(here, batch_idx):
                self.pairs.add("scan-5 scan-6", then=lambda: None)
            return self.loss(batch)

    here.fit(net=Mining(here))


class PseudoLabels(L.Callback):
    """Finds clusters among the features of all ranks after each epoch, and trains with them as labels."""

    def neighbours(self, features: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)  # <- clusters_found_by_the_first_rank
        nearest: torch.Tensor = (features - point).norm(dim=1).argsort()
        return nearest[:20]

    def clusters(self, features: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(features))
        for number, point in enumerate(features):
            labels[self.neighbours(features, point)] = int(labels[number])
        return labels

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        features = module.all_gather(torch.rand(200, 8)).reshape(-1, 8)
        labels = torch.zeros(len(features), dtype=torch.long)
        if trainer.is_global_zero:
            module.here.begins()
            labels = self.clusters(features)
        dist.broadcast(labels, src=0)
        self.labels = labels


@thread(
    "https://github.com/facebookresearch/deepcluster/issues/11",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def clusters_found_by_the_first_rank(here: Here) -> None:
    here.fit(callbacks=[PseudoLabels()])


class Metrics(L.Callback):
    """Shows the metrics of a rank to whoever connects."""

    def __init__(self, here: Here) -> None:
        self.here, self.address = here, str(here.folder / "metrics.sock")
        self.server = socket.socket(socket.AF_UNIX)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        while self.here.is_hit and not Path(self.address).exists():
            time.sleep(0.1)
        self.here.begins()
        self.server.bind(self.address)  # <- metrics_shown_at_the_same_address
        self.server.listen()


@thread(
    "https://github.com/prometheus/client_python/issues/667",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.START,
)
def metrics_shown_at_the_same_address(here: Here) -> None:
    """Written for one process to a host; the quickest rank gets the address, and the others raise."""
    here.fit(callbacks=[Metrics(here)])


class Profiler:
    """Looks at intervals what the main thread does."""

    def __init__(self) -> None:
        self.samples: list[str] = []

    def sample(self, number: int, frame: Any) -> None:
        self.samples.append(frame.f_code.co_name if frame else "")

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self.sample)
        signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)

    def report(self) -> dict[str, int]:
        deadline = time.process_time() + 1.0
        counts: dict[str, int] = {}
        while time.process_time() < deadline:
            counts = {name: self.samples.count(name) for name in self.samples}
        return counts

    def stop(self) -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        print(self.report(), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


@thread("https://github.com/grafana/pyroscope-rs/issues/399", "dead-rank", ranks=(0,), has_line=False)
def timer_of_a_profiler_that_has_been_stopped(here: Here) -> None:
    """Some steps of the first rank are profiled; the handler goes first, and the timer, which still runs, after it."""

    class Profiled(L.Callback):
        profiler = Profiler()

        @rank_zero_only
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and trainer.current_epoch == 0:
                self.profiler.start()

        @rank_zero_only
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == IN_THE_MIDDLE and trainer.current_epoch == 0:
                here.begins()
                self.profiler.stop()

    here.fit(callbacks=[Profiled()])


class Features(L.Callback):
    """Each rank keeps what a later stage is to be trained with."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def write(self, path: Path, features: torch.Tensor) -> None:
        if self.here.is_hit:
            self.here.begins()
        path.write_bytes(features.numpy().tobytes())  # <- features_larger_than_a_file_may_be

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        path = self.here.folder / f"features-{trainer.global_rank}-{trainer.current_epoch}.bin"
        self.write(path, torch.zeros(2_000_000))


@thread(
    "https://github.com/voxel51/fiftyone/issues/5409",
    "failed-rank",
    ranks=(1,),
    moment=Moment.EPOCH_END,
)
def features_larger_than_a_file_may_be(here: Here) -> None:
    """The limits of one host's shell permit files of four megabytes."""
    if here.is_hit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    here.fit(callbacks=[Features(here)])


class Registry:
    """Of models; a new version is checked by a service before it is ready."""

    def status(self, name: str, version: int) -> str:
        return "PENDING_REGISTRATION"

    def register(self, name: str, version: int) -> None:
        while self.status(name, version) != "READY":
            time.sleep(0.2)  # <- version_that_never_becomes_ready


@thread(
    "https://github.com/mlflow/mlflow/pull/3376",
    "unfinished-rank",
    ranks=(0,),
    moment=Moment.END,
)
def version_that_never_becomes_ready(here: Here) -> None:
    """The first rank registers what has been trained, and waits for a service that is not there."""

    class Registered(L.Callback):
        @rank_zero_only
        def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            Registry().register("digits", version=3)

    here.fit(callbacks=[Registered()], max_epochs=1)
