"""Memory in huge pages, for a process that forks again and again.

A fork copies the table of its parent's pages, and at its end gives it back. With torch and Lightning in small pages
that takes 25 ms of a core, in huge ones 5 ms.
"""

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25
BYTES = 2 << 20


def use() -> None:
    """Moves what this process has into huge pages, as far as the kernel does so (Linux 6.1); later ones are as ever."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, permissions, _, _, _, *owner = line.split(maxsplit=5)
        if permissions == "rw-p" and owner in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // BYTES) * BYTES, end // BYTES * BYTES
            if begin < end:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)
