"""Children of this process that were killed or have failed, seen without asking for them as their parent would."""

import os
from contextlib import suppress
from pathlib import Path

from lightning_ncclsafe.machine_facts import EndedProcess
from lightning_ncclsafe.probes.host import signal_name

_PROC = Path("/proc")
_KILLED = (os.CLD_KILLED, os.CLD_DUMPED) if hasattr(os, "CLD_KILLED") else ()


def ended_children(proc: Path = _PROC) -> tuple[EndedProcess, ...]:
    """Children that were killed, or have exited with a code other than 0, and that nobody has waited for yet.

    They are left as they are: whoever waits for them, torch's loader for instance, learns what it would have. Takes
    some 10 µs for each child; nothing where the kernel does not list a process's children.

    Args:
        proc: Root of the file system that tells of this process.
    """
    found = []
    for folder in sorted((proc / "self" / "task").glob("*")):
        with suppress(OSError):
            found += [child for pid in (folder / "children").read_text().split() if (child := _ended(int(pid)))]
    return tuple(found)


def _ended(pid: int) -> EndedProcess | None:
    with suppress(OSError):
        told = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if told is not None and told.si_code in _KILLED:
            return EndedProcess(pid=pid, signal=signal_name(told.si_status))
        if told is not None and told.si_status != 0:
            return EndedProcess(pid=pid, exit_code=told.si_status)
    return None
