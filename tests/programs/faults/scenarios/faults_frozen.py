"""A rank that stands still for what is not its code: its process, its storage, Python, or this package."""

import ctypes
import gc
import itertools
import mmap
import os
import signal
import time
from collections import deque
from pathlib import Path

from training import FOR_LONG_S, Here, MeetingNet, Net, rows
from truths import Moment, fault

from lightning_ncclsafe.sigterm.agreement import StopAgreement


@fault("stopped-process", ranks=(-1,), at={Moment.MIDDLE: (2, 3), Moment.VALIDATION: (2,)}, has_line=False)
def stopped_by_a_signal(here: Here) -> None:
    def stop(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGSTOP)

    here.fit(stop, data=(rows(here), rows(here)), net=MeetingNet(here))


@fault("stopped-process", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_line=False)
def stopped_rank_zero(here: Here) -> None:
    stopped_by_a_signal(here)


@fault("gil-held", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (3,)}, whose="code")
def loop_in_native_code(here: Here) -> None:
    def count(net: Net) -> None:
        if here.is_hit:
            here.begins()
            sum(itertools.repeat(1, 10**12))  # <- here

    here.fit(count)


@fault("gil-held", ranks=(1,), at={Moment.MIDDLE: (2,)}, whose="machine")
def native_call_that_sleeps_with_the_gil(here: Here) -> None:
    """In a read, which signals do not end: from a device, say, that does not answer."""
    read, (pipe, _) = ctypes.PyDLL(None).read, os.pipe()

    def call(net: Net) -> None:
        if here.is_hit:
            here.begins()
            read(pipe, ctypes.create_string_buffer(1), 1)  # <- here

    here.fit(call)


@fault("blocked-on-disk", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False)
def uninterruptible_sleep(here: Here) -> None:
    """As of a storage that hangs: the kernel's state D, from which no signal wakes.

    The parent of a ``vfork`` is in it until its child has started a program, which here waits for a pipe first.
    """
    pipe = here.folder / f"pipe-{here.rank}"
    os.mkfifo(pipe)

    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            actions = [(os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)]
            os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=actions)

    here.fit(read)


@fault("gc-pause", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, whose="code")
def finalizers_in_a_garbage_collection(here: Here) -> None:
    """Objects in a cycle, which close what they hold when they are collected: the collection lasts as long."""

    class Handle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)

    def collect(net: Net) -> None:
        if here.is_hit:
            Handle()
            gc.collect()

    here.fit(collect)


@fault("gc-pause", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False, whose="code")
def huge_graph_of_objects(here: Here) -> None:
    """Collections of some millions of objects, again and again, each with the global interpreter lock held."""

    def collect(net: Net) -> None:
        if here.is_hit:
            here.begins()
            end = time.monotonic() + FOR_LONG_S
            while time.monotonic() < end:
                gc.collect()

    kept = [[] for _ in range(12_000_000)] if here.is_hit else []
    here.fit(collect)
    del kept


@fault("blocked-on-disk", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, needs="cgroups (v1), to be written to")
def storage_that_hardly_answers(here: Here) -> None:
    """One of which this process gets 1,024 bytes a second."""
    cache, group = here.folder / "features.bin", Path("/sys/fs/cgroup/blkio") / here.folder.name

    def read(net: Net) -> None:
        if not here.is_hit:
            return
        cache.write_bytes(bytes(1 << 20))
        os.sync()
        group.mkdir()
        device = os.stat(here.folder).st_dev
        (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} 1024")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        here.begins()
        # Past the cache of the system, four seconds for each page.
        file, page = os.open(cache, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
        deque((os.preadv(file, [page], 0) for _ in range(1000)), maxlen=0)  # <- here

    here.fit(read)


@fault("own-code", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, whose="code")
def lock_of_ours_that_is_never_released(here: Here) -> None:
    """A fault of this package: what its main thread looks at before each batch is held by a thread that is gone."""

    def hold(net: Net) -> None:
        if here.is_hit:
            (agreement,) = (item for item in gc.get_objects() if isinstance(item, StopAgreement))
            here.begins()
            agreement._lock.acquire()

    here.fit(hold)
