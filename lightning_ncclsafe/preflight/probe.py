"""Examines one rank's host before training starts, within three seconds."""

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil

from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.facts import GpuFacts, LoadFacts, PreflightFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.directories import try_directories
from lightning_ncclsafe.probes.gpu import gpu_facts
from lightning_ncclsafe.probes.host.capacity import capacity
from lightning_ncclsafe.probes.host.swap import SwapProbe
from lightning_ncclsafe.probes.network import network_facts
from lightning_ncclsafe.probes.process.environment import settings_seen, versions_seen

# What the slowest part may take beyond its deadline, to end what it has started.
_ENDING_S = 0.3
# Pressure is measured for this long at least, while the other parts run.
_WATCHED_S = 0.1
# How long the findings about a host stay valid.
_NEW_S = 300.0

Parts = Mapping[str, Callable[[], Any]]


def preflight_facts(
    *,
    directories: Mapping[str, str],
    load: LoadFacts,
    local_rank: int,
    is_cuda: bool,
    gpu_index: int | None = None,
    environment: Mapping[str, str] = os.environ,
    deadline_s: float = 2.0,
) -> PreflightFacts:
    """Describes this host. Needs no root and no CUDA context; it neither hangs nor raises.

    All parts run at the same time. One that fails, or is late, is named in ``missing``, and its facts are absent; so
    are clocks, which need the other ranks.

    Args:
        directories: Paths by what they are for: ``"logs"``, ``"checkpoints"``, ``"data"``.
        gpu_index: Place of this rank's GPU among those that CUDA sees; by default ``local_rank``, which it is unless
            the user has chosen some of them (``devices=[2, 3]``).
        environment: Environment variables to read settings from: those of this process, or an earlier copy.
        deadline_s: Seconds that each part has; all of it takes 0.3 s more at most.
    """
    began_s = time.monotonic()
    parts: dict[str, Callable[[], Any]] = {
        "directories": lambda: try_directories(directories, deadline_s),
        "network": lambda: network_facts(is_cuda=is_cuda),
        "capacity": capacity,
        "versions": versions_seen,
        "settings": lambda: settings_seen(environment),
        "open_files_limit": open_files_limit,
        "open_files": open_files,
        "swap": lambda: _watched_swap(deadline_s),
    }
    if is_cuda:
        parts["gpu"] = lambda: gpu_facts(local_rank if gpu_index is None else gpu_index)
    found, missing = run_parts(parts, deadline_s + _ENDING_S)
    facts = PreflightFacts(load=load, is_cuda=is_cuda, missing=tuple(missing), **found)
    return replace(facts, versions=_with_driver(facts), took_s=round(time.monotonic() - began_s, 3))


class RecentFacts:
    """Keeps what this process has found on its host, so that the next call of a Trainer need not examine it again.

    A host with a problem, or of which something is unknown, is examined again.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: tuple[object, ...] = ()
        self._found: PreflightFacts | None = None
        self._found_s = 0.0

    def get(self, *, load: LoadFacts, environment: Mapping[str, str], **asked: Any) -> PreflightFacts:
        """As :func:`preflight_facts`, whose arguments it takes."""
        about = (settings_seen(environment), asked)
        if self._found is None or self._asked != about or self._clock() - self._found_s > _NEW_S:
            found = preflight_facts(load=load, environment=environment, **asked)
            is_whole = not found.missing and not any(directory.problem for directory in found.directories)
            self._asked, self._found, self._found_s = about, found if is_whole else None, self._clock()
            return found
        return replace(self._found, load=load)


def run_parts(parts: Parts, deadline_s: float) -> tuple[dict[str, Any], list[str]]:
    """Runs functions at the same time, each in its own thread; one that hangs keeps its thread.

    Args:
        parts: The functions by name.
        deadline_s: Seconds that all of them have.

    Returns:
        Their results by name, without None; and a sentence for each that failed or was late.
    """
    ends_s = time.monotonic() + deadline_s
    threads = {name: SideThread(f"ncclsafe-preflight-{name}") for name in parts}
    for name, part in parts.items():
        threads[name].begin(part)
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, thread in threads.items():
        try:
            if (value := thread.answer(ends_s - time.monotonic())) is not None:
                found[name] = value
        except UnansweredError:
            problems.append(f"{name}: no answer within {deadline_s:g} s")
        except Exception as error:  # a fact that cannot be determined is reported as missing
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return found, problems


def _watched_swap(deadline_s: float) -> Any:
    probe = SwapProbe()
    time.sleep(min(_WATCHED_S, deadline_s / 2))
    return probe.read()


def open_files_limit() -> int | None:
    """Soft limit of open files; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files() -> int:
    """How many files this process has open, including the one used to count them."""
    known = or_none(lambda: psutil.Process().num_fds())
    return len(os.listdir("/dev/fd")) if known is None else known


def _with_driver(facts: PreflightFacts) -> dict[str, str]:
    gpu = facts.gpu or GpuFacts(index=-1)
    versions = {"driver": gpu.driver, "CUDA of the driver": gpu.cuda}
    return facts.versions | {name: number for name, number in versions.items() if number}
