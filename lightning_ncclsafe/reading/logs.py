"""Logs of any launcher, of one rank or of all: what they say about each rank becomes its facts."""

import re
import zlib
from typing import IO

from lightning_ncclsafe.facts import ExceptionFacts, LogFacts, Statement, StatementKind
from lightning_ncclsafe.facts.recorded import SET_UP
from lightning_ncclsafe.reading import process_ids, starts, statements, tracebacks, watchdog
from lightning_ncclsafe.reading.bars import LastBar, works_on
from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.reading.lines import Line, Unread, lines, parts, telling
from lightning_ncclsafe.reading.process_ids import ProcessIds
from lightning_ncclsafe.reading.rank_log import RankLog
from lightning_ncclsafe.reading.starts import (
    RANKS_OF_A_HOST,
    Starts,
    Summary,
    begins_trainer,
    finished,
    has_started,
    launcher_remark,
    loses_store,
    of_agents,
    of_hosts,
    srun_ended,
    starts_again,
)
from lightning_ncclsafe.reading.statements import Statements, ended_child
from lightning_ncclsafe.reading.tracebacks import RankException, Tracebacks
from lightning_ncclsafe.reading.values import MOST_RANKS, ReadingError, frame, whole

# Every useful line has one of these words; most lines, and most megabytes, have none.
_WORDS = {*process_ids.WORDS, *starts.WORDS, *statements.WORDS, *tracebacks.WORDS, *watchdog.WORDS}
_TELLING = tuple(word.encode() for word in sorted(_WORDS) if not any(one in word and one != word for one in _WORDS))
_MOST_REMARKS = 8
_MOST_BROKEN = 3
_STARTS = "The run was started several times: this is the last start in which anything waits or fails."
# A watchdog's lines end with a full stop or a number.
_WITHIN = re.compile(rb"ProcessGroupNCCL\.cpp:\d+\][^\n]*[A-Za-z]$")
_COLOURS = re.compile(rb"\x1b\[[\d;]{0,20}m")
_LONGEST_TAIL = 2000
_SOON = 8
_OF_COLLECTIVES = ("NCCL", "arrier", "collective", "watchdog", "crash on rank")
_FAILED_AT = "Stack trace of the failed collective"
_PID = re.compile(r"\bpid=(\d+)")
# torchrun's role and local rank
_LOCAL = re.compile(r"[a-z_]+(\d{1,6})")
_RAY_PID = re.compile(r"Worker PID: (\d+)")


class Log:
    """All logs of a job, read line by line.

    Attributes:
        remarks: What was said about no rank in particular, one sentence each.
    """

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self.unread = Unread()
        self._starts = Starts()
        self._tracebacks = Tracebacks()
        self._rank_of: dict[str, int | None] = {}
        self._processes = ProcessIds()
        self._broken: list[str] = []
        self._broken_of: int | None = None
        self._failed: RankLog | None = None
        self._last: RankLog | None = None
        self._summary = Summary()
        self._statements = Statements()
        self._report = watchdog.DesyncReport()
        self._file = _File(None)
        self._is_cut = False
        self._gave_up_pids: set[str] = set()
        self._words: tuple[bytes, ...] = ()

    def read(self, stream: IO[bytes], most: int, rank: int | None = None, start: int = 0) -> None:
        """Reads a log.

        Args:
            most: After how many bytes to stop.
            rank: The rank in its name, which is ignored if a line says otherwise.
            start: Number of the start of the run with which it begins.

        Raises:
            ReadingError: If it is compressed, and damaged; what comes before that has been read.
        """
        self._file = _File(rank)
        self._starts.begin(start)
        self._tracebacks.begin()
        try:
            for line in lines(stream, most, self._wants_block):
                self._file.line += 1
                self._file.last = line
                self._is_cut |= _leaves_out(line)
                self._file.bar.read(line, self._file.line)
                if self._wants(line):
                    for part in parts(line):
                        self._add(part)
                    if self._file.spoke_at or self._starts.now.limits_s:
                        self._file.bar.move(self._starts.now.bars, self._file.line)
        except (EOFError, zlib.error, OSError) as error:
            raise ReadingError(f"only part of it could be read ({error})") from error
        finally:
            self._ends_file()

    def _wants_block(self, block: bytes) -> bool:
        self._words = telling(block, _TELLING)
        return bool(self._words) or self._wants(block)

    def _wants(self, text: bytes) -> bool:
        if self._tracebacks.is_open or self._broken or self._failed or self._statements.is_open:
            return True
        return bool(telling(text, self._words)) or (self._file.spoke_at > 0 and b"%|" in text)

    def _ends_file(self) -> None:
        for statement in self._statements.flush():
            self._starts.now.add_statement(statement)
        for one in self._tracebacks.flush():
            self._raised(one)
        if self._tracebacks.child is not None:
            # The end of its traceback is missing.
            self._starts.now.add_statement(ended_child(self._tracebacks.child))
        self._is_cut |= self._file.is_cut or (self._file.spoke_at > 0 and self._tracebacks.ends_within)
        rank_log = self._of(self._file.rank) if self._tracebacks.nameless else None
        for exception in self._tracebacks.nameless:
            if rank_log is not None:
                rank_log.add_exception(exception)
            elif tracebacks.is_telling(exception):
                self._starts.now.add_exception(exception)

    def rank_logs(self) -> tuple[RankLog, ...]:
        """What was said about each rank, by rank, without ranks that only showed that they were alive.

        If the run was started several times, the last start with any finding counts.
        """
        return tuple(one for _, one in sorted(self._settled().items()) if one.has_finding)

    def _settled(self) -> dict[int, RankLog]:
        return self._starts.last.settled(has_agents=self._starts.has_agents, has_hosts=self._starts.has_hosts)

    @property
    def unnamed(self) -> tuple[ExceptionFacts, ...]:
        """Exceptions of unknown ranks in that start; at most one if all are consequences."""
        found = self._starts.last.unnamed
        return tuple(one for one in found if not one.is_consequence) or tuple(found[:1])

    @property
    def world_size(self) -> int:
        """The number of ranks, if a log gives it; 0 otherwise."""
        return self._starts.world_size

    @property
    def facts(self) -> LogFacts:
        """What was said about that start beyond single ranks."""
        rank_logs, start = self._settled(), self._starts.last
        return LogFacts(
            statements=tuple(one for one in start.statements if not self._has_ended_itself(one)),
            works_on=works_on(start.bars, start.limits_s),
            is_cut=self._is_cut,
            spoke=tuple(sorted(rank for rank, one in rank_logs.items() if not one.has_finding)),
            lost_store=tuple(sorted(start.lost_store)),
            finished=(start if start.has_finding else self._starts.now).finished,
        )

    def _has_ended_itself(self, statement: Statement) -> bool:
        """Whether a process that died had given up waiting before."""
        pid = _RAY_PID.search(statement.line)
        return statement.kind is StatementKind.ENDED and pid is not None and pid[1] in self._gave_up_pids

    def _start_again(self) -> None:
        self._starts.again()
        if _STARTS not in self.remarks:
            self.remarks.append(_STARTS)
        self._last, self._failed = None, None
        self._processes = ProcessIds()

    def _has_next_start(self, text: str) -> bool:
        """Whether the run starts again here; rank 0 announces it for all ranks only in a log of all."""
        if starts_again(text):
            return True
        return has_started(text) and self._file.rank is None and self._starts.now.has_finding

    def _of(self, rank: int | None) -> RankLog | None:
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
        self._processes.read(text)
        rank = self._speaker(line)
        rank = self._processes.rank_by(text) if rank is None else rank
        is_read = self._exceptions(line, rank, text)
        is_read |= self._of_the_job(line, text)
        is_read |= self._begins_or_ends_regularly(rank, text)
        is_read |= self._stated(rank, text)
        is_read |= self._reported(rank, text)
        if any(word in text for word in _OF_COLLECTIVES):
            is_read |= self._collective(rank, line, text)
        if not is_read and not self._broken:
            self.unread.add(text)

    def _of_the_job(self, line: Line, text: str) -> bool:
        """Reads what is said about all ranks, or by a launcher; whether a process ended."""
        self._frame_of_failed(text)
        if size := watchdog.world_size(text):
            self._starts.note_size(size)
        if of_agents(text):
            self._starts.has_agents = True
            # srun's task of another launcher than the first
            self._starts.has_hosts |= line.stream.isdecimal() and whole(line.stream) > 0
        self._starts.has_hosts |= of_hosts(text)
        remark = launcher_remark(text)
        if remark and len(self.remarks) < _MOST_REMARKS and remark not in self.remarks:
            self.remarks.append(remark)
        return self._ends(text)

    def _begins_or_ends_regularly(self, rank: int | None, text: str) -> bool:
        """Reads what is also said where nothing is wrong; whether a call of the Trainer begins."""
        begins = begins_trainer(text)
        self._starts.now.finished = "" if begins else finished(text) or self._starts.now.finished
        if rank is not None and rank < MOST_RANKS and loses_store(text):
            self._starts.now.lost_store.add(rank)
        return begins

    def _stated(self, rank: int | None, text: str) -> bool:
        statements = list(self._statements.read(text, rank, self._processes.rank_of))
        for statement in statements:
            if self._follows_from_timeout(statement):
                continue
            self._starts.now.add_statement(statement)
            if statement.kind is StatementKind.ENDED:
                # This is a launcher's log of all ranks.
                self._file.rank = None
        if "Completed store-based barrier" in text:
            self._starts.now.note_all_joined()
        return bool(statements)

    def _follows_from_timeout(self, statement: Statement) -> bool:
        """Whether a rank compares what a collective has left that its watchdog had given up."""
        if statement.kind is not StatementKind.OTHER_MODEL:
            return False
        by = self._of(statement.by)
        return by is not None and (by.has_given_up or any(one.seq for one in by.standings.values()))

    def _whole_line(self, line: Line) -> str:
        """The text, joined with the lines before it if a terminal has broken the line."""
        text = "".join([*self._broken, line.text.rstrip("\n")])
        if watchdog.is_broken(text) and len(self._broken) < _MOST_BROKEN:
            # The first part is read at once, as what follows may be another line.
            if not self._broken:
                self._broken_of = line.rank
            self._broken.append(line.text)
        else:
            self._broken.clear()
        return text

    def _speaker(self, line: Line) -> int | None:
        if line.rank is not None:
            if line.stream and self._rank_of.setdefault(line.stream, line.rank) != line.rank:
                # It is that of a host, or of a launcher.
                self._rank_of[line.stream] = None
            local = _LOCAL.fullmatch(line.stream)
            self._starts.has_hosts |= local is not None and whole(local[1]) != line.rank
            self._file.speaks(line.rank)
            return line.rank
        if line.stream.isdecimal():
            # The number is srun's task, which is the rank unless torchrun has started the ranks.
            return self._rank_of.get(line.stream, None if self._starts.has_agents else int(line.stream))
        return self._rank_of.get(line.stream) if line.stream else None

    def _exceptions(self, line: Line, rank: int | None, text: str) -> bool:
        """Keeps the exception that ends with this line; whether the line is about an exception."""
        has_numbers = self._starts.world_size <= RANKS_OF_A_HOST and not self._starts.has_hosts
        found, is_read = self._tracebacks.read(line, rank, text, has_numbers=has_numbers)
        for one in found:
            self._raised(one)
        return is_read

    def _raised(self, one: RankException) -> None:
        rank_log = self._of(one.rank)
        if rank_log is not None:
            rank_log.add_exception(one.exception)
        else:
            self._tracebacks.keep(one.exception)

    def _frame_of_failed(self, text: str) -> None:
        """Reads the stack of a failed collective, which follows the line that announces it, without prefixes."""
        if self._failed is None:
            return
        found = watchdog.failed_frame(text)
        if found is None:
            self._failed = None
        elif len(self._failed.stacks) < 60:
            self._failed.stacks.append(frame(*found))

    def _ends(self, text: str) -> bool:
        ends, tasks = self._summary.add(text), srun_ended(text)
        for end in ends:
            rank_log = self._of(end.rank)
            self._file.speaks(end.rank)
            if rank_log is not None:
                rank_log.add_end(end)
        for task in tasks:
            self._starts.now.add_task(task)
            self._file.speaks(task.rank)
        return bool(ends or tasks)

    def _collective(self, rank: int | None, line: Line, text: str) -> bool:
        call, standing = watchdog.timed_out(text), watchdog.standing(text)
        if rank is None:
            rank = self._rank_within(call, standing, text)
        rank_log = self._of(rank)
        is_read = False
        for awaited in watchdog.awaited(text):
            self._awaits(awaited, rank_log, text)
            is_read = True
        if rank_log is None:
            error = watchdog.device_error(text)
            if error:
                self._raised(self._tracebacks.owned(None, ExceptionFacts(type="CUDA error", message=error)))
            return is_read or bool(error) or call is not None
        self._last = rank_log
        self._file.speaks(rank_log.rank)
        if _FAILED_AT in text:
            self._failed = rank_log if not rank_log.stacks else None
        if call is not None and (call.op or not rank_log.has_named(call.seq)):
            self._add_timeout(rank_log, call, line, text)
        if standing is not None:
            rank_log.add_standing(standing)
            rank_log.quote(text)
            self._file.took_at = self._file.line
        return self._of_its_thread(rank_log, text) or is_read or call is not None or standing is not None

    def _add_timeout(self, rank_log: RankLog, call: watchdog.TimedOut, line: Line, text: str) -> None:
        if not rank_log.timeouts:
            self._file.spoke_at = self._file.line
        if pid := _PID.search(line.stream):
            self._gave_up_pids.add(pid[1])
        if call.timeout_ms and call.ran_ms:
            self._starts.now.add_limit(call.timeout_ms / 1e3)
        rank_log.add_timeout(call)
        rank_log.quote(text)

    def _of_its_thread(self, rank_log: RankLog, text: str) -> bool:
        """Reads what happened to the watchdog itself; whether the line is about that."""
        error, lost, stuck = watchdog.device_error(text), watchdog.backend_error(text), watchdog.stuck_s(text)
        if error:
            follows = tracebacks.is_consequence("CUDA error", error)
            rank_log.add_exception(ExceptionFacts(type="CUDA error", message=error, is_consequence=follows))
        if lost:
            rank_log.add_exception(ExceptionFacts(type="NCCL error", message=lost, is_consequence=True))
        if stuck and not rank_log.has_given_up:
            rank_log.stuck_s = max(rank_log.stuck_s, stuck)
        if watchdog.has_timed_out_elsewhere(text):
            rank_log.add_timeout_elsewhere()
        if error or lost or stuck:
            rank_log.quote(text)
            return True
        return False

    def _rank_within(self, call: watchdog.TimedOut | None, standing: watchdog.Standing | None, text: str) -> int | None:
        """The global rank if a line gives only that within the group (before torch 2.2): known in the default group."""
        if standing is not None:
            return standing.rank if standing.group == DEFAULT_GROUP[0] else None
        return call.rank if call is not None else watchdog.ended_rank(text)

    def _reported(self, rank: int | None, text: str) -> bool:
        """Reads what a desync report says of all ranks; whether the line says that."""
        reported = self._report.read(text)
        speaker = (self._of(rank) or self._last) if reported is not None else None
        # Its numbers are those within the group: a rank with another one of its own is in a group of some ranks.
        if reported is not None and speaker is not None and reported.by in (None, speaker.rank):
            self._starts.now.add_report(speaker, reported)
            speaker.quote(text)
        return reported is not None

    def _awaits(self, awaited: watchdog.Awaited, rank_log: RankLog | None, text: str) -> None:
        # A desync report follows some lines after the rank that wrote it; a monitored barrier fails on rank 0.
        speaker = self._of(awaited.by) or rank_log or self._last or self._of(0)
        if speaker is not None and awaited.ranks == (speaker.rank,) and awaited.where != SET_UP:
            # Nobody waits for itself: another rank has written this.
            detail = f"others have waited for it in {awaited.where}, according to PyTorch"
            said = Statement(kind=StatementKind.ABSENT, ranks=awaited.ranks, detail=detail, line=text.strip()[:300])
            self._starts.now.add_statement(said)
        elif speaker is not None:
            speaker.awaited.update(rank for rank in awaited.ranks if rank != speaker.rank)
            speaker.awaited_in = speaker.awaited_in or awaited.where
            speaker.quote(text)


class _File:
    """The file that is being read.

    Attributes:
        rank: The rank in its name, until a line says otherwise.
        line: Number of the line, from 1.
        last: That line.
        spoke_at: The line in which a rank last reported a timeout for the first time; 0 if none has.
        took_at: The last line that gave a rank's position.
        bar: The last progress bar.
    """

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.line = 0
        self.last = b""
        self.spoke_at = 0
        self.took_at = 0
        self.bar = LastBar()

    def speaks(self, rank: int) -> None:
        """A line was written by this rank."""
        if self.rank is not None and rank != self.rank:
            self.rank = None

    @property
    def is_cut(self) -> bool:
        """Whether no whole line follows the one in which a rank last reported for the first time.

        Or the log ends soon after it, within a watchdog's line, so that other reports may be missing.
        """
        if not self.spoke_at:
            return False
        tail = _COLOURS.sub(b"", self.last[-_LONGEST_TAIL:]).rstrip()
        is_open = b"ProcessGroupNCCL.cpp:" in tail and tail.count(b"[") > tail.count(b"]")
        ends_within = is_open or _WITHIN.search(tail) is not None
        return self.spoke_at >= max(self.line - 1, self.took_at) or (ends_within and self.line - self.spoke_at <= _SOON)


def _leaves_out(line: bytes) -> bool:
    """Whether a line replaces others: three dots, or Ray's count of equal lines."""
    return (len(line) < 40 and b"..." in line and not line.strip(b" .[]>#|")) or b"x across cluster]" in line
