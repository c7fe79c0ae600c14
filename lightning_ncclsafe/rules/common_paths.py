"""One path for each source file that hosts have in folders of their own, so that rules see ranks at the same line."""

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import takewhile
from typing import Any

from lightning_ncclsafe.facts import Collective, Frame, Group, JobFacts, RankFacts

# site-packages, dist-packages
_INSTALLED = "-packages/"


def with_common_paths(job: JobFacts) -> JobFacts:
    """The same job, in which a file has the path of the first host that has it.

    A virtual environment or a copy of the code may be elsewhere on each host. A file counts as the same on two hosts if
    it has the same name in a folder of the same name, or in the same package if it is installed, and neither host has
    two such files.
    """
    if len({facts.host for facts in job.ranks}) < 2:
        return job
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    hosts: dict[str, set[str]] = defaultdict(set)
    for facts in job.ranks:
        for frame in _frames(facts):
            seen[_tail(frame.file)][facts.host].add(frame.file)
            if frame.user:
                hosts[frame.file].add(facts.host)
    common: dict[str, str] = {}
    for tail, by_host in seen.items():
        paths = {host: path for host, on_host in by_host.items() for path in on_host}
        is_one_each = all(len(on_host) == 1 for on_host in by_host.values())
        is_other_file = not tail.startswith(_INSTALLED) and _are_of_one_folder(paths, hosts)
        if len({*paths.values()}) > 1 and is_one_each and not is_other_file:
            common |= dict.fromkeys(paths.values(), next(iter(paths.values())))
    return _with_paths(job, common) if common else job


def _are_of_one_folder(paths: dict[str, str], hosts: dict[str, set[str]]) -> bool:
    """Whether hosts have the folder around these files at one place: then they are different files in it.

    Args:
        paths: The files, by host.
        hosts: The hosts that have each of the user's files.
    """
    names = zip(*(path.replace("\\", "/").split("/") for path in {*paths.values()}), strict=False)
    folder = "/".join(alike[0] for alike in takewhile(lambda alike: len({*alike}) == 1, names))
    around = (on for file, on in hosts.items() if folder and file.replace("\\", "/").startswith(f"{folder}/"))
    return any(len({paths[host] for host in on if host in paths}) > 1 for on in around)


def _frames(facts: RankFacts) -> Iterator[Frame]:
    yield from facts.stack
    yield from facts.thread_stack
    yield from facts.raised_stack
    calls = (call.stack for call in facts.collectives)
    peers = (peer.stack for peer in facts.peers)
    caught = (one.stack for one in facts.caught)
    for stack in (*calls, *peers, *caught):
        yield from stack


def _tail(path: str) -> str:
    path = path.replace("\\", "/")
    _, packages, installed = path.rpartition(_INSTALLED)
    return packages + installed if packages else "/".join(path.rsplit("/", 2)[-2:])


def _with_paths(value: Any, common: dict[str, str]) -> Any:
    """The same value with other paths, alone or in ``"file:line in function"``."""
    if isinstance(value, str):
        file, colon, rest = value.rpartition(":")
        return f"{common[file]}:{rest}" if colon and file in common else common.get(value, value)
    if isinstance(value, Group) or (isinstance(value, Collective) and not value.stack):
        return value  # there are very many of these
    if isinstance(value, tuple):
        items = tuple(_with_paths(item, common) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, dict):
        return {key: _with_paths(item, common) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        new = {one.name: _with_paths(getattr(value, one.name), common) for one in fields(value)}
        changed = {name: item for name, item in new.items() if item is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
