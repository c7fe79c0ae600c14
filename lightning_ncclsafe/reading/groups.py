"""Process groups in a Flight Recorder's dump: who is in them, and how far the rank that dumped has come in each.

Members stand under a group's name, positions under a number that the process has given it, which means another group on
another rank; only an entry has both. So where a group's entries have left the ring, its position may have no name.
"""

from collections.abc import Mapping
from typing import Any

from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.reading.values import mapping, ranks, whole

DEFAULT_GROUP = ("0", "default_pg")
MOST_GROUPS = 4096

_Names = Mapping[str, tuple[str, str]]


def groups_of(dump: dict[Any, Any], names: _Names, called: Mapping[str, int]) -> tuple[Group, ...]:
    """The groups of which the position is known.

    Args:
        dump: The dump.
        names: Name and description by the process's own number, as far as entries tell.
        called: The highest sequence number among the entries of each group, by its name.
    """
    config = {str(key): ranks(mapping(value).get("ranks")) for key, value in mapping(dump.get("pg_config")).items()}
    status = {str(key): mapping(value) for key, value in mapping(dump.get("pg_status")).items()}
    # Gloo registers a group before it has a name.
    only = config.pop("", ()) if len(called) == 1 else ()
    known = _known(names, config, status)
    groups = [
        _group(name, description, config.get(name) or only, status.get(number, {}), called.get(name, 0))
        for number, (name, description) in list(known.items())[:MOST_GROUPS]
    ]
    found = {group.name for group in groups}
    if not status.keys() - known.keys():
        # A group has a position from its first collective on: what is left has called none.
        groups += [Group(name=name, ranks=there) for name, there in config.items() if name and name not in found]
    return tuple(groups[:MOST_GROUPS])


def _known(names: _Names, config: Mapping[str, object], status: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Names by number, completed where no other one is possible."""
    known = dict(names)
    if "0" in status and DEFAULT_GROUP[0] not in {name for name, _ in known.values()}:
        # The first group that a process makes, of which a dump of active entries may have none, is the default one.
        known.setdefault("0", DEFAULT_GROUP)
    numbers = status.keys() - known.keys()
    unnumbered = config.keys() - {name for name, _ in known.values()} - {""}
    if len(numbers) == len(unnumbered) == 1:
        known[next(iter(numbers))] = (next(iter(unnumbered)), "")
    return known


def _group(name: str, description: str, members: tuple[int, ...], status: dict[Any, Any], called: int) -> Group:
    enqueued = max(whole(status.get("last_enqueued_collective")), called, 0)
    completed = whole(status.get("last_completed_collective"))
    return Group(
        name=name,
        description=description,
        ranks=members,
        last_enqueued=enqueued,
        last_started=min(whole(status.get("last_started_collective"), -1), enqueued),
        # Some versions give what was in memory there before anything had completed.
        last_completed=completed if 0 < completed <= enqueued else 0,
    )
