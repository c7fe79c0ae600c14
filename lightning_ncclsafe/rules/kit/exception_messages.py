"""What the message of an exception shows: whose fault it is, what is lost or exhausted, and what to do."""

import re
from dataclasses import replace

from lightning_ncclsafe.code.libraries import DISTRIBUTED
from lightning_ncclsafe.facts import CaughtException, ExceptionFacts, RankFacts
from lightning_ncclsafe.facts.wording import capitalised

# Messages of the kernel, gloo, NCCL's sockets and its InfiniBand transport.
_LOST = re.compile(
    r"Connection reset|Connection (?:was )?closed by|[Ss]ocket error|No route to host|Network is (?:unreachable|down)"
    r"|Host is (?:unreachable|down)|Connection timed out|ncclRemoteError|remote process exited or there was a network"
    r"|status=12|transport retry counter|NET/(?:IB|Socket)|ibv_\w+|Broken pipe|Software caused connection abort"
)
# An expired timeout also closes connections, which are not at fault.
_LIMIT = re.compile(
    r"Application timeout caused pair closure|collective operation timeout|Watchdog caught|Timed out waiting"
    r"|[Ww]ait timeout after|monitored_?[Bb]arrier|[Ss]ocket [Tt]imeout|timed out after"
)


# Errors that are only about late peers, whatever their type; and errors of a back end about the rank's own call.
_OF_OTHERS = re.compile(r"monitoredBarrier|Watchdog caught collective operation timeout")
_OF_ITS_OWN = re.compile(
    r"Duplicate GPU detected|Address already in use|EADDRINUSE|no socket interface found"
    r"|ncclInvalidUsage|ncclInvalidArgument|No backend type associated|no GPUs found"
    r"|Tensors must be (?:CUDA|on GPU|contiguous|dense)"
)


def message_of(facts: RankFacts) -> str:
    """The message of a rank's exception; empty if it has raised none."""
    return facts.exception.message if facts.exception is not None else ""


def with_consequence(facts: RankFacts) -> RankFacts:
    """The same rank with ``is_consequence`` of its exception corrected by the message, whatever its type."""
    exception = facts.exception
    if exception is None:
        return facts
    is_own, is_of_others = _OF_ITS_OWN.search(exception.message), _OF_OTHERS.search(exception.message)
    is_consequence = not is_own and (exception.is_consequence or bool(is_of_others))
    if is_consequence == exception.is_consequence:
        return facts
    return replace(facts, exception=replace(exception, is_consequence=is_consequence))


def lost_words(facts: RankFacts) -> str:
    """The message of a lost connection or an expired timeout; empty if there is none."""
    message = _consequence_message(facts)
    return message if _LOST.search(message) or _LIMIT.search(message) else ""


def has_given_up(facts: RankFacts) -> bool:
    """Whether a timeout ended a rank's wait, which does not show whether its peers are alive."""
    return bool(_LIMIT.search(_consequence_message(facts)))


def _consequence_message(facts: RankFacts) -> str:
    exception = facts.exception
    return exception.message if exception is not None and exception.is_consequence else ""


# Messages of torch's allocators: "Tried to allocate more than 1EB memory", "… 8589934592.00 GiB"; on CPUs in bytes.
_WANTED = re.compile(r"allocate (?:more than )?(?P<count>\d+(?:\.\d+)?) ?(?P<unit>EB|EiB|PiB|TiB|GiB|bytes)")
_BYTES = {"EB": 10**18, "EiB": 2**60, "PiB": 2**50, "TiB": 2**40, "GiB": 2**30, "bytes": 1}
# No host and no GPU has this much.
_ABSURD_BYTES = 10**14


# About a number that torch.distributed has received; seen with NCCL, which pairs calls that do not match.
_NO_COUNT = "cannot be converted to type int without overflow"


def is_garbled(error: ExceptionFacts) -> bool:
    """Whether a size was other data: it is absurd as an amount of memory, or no number that torch.distributed sends."""
    amount = _WANTED.search(error.message)
    if amount is not None:
        return float(amount["count"]) * _BYTES[amount["unit"]] >= _ABSURD_BYTES
    return _NO_COUNT in error.message and is_raised_by_torch_distributed(error)


def is_raised_by_torch_distributed(error: ExceptionFacts) -> bool:
    """Whether ``torch.distributed`` itself raised it."""
    deepest = error.stack[-1] if error.stack else None
    return deepest is not None and DISTRIBUTED.has(deepest.file, deepest.function)


_FULL_SHARE = 0.02
# Messages about torch's shared tensors, bus errors of its workers, and NCCL's segments.
_SHM_FULL = re.compile(
    r"unable to (?:write to|open|mmap|resize|allocate|create) [^\n]*(?:</?torch_|shared memory)"
    r"|out of shared memory|insufficient shared memory|shared memory limit"
    r"|(?:/dev/shm|</?torch_|/nccl-)[^\n]*No space left|No space left[^\n]*(?:/dev/shm|/torch_|/nccl-)"
    r"|Error while creating shared memory segment",
    re.IGNORECASE,
)
# Messages about something other than room in /dev/shm: a limit on open files or mappings, missing permissions.
_OTHER_LIMIT = re.compile(
    r"Too many open files|Permission denied|Operation not permitted|No such file|File exists|Cannot allocate memory"
    r"|Resource temporarily unavailable",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left on device|Bus error", re.IGNORECASE)
# After every bus error torch says that shared memory may be used up; if much of it is free, that is a guess.
_BUS_ERROR = re.compile(r"Bus error", re.IGNORECASE)
_MUCH_BYTES = 4_000_000_000
_ROOM_SHARE = 0.5


def shm_is_full(facts: RankFacts) -> bool:
    """Whether less than a fiftieth of /dev/shm is free."""
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    return bool(total) and free is not None and free < _FULL_SHARE * (total or 0)


def says_shm_is_full(facts: RankFacts) -> bool:
    """Whether its exception is about a full /dev/shm; "No space left" alone counts only if /dev/shm is full."""
    message = message_of(facts)
    if _OTHER_LIMIT.search(message) or (_BUS_ERROR.search(message) and _has_much(facts)):
        return False
    return bool(_SHM_FULL.search(message)) or bool(_NO_SPACE.search(message) and shm_is_full(facts))


def is_bus_error(facts: RankFacts) -> bool:
    """Whether its exception is about a bus error, which exhausted shared memory may cause."""
    return bool(_BUS_ERROR.search(message_of(facts)))


def _has_much(facts: RankFacts) -> bool:
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    return total is not None and free is not None and total > _MUCH_BYTES and free > _ROOM_SHARE * total


_MUST_FIT = (
    "let files there be larger (RLIMIT_FSIZE, ulimit -f, or a limit of the file system), or save less in one file"
)
# Part of a message, and what to do.
_KNOWN = (
    ("No space left", "free space there, or keep fewer checkpoints (save_top_k)"),
    ("Disk quota exceeded", "free space there, or ask for a larger quota"),
    ("Permission denied", "let the user of the job write there, on every host"),
    ("Read-only file system", "find out why the file system is mounted read-only, usually after an error"),
    ("Stale file handle", "look at the network file system's server"),
    ("File too large", _MUST_FIT),
    ("Input/output error", "look at the storage: the kernel's log (dmesg) of that host, or the file server"),
    ("No such file or directory", "create the directory on every host, and let nothing remove it during the run"),
    ("Too many open files", "raise the limit of open files (ulimit -n), and close files that are no longer needed"),
    ("timed out", "look at the storage's server and the network to it, and let its client try again"),
    ("PytorchStreamWriter failed", "look whether the file system there is full, over a quota or limits a file's size"),
    ("Can't pickle", "leave what cannot be pickled out of hyper-parameters and on_save_checkpoint"),
    ("cannot pickle", "leave what cannot be pickled out of hyper-parameters and on_save_checkpoint"),
)
_UNKNOWN = "find out why the save fails: its exception and the line that raised it are above"
_MESSAGE = 200


def error_words(error: ExceptionFacts | CaughtException) -> str:
    """``"OSError: No space left on device"``, the message's first line, cut to 200 characters."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    line = lines[0].rstrip(".") if lines else ""
    short = line if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}…"
    return f"{error.type}: {short}" if short else error.type


def advice(error: ExceptionFacts) -> str:
    """What to do about a save that raised this, without a full stop."""
    return capitalised(next((advice for text, advice in _KNOWN if text in error.message), _UNKNOWN))
