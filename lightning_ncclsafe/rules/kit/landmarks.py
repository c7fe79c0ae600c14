"""Frames that tell what a stack is about: a collective, the store, a loader, a logger, a save."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Frame


@dataclass(frozen=True, slots=True)
class Landmark:
    """What a frame says about everything below it.

    Attributes:
        kind: Name of an :class:`~lightning_ncclsafe.rules.kit.activity.Kind`.
        call: The function, or for code of ours what it is for.
        weak: Whether it counts only with a collective outstanding and no user code below it, as its C++ code both
            computes and waits.
        exempt: Whether Lightning waits there without limit on purpose.
    """

    kind: str
    call: str = ""
    weak: bool = False
    exempt: bool = False


_COLLECTIVE, _STORE = Landmark("COLLECTIVE"), Landmark("STORE")
_LOADER, _LOGGER, _CHECKPOINT = Landmark("LOADER"), Landmark("LOGGER"), Landmark("CHECKPOINT")

# The first that fits decides, so exceptions stand before their file's general line.
_BY_CODE = (
    (libraries.INFINITE_BARRIER, Landmark("STORE", exempt=True)),
    (libraries.OBJECT_PICKLING, Landmark("USER")),
    (libraries.GROUP_CREATION, _STORE),
    (libraries.RENDEZVOUS, _STORE),
    (libraries.COLLECTIVES, _COLLECTIVE),
    (libraries.SAVING_SHARDED, _CHECKPOINT),
    (libraries.BACKWARD, Landmark("COLLECTIVE", weak=True)),
    (libraries.DDP, Landmark("COLLECTIVE", weak=True)),
    (libraries.SHARDING, Landmark("COLLECTIVE", weak=True)),
    (libraries.DATALOADER, _LOADER),
    (libraries.FETCH, _LOADER),
    (libraries.FETCHERS, _LOADER),
    (libraries.LOGGING, _LOGGER),
    (libraries.WANDB_AGENT, None),
    (libraries.LOG_WRITERS, _LOGGER),
    (libraries.SAVE, _CHECKPOINT),
    (libraries.SAVING, _CHECKPOINT),
)
_BY_MARK = {
    Mark.STORE.value: Landmark("STORE", call="an agreement of all ranks"),
    Mark.VOTE.value: Landmark("COLLECTIVE", call="the vote on the next batch"),
    Mark.LOGGER.value: _LOGGER,
}

# Reading a device's result in Python waits for everything queued on it, collectives included.
_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|synchronize\(|\.to\(|\bfloat\(|\bint\(|\bbool\(")


def landmark(frame: Frame) -> Landmark | None:
    """What this frame says about the frames below it; None for one that says nothing, as most of the user's own."""
    if frame.user:
        return _LOGGER if libraries.HOOKS_OF_LOGGERS.has(frame.file, frame.function) else None
    return _landmark(frame.file, frame.function, frame.mark)


@lru_cache(maxsize=4096)
def _landmark(file: str, function: str, mark: str) -> Landmark | None:
    by_code = (landmark for code, landmark in _BY_CODE if code.has(file, function))
    found = _BY_MARK.get(mark) if mark else next(by_code, None)
    return replace(found, call=found.call or function) if found is not None else None


def looks_like_device_sync(frame: Frame) -> bool:
    """Whether the line reads a value back from a device, or synchronises with one."""
    return _SYNC.search(frame.code) is not None


def starts_trainer(frame: Frame) -> bool:
    """Whether the Trainer starts to run in this frame."""
    return libraries.TRAINER_RUN.has(frame.file, frame.function)
