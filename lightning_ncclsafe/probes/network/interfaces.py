"""Which network interface NCCL's and gloo's sockets would take, by their own rules."""

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.probes.absent import or_none

# As NCCL searches (ncclFindInterfaces in its socket.cc; "virbr" in newer releases): the first that finds one.
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
_FIRST_UP = "first that is up"


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface that is up.

    Attributes:
        name: Its name.
        addresses: Its IPv4 addresses, then its IPv6 ones.
        speed_mbit: Its speed, Mbit/s; 0 where it is not told.
    """

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches this host only."""
        return any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in self.addresses)

    def __str__(self) -> str:
        speed = f"{self.speed_mbit} Mbit/s" if self.speed_mbit else ""
        return " ".join(part for part in (self.name, speed, *self.addresses[:1]) if part)


def nccl_interface(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> tuple[str, str]:
    """The interface that NCCL would take, empty where there is none, and what decides.

    Args:
        interfaces: Those that are up, in the system's order.
        environment: Of this process.
    """
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    # NCCL passes over a single letter.
    if len(wanted) > 1:
        return _first(interfaces, wanted), f"NCCL_SOCKET_IFNAME={wanted}"
    return next((name for rule in _NCCL_ORDER if (name := _first(interfaces, rule))), ""), _FIRST_UP


def misnamed(names: Collection[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Variables that name what is not there, ``"GLOO_SOCKET_IFNAME=eth9"``: the back end cannot begin with that.

    Args:
        names: All interfaces that have an address; those that are down count, as a back end may still take them.
        environment: Of this process.
    """
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    if len(nccl) > 1 and not any(is_meant(name, nccl) for name in names):
        yield f"NCCL_SOCKET_IFNAME={nccl}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    # Of these, torch makes a device for each.
    if any(part and part not in names for part in gloo.split(",")):
        yield f"GLOO_SOCKET_IFNAME={gloo}"


def _first(interfaces: Sequence[Interface], rule: str) -> str:
    return next((interface.name for interface in interfaces if is_meant(interface.name, rule)), "")


def is_meant(name: str, rule: str) -> bool:
    """Whether ``NCCL_SOCKET_IFNAME`` lets an interface be used.

    Args:
        name: The interface.
        rule: Beginnings of names, ``"eth,ens"``; after ``=`` whole names; after ``^`` those that are not to be used,
            and after ``^=`` by their whole names.
    """
    excluded = rule.startswith("^")
    exact = rule.removeprefix("^").startswith("=")
    names = [part for part in rule.removeprefix("^").removeprefix("=").split(",") if part]
    # A port may follow: "eth0:5000".
    found = any(name == part or (not exact and name.startswith(part)) for part in (n.partition(":")[0] for n in names))
    return found is not excluded


def gloo_interface(
    interfaces: Sequence[Interface],
    environment: Mapping[str, str],
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> tuple[str, str]:
    """The interface that torch's gloo back end would take, empty where there is none, and what decides.

    Gloo takes the address of this host's name. Where that has none it falls back to loopback; what is on the route to
    ``MASTER_ADDR`` should then be named to it.

    Args:
        interfaces: Those that are up, in the system's order.
        environment: Of this process.
        resolve: Gives the address of a host's name; may raise OSError.
    """
    wanted = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if wanted:
        return wanted if wanted in [i.name for i in interfaces] else "", f"GLOO_SOCKET_IFNAME={wanted}"
    named = _with_address(interfaces, or_none(lambda: resolve(socket.gethostname())) or "")
    if named:
        return named, "address of the host's name"
    master = environment.get("MASTER_ADDR", "")
    on_route = _with_address(interfaces, or_none(lambda: _local_address(master)) or "") if master else ""
    if on_route:
        return on_route, "route to MASTER_ADDR"
    return next((i.name for i in interfaces if not i.is_loopback), ""), _FIRST_UP


def _with_address(interfaces: Sequence[Interface], address: str) -> str:
    exact = next((i.name for i in interfaces if address in i.addresses), "")
    # Debian gives the host's name 127.0.1.1, which no interface has and loopback serves.
    loopback = next((i.name for i in interfaces if i.is_loopback), "") if address.startswith("127.") else ""
    return exact or loopback


def _local_address(host: str) -> str:
    """Of the interface on the route to a host: a datagram socket that is connected sends nothing yet."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connected:
        connected.connect(address)
        return str(connected.getsockname()[0])
