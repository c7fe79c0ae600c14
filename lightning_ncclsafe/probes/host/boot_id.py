"""What tells this host from others."""

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_boot_id(boot_id: Path = _BOOT_ID) -> str:
    """What all processes on this host have in common, and nobody else: the kernel's boot, or else the host's name.

    Args:
        boot_id: Where the kernel tells it; also from within a container, whose host name is its own.
    """
    try:
        return boot_id.read_text(encoding="ascii").strip() or socket.gethostname()
    except (OSError, ValueError):
        return socket.gethostname()
