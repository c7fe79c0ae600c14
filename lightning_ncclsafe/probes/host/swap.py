"""Swap space, what it lies on, and what happens on it while somebody watches; pressure on memory, storage and cores."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.facts import SwapFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import filesystem_of
from lightning_ncclsafe.probes.storage.kinds import BLOCK_DEVICES, device_kind, is_network_filesystem, is_on_network

_PROC = Path("/proc")
# Below this a share of the time says nothing.
_SHORTEST_S = 0.01


@dataclass(frozen=True, slots=True)
class _Counters:
    """What only ever grows: bytes written to swap and read from it, and microseconds of pressure."""

    out_bytes: int | None = None
    in_bytes: int | None = None
    pressure_us: dict[str, int] = field(default_factory=dict)


class SwapProbe:
    """Watches the host's swap between :meth:`begin` and :meth:`read`.

    Args:
        proc: Root of the file system with the kernel's counters.
        block_devices: Where the kernel tells of block devices.
        now: Seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        proc: Path = _PROC,
        block_devices: Path = BLOCK_DEVICES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._block_devices = block_devices
        self._now = now
        self.begin()

    def begin(self) -> None:
        """Counts from now on; so does a new probe."""
        self._began_s, self._before = self._now(), self._counters()

    def read(self) -> SwapFacts:
        """Facts since the beginning; what the host does not say is None."""
        swap, after = or_none(psutil.swap_memory), self._counters()
        devices = list(self._devices())
        return SwapFacts(
            total_bytes=swap.total if swap else None,
            used_bytes=swap.used if swap else None,
            swapped_out_bytes=_since(after.out_bytes, self._before.out_bytes),
            swapped_in_bytes=_since(after.in_bytes, self._before.in_bytes),
            devices=tuple(name for name, _ in devices),
            on_network=tuple(name for name, network in devices if network),
            memory_stalled=self._share("memory full", after),
            io_stalled=self._share("io full", after),
            cpu_waited=self._share("cpu some", after),
        )

    def _counters(self) -> _Counters:
        swap = or_none(psutil.swap_memory)
        pressure = {}
        for resource, kind in (("memory", "full"), ("io", "full"), ("cpu", "some")):
            total = or_none(partial(pressure_us, self._proc / "pressure" / resource, kind))
            if total is not None:
                pressure[f"{resource} {kind}"] = total
        return _Counters(getattr(swap, "sout", None), getattr(swap, "sin", None), pressure)

    def _share(self, name: str, after: _Counters) -> float | None:
        spent_us = _since(after.pressure_us.get(name), self._before.pressure_us.get(name))
        took_s = self._now() - self._began_s
        if spent_us is None or took_s < _SHORTEST_S:
            return None
        # The kernel adds up in steps of its own, so that a short while may get more than its due.
        return round(min(max(spent_us / 1e6 / took_s, 0.0), 1.0), 4)

    def _devices(self) -> Iterator[tuple[str, bool]]:
        """What is swapped to, in words, and whether it is on a network."""
        text = or_none((self._proc / "swaps").read_text) or ""
        for line in text.splitlines()[1:]:
            words = line.split()
            if len(words) < 2:
                continue
            path = words[0].replace("\\040", " ")
            if words[1] == "file":
                kind = or_none(partial(filesystem_of, path)) or ""
                network = is_network_filesystem(kind)
            else:
                kind = device_kind(path, self._block_devices)
                network = is_on_network(kind)
            yield f"{path} on {kind}" if kind else path, network


def pressure_us(file: Path, kind: str) -> int | None:
    """Microseconds of pressure, from a line such as ``full avg10=0.00 avg60=0.00 avg300=0.00 total=4711``.

    Args:
        file: What the kernel tells of one resource.
        kind: ``"some"`` or ``"full"``.
    """
    for line in file.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{kind} "):
            return int(line.rpartition("total=")[2])
    return None


def _since(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
