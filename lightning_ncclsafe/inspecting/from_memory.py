"""What the memory of a rank that stands still tells: what it has raised, how far its Trainer has come, its group."""

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, UnreadObjects, is_past_program
from lightning_ncclsafe.inspecting.groups import group_of
from lightning_ncclsafe.inspecting.layouts import is_known
from lightning_ncclsafe.inspecting.objects import Interpreter, ReadException
from lightning_ncclsafe.inspecting.sources import folder_of, from_storage, remember_sources, whole
from lightning_ncclsafe.inspecting.trainer_objects import counted

# It takes a hundredth of a second of processor time, which a busy host does not give at once.
_MEMORY_S = 10.0


def from_memory(seen: SeenRank) -> dict[str, Any]:
    """What the objects of a rank that stands still tell: what it has raised, and how far its Trainer has come.

    What is read twice alike has not changed meanwhile.
    """
    pid = seen.process.pid
    stack = next((one.stack for one in reversed(seen.looks) if one.stack), ())
    folder = folder_of(pid)

    if not is_known():
        return {"unread": UnreadObjects.UNKNOWN_PYTHON}

    def read() -> dict[str, Any]:
        with Interpreter(pid) as interpreter:
            if not interpreter.is_same:
                return {"unread": UnreadObjects.OTHER_PYTHON, "left": (), "handled": ()}
            return {
                "left": interpreter.printed() if is_past_program(stack) else (),
                "handled": interpreter.handled(),
                "counted": counted(interpreter, stack),
                "group": group_of(interpreter, stack),
            }

    # The kernel reads nothing of a process whose memory is locked, as by a thread that waits for storage.
    found = from_storage(read, None, within_s=_MEMORY_S) or {}
    if not found or from_storage(read, None, within_s=_MEMORY_S) != found:
        return {}
    raised = {name: tuple(_placed_in(folder, one) for one in found[name]) for name in ("left", "handled")}
    files = {file for of in raised.values() for one in of for file, *_ in one.places}
    from_storage(partial(remember_sources, pid, files), None)
    return found | raised


def _placed_in(folder: str, raised: ReadException) -> ReadException:
    return replace(
        raised, places=tuple((whole(file, folder), line, function) for file, line, function in raised.places)
    )
