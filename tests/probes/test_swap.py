"""Swap from constructed trees: where it lies, what happens on it, and what the kernel says of pressure."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.facts import SwapFacts
from lightning_ncclsafe.probes.host import swap as module
from lightning_ncclsafe.probes.host.swap import SwapProbe, device_kind, is_network_filesystem, is_on_network

Swap = namedtuple("Swap", "total used sin sout")
HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


class Host:
    """A /proc and a /sys/class/block, written out by hand, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.block = folder / "proc", folder / "sys" / "class" / "block"
        self.now_s = 100.0
        self.swap = Swap(0, 0, 0, 0)
        (self.proc / "pressure").mkdir(parents=True)
        self.block.mkdir(parents=True)
        monkeypatch.setattr(psutil, "swap_memory", lambda: self.swap)

    def probe(self) -> SwapProbe:
        return SwapProbe(self.proc, self.block, lambda: self.now_s)

    def swaps(self, *lines: str) -> SwapFacts:
        (self.proc / "swaps").write_text(HEADER + "".join(f"{line}\t1000\t0\t-2\n" for line in lines))
        return self.probe().read()

    def pressure(self, resource: str, some_us: object, full_us: object) -> None:
        line = "{} avg10=9.00 avg60=0.00 avg300=0.00 total={}\n"
        text = line.format("some", some_us) + line.format("full", full_us)
        (self.proc / "pressure" / resource).write_text(text)

    def device(self, name: str, place: str, transport: str = "", below: str = "") -> Path:
        folder = self.block.parent.parent / "devices" / place / name
        folder.mkdir(parents=True)
        (self.block / name).symlink_to(folder)
        if transport:
            file = folder / "device" / transport.partition("=")[0]
            file.parent.mkdir(parents=True)
            file.write_text(transport.partition("=")[2] + "\n")
        if below:
            (folder / "slaves" / below).mkdir(parents=True)
        return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_swapping_since_the_probe_is_counted(host: Host) -> None:
    host.swap = Swap(total=8000, used=100, sin=70, sout=500)
    probe = host.probe()
    host.swap = Swap(total=8000, used=900, sin=71, sout=1500)
    facts = probe.read()
    assert (facts.total_bytes, facts.used_bytes) == (8000, 900)
    assert (facts.swapped_out_bytes, facts.swapped_in_bytes) == (1000, 1)
    probe = host.probe()
    assert (probe.read().swapped_out_bytes, probe.read().swapped_in_bytes) == (0, 0)


def test_pressure_is_a_share_of_the_elapsed_time(host: Host) -> None:
    for resource in ("memory", "io", "cpu"):
        host.pressure(resource, 1_000_000, 1_000_000)
    probe = host.probe()
    host.now_s += 2.0
    host.pressure("memory", 9_000_000, 1_500_000)
    host.pressure("io", 9_000_000, 2_000_000)
    host.pressure("cpu", 1_200_000, 9_000_000)
    facts = probe.read()
    assert (facts.memory_stalled, facts.io_stalled, facts.cpu_waited) == (0.25, 0.5, 0.1)


def test_a_share_is_at_most_one(host: Host) -> None:
    host.pressure("memory", 0, 0)
    probe = host.probe()
    host.now_s += 1.0
    host.pressure("memory", 0, 1_100_000)
    assert probe.read().memory_stalled == 1.0


def test_without_elapsed_time_there_is_no_share(host: Host) -> None:
    host.pressure("memory", 0, 0)
    assert host.probe().read().memory_stalled is None


@pytest.mark.parametrize("text", ["", "full", "full avg10=0.00 total=\n", "full total=x", "some total=5"])
def test_torn_pressure_is_unknown(host: Host, text: str) -> None:
    (host.proc / "pressure" / "memory").write_text(text)
    probe = host.probe()
    host.now_s += 1.0
    assert probe.read().memory_stalled is None


@pytest.mark.parametrize("filesystem", ["nfs4", "ext4", ""])
def test_a_swap_file_has_its_file_system(host: Host, filesystem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "filesystem_of", lambda path: filesystem if path == "/mnt/my swap" else "?")
    facts = host.swaps("/mnt/my\\040swap file")
    name = f"/mnt/my swap on {filesystem}" if filesystem else "/mnt/my swap"
    assert facts.devices == (name,)
    assert facts.on_network == ((name,) if filesystem == "nfs4" else ())


@pytest.mark.parametrize(
    ("filesystem", "network"),
    [
        *((name, True) for name in ("nfs", "cifs", "ceph", "lustre", "gpfs", "fuse.sshfs")),
        *((name, False) for name in ("ext4", "xfs", "fuseblk", "nfsd", "overlay")),
    ],
)
def test_network_file_systems_are_recognised(filesystem: str, network: bool) -> None:
    assert is_network_filesystem(filesystem) is network


def test_swap_on_network_devices_is_recognised(host: Host) -> None:
    host.device("sdb", "platform/host2/session1/target2:0:0/2:0:0:0/block")
    host.device("nvme0n1", "pci0000:00/nvme/nvme0", "transport=pcie")
    facts = host.swaps("/dev/nbd0 partition", "/dev/sdb partition", "/dev/nvme0n1 partition", "/dev/sdz9 partition")
    assert facts.devices == ("/dev/nbd0 on nbd", "/dev/sdb on iscsi", "/dev/nvme0n1", "/dev/sdz9")
    assert facts.on_network == ("/dev/nbd0 on nbd", "/dev/sdb on iscsi")


@pytest.mark.parametrize(
    ("name", "place", "transport", "kind"),
    [
        ("rbd0", "virtual", "", "rbd"),
        ("drbd1", "virtual", "", "drbd"),
        ("nbd3p1", "virtual", "", "nbd"),
        ("zram0", "virtual", "", "zram"),
        ("sdc1", "pci/host3/rport-3:0-1/target3:0:0/block/sdc", "", "fibre channel"),
        ("nvme1n1", "virtual/nvme-fabrics/ctl", "transport=tcp", "nvme over tcp"),
        ("nvme2n1", "virtual/nvme-subsystem", "nvme2/transport=rdma", "nvme over rdma"),
        ("nvme3n1", "pci/nvme", "transport=pcie", ""),
        ("sda", "pci/ata1/host0/target0:0:0/block", "", ""),
        ("sda", "pci/session/host0", "", ""),
    ],
)
def test_device_kinds_are_recognised(host: Host, name: str, place: str, transport: str, kind: str) -> None:
    host.device(name, place, transport)
    assert device_kind(f"/dev/{name}", host.block) == kind
    assert is_on_network(kind) is (kind not in ("", "zram"))


def test_a_partition_has_the_transport_of_its_disk(host: Host) -> None:
    disk = host.device("nvme1n1", "virtual/nvme-fabrics", "transport=tcp")
    (disk / "nvme1n1p2").mkdir()
    (host.block / "nvme1n1p2").symlink_to(disk / "nvme1n1p2")
    assert device_kind("/dev/nvme1n1p2", host.block) == "nvme over tcp"


def test_a_mapped_device_has_the_kind_of_its_lower_device(host: Host) -> None:
    host.device("dm-1", "virtual", below="dm-0")
    host.device("dm-0", "virtual2", below="nbd0")
    assert device_kind("/dev/dm-1", host.block) == "nbd"


def test_cyclic_device_mappings_terminate(host: Host) -> None:
    host.device("dm-1", "virtual", below="dm-0")
    host.device("dm-0", "virtual2", below="dm-1")
    assert device_kind("/dev/dm-1", host.block) == ""


def test_torn_lines_are_skipped(host: Host) -> None:
    (host.proc / "swaps").write_text(f"{HEADER}\n/dev/sda\n/dev/sdb partition\n")
    assert host.probe().read().devices == ("/dev/sdb",)


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, psutil.AccessDenied, RuntimeWarning])
def test_a_host_without_swap_information_is_handled(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(psutil, "swap_memory", refuse)
    assert SwapProbe(tmp_path / "none", tmp_path / "neither").read() == SwapFacts()


def is_readable(file: Path) -> bool:
    try:
        return bool(file.read_bytes())
    except OSError:
        return False


def test_what_the_kernel_of_this_host_reports_is_read() -> None:
    times = iter([0.0, 10.0])
    facts = SwapProbe(now=times.__next__).read()
    shares = {"cpu": facts.cpu_waited, "memory": facts.memory_stalled, "io": facts.io_stalled}
    for name, share in shares.items():
        assert (share is not None) == is_readable(Path("/proc/pressure") / name), name
    swaps = Path("/proc/swaps").read_text().splitlines()[1:] if is_readable(Path("/proc/swaps")) else []
    assert [device.split(" on ")[0] for device in facts.devices] == [line.split()[0] for line in swaps]
    assert facts.total_bytes == psutil.swap_memory().total
