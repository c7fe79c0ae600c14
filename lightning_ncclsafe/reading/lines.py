"""The lines of a log in bounded memory, without colours and the prefixes that launchers add, and messages in them."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import IO, Generic, NamedTuple, TypeVar

from lightning_ncclsafe.reading.values import MOST_RANKS

LONGEST_LINE = 16_384
_BLOCK = 1024 * 1024
_ENDS = re.compile(rb"[\r\n]+")
# Control sequences of terminals; also colours whose escape character was lost in copying.
_COLOURS = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[(][0-9;?]*[ -/]*[@-~]|\x1b.|(?<![\w])\[\d{1,3}(?:;\d{1,3})*m"
)
# mpirun, Horovod and SageMaker; also in the middle of a line that a process has written in pieces.
_TAG = re.compile(
    r"\[(?:[\w.-]{1,80}@)?(?:\d+,)?(?:mpirank:)?(?P<stream>\d{1,6})(?:,algo-\d{1,6})?\](?:\[[\w.-]{1,60}:\d+\])?"
    r"<std(?:err|out)>:"
)
# Any sequence of these may precede what a rank prints.
_PREFIXES = (
    # torch, since 2.2; "[rank" is sometimes lost in copying, and a launcher may write it again
    re.compile(r"\[?rank(?P<rank>\d+)\]?:\s?(?:\[rank(?P=rank)\]:\s?)*"),
    re.compile(r"\[(?P<stream>[a-z_]\w{0,60}?\d+)\]:\s?"),  # torchrun: role and local rank
    # srun --label; not Horovod's lists of what a rank has not reached
    re.compile(r"(?P<stream>\d{1,6}): (?!\[(?!rank\d)[\w./:-]+(?:, |\]\s*$| \.\.\.))"),
    _TAG,
    # journald, syslog
    re.compile(
        r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT[\d:.]{8,15}(?:Z|[+-]\d\d:?\d\d))"
        r" (?P<stream>[\w.-]{1,60} [\w.@-]{1,60}\[\d{1,8}\]): "
    ),
    re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]?\d \d\d:\d\d:\d\d \d{4}(?=\[\d)"),  # the time before that
    re.compile(r"\[(?P<stream>pod/[^\]]{1,200})\] "),  # kubectl logs --prefix
    re.compile(  # Ray, vLLM
        r"\((?P<stream>[\w.:-]{1,100}(?:\[rank=(?P<ray>\d+)\])? (?:rank=(?P<vllm>\d+) )?(?:pid|ip)=[^)]{0,100})\)\s?"
    ),
    re.compile(r"(?P<stream>\S{1,100}) \[std(?:err|out)\] "),  # milabench and others
    re.compile(r"(?P<stream>[A-Za-z][\w.-]{0,60})\s{1,3}\|\s+(?=[\[(])"),  # docker compose
    re.compile(r"(?P<stream>[A-Za-z][\w.]{0,60}-[\w.-]{1,60})\s{1,3}\|\s"),  # and its lines of any other beginning
    re.compile(
        r"(?P<stream>[a-z][a-z0-9]*(?:-[\w.-]{1,60}|\d[\w.-]{0,60})): (?=\[|Traceback|\s+File|[\w.]*Error)"
    ),  # pdsh
    re.compile(r"(?P<stream>\d{1,3}(?:\.\d{1,3}){3}): "),  # pdsh, DeepSpeed: hosts by address
    re.compile(r"[\w.-]{1,60}/\d{1,4} (?=\[)"),  # torchx
    re.compile(r"std(?:err|out)(?:: | [FP] )"),  # Accelerate; containers of Kubernetes
    re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP(?P<tp>\d{1,6})(?: EP\d{1,6})?\]\s?"),  # SGLang
    # Further spaces are a traceback's own.
    re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s?"),
    re.compile(r"UTC [\w.-]{1,60} -- "),  # polyaxon
    re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d+)?\s"),
    re.compile(r"\[?(?:ERROR|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w.]{1,60}:\d+\] ?"),  # vLLM
    re.compile(r"\[\d+\] (?=\[|\(|Traceback|\s+File|$)"),  # a line's number
    re.compile(r"\s{0,8}\d{1,6}\s{1,4}(?=\[rank\d)"),  # likewise, of an editor or a website
    re.compile(r"[|>]\s+|\s*\|\s+(?=\d{4}-)|\s+(?=[(\[]|\d{4}-|\| )"),
)
_MOST_PREFIXES = 6
_MOST_PARTS = 64
_MOST_OF_A_MESSAGE = 64
# Ranks that share a stream write line ends separately, so the next rank's line may begin in the middle of a line.
_NEXT = re.compile(
    r"(?<=.)(?=\[rank\d{1,6}\]:)|(?<=[^\s:])(?=\[[EF][ \d][^\]]{0,60}ProcessGroup)|(?<=[\w'])(?=terminate called)"
)
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


# Docker, Datadog, Fluent Bit, Google Cloud
_WRAPPED_IN = ("message", "log", "msg", "textPayload")
_WRITERS = ("pod_name", "pod", "host", "hostname")


class Line(NamedTuple):
    """A line.

    Attributes:
        rank: Global rank that wrote it, by its prefix; None if it has none.
        stream: Another part of the prefix, the same for all lines of one process; may be empty.
        text: The line without that.
    """

    rank: int | None
    stream: str
    text: str


def lines(stream: IO[bytes], most: int, wanted: Callable[[bytes], bool] = lambda _: True) -> Iterator[bytes]:
    """The lines of a stream, in pieces if they are too long; the carriage returns of progress bars end lines, too.

    Args:
        most: After how many bytes to stop.
        wanted: Called with each block; the lines of blocks that it refuses are left out.
    """
    rest, read = b"", 0
    decoder: codecs.IncrementalDecoder | None = None
    while read < most and (block := stream.read(_BLOCK)):
        decoder = _decoder(block) if not read else decoder
        read += len(block)
        block = rest + (decoder.decode(block).encode("utf-8", "replace") if decoder else block)
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        whole, rest = block[:end], block[end:]
        if whole and wanted(whole):
            yield from (line[:LONGEST_LINE] for line in _ENDS.split(whole) if line)
        while len(rest) > LONGEST_LINE:
            # Nothing is dropped: the end of a progress bar's line may hold more than the bar.
            wanted(rest)
            yield rest[:LONGEST_LINE]
            rest = rest[LONGEST_LINE:]
    if rest:
        wanted(rest)
        yield rest[:LONGEST_LINE]


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    """A decoder for UTF-16, which some shells on Windows write; None for anything else."""
    name = _UTF_16.get(head[:2])
    return codecs.getincrementaldecoder(name)("replace") if name else None


def telling(text: bytes, words: Iterable[bytes]) -> tuple[bytes, ...]:
    """Which of these words occur in one or more lines."""
    return tuple(word for word in words if word in text)


def parts(line: bytes) -> list[Line]:
    """A line without prefixes; one part per rank if several ranks have written into it."""
    if line[:2] == b'{"' and (wrapped := _wrapped(line)) is not None:
        stream, text = wrapped
        inner = (part for one in text.splitlines() for part in _parts(_stripped(_COLOURS.sub("", one))))
        return [part if part.stream else part._replace(stream=stream) for part in inner]
    return _parts(taken_apart(line))


def _wrapped(line: bytes) -> tuple[str, str] | None:
    """Who wrote a line, and the line, which collectors of logs have put into JSON; None if it is something else."""
    with suppress(ValueError, RecursionError):
        data = json.loads(line)
        said = next((data[key] for key in _WRAPPED_IN if isinstance(data.get(key), str)), None)
        if said is not None:
            # With the key, as a host's name may be a number, or end in one like a launcher's label, and is no rank.
            return next((f"{key} {data[key][:60]}" for key in _WRITERS if isinstance(data.get(key), str)), ""), said
    return None


def _parts(whole: Line) -> list[Line]:
    if whole.text.count("[") < 2 and "terminate called" not in whole.text:
        return [whole]
    first, *others = _NEXT.split(whole.text, maxsplit=_MOST_PARTS)
    return [whole._replace(text=first), *(_stripped(other)._replace(stream=whole.stream) for other in others)]


def taken_apart(line: bytes) -> Line:
    """A line without colours and prefixes."""
    return _stripped(_COLOURS.sub("", line.decode("utf-8", "replace")))


def _stripped(text: str) -> Line:
    rank: int | None = None
    stream, position = "", 0
    for _ in range(_MOST_PREFIXES):
        match = next((found for prefix in _PREFIXES if (found := prefix.match(text, position))), None)
        if match is None or not match.group():
            break
        position = match.end()
        if match.re is _TAG:
            text = text[:position] + text[position:].replace(match.group(), "")
        said = match.groupdict()
        stream = stream or said.get("stream") or ""
        rank = _rank(said.get("rank") or said.get("ray") or said.get("vllm") or said.get("tp"), rank)
        if said.get("rank"):
            break
    return Line(rank, stream, text[position:])


def _rank(said: str | None, otherwise: int | None) -> int | None:
    return int(said) if said and len(said) < 8 and int(said) < MOST_RANKS else otherwise


_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Message(Generic[_Kind]):
    """Messages of one form.

    Attributes:
        kind: What it means.
        word: A word in all of them, which is searched for before the pattern is tried.
        pattern: The pattern, with named groups.
        words: The details, with the groups: ``"rank {rank} has {count}"``.
        code: The exit code that they stand for; None if a group gives it, or if it is unknown.
    """

    kind: _Kind
    word: str
    pattern: re.Pattern[str]
    words: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Found(Generic[_Kind]):
    """A message in a line: its details, and its groups, which are empty if absent."""

    message: Message[_Kind]
    words: str
    groups: dict[str, str]

    def of(self, *names: str) -> list[str]:
        """The values of the groups of these names that are present."""
        return [self.groups[name] for name in names if self.groups.get(name)]


def message(kind: _Kind, word: str, pattern: str, words: str = "", code: int | None = None) -> Message[_Kind]:
    """An entry of a table of messages."""
    return Message(kind, word, re.compile(pattern), words, code)


def found_in(text: str, messages: Iterable[Message[_Kind]]) -> Iterator[Found[_Kind]]:
    """The messages of a table that a line holds; one of several ranks may hold a message for each."""
    for one in messages:
        for found in islice(one.pattern.finditer(text), _MOST_OF_A_MESSAGE) if one.word in text else ():
            groups = {name: (said or "").strip() for name, said in found.groupdict().items()}
            yield Found(one, one.words.format(**groups), groups)


class Unread:
    """Lines that look like errors of unknown formats: their number, and some examples."""

    _ALARM = re.compile(
        r"\[[EF][ \d][^\]]{0,80}\.(?:cpp|hpp|cu):\d+\]|NCCL WARN|[RHX]CCL (?:WARN|ERROR)"
        r"|Dist(?:Backend|Store|Network)Error|\[ERROR\].{0,80}(?:rank|device|collective)|terminated by signal|MPI_ABORT"
        r"|libfabric|NET/\w+ .{0,80}error"
    )
    _SAYS_NO_MORE = re.compile(
        r"Some NCCL operations|To avoid (?:data|this) inconsistency|Exception raised from|Stack trace of the failed"
        r"|debug info|dump signal|Terminating the process|First PG on this rank|terminate called|ncclInvalidUsage"
        r"|flight recorder|timed out in blocking wait|watchdog got stuck|NCCL (?:operations|error)"
        r"|ProcessGroupNCCL\.cpp:\d+\] Rank \d+$|Failed to execute operation|Socket recv failed"
        r"|Error encountered progressing|successfully reached|poll for socket"
    )
    _MOST = 3

    def __init__(self) -> None:
        self._count = 0
        self._lines: dict[str, str] = {}

    def add(self, text: str) -> None:
        """Counts a line if it looks like an error; of lines that differ in numbers only, the first is an example."""
        head = text[:1000]
        if self._ALARM.search(head) and not self._SAYS_NO_MORE.search(text[:2000]):
            self._count += 1
            if len(self._lines) < self._MOST:
                self._lines.setdefault(re.sub(r"\d+", "0", head[:80]), head.strip()[:160])

    @property
    def sentences(self) -> Iterable[str]:
        """One sentence, or none."""
        if self._count:
            shown = "; ".join(f'"{line}"' for line in self._lines.values())
            what = "1 line looks like an error" if self._count == 1 else f"{self._count:,} lines look like errors"
            yield f"{what} in a format that is not known, such as: {shown}."
