"""Frames of Python stacks, and exceptions."""

from dataclasses import dataclass
from enum import Enum

ELSE = "else of "
"""Prefix of a rank condition if the line is in the branch for the ranks on which it does not hold."""
PAST = "past "
"""Prefix of a rank condition if the ranks on which it holds have left by a jump before the line."""


class Decides(str, Enum):
    """What a branch depends on."""

    RANK = "rank"
    """The rank."""
    VALUE = "value"
    """A value that may differ: data, a file, the time, what a rank has counted."""
    PASSES = "passes"
    """How many passes a loop makes."""
    EXCEPTION = "exception"
    """Whether something is raised."""
    COMMON = "common"
    """Something that is equal on all ranks: the index of a batch or step, a constant in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A place in a function where control may flow around one of its lines.

    Attributes:
        line: The line of the jump; without one, of the condition, the loop or the clause.
        test: The condition, loop or clause with its line number, ``"if not batch.any():  (line 41)"``, cut to 120
            characters; ``"else of if rank == 0:  (line 12)"`` for a block that runs if the condition does not hold.
        on: What it depends on.
        jump: ``"return"``, ``"continue"``, ``"break"`` or ``"raise"``, if it is before the line or ends a loop around
            it; empty if the line is in the block that the branch decides about.
        until: The last line of that block; 0 for a jump.
        within: The condition on the rank, with its line number, around that of a jump: only ranks under both jump.
        handled_at: Where a context manager handles what is raised in its ``with`` block, ``"FILE:40 in skipping"``;
            empty for all else. The line of such a branch is that of the ``with``.
        differs_at: The line of the condition, where that is to be looked at in place of a jump: if it compares a value
            with a limit, or if the jump is a ``break``. 0 for any other, and under a condition on the rank: a jump that
            leaves out what cannot be done, as there is no data for it, has to be changed itself.
    """

    line: int
    test: str
    on: Decides
    jump: str = ""
    until: int = 0
    within: str = ""
    handled_at: str = ""
    differs_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One Python frame of a stack.

    Attributes:
        file: Path of the source file as Python names it.
        line: Line number, from 1.
        function: Name of the function.
        code: The source line, stripped; empty where the source cannot be read.
        user: Whether the file is the user's own code: neither the standard library, nor an installed package.
        rank_condition: The condition on the rank that encloses this line in the source, with its line number, such as
            ``"if trainer.is_global_zero:  (line 41)"`` or ``"else of if rank == 0:  (line 12)"``; after an early return
            ``"past return under if rank != 0:  (line 12)"``. Empty if there is none.
        mark: What code of this package declares about itself, or that it is of a logger that the user has written, see
            :class:`~lightning_ncclsafe.code.marks.Mark`; empty for other code, and if no probe took the frame.
        handler: The clause that handles an exception in the ``try`` or ``with`` that encloses this line, with its line
            number, such as ``"except RuntimeError:  (line 47)"``; empty if there is none, or if the line is also under
            a condition.
        branches: What may lead around this line within its function, from outside in: the innermost 8. Only of the
            user's code.
    """

    file: str
    line: int
    function: str
    code: str = ""
    user: bool = False
    rank_condition: str = ""
    mark: str = ""
    handler: str = ""
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionFacts:
    """An exception that ended, or is ending, the Trainer on a rank.

    Attributes:
        type: Class name.
        message: Its text, cut to 2,000 characters.
        stack: Where it was raised, outermost frame first.
        is_consequence: Whether it only reports that a peer is gone or a collective failed (a transport error), so that
            the cause is elsewhere.
        handled: Of an exit, class name and text of the exception that was being handled, cut to 400 characters.
    """

    type: str
    message: str
    stack: tuple[Frame, ...] = ()
    is_consequence: bool = False
    handled: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtException:
    """An exception that did not end a rank's Trainer: the code caught it, or it ended another thread.

    Attributes:
        type: Class name.
        message: The first line of its text, cut to 200 characters.
        stack: Where it was raised, outermost frame first: the last lines of the user's code, and the very last line.
        caught_at: The user's line that handles it; None if unknown.
        passed: What it propagated through: a function of ``torch.distributed``, such as ``"all_reduce"``, or an action
            of Lightning; empty if it was seen in the user's code.
        thread: Name of the thread that it ended; empty if it was caught.
        ago_s: Seconds since then, or since the last of several.
        count: How many of this kind there were.
        is_held: Whether the main thread is still in the ``except`` block that caught it.
        is_consequence: Whether it only reports that a collective failed, see :class:`ExceptionFacts`.
    """

    type: str
    message: str = ""
    stack: tuple[Frame, ...] = ()
    caught_at: Frame | None = None
    passed: str = ""
    thread: str = ""
    ago_s: float = 0.0
    count: int = 1
    is_held: bool = False
    is_consequence: bool = False
