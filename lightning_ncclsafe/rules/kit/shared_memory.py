"""What says that /dev/shm is full, through which loader workers hand their batches over."""

import re

from lightning_ncclsafe.facts import RankFacts

_FULL_SHARE = 0.02
# Of torch's shared tensors, its workers' bus errors, and NCCL's segments.
_SAYS_SO = re.compile(
    r"unable to (?:write to|open|mmap|resize|allocate|create) [^\n]*(?:</?torch_|shared memory)"
    r"|out of shared memory|insufficient shared memory|shared memory limit"
    r"|(?:/dev/shm|</?torch_|/nccl-)[^\n]*No space left|No space left[^\n]*(?:/dev/shm|/torch_|/nccl-)"
    r"|Error while creating shared memory segment",
    re.IGNORECASE,
)
# What the kernel says where it is not room in /dev/shm that is lacking: a limit on open files, on mappings, rights.
_OTHER_LIMIT = re.compile(
    r"Too many open files|Permission denied|Operation not permitted|No such file|File exists|Cannot allocate memory"
    r"|Resource temporarily unavailable",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left on device|Bus error", re.IGNORECASE)
# torch says after every bus error that shared memory may be used up; where there is much of it, that is a guess.
_BUS_ERROR = re.compile(r"Bus error", re.IGNORECASE)
_MUCH_BYTES = 4_000_000_000
_ROOM_SHARE = 0.5


def shm_is_full(facts: RankFacts) -> bool:
    """Whether less than a fiftieth of /dev/shm is free."""
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    return bool(total) and free is not None and free < _FULL_SHARE * (total or 0)


def says_shm_is_full(facts: RankFacts) -> bool:
    """Whether its exception says so; that there is no space left says so only where /dev/shm is full."""
    message = facts.exception.message if facts.exception is not None else ""
    if _OTHER_LIMIT.search(message) or (_BUS_ERROR.search(message) and _has_much(facts)):
        return False
    return bool(_SAYS_SO.search(message)) or bool(_NO_SPACE.search(message) and shm_is_full(facts))


def is_bus_error(facts: RankFacts) -> bool:
    """Whether its exception tells of a bus error, which shared memory that is used up is one reason for."""
    return facts.exception is not None and bool(_BUS_ERROR.search(facts.exception.message))


def _has_much(facts: RankFacts) -> bool:
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    return total is not None and free is not None and total > _MUCH_BYTES and free > _ROOM_SHARE * total
