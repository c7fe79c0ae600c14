"""Where waiting ends in a job, and why."""

from dataclasses import dataclass
from enum import Enum

from lightning_ncclsafe.rules.recorded.calls import Op


class RootCause(str, Enum):
    """Why waiting ends there."""

    HOST = "host"
    DEVICE = "device"
    ORDER = "order"
    UNMATCHED = "unmatched"
    JOINED = "joined"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where waiting ends.

    Attributes:
        cause: The reason.
        ranks: The ranks that are the cause, ascending; all members if all have called the same.
        held: Ranks that wait for it, also by way of others, ascending.
        ops: The collectives in which these wait there, by group and number; those of most ranks first.
        circle: All ranks of a circle.
        is_sure: Whether this is known, and not only inferred.
    """

    cause: RootCause
    ranks: tuple[int, ...]
    held: tuple[int, ...] = ()
    ops: tuple[Op, ...] = ()
    circle: tuple[int, ...] = ()
    is_sure: bool = True
