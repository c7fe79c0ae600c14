"""What surrounds a rank and needs to be read only once: its workers, files, host and installed packages."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.code.libraries import LOADING
from lightning_ncclsafe.facts import GONE, EndedProcess, HostFacts, ProcessFacts, StorageFacts
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, frames_of
from lightning_ncclsafe.inspecting.looks import Look, StackReader
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.sources import from_storage, remember_sources
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import child_processes, filesystem_of, host_facts, look_at
from lightning_ncclsafe.probes.network import name_servers_asked
from lightning_ncclsafe.probes.process.growth import MemoryLook, growth_between
from lightning_ncclsafe.probes.process.lock_waits import awaited_lock
from lightning_ncclsafe.probes.process.stacks import with_source

# Stacks of workers are read only if their rank waits for data, and only of a few, as all do the same.
_WORKERS_READ = 2
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".part", ".tmp")
_LOGS = ("tfevents", "metrics.csv", ".wandb")
_VERSIONS = {"torch": ("torch",), "lightning": ("lightning", "pytorch_lightning")}


def seen_rank(one: RankProcess, looks: tuple[Look, ...], reader: StackReader, ranks: Sequence[RankProcess]) -> SeenRank:
    """A rank with its surroundings.

    Args:
        one: The rank.
        looks: The looks at it.
        reader: Reads stacks of its workers.
        ranks: All ranks of this host.
    """
    last = looks[-1].process if looks else None
    if last is not None and last.state == GONE:
        return SeenRank(process=one, looks=looks)
    # Lightning's launcher makes the other ranks children of the first one; these are not workers.
    others = [other.pid for other in ranks]
    children = or_none(lambda: psutil.Process(one.pid).children()) or []
    ended = [seen for child in children if child.pid not in others and (seen := look_at(child.pid)).state == "zombie"]
    workers = child_processes(besides=others, of=one.pid)
    loads = bool(looks) and any(LOADING.has(frame.file, frame.function) for frame in looks[-1].stack)
    from_storage(partial(remember_sources, one.pid, {frame.file for seen in looks for frame in seen.stack}), None)
    return SeenRank(
        process=one,
        looks=looks,
        workers=tuple(
            _worker(pid, reader if loads and number < _WORKERS_READ else None)
            for number, pid in enumerate(workers)
            if pid not in [seen.pid for seen in ended]
        ),
        ended=tuple(EndedProcess(pid=seen.pid, signal=seen.ended_by, exit_code=seen.exit_code) for seen in ended),
        storage=from_storage(lambda: tuple(_open_files(one.pid)), ()),
        name_servers=name_servers_asked(one.pid),
        file_lock=from_storage(partial(awaited_lock, one.pid), None),
        host_facts=_host_facts(one.pid, looks),
        versions=from_storage(partial(_versions, looks), {}),
    )


def _worker(pid: int, reader: StackReader | None) -> ProcessFacts:
    seen = look_at(pid)
    if reader is None:
        return seen
    threads, _ = reader.read(pid)
    main = next((thread for thread in threads if thread.is_main), None)
    return replace(seen, stack=with_source(frames_of(main.frames))) if main is not None else seen


def _open_files(pid: int) -> Iterator[StorageFacts]:
    """Folders in which files are open for writing, with their owner according to the files' names."""
    seen = set()
    for file in or_none(lambda: psutil.Process(pid).open_files()) or []:
        folder, name = os.path.split(file.path)
        is_log = any(part in name for part in _LOGS)
        owner = "Logger" if is_log else "Checkpoint" if name.endswith(_CHECKPOINTS) else ""
        is_written = "w" in (getattr(file, "mode", "") or "") or "a" in (getattr(file, "mode", "") or "")
        if owner and is_written and (owner, folder) not in seen:
            seen.add((owner, folder))
            yield StorageFacts(owner=owner, path=folder, filesystem=or_none(partial(filesystem_of, folder)) or "")


def _host_facts(pid: int, looks: Sequence[Look]) -> HostFacts:
    known = [
        MemoryLook(at_s=one.at_s, rss_bytes=one.process.rss_bytes, swap_bytes=one.process.swap_bytes)
        for one in looks
        if one.process is not None and one.process.rss_bytes is not None
    ]
    facts = host_facts(pid)
    if not known:
        return facts
    first, last = known[0], known[-1]
    grows, swaps = growth_between(first, last)
    return replace(
        facts,
        rss_bytes=last.rss_bytes,
        process_swap_bytes=last.swap_bytes,
        memory_growth_bytes_per_s=grows,
        swap_growth_bytes_per_s=swaps,
    )


def _versions(looks: Sequence[Look]) -> dict[str, str]:
    """Versions by the metadata beside the packages that its frames are in."""
    files = {frame.file for seen in looks for frame in seen.stack if "-packages/" in frame.file}
    folders = {file[: file.index("-packages/") + len("-packages")] for file in files}
    found: dict[str, str] = {}
    for folder in folders:
        for name, installed in _VERSIONS.items():
            for path in (path for one in installed for path in Path(folder).glob(f"{one}-*.dist-info")):
                found.setdefault(name, path.name.removesuffix(".dist-info").rpartition("-")[2])
    return found
