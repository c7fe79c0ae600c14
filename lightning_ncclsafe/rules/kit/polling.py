"""Lines that look again and again for something, with a pause in between."""

import re

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.wording import condition_place, condition_words
from lightning_ncclsafe.rules.kit.frames import inside_trainer

_SLEEP = re.compile(r"\bsleep\(")
_REMEDY = (
    "This line only pauses before {condition} is looked at again: find out what should end that loop (another process, "
    "a file, a service) and why it does not, and give up with an error after some time."
)


def sleeps(stack: tuple[Frame, ...]) -> bool:
    """Whether a line of the user's, below the Trainer, pauses."""
    inner = inside_trainer(stack)[-1:]
    return any(frame.user and _SLEEP.search(frame.code) for frame in inner)


def polling_remedy(stack: tuple[Frame, ...]) -> str:
    """What to do if the user's innermost line pauses in a loop that a condition ends; empty if it does not."""
    condition = _polled(stack)
    return _REMEDY.format(condition=condition_words(condition)) if condition else ""


def polled_at(stack: tuple[Frame, ...]) -> str:
    """``"path:line in function"`` of the condition that ends the loop in which the user's innermost line pauses."""
    condition = _polled(stack)
    return condition_place(condition, stack[-1]) if condition else ""


def _polled(stack: tuple[Frame, ...]) -> str:
    """That condition: of a ``while``, or the only one under which another loop is left; empty if there is none."""
    if not sleeps(stack):
        return ""
    frame = stack[-1]
    loops = [one.test for one in frame.branches if one.until and one.test.startswith("while ")]
    # A return before the line may as well be before the loop.
    jumps = (one for one in frame.branches if one.jump == "break" or (one.jump == "return" and one.line > frame.line))
    leaves = [one.test for one in jumps]
    return loops[-1] if loops else leaves[0] if len(leaves) == 1 else ""
