"""What errors of the transport say: that a connection was lost, or that a wait was given up."""

import re
from dataclasses import replace

from lightning_ncclsafe.facts import RankFacts

# As the kernel, gloo, NCCL's sockets and its InfiniBand transport say it.
_LOST = re.compile(
    r"Connection reset|Connection (?:was )?closed by|[Ss]ocket error|No route to host|Network is (?:unreachable|down)"
    r"|Host is (?:unreachable|down)|Connection timed out|ncclRemoteError|remote process exited or there was a network"
    r"|status=12|transport retry counter|NET/(?:IB|Socket)|ibv_\w+|Broken pipe|Software caused connection abort"
)
# A limit that is over closes connections as well, and is no fault of theirs.
_LIMIT = re.compile(
    r"Application timeout caused pair closure|collective operation timeout|Watchdog caught|Timed out waiting"
    r"|[Ww]ait timeout after|monitored_?[Bb]arrier|[Ss]ocket [Tt]imeout|timed out after"
)


# Of late peers only, though raised as any error may be; and what a back end raises of the rank's own call.
_OF_OTHERS = re.compile(r"monitoredBarrier|Watchdog caught collective operation timeout")
_OF_ITS_OWN = re.compile(
    r"Duplicate GPU detected|Address already in use|EADDRINUSE"
    r"|ncclInvalidUsage|ncclInvalidArgument|No backend type associated|no GPUs found"
    r"|Tensors must be (?:CUDA|on GPU|contiguous|dense)"
)


def with_consequence(facts: RankFacts) -> RankFacts:
    """The same rank; an exception of late peers only, or of its own call, is marked so, whatever its type says."""
    exception = facts.exception
    if exception is None:
        return facts
    is_own, is_of_others = _OF_ITS_OWN.search(exception.message), _OF_OTHERS.search(exception.message)
    is_consequence = not is_own and (exception.is_consequence or bool(is_of_others))
    if is_consequence == exception.is_consequence:
        return facts
    return replace(facts, exception=replace(exception, is_consequence=is_consequence))


def lost_words(facts: RankFacts) -> str:
    """What a rank was told of its connections, be it that they are lost or that a limit is over; empty if nothing."""
    message = _told(facts)
    return message if _LOST.search(message) or _LIMIT.search(message) else ""


def has_given_up(facts: RankFacts) -> bool:
    """Whether a limit has ended a rank's wait: that says nothing of whether its peers are there."""
    return bool(_LIMIT.search(_told(facts)))


def _told(facts: RankFacts) -> str:
    exception = facts.exception
    return exception.message if exception is not None and exception.is_consequence else ""
