"""Makes facts of the exceptions that were read from a rank: either one has ended its work, or its code caught one."""

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from lightning_ncclsafe.code.libraries import TRAINER_CALL
from lightning_ncclsafe.facts import CaughtException, ExceptionFacts, Frame
from lightning_ncclsafe.inspecting.objects import ReadException
from lightning_ncclsafe.inspecting.sources import is_users_file
from lightning_ncclsafe.probes.process.stacks import with_source
from lightning_ncclsafe.reading.tracebacks import is_consequence

# Exceptions that end an iteration, a generator, or a Trainer that was asked to stop, are not errors.
_CONTROL_FLOW = {
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "_TunerExitException",
    "SIGTERMException",
}
# These concern the rank itself, even if their message looks like a consequence of another rank's end.
_OWN = {"SystemExit", "KeyboardInterrupt"}
_MESSAGE, _MOST_FRAMES = 200, 3

Errors = tuple[ExceptionFacts | None, tuple[CaughtException, ...]]


def errors_of(
    handled: Sequence[ReadException], left: Sequence[ReadException], stack: Sequence[Frame], since_s: float = 0.0
) -> Errors:
    """The exception that has ended a rank's work, or else the one that its code still handles.

    Args:
        handled: The exceptions that its main thread handles, the latest first.
        left: The exceptions that have left its program.
        stack: The stack of its main thread with its source, outermost frame first.
        since_s: Seconds for which it is known to have stood there.
    """
    meant = _meant(handled, left)
    if not meant:
        return None, ()
    # Of several, the one that left the Trainer: later ones were raised while it ended.
    ending = next((one for one in meant if _has_left_trainer(one)), meant[0])
    if left or _has_left_trainer(ending) or _passes(ending, stack):
        return _ended(ending), ()
    return None, (_caught(meant[0], stack, since_s),)


def has_failed(handled: Sequence[ReadException], left: Sequence[ReadException]) -> bool:
    """Whether an exception has left a rank's program or its Trainer; this does not need the source."""
    meant = _meant(handled, left)
    return bool(meant) and (bool(left) or any(map(_has_left_trainer, meant)))


def _meant(handled: Sequence[ReadException], left: Sequence[ReadException]) -> list[ReadException]:
    return [one for one in (*left, *handled) if one.type not in _CONTROL_FLOW]


def _has_left_trainer(one: ReadException) -> bool:
    return any(TRAINER_CALL.has(file, function) for file, _, function in one.places)


def _ended(one: ReadException) -> ExceptionFacts:
    return ExceptionFacts(
        type=one.type,
        message=one.message,
        stack=with_source(_frames(one.places)),
        is_consequence=_is_consequence(one),
    )


def _caught(one: ReadException, stack: Sequence[Frame], since_s: float) -> CaughtException:
    frames = [*_frames(one.places)]
    own = [frame for frame in frames if frame.user]
    last = frames[-1:] if frames and not frames[-1].user else []
    lines = (line.strip() for line in one.message.splitlines() if line.strip())
    return CaughtException(
        type=one.type,
        message=next(lines, "")[:_MESSAGE],
        stack=with_source((*own[-_MOST_FRAMES:], *last)),
        caught_at=_handler(one, stack),
        ago_s=round(since_s, 1),
        is_held=True,
        is_consequence=_is_consequence(one),
    )


def _is_consequence(one: ReadException) -> bool:
    return one.type not in _OWN and is_consequence(one.type, one.message)


def _frames(places: Iterable[tuple[str, int, str]]) -> Iterator[Frame]:
    for file, line, function in places:
        yield Frame(file=file, line=line, function=function, user=is_users_file(file))


def _handler(one: ReadException, stack: Sequence[Frame]) -> Frame | None:
    """The frame that handles an exception, as it is on the stack now."""
    file, _, function = one.places[0] if one.places else ("", 0, "")
    return next((frame for frame in reversed(stack) if (frame.file, frame.function) == (file, function)), None)


def _passes(one: ReadException, stack: Sequence[Frame]) -> bool:
    """Whether the exception will leave the block that handles it: a ``finally``, or an ``except`` that raises again."""
    frame = _handler(one, stack)
    return frame is not None and _is_read(frame.file) and frame.line not in _keeping(frame.file)


def _is_read(file: str) -> bool:
    return bool(linecache.getlines(file))


@lru_cache(maxsize=64)
def _keeping(file: str) -> frozenset[int]:
    """The lines of ``except`` blocks that end without raising."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    kept = (block for block in blocks if not isinstance(block.body[-1], ast.Raise))
    return frozenset(line for block in kept for line in range(block.lineno, (block.end_lineno or block.lineno) + 1))
