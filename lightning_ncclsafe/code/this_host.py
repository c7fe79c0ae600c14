"""Which host this is, and within which processes ids of processes are unique: names of hosts often are not."""

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHORT = 8


def host_boot_id() -> str:
    """An id that is equal for all processes of this host, and only for them: the kernel's boot id, or else its name.

    A container has the boot id of its host, but a name of its own.
    """
    try:
        return _BOOT_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def host_name() -> str:
    """Name of this host; if it has none of its own, with a part of its boot id."""
    name = socket.gethostname()
    return f"{name}-{host_boot_id()[:_SHORT]}" if name.partition(".")[0] == "localhost" else name


def process_space() -> str:
    """This host and its namespace of process ids, as a part of file names without ``@``.

    Hosts may have one name, and first namespaces have one number on all hosts. A container may have its own namespace,
    but its host's name.
    """
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname()}-{host_boot_id()[:_SHORT]}-{space}".replace("@", "")
