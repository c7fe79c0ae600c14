"""What a rank publishes about itself when it begins to watch, and where."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank publishes about itself, for peers that have to look at it when it does not answer.

    Attributes:
        rank: Global rank.
        host: Host name.
        pid: Process id.
        started: When the process was started, seconds since the epoch.
        guard_threads: The kernel's numbers of its guard's threads; empty if it has none yet.
        has_guard: Whether it has reached its Trainer, so that its guard would answer; if not, peers have found its
            process themselves.
    """

    rank: int
    host: str
    pid: int
    started: float = 0.0
    guard_threads: tuple[int, ...] = ()
    has_guard: bool = True


def info_key(rank: int) -> str:
    """The key under which a rank publishes its info when it begins to watch."""
    return f"info/{rank}"
