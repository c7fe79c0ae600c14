"""Lines that look again and again for something, with a pause in between."""

import re

from lightning_ncclsafe.facts import Decides, Frame
from lightning_ncclsafe.rules.kit.frames import inside_trainer
from lightning_ncclsafe.rules.kit.wording import condition_words

_SLEEP = re.compile(r"\bsleep\(")
_REMEDY = (
    "This line only pauses before {loop} is looked at again: find out what should end that loop (another process, a "
    "file, a service) and why it does not, and give up with an error after some time."
)


def sleeps(stack: tuple[Frame, ...]) -> bool:
    """Whether a line of the user's, below the Trainer, pauses."""
    inner = inside_trainer(stack)[-1:]
    return any(frame.user and _SLEEP.search(frame.code) for frame in inner)


def polling_remedy(stack: tuple[Frame, ...]) -> str:
    """What to do if the user's innermost line pauses in a ``while`` loop that has a condition; empty if it does not."""
    if not sleeps(stack):
        return ""
    loops = (one for one in stack[-1].branches if one.on is Decides.PASSES and one.until and not one.jump)
    tests = [one.test for one in loops if one.test.startswith("while ")]
    return _REMEDY.format(loop=condition_words(tests[-1])) if tests else ""
