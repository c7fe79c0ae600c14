"""A host that has too little of something, a device that stalls, and compilation."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from samples import stored
from torch.utils.data import DataLoader, Dataset
from training import BATCH_SIZE, FOR_LONG_S, Here, Net
from truths import Moment, fault

# From <sched.h> and <sys/mount.h>.
_NEW_NAMESPACE, _PRIVATE_AND_BELOW = 0x00020000, (1 << 18) | (1 << 14)
BIND = 1 << 12


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts something that only this thread, and what it starts, sees.

    Raises:
        PermissionError: This machine does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.unshare(_NEW_NAMESPACE) == 0
    made = made and libc.mount(b"none", b"/", None, _PRIVATE_AND_BELOW, None) == 0
    made = made and libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) == 0
    if not made:
        raise PermissionError(os.strerror(ctypes.get_errno()))


class Large(Dataset[torch.Tensor]):
    """Samples of 1 MB, which workers hand over through shared memory."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 6 * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        return torch.zeros(8, 32_000)


class LargeNet(Net):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch[..., 0])


@fault(
    "shm-exhausted",
    ranks=(1,),
    at={Moment.FIRST_STEP: (2, 3)},
    has_line=False,
    has_phase=False,
    needs="mounts",
)
def small_dev_shm(here: Here) -> None:
    """A container's 64 MB, in small: 4 MB batches of two workers in 6 MB."""
    if here.is_hit:
        mount("shm", "/dev/shm", "tmpfs", options="size=6m")
    data = DataLoader(Large(here), batch_size=BATCH_SIZE, num_workers=2, prefetch_factor=4)
    here.fit(data=data, net=LargeNet(here))


@fault("shm-exhausted", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def worker_that_finds_no_shared_memory(here: Here) -> None:
    """What PyTorch raises in a worker where ``/dev/shm`` is full."""

    def read() -> None:
        raise RuntimeError("unable to write to file </torch_4711_1234_5>: No space left on device (28)")

    here.fit(data=stored(here, read, num_workers=1))


@fault("host-starved", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def core_that_others_keep_busy(here: Here) -> None:
    """The main thread may only have what another process on its core leaves over, which is nearly nothing."""

    def starve(net: Net) -> None:
        if not here.is_hit:
            return
        core = {min(os.sched_getaffinity(0))}
        busy = "import os, time\nend = time.monotonic() + 40\n"
        busy += f"while os.getppid() == {os.getpid()} and time.monotonic() < end: pass"
        other = subprocess.Popen([sys.executable, "-S", "-c", busy])
        os.sched_setaffinity(other.pid, core)
        os.sched_setaffinity(0, core)
        here.begins()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        compute()

    def compute() -> None:
        end = time.monotonic() + FOR_LONG_S
        while time.monotonic() < end:
            torch.rand(50, 50).svd()

    here.fit(starve)


@fault(
    "host-starved",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_line=False,
    has_phase=False,
    needs="cgroups (v1), to be written to",
)
def quota_of_a_container(here: Here) -> None:
    """A limit of CPU time that is used up: the kernel stops all threads for most of each period."""
    group = Path("/sys/fs/cgroup/cpu") / here.folder.name

    def throttle(net: Net) -> None:
        if not here.is_hit:
            return
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("3000")
        here.begins()
        (group / "cgroup.procs").write_text(str(os.getpid()))
        compute()

    def compute() -> None:
        end = time.monotonic() + FOR_LONG_S
        while time.monotonic() < end:
            torch.rand(50, 50).svd()

    here.fit(throttle)


@fault("compile-skew", ranks=(1,), at={Moment.FIRST_STEP: (2, 3), Moment.MIDDLE: (2,)}, has_line=False)
def compilation_on_one_host(here: Here) -> None:
    """The others have what they need in their caches; here one rank compiles, and nothing is cached."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here.folder / f"cache-{here.rank}")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    def forward(net: Net) -> None:
        if here.is_hit:
            here.begins()
            torch.compile(long_chain, dynamic=False)(torch.rand(64, 64))

    here.fit(forward)


def long_chain(values: torch.Tensor) -> torch.Tensor:
    for number in range(150):
        values = (values @ values.T).softmax(-1).cumsum(number % 2).sin() + values[number % 64].exp()
    return values
