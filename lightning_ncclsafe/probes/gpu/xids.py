"""Errors that the NVIDIA driver has written to the kernel's log."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial

from lightning_ncclsafe.probes.absent import or_none

# The first is readable by all unless kernel.dmesg_restrict is set; the other some distributions write once a boot.
KERNEL_LOGS = ("/dev/kmsg", "/var/log/dmesg")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
# One record of the kernel's is 8 KiB at most, and its buffer holds some ten thousand.
_RECORD_BYTES = 8192
_MOST_RECORDS = 50_000
_MOST_S = 0.3
_NEWEST = 8
# NVIDIA's "Xid Errors", in words that fit into a line.
_MEANINGS = {
    48: "double-bit ECC error",
    61: "microcontroller breakpoint",
    62: "microcontroller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    145: "NVLink RLW error",
    149: "NVLink NETIR error",
    154: "recovery action changed",
}


# What a program's own mistakes and its being killed leave there: exception, page fault, stopped, cleaned up.
_OF_PROGRAMS = (13, 31, 43, 45)


def xids(bus_id: str, logs: Iterable[str] = KERNEL_LOGS) -> tuple[str, ...]:
    """Xid errors of one GPU since the host was started, newest last, 8 at most, the same one once.

    Those that say something of the programs that ran on it, and nothing of the GPU, are left out.

    Args:
        bus_id: Its place on the bus as NVML tells it (``"00000000:3B:00.0"``).
        logs: Where the kernel's log may be; the first that can be read counts. Empty where none can.
    """
    text = next((text for log in logs if (text := or_none(partial(_records, log))) is not None), [])
    own = [int(found[2]) for line in text if (found := _XID.search(line)) and _place(found[1]) == _place(bus_id)]
    # A dictionary keeps the order; the last time counts.
    newest = [xid for xid in dict.fromkeys(reversed(own)) if xid not in _OF_PROGRAMS][:_NEWEST]
    return tuple(f"{xid} ({_MEANINGS[xid]})" if xid in _MEANINGS else str(xid) for xid in reversed(newest))


def _place(bus_id: str) -> str:
    """Domain, bus and device: the driver leaves the function out, and NVML writes eight digits of the domain."""
    parts = bus_id.lower().partition(".")[0].split(":")
    return ":".join([parts[0][-4:], *parts[1:]])


def _records(log: str) -> list[str]:
    # Without waiting for new records.
    file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        whole = b"".join(_read(file))
    finally:
        os.close(file)
    return [line for line in whole.decode(errors="replace").splitlines() if "NVRM" in line]


def _read(file: int) -> Iterator[bytes]:
    ends_s = time.monotonic() + _MOST_S
    for _ in range(_MOST_RECORDS):
        try:
            data = os.read(file, _RECORD_BYTES)
        except BrokenPipeError:  # the kernel has overwritten the next record; then comes the oldest there is
            continue
        except BlockingIOError:
            return
        if not data or time.monotonic() > ends_s:
            return
        yield data
