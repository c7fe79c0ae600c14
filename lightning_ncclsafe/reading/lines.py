"""The lines of a log in bounded memory, without colours, and the prefixes that launchers add to them."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple

from lightning_ncclsafe.reading.values import MOST_RANKS

LONGEST_LINE = 16_384
_BLOCK = 1024 * 1024
_ENDS = re.compile(rb"[\r\n]+")
# Control sequences of terminals; also colours whose escape character was lost in copying.
_COLOURS = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[(][0-9;?]*[ -/]*[@-~]|\x1b.|(?<![\w])\[\d{1,3}(?:;\d{1,3})*m"
)
# mpirun, Horovod and SageMaker; also in the middle of a line that a process has written in pieces.
_TAG = re.compile(r"\[(?:\d+,)?(?:mpirank:)?(?P<stream>\d{1,6})(?:,algo-\d{1,6})?\]<std(?:err|out)>:")
# Any sequence of these may precede what a rank says.
_PREFIXES = (
    re.compile(r"\[?rank(?P<rank>\d+)\]?:\s?"),  # torch, since 2.2; "[rank" is sometimes lost in copying
    re.compile(r"\[(?P<stream>[a-z_]\w{0,60}?\d+)\]:\s?"),  # torchrun: role and local rank
    # srun --label; not Horovod's lists of what a rank has not reached
    re.compile(r"(?P<stream>\d{1,6}): (?!\[(?!rank\d)[\w./:-]+(?:, |\]\s*$| \.\.\.))"),
    _TAG,
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
    re.compile(r"[\w.-]{1,60}/\d{1,4} (?=\[)"),  # torchx
    re.compile(r"std(?:err|out)(?:: | [FP] )"),  # Accelerate; containers of Kubernetes
    re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP(?P<tp>\d{1,6})(?: EP\d{1,6})?\]\s?"),  # SGLang
    re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s*"),
    re.compile(r"UTC [\w.-]{1,60} -- "),  # polyaxon
    re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d+)?\s+"),
    re.compile(r"\[?(?:ERROR|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w.]{1,60}:\d+\] ?"),  # vLLM
    re.compile(r"\[\d+\] (?=\[|\(|Traceback|\s+File|$)"),  # a line's number
    re.compile(r"[|>]\s+|\s*\|\s+(?=\d{4}-)|\s+(?=[(\[]|\d{4}-|\| )"),
)
_MOST_PREFIXES = 6
_MOST_PARTS = 64
# Ranks that share a stream write line ends separately, so the next rank's line may begin in the middle of a line.
_NEXT = re.compile(
    r"(?<=.)(?=\[rank\d{1,6}\]:)|(?<=[^\s:])(?=\[[EF][ \d][^\]]{0,60}ProcessGroup)|(?<=[\w'])(?=terminate called)"
)
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


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
        stream: The stream.
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
    whole = taken_apart(line)
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
