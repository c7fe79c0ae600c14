"""A log's lines in bounded memory, without the colours, and what launchers put before each of them."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple

from lightning_ncclsafe.reading.values import MOST_RANKS

LONGEST_LINE = 16_384
_BLOCK = 1024 * 1024
_ENDS = re.compile(rb"[\r\n]+")
# Whatever tells a terminal something; where the escape itself was lost in copying, colours.
_COLOURS = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[(][0-9;?]*[ -/]*[@-~]|\x1b.|(?<![\w])\[\d{1,3}(?:;\d{1,3})*m"
)
# mpirun, Horovod and SageMaker. Where a process writes a line in pieces, it stands in the middle of that as well.
_TAG = re.compile(r"\[(?:\d+,)?(?:mpirank:)?(?P<stream>\d{1,6})(?:,algo-\d{1,6})?\]<std(?:err|out)>:")
# One after the other, any of these may stand before what a rank says.
_PREFIXES = (
    re.compile(r"\[?rank(?P<rank>\d+)\]?:\s?"),  # torch, since 2.2; "[rank" is sometimes lost in copying
    re.compile(r"\[(?P<stream>[a-z_]\w{0,60}?\d+)\]:\s?"),  # torchrun: role and local rank
    # srun --label; not Horovod's lists of what a rank has not come to
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
# Ranks that share a stream write the ends of their lines apart from these: the next one's may begin in the middle.
_NEXT = re.compile(
    r"(?<=.)(?=\[rank\d{1,6}\]:)|(?<=[^\s:])(?=\[[EF][ \d][^\]]{0,60}ProcessGroup)|(?<=[\w'])(?=terminate called)"
)
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class Line(NamedTuple):
    """A line.

    Attributes:
        rank: Global rank that says it, by what stands before it; None where nothing does.
        stream: What else stands before it and is the same for all lines of one process; may be empty.
        text: The line without that.
    """

    rank: int | None
    stream: str
    text: str


def lines(stream: IO[bytes], most: int, wanted: Callable[[bytes], bool] = lambda _: True) -> Iterator[bytes]:
    """The lines of a stream, also of one without any ends of lines; those of progress bars end where these go back.

    Args:
        stream: The stream.
        most: After how many bytes to stop.
        wanted: Asked of each block before its lines are given; those of blocks that it does not want are left out.
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
            # What follows a progress bar is its last part, so nothing is thrown away.
            wanted(rest)
            yield rest[:LONGEST_LINE]
            rest = rest[LONGEST_LINE:]
    if rest:
        wanted(rest)
        yield rest[:LONGEST_LINE]


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    """Of UTF-16, as some shells of Windows write it; None for all else."""
    name = _UTF_16.get(head[:2])
    return codecs.getincrementaldecoder(name)("replace") if name else None


def telling(text: bytes, words: Iterable[bytes]) -> tuple[bytes, ...]:
    """Which of these words stand in a line, or in many of them."""
    return tuple(word for word in words if word in text)


def parts(line: bytes) -> list[Line]:
    """A line without what launchers put before it; where several ranks have written into it, what each has."""
    whole = taken_apart(line)
    if whole.text.count("[") < 2 and "terminate called" not in whole.text:
        return [whole]
    first, *others = _NEXT.split(whole.text, maxsplit=_MOST_PARTS)
    return [whole._replace(text=first), *(_stripped(other)._replace(stream=whole.stream) for other in others)]


def taken_apart(line: bytes) -> Line:
    """A line without colours, and without what a launcher has put before it."""
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
