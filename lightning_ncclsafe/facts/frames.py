"""Frames of Python stacks, and exceptions."""

from dataclasses import dataclass

ELSE = "else of "
"""Prefix of a rank condition if the line is in the branch for ranks for which it does not hold."""


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
            ``"if trainer.is_global_zero:  (line 41)"``, ``"else of if rank == 0:  (line 12)"``; empty if there is none.
        mark: What code of this package declares about itself, see :class:`~lightning_ncclsafe.code.marks.Mark`; empty
            for other code, and if the frame was not taken by a probe.
        handler: The clause that handles an exception in the ``try`` that encloses this line, with its line number, such
            as ``"except RuntimeError:  (line 47)"``; empty if there is none, or if the line is also under a condition.
        loop: The innermost ``for`` statement around this line, likewise; empty if there is none.
    """

    file: str
    line: int
    function: str
    code: str = ""
    user: bool = False
    rank_condition: str = ""
    mark: str = ""
    handler: str = ""
    loop: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionFacts:
    """An exception that ended, or is ending, the Trainer on a rank.

    Attributes:
        type: Class name.
        message: Its text, cut to 2,000 characters.
        stack: Where it was raised, outermost frame first.
        is_consequence: Whether it only reports that a peer is gone or a collective failed (a transport error), so that
            the cause is elsewhere.
    """

    type: str
    message: str
    stack: tuple[Frame, ...] = ()
    is_consequence: bool = False


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
