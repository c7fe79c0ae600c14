"""Several hosts on one machine, in namespaces: each has its own network, name, processes, boot id and temporary files.

They share the files, as hosts with a network file system do, the cores and the memory.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from witnesses import attending

import lightning_ncclsafe
from lightning_ncclsafe.guard.witness import Witness

LINK = "up0"
FIRST_ADDRESS = "10.77.1.1"
# From <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>.
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_PIDS, _NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_BIND, _PRIVATE_AND_BELOW = 0x1000, (1 << 18) | (1 << 14)
_SET_DEATH_SIGNAL = 1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def become_one_of(host: str, folder: Path) -> None:
    """Goes on as a process of a host; the one that calls this waits for it, and ends as it does.

    Args:
        host: What the environment has as ``HOST``.
        folder: What all hosts share; the temporary files of each are below it, at one path and apart.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(returned: int) -> None:
        if returned:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    name, pids = host.split(":")
    with open(f"/run/netns/{name}") as network, open(f"/proc/{pids}/ns/pid_for_children") as processes:
        checked(libc.setns(network.fileno(), _NEW_NET))
        checked(libc.setns(processes.fileno(), _NEW_PIDS))
    checked(libc.unshare(_NEW_UTS | _NEW_IPC | _NEW_MOUNTS))
    socket.sethostname(name)
    checked(libc.mount(b"none", b"/", None, _PRIVATE_AND_BELOW, None))
    if pid := os.fork():
        _end_as(pid)
    libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    checked(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    local, of_all = folder / f"local-{name}", folder / "local"
    for one in (local, of_all):
        one.mkdir(exist_ok=True)
    checked(libc.mount(bytes(local), bytes(of_all), None, _BIND, None))
    boot_id = of_all / "boot_id"
    boot_id.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, name)}\n")
    checked(libc.mount(bytes(boot_id), _BOOT_ID.encode(), None, _BIND, None))
    os.environ["TMPDIR"] = tempfile.tempdir = str(of_all)


def wait_for_witnesses() -> None:
    """From now on, a rank that is alone on its host goes on when the process beside it attends.

    Most trainings go wrong before it has imported anything, which others do not.
    """
    begin = Witness.begin

    def begin_and_wait(self: Witness, **call: Any) -> Callable[[], None]:
        end = begin(self, **call)
        with lightning_ncclsafe.pause():
            attending()
        return end

    Witness.begin = begin_and_wait  # type: ignore[method-assign]


def _end_as(pid: int) -> NoReturn:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


@contextmanager
def hosts(tag: str, world_size: int, count: int) -> Iterator[list[dict[str, str]]]:
    """The environments of ranks on as many hosts, in their order and as many on each.

    Raises:
        PermissionError: This machine does not let us; the message says what is in the way.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise PermissionError("several hosts need namespaces: root, and the command ip")
    names = [f"fault-{chr(ord('a') + node)}-{tag}" for node in range(count)]
    switch = f"fault-switch-{tag}"
    commands = [f"netns add {name}" for name in (switch, *names)]
    commands += [f"-n {switch} link add bridge0 type bridge", f"-n {switch} link set bridge0 up"]
    for node, name in enumerate(names, start=1):
        commands += [f"link add {LINK} netns {name} type veth peer name port{node} netns {switch}"]
        commands += [f"-n {switch} link set port{node} master bridge0 up"]
        commands += [f"-n {name} addr add 10.77.1.{node}/24 dev {LINK}"]
        commands += [f"-n {name} link set {link} up" for link in ("lo", LINK)]
    job = {"MASTER_ADDR": FIRST_ADDRESS, "MASTER_PORT": "29500", "WORLD_SIZE": str(world_size), "NODES": str(count)}
    job |= {"GLOO_SOCKET_IFNAME": LINK}
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                raise PermissionError(f"ip could not make network namespaces: {done.stderr.strip()}")
        with ExitStack() as first_processes:
            pids = [first_processes.enter_context(_first_process()) for _ in names]
            yield [
                job | {"NODE_RANK": str(node), "LOCAL_RANK": str(rank), "HOST": f"{names[node]}:{pids[node]}"}
                for node in range(count)
                for rank in range(world_size // count)
            ]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def _first_process() -> Iterator[int]:
    """A namespace of process ids lasts as long as its first process; yields whose children are in it."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-S", "-c", _SLEEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        if not program.stdout.readline():
            raise PermissionError("unshare could not make a namespace of process ids")
        try:
            yield program.pid
        finally:
            program.kill()


# It takes the exit status of those whose parents have gone.
_SLEEP = "import signal, sys; signal.signal(17, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
