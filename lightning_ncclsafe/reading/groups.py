"""Process groups in a Flight Recorder's dump: their members, and the position of the rank in each.

A dump lists members by a group's name, and positions by a number that each process assigns itself; only entries have
both. If a group has no entry in a dump, its position has no name, unless the dump of a rank with the same kinds of
groups gives it.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.reading.values import mapping, ranks, text
from lightning_ncclsafe.recorder.model import GroupPosition, Recorder

DEFAULT_GROUP = ("0", "default_pg")
MOST_GROUPS = 4096
# Members and description.
_Kind = tuple[tuple[int, ...], str]


@dataclass(slots=True)
class Places:
    """Numbers, names, members and positions of the groups of one dump.

    Attributes:
        names: Name and description by the process's own number, if known.
        members: Global ranks by name.
        about: Descriptions by name.
        positions: Positions by number.
        only: Members of the only group, if it was registered before it had a name.
    """

    names: dict[str, tuple[str, str]]
    members: dict[str, tuple[int, ...]]
    about: dict[str, str]
    positions: Mapping[str, GroupPosition]
    only: tuple[int, ...] = ()

    @classmethod
    def of(cls, dump: dict[Any, Any], recorder: Recorder[Any]) -> "Places":
        """The places in a dump; missing names are filled in where only one is possible."""
        config = {str(key): mapping(value) for key, value in mapping(dump.get("pg_config")).items()}
        members = {text(name): ranks(one.get("ranks")) for name, one in config.items()}
        names = {number: (text(name), text(about)) for number, (name, about) in recorder.names.items()}
        about = {text(name): text(one.get("desc")) for name, one in config.items()}
        known = {name for name, _ in names.values()}
        # Gloo registers a group before it has a name.
        only = members.pop("", ()) if len(known) == 1 else ()
        if "0" in recorder.positions and DEFAULT_GROUP[0] not in known:
            # The default group is the first that a process makes; a dump of active entries may have none of it.
            names.setdefault("0", (DEFAULT_GROUP[0], about.get(DEFAULT_GROUP[0]) or DEFAULT_GROUP[1]))
        places = cls(names, members, about, recorder.positions, only)
        places._complete()
        return places

    @property
    def unnamed(self) -> list[str]:
        """Numbers of groups whose names are not known."""
        return [number for number in self.positions if number not in self.names]

    @property
    def unnumbered(self) -> list[str]:
        """Names of groups whose numbers are not known."""
        known = {name for name, _ in self.names.values()}
        return [name for name in self.members if name and name not in known]

    def kind(self, name: str) -> _Kind:
        """Members and description of a group, which are the same on all ranks."""
        return self.members.get(name, ()), self.about.get(name, "")

    @property
    def mixed(self) -> set[_Kind]:
        """Groups that have sends and receives."""
        return {self.kind(name) for number, (name, _) in self.names.items() if self._is_mixed(number)}

    def _is_mixed(self, number: str) -> bool:
        position = self.positions.get(number)
        return position is not None and position.is_mixed

    def is_even_but_for(self, mixed: Container[_Kind]) -> bool:
        """Whether the counters show nothing outstanding, apart from groups whose counters do not show it."""
        uneven = [number for number, position in self.positions.items() if position.called > position.completed]
        return all(number in self.names and self.kind(self.names[number][0]) in mixed for number in uneven)

    def take(self, number: str, about: str) -> None:
        """Gives a number the name of the only group of that kind, if there is only one."""
        fitting = [name for name in self.unnumbered if self.about.get(name) == about]
        if len(fitting) == 1:
            self.names[number] = (fitting[0], about)

    def _complete(self) -> None:
        unnamed, unnumbered = self.unnamed, self.unnumbered
        if len(unnamed) == len(unnumbered) == 1:
            self.names[unnamed[0]] = (unnumbered[0], self.about.get(unnumbered[0], ""))


def complete(all_places: Iterable[Places]) -> bool:
    """Names positions after dumps of other ranks that have the same kinds of groups, and so number them alike.

    Returns:
        Whether any position was named.
    """
    alike: dict[object, list[Places]] = defaultdict(list)
    for places in all_places:
        kinds = Counter(places.about.values())
        alike[(frozenset(places.positions), frozenset(kinds.items()))].append(places)
    changed = False
    for same in alike.values():
        descriptions: dict[str, set[str]] = defaultdict(set)
        for places in same:
            for number, (_, about) in places.names.items():
                descriptions[number].add(about)
        for places in same:
            before = len(places.names)
            for number in places.unnamed:
                if len(descriptions[number]) == 1:
                    places.take(number, next(iter(descriptions[number])))
            places._complete()
            changed |= len(places.names) != before
    return changed


def common_names(all_places: Mapping[int, Places]) -> dict[int, dict[str, str]]:
    """By rank: its own names of groups that have another name on their lowest member, each with that common name.

    Each process numbers or hashes names itself, so members of a group may disagree about its name, and one name may
    mean different groups; then the members become part of the name.
    """
    by_members: dict[_Kind, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, places in sorted(all_places.items()):
        for name, there in places.members.items():
            if name and rank in there:
                by_members[(there, places.about.get(name, ""))][rank].append(name)
    one = {kind: by_rank for kind, by_rank in by_members.items() if all(len(own) == 1 for own in by_rank.values())}
    common = {kind: next(iter(by_rank.values()))[0] for kind, by_rank in one.items()}
    differ = {kind for kind, by_rank in one.items() if len({own[0] for own in by_rank.values()}) > 1}
    if differ:
        common |= {kind: f"{common[kind]} of {ranks_words(kind[0])}" for kind in _ambiguous(one, common)}
    renamed: dict[int, dict[str, str]] = defaultdict(dict)
    for kind, by_rank in one.items():
        for rank, own in by_rank.items():
            if own[0] != common[kind] or kind in differ:
                renamed[rank][own[0]] = common[kind]
    return renamed


def _ambiguous(groups: Mapping[_Kind, Mapping[int, list[str]]], common: Mapping[_Kind, str]) -> set[_Kind]:
    """Groups that would share a name with another group on a common member."""
    taken: dict[tuple[int, str], set[_Kind]] = defaultdict(set)
    for kind, by_rank in groups.items():
        for rank in by_rank:
            taken[(rank, common[kind])].add(kind)
    return {kind for kinds in taken.values() if len(kinds) > 1 for kind in kinds}


def groups_of(places: Places) -> tuple[Group, ...]:
    """The groups whose position is known."""
    groups = [
        _group(name, about, places.members.get(name) or places.only, places.positions.get(number))
        for number, (name, about) in list(places.names.items())[:MOST_GROUPS]
    ]
    found = {group.name for group in groups}
    if not places.unnamed:
        # A group has a position after its first collective, so these have called none.
        groups += [
            Group(name=name, ranks=there) for name, there in places.members.items() if name and name not in found
        ]
    return tuple(groups[:MOST_GROUPS])


def _group(name: str, about: str, members: tuple[int, ...], position: GroupPosition | None) -> Group:
    if position is None:
        return Group(name=name, description=about, ranks=members)
    return Group(
        name=name,
        description=about,
        ranks=members,
        last_enqueued=position.called,
        last_started=position.started,
        last_completed=position.completed,
        is_mixed=position.is_mixed,
    )
