"""Network interfaces that are up, those that NCCL and gloo choose, InfiniBand ports, and what prevents their use."""

import ctypes.util
import ipaddress
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.facts import InterfaceFacts, NetworkFacts
from lightning_ncclsafe.probes.absent import file_text, or_none

# NCCL's search order (ncclFindInterfaces in its socket.cc; "virbr" in newer releases): the first that matches.
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
_FIRST_UP = "first that is up"

_PORTS = Path("/sys/class/infiniband")
_DEVICES = Path("/dev/infiniband")
_MOST = 16
_DNS_PORT = 53
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface that is up.

    Attributes:
        addresses: Its IPv4 addresses, then its IPv6 ones.
        speed_mbit: Its speed, Mbit/s; 0 if unknown.
    """

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches only this host."""
        return any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in self.addresses)

    def __str__(self) -> str:
        speed = f"{self.speed_mbit} Mbit/s" if self.speed_mbit else ""
        return " ".join(part for part in (self.name, speed, *self.addresses[:1]) if part)


def nccl_interface(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> tuple[str, str]:
    """The one of these interfaces, in the system's order, that NCCL would choose, empty if none, and why."""
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    # NCCL ignores a single letter.
    if len(wanted) > 1:
        return _first(interfaces, wanted), f"NCCL_SOCKET_IFNAME={wanted}"
    return next((name for rule in _NCCL_ORDER if (name := _first(interfaces, rule))), ""), _FIRST_UP


def misnamed(names: Collection[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Variables that name a missing interface, ``"GLOO_SOCKET_IFNAME=eth9"``: the back end cannot start with that.

    Args:
        names: All interfaces that have an address, even those that are down, as a back end may still choose them.
    """
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    if len(nccl) > 1 and not any(is_meant(name, nccl) for name in names):
        yield f"NCCL_SOCKET_IFNAME={nccl}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    # Torch makes a device for each of these.
    if any(part and part not in names for part in gloo.split(",")):
        yield f"GLOO_SOCKET_IFNAME={gloo}"


def _first(interfaces: Sequence[Interface], rule: str) -> str:
    return next((interface.name for interface in interfaces if is_meant(interface.name, rule)), "")


def is_meant(name: str, rule: str) -> bool:
    """Whether ``NCCL_SOCKET_IFNAME`` lets an interface be used.

    Args:
        rule: Beginnings of names, ``"eth,ens"``; after ``=`` whole names; after ``^`` excluded beginnings, and after
            ``^=`` excluded whole names.
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
    """The interface that torch's gloo back end would choose, empty if there is none, and why.

    Gloo uses the address of this host's name, and falls back to loopback if that has none; the user should then name
    the interface on the route to ``MASTER_ADDR``.
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


def _local_address(host: str, port: str | int = 9) -> str:
    """The address of the interface on the route to a host; connecting a datagram socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connected:
        connected.connect(address)
        return str(connected.getsockname()[0])


def own_address_towards(host: str, port: str) -> str:
    """The address of this host from which another one is reached; empty for this host itself, or if unknown."""
    try:
        here = _local_address(host, port)
    except OSError:
        return ""
    return "" if here.startswith("127.") or here in ("::1", "0.0.0.0", "::") else here


def network_facts(
    *,
    is_cuda: bool,
    environment: Mapping[str, str] = os.environ,
    ports: Path = _PORTS,
    devices: Path = _DEVICES,
) -> NetworkFacts:
    """The network of this host, and what the back end would use. Resolves host names, which may take seconds.

    Args:
        is_cuda: Whether NCCL is used, or else gloo.
        devices: The folder of InfiniBand devices.
    """
    up = or_none(interfaces) or []
    name, why = nccl_interface(up, environment) if is_cuda else gloo_interface(up, environment)
    found = or_none(lambda: list(_infiniband(ports))) or []
    return NetworkFacts(
        interfaces=tuple(str(interface) for interface in up if not interface.is_loopback)[:_MOST],
        default_interface=name,
        chosen_by=why,
        misnamed=tuple(misnamed(named, environment)) if (named := or_none(_names_with_address)) else (),
        infiniband=tuple(port for port, _ in found)[:_MOST],
        infiniband_active=sum(is_active for _, is_active in found),
        infiniband_off=infiniband_off(environment, devices) if found else "",
    )


def taken_interface(*, is_cuda: bool, environment: Mapping[str, str] = os.environ) -> InterfaceFacts | None:
    """The interface that the run's back end uses towards other hosts; None if the system lists none.

    For gloo, it resolves the host's own name, which may take seconds.

    Args:
        is_cuda: Whether NCCL is used, or else gloo.
    """
    up = or_none(interfaces)
    if up is None:
        return None
    name, why = nccl_interface(up, environment) if is_cuda else gloo_interface(up, environment)
    taken = next((interface for interface in up if interface.name == name), None)
    address = taken.addresses[0] if taken else ""
    return InterfaceFacts(
        backend="nccl" if is_cuda else "gloo",
        name=name,
        address=address,
        network=or_none(partial(_network, name, address)) or "",
        chosen_by=why,
        is_loopback=taken is not None and taken.is_loopback,
        others=tuple(f"{other.name} {other.addresses[0]}" for other in up if other is not taken)[:_MOST],
    )


def _network(name: str, address: str) -> str:
    masks = (entry.netmask for entry in psutil.net_if_addrs()[name] if entry.address == address)
    return str(ipaddress.ip_network(f"{address}/{next(masks)}", strict=False))


def interfaces() -> list[Interface]:
    """The interfaces that are up and have an address, loopback too, in the system's order.

    Raises:
        psutil.Error, OSError, AttributeError: If the system does not list them.
    """
    addresses, states = psutil.net_if_addrs(), or_none(psutil.net_if_stats) or {}
    found = []
    for name, entries in addresses.items():
        families = sorted(
            (entry for entry in entries if entry.family in _FAMILIES),
            key=lambda entry: _FAMILIES.index(entry.family),
        )
        state = states.get(name)
        if families and (state is None or state.isup):
            found.append(Interface(name, tuple(entry.address for entry in families), state.speed if state else 0))
    return found


def _names_with_address() -> list[str]:
    """The names of all interfaces that have an address, up or down."""
    addresses = psutil.net_if_addrs()
    return [name for name in addresses if any(entry.family in _FAMILIES for entry in addresses[name])]


def name_servers_asked(pid: int | None = None) -> tuple[str, ...]:
    """The name servers that a process, by default this one, waits for: a resolver keeps a socket open meanwhile."""
    sockets = or_none(lambda: psutil.Process(pid).net_connections("udp")) or []
    # One that is not connected has an empty tuple in place of an address.
    return tuple(sorted({one.raddr.ip for one in sockets if getattr(one.raddr, "port", None) == _DNS_PORT}))


def infiniband_off(environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> str:
    """Why NCCL would not use the host's InfiniBand ports; empty if nothing prevents it.

    Args:
        devices: The folder of InfiniBand devices, which a container must be given.
    """
    disabled = environment.get("NCCL_IB_DISABLE", "")
    if disabled not in ("", "0"):
        return f"NCCL_IB_DISABLE={disabled}"
    # Other names are those of plugins, which use InfiniBand or something better.
    if environment.get("NCCL_NET", "").lower() == "socket":
        return f"NCCL_NET={environment['NCCL_NET']}"
    if not or_none(lambda: list(devices.glob("uverbs*"))):
        return f"{devices} does not exist, as in a container that was not given it"
    # Searched, but not loaded: only NCCL should load it.
    return "" if or_none(lambda: ctypes.util.find_library("ibverbs")) else "libibverbs.so.1 cannot be loaded"


def _infiniband(ports: Path) -> Iterator[tuple[str, bool]]:
    """Each InfiniBand or RoCE port in words, and whether it is active."""
    for folder in sorted(ports.glob("*/ports/*")):
        # "4: ACTIVE" and "400 Gb/sec (4X NDR)"
        state = file_text(folder / "state").partition(":")[2].strip()
        rate = file_text(folder / "rate").partition("(")[0].strip()
        link = file_text(folder / "link_layer")
        kind = "" if link in ("", "InfiniBand") else f"({link})"
        name = f"{folder.parent.parent.name}:{folder.name}"
        yield " ".join(part for part in (name, state, rate, kind) if part), state == "ACTIVE"
