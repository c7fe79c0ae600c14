"""Connections between ranks that break or fall silent, and hosts that cannot be reached."""

import ctypes
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from hosts import LINK
from scenarios.faults_host import BIND, mount
from training import Here, Net, rows
from truths import Moment, fault

# From <asm/socket.h>.
_ATTACH_FILTER = 26


def connections(here: Here) -> Iterator[socket.socket]:
    """Those of the ranks with one another, and not those to the job's store."""
    store_port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            ports = {one.getsockname()[1], one.getpeername()[1]} if one.family != socket.AF_UNIX else {store_port}
            if one.type == socket.SOCK_STREAM and store_port not in ports:
                yield one


class Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint))


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def drop_all(one: socket.socket) -> None:
    """Nothing arrives any more, and nobody is told: as with a broken link, or a firewall that drops."""
    program = Filter(1, ctypes.pointer(Instruction(0x06, 0, 0, 0)))
    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, bytes(program))


@fault("all-joined", ranks=None, at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)}, has_line=False)
def link_that_drops_packets(here: Here) -> None:
    """All ranks call the same, and nothing of it arrives."""

    def cut(net: Net) -> None:
        here.begins()
        for one in connections(here):
            drop_all(one)

    here.fit(cut)


@fault("network-cut", ranks=(), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False, has_ranks=False)
def connections_that_are_reset(here: Here) -> None:
    """All ranks are alive; what is lost is between them."""

    def cut(net: Net) -> None:
        if here.rank == 0:
            here.begins()
            for one in connections(here):
                one.shutdown(socket.SHUT_RDWR)

    here.fit(cut)


@fault(
    "unreachable-host",
    "network-cut",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_line=False,
    has_phase=False,
    needs="namespaces",
)
def host_that_is_cut_off(here: Here) -> None:
    def cut(net: Net) -> None:
        # Not before the ranks have told one another where they are.
        if here.is_hit and net.global_step > 5:
            here.begins()
            subprocess.run(["ip", "link", "set", LINK, "down"], check=True)

    class Slow(Net):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            import time

            time.sleep(0.25)
            self.act(self)

    here.fit(cut, net=Slow(here), data=rows(here, batches=40))


@fault("slow-name-server", ranks=(1,), at={Moment.START: (2, 3), Moment.MIDDLE: (2,)}, needs="mounts")
def name_server_that_does_not_answer(here: Here) -> None:
    """Its port is open, and nobody reads what comes."""

    def ask(*_: object) -> None:
        if here.is_hit:
            # An address of this process alone: other cases, and the host's own resolver, listen on theirs.
            address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
            server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            server.bind((address, 53))
            resolv_conf = Path(tempfile.mkdtemp(dir=".")) / "resolv.conf"
            resolv_conf.write_text(f"nameserver {address}\n")
            mount(str(resolv_conf), "/etc/resolv.conf", "", BIND)
            os.environ["RES_OPTIONS"] = "timeout:30 attempts:1"
            here.begins()
            socket.getaddrinfo("data.example.com", 443)  # <- here

    here.fit(ask)


@fault("wrong-interface", ranks=(), at={Moment.START: (2,)}, has_line=False, has_ranks=False, needs="namespaces")
def interface_without_a_way_to_the_other_host(here: Here) -> None:
    """Each host has a bridge of its own for containers, with the same network, and is told to use it."""
    commands = ["link add docker0 type veth peer name container", "addr add 172.17.0.1/16 dev docker0"]
    for command in [*commands, "link set container up", "link set docker0 up"]:
        subprocess.run(["ip", *command.split()], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "docker0"
    here.begins()
    here.fit()
    dist.barrier()
