"""Network interfaces and InfiniBand from constructed hosts, and by the rules of NCCL and gloo."""

import ctypes.util
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.facts import InterfaceFacts, NetworkFacts
from lightning_ncclsafe.probes import network as module
from lightning_ncclsafe.probes.network import (
    Interface,
    gloo_interface,
    infiniband_off,
    interfaces,
    is_meant,
    name_servers_asked,
    nccl_interface,
    network_facts,
    taken_interface,
)

Address = namedtuple("Address", "family address netmask", defaults=("255.255.255.0",))
Stats = namedtuple("Stats", "isup speed")
V4, V6, LINK = socket.AF_INET, socket.AF_INET6, 17

LO = Interface("lo", ("127.0.0.1", "::1"))
DOCKER = Interface("docker0", ("172.17.0.1",))
ETH = Interface("eth0", ("10.0.0.7", "fe80::1%eth0"), 10_000)
IB = Interface("ib0", ("10.1.0.7",), 200_000)
VIRBR = Interface("virbr0", ("192.168.122.1",))


def nobody(_: str) -> str:
    raise socket.gaierror


@pytest.mark.parametrize(
    ("there", "name"),
    [
        ((LO, DOCKER, ETH, IB), "ib0"),
        ((LO, DOCKER, ETH), "eth0"),
        ((LO, DOCKER), "docker0"),
        ((LO, VIRBR), "lo"),
        ((VIRBR, ETH), "eth0"),
        ((LO,), "lo"),
        ((VIRBR,), "virbr0"),
        ((), ""),
    ],
)
def test_nccl_prefers_interfaces_in_its_own_order(there: tuple[Interface, ...], name: str) -> None:
    assert nccl_interface(there, {}) == (name, "first that is up")


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("eth", "eth0"),
        ("=eth", ""),
        ("=eth0", "eth0"),
        ("ens,docker", "docker0"),
        ("^lo,docker", "eth0"),
        ("^=lo", "docker0"),
        ("^docker,lo,eth", "ib0"),
        ("^lo,docker,eth,ib", ""),
        ("eth9", ""),
        ("eth0:5000", "eth0"),
        ("lo", "lo"),
    ],
)
def test_the_variable_selects_the_nccl_interface(rule: str, name: str) -> None:
    there = (LO, DOCKER, ETH, IB)
    assert nccl_interface(there, {"NCCL_SOCKET_IFNAME": rule}) == (name, f"NCCL_SOCKET_IFNAME={rule}")


@pytest.mark.parametrize("rule", ["", "e"])
def test_a_too_short_variable_is_ignored(rule: str) -> None:
    assert nccl_interface((LO, ETH), {"NCCL_SOCKET_IFNAME": rule}) == ("eth0", "first that is up")


def test_an_exact_exclusion_does_not_match_prefixes() -> None:
    assert is_meant("eth01", "^=eth0") and not is_meant("eth01", "^eth0")
    assert not is_meant("eth01", "=eth0") and is_meant("eth01", "eth0")


def test_gloo_uses_the_address_of_the_hostname() -> None:
    chosen = gloo_interface((LO, DOCKER, ETH), {"MASTER_ADDR": "127.0.0.1"}, lambda _: "10.0.0.7")
    assert chosen == ("eth0", "address of the host's name")


def test_gloo_uses_loopback_for_a_debian_hostname() -> None:
    assert gloo_interface((LO, ETH), {}, lambda _: "127.0.1.1") == ("lo", "address of the host's name")


@pytest.mark.parametrize(("rule", "name"), [("eth0", "eth0"), ("eth", ""), ("docker0,eth0", "docker0")])
def test_the_variable_selects_the_gloo_interface_by_exact_name(rule: str, name: str) -> None:
    chosen = gloo_interface((LO, DOCKER, ETH), {"GLOO_SOCKET_IFNAME": rule}, lambda _: "10.0.0.7")
    assert chosen == (name, f"GLOO_SOCKET_IFNAME={rule.partition(',')[0]}")


@pytest.mark.parametrize("resolve", [nobody, lambda _: "8.8.8.8"])
def test_without_a_hostname_the_route_to_the_master_decides(resolve: Any) -> None:
    assert gloo_interface((ETH, LO), {"MASTER_ADDR": "127.0.0.1"}, resolve) == ("lo", "route to MASTER_ADDR")


def test_without_hostname_and_route_the_first_interface_up_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: nobody(""))
    for environment in ({}, {"MASTER_ADDR": "nowhere.invalid"}):
        assert gloo_interface((LO, ETH), environment, nobody) == ("eth0", "first that is up")
    assert gloo_interface((LO,), {}, nobody) == ("", "first that is up")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stats]:
    addresses = {
        "lo": [Address(V4, "127.0.0.1"), Address(V6, "::1"), Address(LINK, "00:00")],
        "down0": [Address(V4, "10.9.9.9")],
        "bare0": [Address(LINK, "00:01")],
        "eth0": [Address(V6, "fe80::1%eth0"), Address(V4, "10.0.0.7")],
        "odd0": [Address(V4, "10.0.0.8")],
    }
    states = {"lo": Stats(True, 0), "down0": Stats(False, 0), "bare0": Stats(True, 0), "eth0": Stats(True, 10_000)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    return states


def test_only_interfaces_up_with_an_address_are_listed(host: dict[str, Stats]) -> None:
    assert [interface.name for interface in interfaces()] == ["lo", "eth0", "odd0"]
    host["odd0"] = Stats(False, 0)
    assert [interface.name for interface in interfaces()] == ["lo", "eth0"]


def test_interfaces_are_described_without_loopback(host: dict[str, Stats], tmp_path: Path) -> None:
    facts = network_facts(is_cuda=True, environment={}, ports=tmp_path)
    assert facts.interfaces == ("eth0 10000 Mbit/s 10.0.0.7", "odd0 10.0.0.8")
    assert (facts.default_interface, facts.chosen_by) == ("eth0", "first that is up")


def test_each_back_end_has_its_own_variable(host: dict[str, Stats], tmp_path: Path) -> None:
    environment = {"NCCL_SOCKET_IFNAME": "odd", "GLOO_SOCKET_IFNAME": "eth0"}
    chosen = [
        network_facts(is_cuda=is_cuda, environment=environment, ports=tmp_path).default_interface
        for is_cuda in (True, False)
    ]
    assert chosen == ["odd0", "eth0"]


def test_the_used_interface_has_its_network(host: dict[str, Stats]) -> None:
    assert taken_interface(is_cuda=True, environment={"NCCL_SOCKET_IFNAME": "eth"}) == InterfaceFacts(
        backend="nccl",
        name="eth0",
        address="10.0.0.7",
        network="10.0.0.0/24",
        chosen_by="NCCL_SOCKET_IFNAME=eth",
        others=("lo 127.0.0.1", "odd0 10.0.0.8"),
    )
    loopback = taken_interface(is_cuda=False, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert loopback is not None
    assert (loopback.backend, loopback.address, loopback.is_loopback) == ("gloo", "127.0.0.1", True)
    missing = taken_interface(is_cuda=False, environment={"GLOO_SOCKET_IFNAME": "nope"})
    assert missing is not None
    assert (missing.name, missing.address, missing.network) == ("", "", "")


@pytest.mark.parametrize(
    ("name", "value", "is_missing"),
    [
        ("GLOO_SOCKET_IFNAME", "nope", True),
        ("GLOO_SOCKET_IFNAME", "eth", True),
        ("GLOO_SOCKET_IFNAME", "eth0,nope", True),
        ("GLOO_SOCKET_IFNAME", "eth0,odd0", False),
        ("GLOO_SOCKET_IFNAME", "lo", False),
        ("GLOO_SOCKET_IFNAME", "down0", False),  # its address can be taken
        ("GLOO_SOCKET_IFNAME", "bare0", True),
        ("NCCL_SOCKET_IFNAME", "nope", True),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "^lo,down,eth,odd", True),
        ("NCCL_SOCKET_IFNAME", "x", False),  # passed over
    ],
)
@pytest.mark.parametrize("is_cuda", [True, False])
def test_misnamed_interfaces_are_found(
    name: str, value: str, is_missing: bool, is_cuda: bool, host: dict[str, Stats], tmp_path: Path
) -> None:
    facts = network_facts(is_cuda=is_cuda, environment={name: value}, ports=tmp_path)
    assert facts.misnamed == ((f"{name}={value}",) if is_missing else ())


def test_without_system_information_no_name_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: 1 / 0)
    assert network_facts(is_cuda=False, environment={"GLOO_SOCKET_IFNAME": "eth0"}, ports=tmp_path).misnamed == ()


def port(root: Path, name: str, state: str, rate: str = "400 Gb/sec (4X NDR)", link: str = "InfiniBand") -> None:
    device, _, number = name.partition(":")
    folder = root / device / "ports" / number
    folder.mkdir(parents=True)
    for file, text in (("state", state), ("rate", rate), ("link_layer", link)):
        (folder / file).write_text(f"{text}\n")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    return tmp_path / "dev"


def test_infiniband_ports_are_read(tmp_path: Path, devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    ports = tmp_path / "infiniband"
    port(ports, "mlx5_0:1", "4: ACTIVE")
    port(ports, "mlx5_1:1", "1: DOWN", rate="40 Gb/sec (4X QDR)")
    port(ports, "mlx5_2:1", "4: ACTIVE", rate="100 Gb/sec (4X EDR)", link="Ethernet")
    (ports / "torn_0" / "ports" / "1").mkdir(parents=True)
    facts = network_facts(is_cuda=True, environment={}, ports=ports, devices=devices)
    assert facts.infiniband == (
        "mlx5_0:1 ACTIVE 400 Gb/sec",
        "mlx5_1:1 DOWN 40 Gb/sec",
        "mlx5_2:1 ACTIVE 100 Gb/sec (Ethernet)",
        "torn_0:1",
    )
    assert (facts.infiniband_active, facts.infiniband_off) == (2, "")


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
        ({"NCCL_IB_DISABLE": "0"}, ""),
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
        ({"NCCL_NET": "IB"}, ""),
        ({"NCCL_NET": "AWS Libfabric"}, ""),
    ],
)
def test_the_reason_nccl_avoids_infiniband_is_found(
    environment: dict[str, str], why: str, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    assert infiniband_off(environment, devices) == why


def test_without_library_or_device_nccl_has_no_infiniband(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert infiniband_off({}, devices) == "libibverbs.so.1 cannot be loaded"
    (devices / "uverbs0").unlink()
    assert infiniband_off({}, devices) == f"{devices} does not exist, as in a container that was not given it"


def test_without_ports_infiniband_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: pytest.fail("looked for"))
    facts = network_facts(is_cuda=True, environment={"NCCL_IB_DISABLE": "1"}, ports=tmp_path)
    assert facts.infiniband == () and facts.infiniband_off == ""


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, psutil.AccessDenied, OSError])
def test_a_host_without_any_information_is_handled(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise error

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    assert interfaces() != []
    monkeypatch.setattr(psutil, "net_if_addrs", refuse)
    facts = network_facts(is_cuda=True, environment={}, ports=tmp_path / "none")
    assert facts == NetworkFacts(chosen_by="first that is up")


@pytest.mark.parametrize(("is_cuda", "variable"), [(True, "NCCL_SOCKET_IFNAME"), (False, "GLOO_SOCKET_IFNAME")])
def test_interfaces_and_variables_of_this_host_are_read(
    is_cuda: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (loopback,) = [one.name for one in interfaces() if "127.0.0.1" in one.addresses]
    monkeypatch.setenv(variable, loopback)
    facts = network_facts(is_cuda=is_cuda)
    assert (facts.default_interface, facts.chosen_by) == (loopback, f"{variable}={loopback}")
    others = {name for _, name in socket.if_nameindex()} - {loopback}
    assert {line.split()[0] for line in facts.interfaces} <= others


def test_a_pending_name_server_query_is_found() -> None:
    assert name_servers_asked() == ()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.connect(("127.0.0.1", 53))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.connect(("127.0.0.2", 54))
            assert name_servers_asked() == ("127.0.0.1",)
    assert name_servers_asked() == ()
