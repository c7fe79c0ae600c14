"""Logs of any launcher, of one rank or of all: what they say of each rank becomes its facts."""

import zlib
from typing import IO

from lightning_ncclsafe.facts import ExceptionFacts
from lightning_ncclsafe.reading import launchers, tracebacks, watchdog
from lightning_ncclsafe.reading.errors import ReadingError
from lightning_ncclsafe.reading.frames import frame
from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.reading.lines import Line, lines, may_tell, parts, taken_apart
from lightning_ncclsafe.reading.said import Said
from lightning_ncclsafe.reading.starts import Starts
from lightning_ncclsafe.reading.values import MOST_RANKS

_Key = tuple[int | None, str]
_MOST_OPEN = 4096
_MOST_IDLE = 5000
_MOST_REMARKS = 8
_MOST_BROKEN = 3
_STARTS = "There were several starts of the run: this is the last one in which anything is said to wait or to fail."
_FAILED_AT = "Stack trace of the failed collective"


class Log:
    """All logs of a job, read line by line.

    Attributes:
        remarks: What was said of no rank in particular, one sentence each.
    """

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self._starts = Starts()
        self._idle = 0
        self._open: dict[_Key, tracebacks.Traceback] = {}
        self._rank_of: dict[str, int] = {}
        self._default_rank: int | None = None
        self._broken: list[str] = []
        self._broken_of: int | None = None
        self._failed: Said | None = None
        self._last: Said | None = None
        self._summary = launchers.Summary()

    def read(self, stream: IO[bytes], most: int, rank: int | None = None, start: int = 0) -> None:
        """Reads a log.

        Args:
            stream: Its bytes.
            most: After how many bytes to stop.
            rank: The rank that wrote it, if its name says so.
            start: Number of the start of the run that it begins with.

        Raises:
            ReadingError: If it is compressed, and damaged; what comes before that has been read.
        """
        self._default_rank = rank
        self._starts.begin(start)
        self._open.clear()
        try:
            for line in lines(stream, most, self._wants):
                if self._wants(line):
                    for part in parts(line):
                        self._add(taken_apart(part))
        except (EOFError, zlib.error, OSError) as error:
            raise ReadingError(f"it could be read in part only ({error})") from error

    def _wants(self, text: bytes) -> bool:
        return bool(self._open or self._broken or self._failed) or may_tell(text)

    def said(self) -> tuple[Said, ...]:
        """What was said of each rank, by rank; ranks of which it is only known that they live are left out.

        Of several starts of a run in one log, the last one of which anything is said counts.
        """
        return tuple(one for _, one in sorted(self._starts.last.said.items()) if one.tells)

    @property
    def unnamed(self) -> tuple[ExceptionFacts, ...]:
        """Exceptions in that start of which no rank is known; of those that follow from others only one."""
        found = self._starts.last.unnamed
        return tuple(one for one in found if not one.is_consequence) or tuple(found[:1])

    @property
    def world_size(self) -> int:
        """The number of ranks by a log's own word; 0 where it says nothing of that."""
        return self._starts.world_size

    def _start_again(self) -> None:
        self._starts.again()
        if _STARTS not in self.remarks:
            self.remarks.append(_STARTS)
        self._last, self._failed = None, None

    def _has_next_start(self, text: str) -> bool:
        """Whether the run starts again here; rank 0's word for it is one on all only in a log of all."""
        if launchers.starts_again(text):
            return True
        return launchers.has_started(text) and self._default_rank is None and self._starts.now.tells

    def _of(self, rank: int | None) -> Said | None:
        if rank is None or not 0 <= rank < MOST_RANKS:
            return None
        return self._starts.now.of(rank)

    def _add(self, line: Line) -> None:
        if self._broken and (line.rank is not None or tracebacks.begins(line.text)):
            self._broken.clear()
        if self._broken:
            line = line._replace(rank=self._broken_of)
        text = self._whole_line(line)
        if self._has_next_start(text):
            self._start_again()
        rank = self._speaker(line)
        self._traceback(line, rank, text)
        self._frame_of_failed(text)
        if size := watchdog.world_size(text):
            self._starts.has_size(size)
        self._ends(text)
        remark = launchers.child_ended(text)
        if remark and len(self.remarks) < _MOST_REMARKS and remark not in self.remarks:
            self.remarks.append(remark)
        if "NCCL" in text or "arrier" in text or "collective" in text:
            self._collective(rank, line, text)

    def _whole_line(self, line: Line) -> str:
        """The text, with what a terminal has broken off, as far as it has been read."""
        text = "".join([*self._broken, line.text.rstrip("\n")])
        if watchdog.is_broken(text) and len(self._broken) < _MOST_BROKEN:
            # The first part is told at once: what follows it may be another line.
            if not self._broken:
                self._broken_of = line.rank
            self._broken.append(line.text)
        else:
            self._broken.clear()
        return text

    def _speaker(self, line: Line) -> int | None:
        if line.rank is not None:
            if line.stream:
                self._rank_of.setdefault(line.stream, line.rank)
            return line.rank
        if line.stream.isdecimal():
            # srun's task, which is the rank unless a line has said otherwise.
            return self._rank_of.get(line.stream, int(line.stream))
        return self._rank_of.get(line.stream) if line.stream else self._default_rank

    def _traceback(self, line: Line, rank: int | None, text: str) -> None:
        key = (line.rank, line.stream)
        reading = self._open.get(key)
        self._idle = 0 if reading is not None else self._idle + 1
        if self._idle > _MOST_IDLE:
            # Their ranks have been ended in the middle of them.
            self._open.clear()
        if reading is not None and not reading.goes_on(text):
            del self._open[key]
            if reading.exception is not None:
                self._raised(rank, reading.exception)
        if tracebacks.begins(text) and len(self._open) < _MOST_OPEN:
            self._open[key] = tracebacks.Traceback()

    def _raised(self, rank: int | None, exception: ExceptionFacts) -> None:
        said = self._of(rank)
        if said is not None:
            said.raised(exception)
        elif tracebacks.is_telling(exception):
            self._starts.now.has_raised(exception)

    def _frame_of_failed(self, text: str) -> None:
        """The stack of a failed collective stands below the line that announces it, without anything before it."""
        if self._failed is None:
            return
        found = watchdog.failed_frame(text)
        if found is None:
            self._failed = None
        elif len(self._failed.stacks) < 60:
            self._failed.stacks.append(frame(*found))

    def _ends(self, text: str) -> None:
        ended = self._summary.add(text)
        for end in [*([ended] if ended else []), *launchers.srun_ended(text)]:
            said = self._of(end.rank)
            if said is not None:
                said.exit_code = said.exit_code or end.exit_code
                said.ended_first = said.ended_first or end.is_first
                said.host = said.host or end.host

    def _collective(self, rank: int | None, line: Line, text: str) -> None:
        call, standing = watchdog.timed_out(text), watchdog.standing(text)
        if rank is None:
            rank = self._rank_within(call, standing)
        said = self._of(rank)
        for awaited in watchdog.awaited(text):
            self._awaits(awaited, said, text)
        if said is None:
            return
        self._last = said
        if _FAILED_AT in text:
            self._failed = said if not said.stacks else None
        if call is not None and (call.op or not said.has_named(call.seq)):
            said.has_timed_out(call)
            said.quote(text)
        if standing is not None:
            said.stands(standing)
            said.quote(text)
        self._of_its_thread(said, text)

    def _of_its_thread(self, said: Said, text: str) -> None:
        """What becomes of the watchdog itself."""
        if error := watchdog.device_error(text):
            said.raised(ExceptionFacts(type="CUDA error", message=error))
            said.quote(text)
        if stuck := watchdog.stuck_s(text):
            said.stuck_s = max(said.stuck_s, stuck)
            said.quote(text)

    def _rank_within(self, call: watchdog.TimedOut | None, standing: watchdog.Standing | None) -> int | None:
        """Before torch 2.2 nothing but the rank within the group is said; of the default group that is the rank."""
        if standing is not None:
            return standing.rank if standing.group == DEFAULT_GROUP[0] else None
        return call.rank if call is not None else None

    def _awaits(self, awaited: watchdog.Awaited, said: Said | None, text: str) -> None:
        # A desync report is some lines below the one that says whose it is; a monitored barrier fails on rank 0.
        speaker = self._of(awaited.by) or said or self._last or self._of(0)
        if speaker is not None:
            speaker.awaited.update(rank for rank in awaited.ranks if rank != speaker.rank)
            speaker.awaited_in = speaker.awaited_in or awaited.where
            speaker.quote(text)
