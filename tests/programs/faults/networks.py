"""Two hosts on one machine: network namespaces with one link."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LINK = "up0"
FIRST_ADDRESS = "10.77.1.1"
# From <linux/sched.h>.
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000


def move_to(namespace: str) -> None:
    """This process becomes one of another host: with its network, and its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as network:
        if libc.setns(network.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(Path(namespace).name)


@contextmanager
def two_hosts(tag: str) -> Iterator[list[dict[str, str]]]:
    """The environments of one rank on each of two hosts.

    Raises:
        PermissionError: This machine does not let us; the message says what is in the way.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise PermissionError("two hosts need network namespaces: root, and the command ip")
    names = [f"fault-{side}-{tag}" for side in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {LINK} netns {names[0]} type veth peer name {LINK} netns {names[1]}"]
    commands += [f"-n {name} addr add 10.77.1.{node}/24 dev {LINK}" for node, name in enumerate(names, start=1)]
    commands += [f"-n {name} link set {link} up" for name in names for link in ("lo", LINK)]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                raise PermissionError(f"ip could not make network namespaces: {done.stderr.strip()}")
        job = {"MASTER_ADDR": FIRST_ADDRESS, "MASTER_PORT": "29500", "LOCAL_RANK": "0", "NODES": "2"}
        job |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": LINK}
        yield [job | {"NODE_RANK": str(node), "NAMESPACE": f"/run/netns/{name}"} for node, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
