"""A process beside a rank that is alone on its host: it sees that rank from outside, as other ranks of a host would.

Without it, nobody could tell why such a rank does not answer: whether its process is stopped, holds the GIL, or has
ended, and how. It is no child of the rank, trains nothing, and has a connection of its own to the job's store. When the
rank has died, it stays until the others have asked about it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    ExchangeError,
    FallbackExchange,
    InTimeExchange,
    TcpStoreExchange,
    poll_interval_s,
    wait_for,
)
from lightning_ncclsafe.facts import ENDED, IncidentKind, codec
from lightning_ncclsafe.guard.ending import end_frozen, goodbye_key
from lightning_ncclsafe.guard.gathering import Gathering
from lightning_ncclsafe.guard.shared import IncidentLog
from lightning_ncclsafe.probes.host.resources import look_at
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.process.growth import MemoryGrowth
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key
from lightning_ncclsafe.report.terminal import say_on_stderr

# What Python and the dynamic linker need, and nothing that would make it a rank of the job.
_KEPT = ("CONDA", "HOME", "LANG", "LC_", "LD_", "PATH", "PYTHON", "RES_OPTIONS", "TMPDIR", "VIRTUAL_ENV")
# With the first, it would not end; with the second, it might end at a warning that the program avoids.
_DROPPED = ("PYTHONINSPECT", "PYTHONWARNINGS")
# Modules of its working directory are not those of the program, and no backend of torch may take a device.
_SET = {"PYTHONSAFEPATH": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# A program that waits for all of its children would wait for this one, too.
_AS_NO_CHILD = "import os, sys; os.fork() and os._exit(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
# An interpreter without any import, from a slow file system.
_STARTS_S = 10.0
_POLL_S, _POLLS_PER_S = 0.25, 1000.0
# How long it waits for the next call of the Trainer: imports take seconds.
_BETWEEN_CALLS_S = 60.0
# From when the others reach their hard limit until they have left.
_LEAVE_S = 60.0
_STDIN = 0
# While it imports, the rank comes first; but it must be quick to look at a rank that takes a core.
_NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttendedCall:
    """One call of the Trainer, as its witness has to know it.

    Attributes:
        rank: The rank that is alone on its host.
        world_size: Number of ranks.
        keys: Where the keys of this call are.
        folder: Where they are once the store is lost.
        stays_s: How long the witness stays when the rank's process has ended, in seconds.
    """

    rank: int
    world_size: int
    keys: stores.Address
    folder: str
    stays_s: float


class Witness:
    """That process, as the rank beside it knows it: one for all calls of the Trainer, which starts with the first.

    Training does not depend on it: if it cannot be started, that is printed once.
    """

    def __init__(self, say: Callable[[str], None] = say_on_stderr) -> None:
        self._say = say
        self._socket: socket.socket | None = None
        # The last one is within all others.
        self._calls: list[bytes] = []
        # Other systems cannot send without SIGPIPE, and a frozen program would run once more.
        self._is_off = sys.platform != "linux" or hasattr(sys, "frozen")

    def begin(
        self, *, rank: int, world_size: int, keys: stores.Address, folder: str, longest_s: float
    ) -> Callable[[], None]:
        """A call begins, maybe within another: the rank has published its info.

        Args:
            keys: Where the keys of the call are.
            folder: Where they are once the store is lost, as with rank 0: the folder of a DirectoryExchange.
            longest_s: The longest time until the others end a run that is stuck, in seconds.

        Returns:
            What to call when the call has ended; if no other one begins soon, the process ends as well.
        """
        stays_s = longest_s + _LEAVE_S
        call = codec.encode(_AttendedCall(rank=rank, world_size=world_size, keys=keys, folder=folder, stays_s=stays_s))
        self._calls.append(call)
        if not self._is_off and not self._tell(call):
            try:
                self._start()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._is_off = True
                why = f"no process can be started beside this rank, to see it from outside ({error})"
                self._say(f"rank {rank}: {why}; training continues, but if this rank dies, the reason is unknown")
            self._tell(call)
        return partial(self._end, call)

    def _end(self, call: bytes) -> None:
        with suppress(ValueError):
            self._calls.remove(call)
        self._tell(self._calls[-1] if self._calls else b"")

    def _tell(self, line: bytes) -> bool:
        """Whether the process has been told, or is too busy to listen."""
        if self._socket is None:
            return False
        try:
            # A program may have the signal end it.
            self._socket.send(line + b"\n", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._socket.close()
        except OSError:
            # The program has closed all descriptors, and this one may be another file now.
            self._socket.detach()
        else:
            return True
        self._socket = None
        return False

    def _start(self) -> None:
        if not sys.executable:  # Python is embedded
            raise FileNotFoundError("sys.executable is empty")
        kept = {name: os.environ[name] for name in os.environ if name.startswith(_KEPT) and name not in _DROPPED}
        self._socket, other_end = socket.socketpair()
        weakref.finalize(self, self._socket.close)
        with other_end:
            subprocess.run(
                # The last argument is for whoever lists processes.
                [sys.executable, "-S", "-c", _AS_NO_CHILD, "-m", __name__, str(os.getpid())],
                # Python 3.10 always looks for modules there first.
                cwd="/",
                env=kept | _SET | {"PYTHONPATH": _search_path()},
                stdin=other_end.fileno(),
                # Who reads the output of a rank waits until no process can write to it any more.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_STARTS_S,
            )


def _search_path() -> str:
    """Where this process finds modules, for one with another working directory."""
    entries: list[object] = [*sys.path]
    found: list[str] = []
    for entry in entries:
        # Python takes no notice of others, such as a Path that a program has added.
        if isinstance(entry, str) and os.pathsep not in entry:
            with suppress(OSError):  # relative to a working directory that is gone
                found.append(os.path.abspath(entry))
    return os.pathsep.join(found)


class _Attendance:
    """The witness of one call.

    Raises:
        Exception: The store cannot be reached, or the rank has not published its info.
    """

    def __init__(self, call: _AttendedCall) -> None:
        self._call = call
        files = InTimeExchange(DirectoryExchange(Path(call.folder)), what="the report folder")
        self._exchange = FallbackExchange(TcpStoreExchange(stores.connection_to(call.keys)), files)
        self._log = IncidentLog(self._exchange)
        self._info = codec.decode(RankInfo, self._exchange.get_many([info_key(call.rank)])[info_key(call.rank)])
        self._peers = Peers(growth=MemoryGrowth())
        self._died_s: float | None = None

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the store."""
        return poll_interval_s(self._call.world_size, least_s=_POLL_S, polls_per_s=_POLLS_PER_S)

    @property
    def is_over(self) -> bool:
        """Whether the rank's process is gone, and those who may ask about it."""
        if self._died_s is None:
            self._died_s = time.monotonic() if self._has_ended() else None
        if self._died_s is None:
            return False
        if self._exchange.lost:
            # Those who have lost their store with this rank ask soon.
            return time.monotonic() - self._died_s > min(self._call.stays_s, _LEAVE_S)
        return time.monotonic() - self._died_s > self._call.stays_s or self._is_forgotten()

    def _is_forgotten(self) -> bool:
        """Whether the next start of the job has begun, on the same store."""
        key = info_key(self._call.rank)
        with suppress(ExchangeError):
            return key not in self._exchange.get_many([key])
        return False

    def attend(self) -> None:
        """Takes part in the next round, if there is one."""
        # Its files are there once the rank has begun to watch itself.
        self._peers.known = (self._info,)
        entry = self._log.read()
        if entry is None:
            return
        self._log.number += 1
        if entry.recovered_after_s is None:
            with suppress(ExchangeError):
                self._take_part(entry.incident.kind)

    def _take_part(self, kind: IncidentKind) -> None:
        gathering = Gathering(
            self._exchange,
            round_number=self._log.number - 1,
            rank=self._call.rank,
            world_size=self._call.world_size,
            peers=(self._info,),
            witness=self._peers.witness,
            is_dropped=lambda: self._log.read() is not None,
        )
        verdict = gathering.attend()
        if verdict is None or not verdict.ends_run or kind is not IncidentKind.TIMEOUT:
            return
        if self._call.rank in verdict.frozen:
            self._end_frozen(verdict.frozen)

    def _end_frozen(self, frozen: Collection[int]) -> None:
        # The others may still save the state of the run, and a launcher may end them with the first.
        others = [goodbye_key(rank) for rank in range(self._call.world_size) if rank not in frozen]
        with suppress(ExchangeError):
            wait_for(
                lambda: len(self._exchange.get_many(others)) == len(others),
                deadline_s=self._call.stays_s,
                poll_s=self.poll_s,
                give_up=self._has_ended,
                forgive=self._exchange,
            )
        # One that goes on meanwhile ends itself.
        seen = self._peers.witness((self._info,))
        end_frozen((self._info for facts in seen if facts.gil_held or facts.state == "stopped"), lambda text: None)

    def _has_ended(self) -> bool:
        return look_at(self._info.pid, rank=self._info.rank, started=self._info.started or None).state in ENDED

    def close(self) -> None:
        """Closes the connection, and what is open of the rank's process."""
        self._peers.close()
        self._exchange.close()


def _attendances() -> Iterator[_Attendance | None]:
    """At a steady pace: the call to attend, as stdin has it in a line for each, or None if an empty line follows.

    Ends when there is no call, and none is to be expected.
    """
    attendance: _Attendance | None = None
    ended_s, rest, is_open = time.monotonic(), b"", True
    while attendance is not None or (is_open and time.monotonic() - ended_s < _BETWEEN_CALLS_S):
        poll_s = attendance.poll_s if attendance is not None else _POLL_S
        if not is_open:
            time.sleep(poll_s)
        elif select.select([_STDIN], [], [], poll_s)[0]:
            read = os.read(_STDIN, 1 << 16)
            is_open = bool(read)
            *lines, rest = (rest + read).split(b"\n")
            if lines:
                if attendance is not None:
                    attendance.close()
                ended_s = time.monotonic()
                attendance = _Attendance(codec.decode(_AttendedCall, lines[-1])) if lines[-1] else None
        yield attendance


def _main() -> None:
    """The process itself."""
    # Ctrl-C and a scheduler's signals are for the ranks.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(_NICE)
    for attendance in _attendances():
        if attendance is not None:
            attendance.attend()
            if attendance.is_over:
                # What ranks share by files goes with the last process that closes them.
                attendance.close()
                break


if __name__ == "__main__":
    _main()
