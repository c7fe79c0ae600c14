"""In which process group's collective a rank waits, read out of the memory of its process."""

from collections.abc import Sequence
from contextlib import suppress

from lightning_ncclsafe.code.libraries import C10D
from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter

_MODULE = "torch.distributed.distributed_c10d"


def group_of(interpreter: Interpreter, stack: Sequence[SeenFrame]) -> Group | None:
    """The group whose collective a stack is in, with its members; None where it is in none, or that cannot be read.

    Args:
        interpreter: Of the process.
        stack: Of its main thread.
    """
    inside = (frame.addresses.get("group", 0) for frame in reversed(stack) if C10D.has(frame.file, frame.function))
    with suppress(LookupError, OSError, ValueError):
        if group := next(filter(None, inside), 0):
            name = interpreter.value(interpreter.under(interpreter.named(_MODULE, "_pg_names"), group))
            members = interpreter.under(interpreter.named(_MODULE, "_pg_group_ranks"), group)
            return Group(name=str(name), ranks=tuple(sorted(interpreter.numbers_of(members))))
    return None
