"""Frames of Python stacks, and exceptions."""

from dataclasses import dataclass

ELSE = "else of "
"""What a rank condition begins with where the line is in the branch for ranks for which it does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One Python frame of a stack.

    Attributes:
        file: Path of the source file as Python names it.
        line: Line number, from 1.
        function: Name of the function.
        code: The source line, stripped; empty where the source cannot be read.
        user: Whether the file is the user's own code: neither the standard library, nor an installed package.
        rank_condition: The condition on the rank that encloses this line in the source, with its line number, e.g.
            ``"if trainer.is_global_zero:  (line 41)"``, ``"else of if rank == 0:  (line 12)"``; empty if there is none.
        mark: What code of this package says of itself, see :class:`~lightning_ncclsafe.code.marks.Mark`; empty for that
            of others, and where the frame was not taken by a probe.
        handler: What goes on after an exception that is raised within the ``try`` that encloses this line, with its
            line number, e.g. ``"except RuntimeError:  (line 47)"``; empty if there is none, or if the line also stands
            under a condition.
    """

    file: str
    line: int
    function: str
    code: str = ""
    user: bool = False
    rank_condition: str = ""
    mark: str = ""
    handler: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionFacts:
    """An exception that ended, or is ending, the Trainer on a rank.

    Attributes:
        type: Class name.
        message: Its text, cut to 2,000 characters.
        stack: Where it was raised, outermost frame first.
        is_consequence: Whether it only says that a peer is gone or a collective failed (a transport error), so that
            the cause must be looked for elsewhere.
    """

    type: str
    message: str
    stack: tuple[Frame, ...] = ()
    is_consequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtException:
    """An exception that has not ended a rank's Trainer: its code has caught it, or it has ended another thread.

    Attributes:
        type: Class name.
        message: The first line of its text, cut to 200 characters.
        stack: Where it was raised, outermost frame first: the last lines of the user's own, and the very last line.
        caught_at: The user's line that handles it; None where that is not known.
        passed: What it has left: a function of ``torch.distributed``, ``"all_reduce"``, or an action of Lightning's;
            empty where it was seen in the user's code.
        thread: Name of the thread that it has ended; empty where it was caught.
        ago_s: Seconds since then; since the last one of several.
        count: How many like this there have been.
        is_held: Whether the main thread still is in the ``except`` block that has caught it.
        is_consequence: Whether it only says that a collective failed, see :class:`ExceptionFacts`.
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
