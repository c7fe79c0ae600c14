"""The contents of paths: one job from all dumps and logs, each report by itself, and one error for each bad file."""

import gc
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from lightning_ncclsafe.facts import JobFacts, RankFacts, RecordFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.reading.dumps import (
    MOST_BYTES,
    MOST_CONTAINERS,
    from_json,
    from_pickle,
    is_dump,
    rank_of,
    read_dump,
)
from lightning_ncclsafe.reading.files import MOST_UNPACKED, FileKind, Source, content, found, opened
from lightning_ncclsafe.reading.groups import Places, common_names, complete, groups_of
from lightning_ncclsafe.reading.logs import Log
from lightning_ncclsafe.reading.merging import job_of, later, renamed
from lightning_ncclsafe.reading.runs import Apart, apart
from lightning_ncclsafe.reading.values import ReadingError, whole
from lightning_ncclsafe.recorder.model import MOST_ENTRIES
from lightning_ncclsafe.report.json import ReportError, read_report

STANDARD_INPUT = "-"
_REPORT = "report.json"
_RANK_IN_NAME = re.compile(
    r"((?:.{0,200}[^a-z0-9])?rank[-_.]?)(?P<rank>\d{1,6})((?:[^a-z0-9].{0,200})?)", re.IGNORECASE
)
_ATTEMPT = re.compile(r"[/\\]attempt_(\d{1,6})[/\\]")
# These say the same as the report.json beside them.
_IN_WORDS = ("report.txt", "report.html")

MOST_REPORT_BYTES = 1024 * 1024 * 1024
"""The largest report that is read; a report of 16,384 ranks has about half of that."""
MOST_REPORT_CONTAINERS = 20_000_000


@dataclass(slots=True)
class Artifacts:
    """What was read.

    Attributes:
        dumps: Facts from dumps, by rank.
        log: The contents of all logs.
        reports: Path and content of each report.
        errors: One sentence for each file that could not be read.
        missing: What was read only in part, one sentence each.
        files: Files of which something was read.
    """

    dumps: dict[int, RankFacts] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    reports: list[tuple[str, Diagnosis]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    files: int = 0
    _paths: dict[int, str] = field(default_factory=dict)
    _twice: dict[int, tuple[str, str]] = field(default_factory=dict)
    _places: dict[int, Places] = field(default_factory=dict)
    _cut: dict[int, int] = field(default_factory=dict)
    _unknown_backends: set[str] = field(default_factory=set)

    def read(self, path: str) -> None:
        """Reads a file, all that is in a folder, or with ``"-"`` a log from standard input."""
        # Hardly any of millions of small objects is garbage, but Python would search them all for it repeatedly.
        was_on = gc.isenabled()
        gc.disable()
        try:
            self._read_path(path)
        finally:
            if was_on:
                gc.enable()

    def _read_path(self, path: str) -> None:
        try:
            if path == STANDARD_INPUT:
                self._read_log(Source(path=path, kind=FileKind.TEXT))
                return
            for source in found(path):
                self._try(source)
        except (ReadingError, OSError) as error:
            self.errors.append(f"{path}: {_words(error)}")

    def add_dump(self, path: str, dump: dict[Any, Any]) -> None:
        """Takes a dump that was read already.

        Args:
            path: Its path; the name has the rank that wrote it.

        Raises:
            ReadingError: If the name does not say so.
        """
        rank = rank_of(path)
        if rank is None:
            raise ReadingError("its name does not say which rank wrote it: end it with the rank, as in trace_3")
        found = read_dump(dump, rank)
        facts = found.facts
        self.files += 1
        self._unknown_backends.update(found.unknown_backends)
        if found.left_out:
            self._cut[rank] = found.left_out
        if rank in self._paths:
            self._places.pop(rank, None)
        else:
            self._places[rank] = found.places
        if rank in self.dumps:
            facts, both = later(self.dumps[rank], facts)
            if both:
                self._twice[rank] = (self._paths[rank], path)
        self.dumps[rank] = facts
        self._paths[rank] = path

    def job(self) -> JobFacts | None:
        """The job that dumps and logs are about; None if they contain nothing."""
        rank_logs, log, unread = self.log.rank_logs(), self.log.facts, tuple(self.log.unread.sentences)
        if not (self.dumps or rank_logs or self.log.unnamed or log.statements or unread):
            return None
        dumps = self._completed_dumps()
        left_out = apart(dumps)
        return job_of(
            {rank: _marked(facts, left_out) for rank, facts in dumps.items() if rank not in left_out.ranks},
            rank_logs,
            self.log.world_size,
            unnamed=self.log.unnamed,
            missing=(*left_out.reasons, *self._of_two(), *self._cut_short(), *self.missing, *self.log.remarks, *unread),
            outdated=left_out.older,
            left_out=sorted(left_out.ranks.difference(left_out.older)),
            log=log,
        )

    def _completed_dumps(self) -> dict[int, RankFacts]:
        """The dumps, completed by each other: the group that a position belongs to, and one name for each group."""
        dumps = dict(self.dumps)
        if complete(self._places.values()):
            for rank, places in self._places.items():
                dumps[rank] = replace(dumps[rank], groups=groups_of(places))
        mixed = set().union(*(places.mixed for places in self._places.values()))
        for rank, places in self._places.items():
            if mixed and _has_nothing_open(dumps[rank]) and places.is_even_but_for(mixed):
                dumps[rank] = replace(dumps[rank], record=replace(dumps[rank].record or RecordFacts(), is_idle=True))
        for rank, names in common_names(self._places).items():
            dumps[rank] = renamed(dumps[rank], names)
        return dumps

    def _cut_short(self) -> Iterator[str]:
        if self._cut:
            yield (
                f"The recorders of {ranks_words(self._cut)} kept more than {MOST_ENTRIES:,} entries: the newest were "
                "read."
            )
        if self._unknown_backends:
            yield (
                f"How the back end {', '.join(sorted(self._unknown_backends))} records the end of a collective is not "
                "known: it is read as gloo's."
            )

    def _of_two(self) -> Iterator[str]:
        if self._twice:
            one, other = next(iter(self._twice.values()))
            yield f"There are two dumps of {ranks_words(self._twice)}, {one} and {other}: the later one is used."

    def _try(self, source: Source) -> None:
        try:
            self._read(source)
        except (ReadingError, OSError) as error:
            if source.named or _is_expected(source):
                self.errors.append(f"{source.path}: {_words(error)}")

    def _read(self, source: Source) -> None:
        if source.kind is FileKind.PICKLE:
            self.add_dump(source.path, from_pickle(content(source, MOST_BYTES)))
        elif source.kind in (FileKind.JSON, FileKind.REPORT):
            self._read_json(source)
        elif source.kind is FileKind.TEXT:
            self._read_log(source)
        else:
            raise ReadingError("it is neither a dump, nor a report, nor a log")

    def _read_json(self, source: Source) -> None:
        is_large = source.kind is FileKind.REPORT or os.path.basename(source.path) == _REPORT
        try:
            data = content(source, MOST_REPORT_BYTES if is_large else MOST_BYTES)
            plain = from_json(data, MOST_REPORT_CONTAINERS if is_large else MOST_CONTAINERS)
        except ReadingError:
            if source.path.removesuffix(".gz").endswith(".json"):
                raise
            # A log whose first line is a dictionary.
            self._read_log(source)
            return
        if isinstance(plain, dict) and plain.keys() >= {"schema", "findings"}:
            self.reports.append((source.path, _report(data)))
            self.files += 1
        elif isinstance(plain, dict) and is_dump(plain):
            self.add_dump(source.path, plain)
        elif source.named:
            raise ReadingError("it is JSON, but neither a dump of PyTorch's Flight Recorder nor a report")

    def _read_log(self, source: Source) -> None:
        if not source.named and os.path.basename(source.path) in _IN_WORDS:
            return
        if source.path == STANDARD_INPUT:
            self.log.read(sys.stdin.buffer, MOST_UNPACKED)
        else:
            self._read_log_file(source)
        self.files += 1

    def _read_log_file(self, source: Source) -> None:
        with opened(source) as stream:
            most = MOST_UNPACKED if source.packed else sys.maxsize
            self.log.read(stream, most, _rank_in_name(source.path), _attempt_in_name(source.path))
            if source.packed and stream.read(1):
                self.missing.append(
                    f"Only the first {MOST_UNPACKED / 1024**3:.1f} GiB of {source.path}, unpacked, were read."
                )


def _marked(facts: RankFacts, left_out: Apart) -> RankFacts:
    """The facts; those of a doubtful dump say so."""
    if facts.rank not in left_out.doubtful or facts.record is None:
        return facts
    return replace(facts, record=replace(facts.record, is_doubtful=True))


def _has_nothing_open(facts: RankFacts) -> bool:
    is_empty = facts.record is None or facts.record.is_empty
    return not is_empty and all(call.completed for call in facts.collectives)


def _is_expected(source: Source) -> bool:
    """Other data in the same folder is no error; a dump has its rank in its name."""
    name = os.path.basename(source.path)
    return source.kind is FileKind.TEXT or name == _REPORT or rank_of(name) is not None


def _rank_in_name(path: str) -> int | None:
    """The rank in the name of a log, if other logs beside it have the same name with other numbers: ``rank_3.log``.

    A single name may describe the log instead: ``8ranks.log``, ``hang-of-rank3.log``.
    """
    folder, name = os.path.split(path)
    found = _RANK_IN_NAME.fullmatch(name)
    return whole(found["rank"]) if found and len(_numbered(folder).get((found[1], found[3]), ())) > 1 else None


@lru_cache(maxsize=4)
def _numbered(folder: str) -> dict[tuple[str, str], set[str]]:
    """The numbers in the names of logs, by the parts of the names before and after the numbers."""
    alike: dict[tuple[str, str], set[str]] = defaultdict(set)
    with suppress(OSError):
        for found in filter(None, map(_RANK_IN_NAME.fullmatch, os.listdir(folder or os.curdir))):
            alike[found[1], found[3]].add(found["rank"])
    return alike


def _attempt_in_name(path: str) -> int:
    """torchrun has a folder for each start: ``run/attempt_1/3/stderr.log``."""
    found = _ATTEMPT.search(path)
    return int(found[1]) if found else 0


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _report(data: bytes) -> Diagnosis:
    """The diagnosis in a report.

    Raises:
        ReadingError: If it is damaged, or was written by another version.
    """
    try:
        return read_report(data)
    except ReportError as error:
        raise ReadingError(str(error).rstrip(".")) from error
