"""What PyTorch's check of collectives prints (TORCH_DISTRIBUTED_DEBUG=DETAIL): what ranks run, and a mismatch."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import Statement, StatementKind
from lightning_ncclsafe.facts.wording import clause
from lightning_ncclsafe.reading.values import ranks, whole
from lightning_ncclsafe.report.lines import cut

_LONGEST_LINE = 300
_LONGEST_DETAIL = 400
_MOST_LINES, _MOST_CHARACTERS = 12, 4000
_MOST_RANKS = 4096


class _Call(NamedTuple):
    """What a rank runs, according to PyTorch's check; unknown fields are empty."""

    rank: int
    op: str
    shape: str
    seq: str

    def words(self, *, with_number: bool) -> str:
        """``"rank 1 runs allreduce of shape [51123456]"``."""
        number = f" (number {self.seq})" if with_number and self.seq else ""
        shape = f" of shape [{self.shape}]" if self.shape else ""
        return f"rank {self.rank} runs {self.op or 'something else'}{shape}{number}"


class Mismatch:
    """``Detected mismatch between collectives on ranks. Rank 1 is running collective: …, but Rank 0 is …``.

    Each rank compares itself with all, and names the first that differs. Which of the two is the odd one is known if
    other ranks run what one of them runs: by ``[Rank 3] Running collective: …``, which every rank prints before each.
    """

    _BEGINS = "Detected mismatch between collectives on ranks"
    _RUNNING = re.compile(r"\[Rank (\d+)\] Running collective: ?(?:CollectiveFingerPrint\()?(.{0,600})")
    _ONE = re.compile(
        r"Rank (?P<rank>\d+) is running (?P<how>inconsistent )?collective: ?(?:CollectiveFingerPrint\()?"
        r"(?P<body>.{0,600}?)(?=Rank \d+ is running|Collectives differ|$)"
    )
    # The other rank of a message that is cut before what that one runs.
    _OTHER = re.compile(r", but Rank (\d+) ")
    _OP = re.compile(r"OpType=(\w+)|^(\w+)\.?\s*$")
    _SHAPE = re.compile(r"TensorShape=\[([\d, ]*)\]")
    _SEQ = re.compile(r"SequenceNumber=(\d+)")
    _WRAPPED = re.compile(r" {5,}")
    # What no longer belongs to the message.
    _NEXT = re.compile(r"\s*(?:\[(?:rank\d|[EWIF][ \d])|Traceback |terminate called|frame #\d)")

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._latest: dict[int, _Call] = {}

    @property
    def is_open(self) -> bool:
        """Whether the message continues in the next line."""
        return bool(self._lines)

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        """The mismatch that is complete with this line."""
        if running := self._RUNNING.search(text):
            self._note(self._call(whole(running[1]), running[2]))
            return
        begins = self._BEGINS in text
        if begins or self._NEXT.match(text):
            yield from self.flush()
        if begins or self._lines:
            self._lines.append(text.rstrip("\r\n")[:_MOST_CHARACTERS])
        if self._lines and (self._is_complete() or len(self._lines) >= _MOST_LINES):
            yield from self.flush()

    def flush(self) -> Iterator[Statement]:
        """The mismatch, as far as its lines are there."""
        calls = self._calls()
        if calls:
            is_one_sided = len(calls) == 1 and "inconsistent" not in " ".join(self._lines)
            odd, like = self._odd(calls, is_one_sided=is_one_sided)
            same = len(calls) > 1 and len({call.op for call in calls}) == 1
            numbers = len({call.seq for call in calls}) > 1
            words = " and ".join(call.words(with_number=numbers) for call in calls)
            yield Statement(
                kind=StatementKind.OTHER_SIZES if same else StatementKind.OTHER_OPERATIONS,
                ranks=odd,
                detail=cut(f"PyTorch's check of collectives reports that {words}{like}", _LONGEST_DETAIL),
                count=1 if is_one_sided else len(calls),
                line=cut(self._lines[0].strip(), _LONGEST_LINE),
            )
        for call in calls:
            self._note(call)
        self._lines.clear()

    def _note(self, call: _Call) -> None:
        if call.op and (call.rank in self._latest or len(self._latest) < _MOST_RANKS):
            self._latest[call.rank] = call

    def _odd(self, calls: list[_Call], *, is_one_sided: bool) -> tuple[tuple[int, ...], str]:
        """The ranks that differ, and who runs what another one runs, as the end of a sentence."""
        named = ranks([call.rank for call in calls])
        others = {rank: call for rank, call in self._latest.items() if rank not in named and call.seq}
        like = [[rank for rank, other in sorted(others.items()) if other == call._replace(rank=rank)] for call in calls]
        if not any(like) or (all(like) and not is_one_sided):
            return named, ""
        most = next(at for at, who in enumerate(like) if who)
        words = f"; {clause(like[most], 'runs|run')} the same as rank {calls[most].rank}"
        if is_one_sided:
            # The odd one is none of these.
            return (), words
        return tuple(rank for rank in named if rank != calls[most].rank), words

    def _calls(self) -> list[_Call]:
        text = " ".join(line.strip() for line in self._lines)
        found: list[re.Match[str]] = []
        # Narrow pages and terminals tear words, with five spaces in the middle, or with nothing.
        for one in (text, self._WRAPPED.sub("", text), "".join(self._lines)):
            if len(found) < 2:
                found = list(self._ONE.finditer(one)) or found
        calls = [self._call(whole(each["rank"]), each["body"]) for each in found][:2]
        if len(calls) == 1 and (other := self._OTHER.search(text)):
            calls.append(_Call(whole(other[1]), "", "", ""))
        return calls

    def _call(self, rank: int, body: str) -> _Call:
        op, shape, seq = self._OP.search(body.strip()), self._SHAPE.search(body), self._SEQ.search(body)
        name = (op[1] or op[2]).lower() if op else ""
        return _Call(rank, name, shape[1] if shape else "", seq[1] if seq else "")

    def _is_complete(self) -> bool:
        calls = self._calls()
        return len(calls) == 2 and bool(calls[1].op) and bool(calls[1].shape or "." in self._lines[-1][-3:])
