"""What is wrong with the hosts of a job, each with its remedy, and a table of what differs between ranks."""

from collections.abc import Callable, Iterator

from lightning_ncclsafe.facts import DirectoryFacts, JobFacts, PreflightFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding, Severity
from lightning_ncclsafe.facts.wording import ranks_words, size_words
from lightning_ncclsafe.report.lines import columns, cut, first_of, safe, section, wrapped
from lightning_ncclsafe.report.tables.data import host_words, rank_numbers
from lightning_ncclsafe.rules.kit.hosts import JobHosts, in_flight_bytes
from lightning_ncclsafe.rules.kit.parts import Groups, grouped
from lightning_ncclsafe.rules.preflight.directories import checked_directories
from lightning_ncclsafe.rules.preflight.settings import differing_settings, versions_of

Words = Callable[[float], str]

_LONGEST_SUMMARY = 480
_MOST_ROWS = 8
_MOST_COLUMNS = 8
_WIDEST_CELL = 28
_MOST_UNKNOWN = 2
_MOST_VALUES = 12
_UNKNOWN = "unknown"


def _rough(value: int | None) -> str:
    """A size to two digits: memory that firmware reserves differs between hosts and does not matter."""
    return "" if value is None else size_words(int(float(f"{value:.1e}")))


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.10g}"


_STEADY: dict[str, Callable[[PreflightFacts], str]] = {
    "quota": lambda facts: _count(facts.capacity.quota_cores),
    "memory": lambda facts: _rough(facts.capacity.memory_total_bytes),
    "memory limit": lambda facts: _rough(facts.capacity.memory_limit_bytes),
    "/dev/shm": lambda facts: _rough(facts.capacity.shm_total_bytes),
    "swap": lambda facts: _rough(facts.swap.total_bytes),
    "workers": lambda facts: _count(facts.load.loader_workers),
    "in flight": lambda facts: _count(facts.load.batches_in_flight),
    "threads": lambda facts: _count(facts.load.omp_threads),
    "GPU memory": lambda facts: _rough(facts.gpu.total_bytes) if facts.gpu is not None else "none",
    "interface": lambda facts: facts.network.default_interface,
    "InfiniBand": lambda facts: f"{facts.network.infiniband_active} active",
    "open files": lambda facts: _count(facts.open_files_limit),
}


def steady(view: JobHosts, *, every: bool = False) -> dict[str, Groups[str]]:
    """Ranks by each constant property of their hosts, by the names of the questions.

    Args:
        every: Whether to include all settings, not only those that differ and must not; and the lists behind numbers.
    """
    shares = {rank: share for host in view.hosts for rank, share in host.core_shares().items()}
    cores = grouped({rank: f"{shares[rank]:.1f}" if rank in shares else "" for rank in view.facts})
    found = {"cores": cores} | {name: view.by(ask) for name, ask in _STEADY.items()}
    for role in sorted({one.role for facts in view.facts.values() for one in facts.directories}):
        found[role] = view.by(lambda facts, role=role: _filesystems(facts, role))  # type: ignore[misc]
    for name, groups in versions_of(view).items():
        version_of = {rank: version for version, ranks in groups.parts for rank in ranks}
        found[name] = grouped({rank: version_of.get(rank, "") for rank in view.facts})
    return found | (_lists(view) | _settings(view) if every else dict(differing_settings(view)))


def _filesystems(facts: PreflightFacts, role: str) -> str:
    return ", ".join(dict.fromkeys(one.filesystem for one in facts.directories if one.role == role and one.filesystem))


def _lists(view: JobHosts) -> dict[str, Groups[str]]:
    return {
        "interfaces": view.by(lambda facts: "; ".join(facts.network.interfaces)),
        "interface chosen by": view.by(lambda facts: facts.network.chosen_by),
        "InfiniBand ports": view.by(lambda facts: "; ".join(facts.network.infiniband)),
        "InfiniBand off": view.by(lambda facts: facts.network.infiniband_off),
        "swap devices": view.by(lambda facts: "; ".join(facts.swap.devices)),
    }


def _settings(view: JobHosts) -> dict[str, Groups[str]]:
    names = sorted({name for facts in view.facts.values() for name in facts.settings})
    return {name: view.by(lambda facts, name=name: facts.settings.get(name, "not set")) for name in names}  # type: ignore[misc]


def _size(value: float) -> str:
    return size_words(int(value))


def _whole(value: float) -> str:
    return f"{int(value):,}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms"


def _share(value: float) -> str:
    return f"{value:.0%}"


_MEASURED: dict[str, tuple[Callable[[PreflightFacts], float | None], Words]] = {
    "memory available": (lambda facts: facts.capacity.memory_available_bytes, _size),
    "memory used by the control group": (lambda facts: facts.capacity.memory_used_bytes, _size),
    "memory the process may allocate": (lambda facts: facts.capacity.process_limit_bytes, _size),
    "free in /dev/shm": (lambda facts: facts.capacity.shm_free_bytes, _size),
    "batches in flight": (lambda facts: in_flight_bytes(facts) or None, _size),
    "model, gradients and optimizer": (lambda facts: facts.load.replica_bytes, _size),
    "swap in use": (lambda facts: facts.swap.used_bytes, _size),
    "swapped out": (lambda facts: facts.swap.swapped_out_bytes, _size),
    "swapped in": (lambda facts: facts.swap.swapped_in_bytes, _size),
    "stalled by memory": (lambda facts: facts.swap.memory_stalled, _share),
    "stalled by storage": (lambda facts: facts.swap.io_stalled, _share),
    "waited for a core": (lambda facts: facts.swap.cpu_waited, _share),
    "free on the GPU": (lambda facts: facts.gpu.free_bytes if facts.gpu is not None else None, _size),
    "open files now": (lambda facts: facts.open_files, _whole),
    "clock ahead of rank 0's": (lambda facts: facts.clock_offset_s, _milliseconds),
    "the check took": (lambda facts: facts.took_s, _milliseconds),
}
_TRIED: dict[str, tuple[Callable[[DirectoryFacts], float | None], Words]] = {
    "append": (lambda one: one.append_s, _milliseconds),
    "slowest append": (lambda one: one.append_worst_s, _milliseconds),
    "fsync": (lambda one: one.fsync_s, _milliseconds),
    "read": (lambda one: one.read_s, _milliseconds),
    "free": (lambda one: one.free_bytes, _size),
    "files to be made": (lambda one: one.free_inodes, _whole),
}


def measured(view: JobHosts) -> Iterator[tuple[str, str]]:
    """Measured values, by the names of the questions: ``"1.2 GB (rank 3) to 4.0 GB (rank 0)"``."""
    for name, (ask, words) in _MEASURED.items():
        yield from _ranged(name, {rank: ask(facts) for rank, facts in view.facts.items()}, words)
    for directory in checked_directories(view):
        one = next(iter(directory.values()))
        for name, (of, words) in _TRIED.items():
            found = {rank: of(facts) for rank, facts in directory.items()}
            yield from _ranged(f"{name}, {one.role} at {one.path}", found, words)


def _ranged(name: str, found: dict[int, float | None], words: Words) -> Iterator[tuple[str, str]]:
    values = {rank: value for rank, value in found.items() if value is not None}
    if not values:
        return
    low, high = min(values, key=lambda rank: values[rank]), max(values, key=lambda rank: values[rank])
    least, most = words(values[low]), words(values[high])
    alike = f"{least} on {ranks_words(values)}"
    yield name, alike if least == most else f"{least} (rank {low}) to {most} (rank {high})"


def render_preflight(diagnosis: Diagnosis) -> str:
    """One line for each finding with its remedy, errors first, then what differs between ranks; fewer than 40 lines.

    Empty if nothing is wrong and nothing differs.
    """
    lines = [
        f"{finding.severity.value}: {finding.rule}: {cut(finding.summary, _LONGEST_SUMMARY)} "
        f"What to do: {finding.remedy}"
        for finding in _ordered(diagnosis)
    ]
    lines += preflight_table(diagnosis.job)
    if lines:
        lines += [f"not known: {line}" for line in diagnosis.unanswered[:_MOST_UNKNOWN]]
    return "\n".join(safe(line) for line in lines)


def render_preflight_all(diagnosis: Diagnosis) -> str:
    """Everything: findings with all evidence, each question with the ranks' answers, and what is unknown."""
    view = JobHosts(diagnosis.job)
    parts = [
        *(_full(finding) for finding in _ordered(diagnosis)),
        "" if diagnosis.findings else f"Nothing is wrong with the hosts of {ranks_words(view.facts)}.",
        section("What the ranks have found", _answers(view)),
        section("What could not be determined", (f"- {line}" for line in diagnosis.unanswered)),
    ]
    return "\n\n".join(part for part in parts if part)


def preflight_table(job: JobFacts) -> list[str]:
    """A table of only the columns in which ranks differ; equal ranks share a row. Empty if nothing differs."""
    view = JobHosts(job)
    answers = {name: groups for name, groups in steady(view).items() if groups.differ}
    if not answers:
        return []
    shown = dict(list(answers.items())[:_MOST_COLUMNS])
    rows, left_out = _rows(view, shown)
    lines = list(columns(rows, widest=_WIDEST_CELL))
    lines += [f"  … {left_out:,} more rows are in ncclsafe preflight --all"] if left_out else []
    if hidden := [cut(name, _WIDEST_CELL) for name in answers][_MOST_COLUMNS:]:
        lines.append(
            f"  … {', '.join(first_of(hidden, _MOST_COLUMNS))} {'differs' if len(hidden) == 1 else 'differ'} too"
        )
    return lines


def _ordered(diagnosis: Diagnosis) -> list[Finding]:
    severities = tuple(Severity)
    return sorted(diagnosis.findings, key=lambda finding: severities.index(finding.severity))


def _full(finding: Finding) -> str:
    lines = [wrapped(f"{finding.severity.value}: {finding.rule}, {ranks_words(finding.ranks)}")]
    lines += [wrapped(f"- {item.text}", "   ") for item in finding.evidence] or [wrapped(finding.summary, "   ")]
    return "\n".join([*lines, wrapped(f"What to do: {finding.remedy}", "   ")])


def _answers(view: JobHosts) -> Iterator[str]:
    for name, groups in steady(view, every=True).items():
        words = [f"{value} on {ranks_words(ranks)}" for value, ranks in groups.parts if value]
        yield f"- {name}: {', '.join(first_of(words, _MOST_VALUES)) or _UNKNOWN}"
    for name, text in measured(view):
        yield f"- {name}: {text}"


def _rows(view: JobHosts, shown: dict[str, Groups[str]]) -> tuple[list[tuple[str, ...]], int]:
    cells: dict[int, list[str]] = {rank: [] for rank in view.facts}
    for groups in shown.values():
        for value, ranks in groups.parts:
            for rank in ranks:
                cells[rank].append(value or _UNKNOWN)
    alike = grouped({rank: tuple(values) for rank, values in cells.items()}).parts
    body = [
        (rank_numbers(ranks), host_words({view.names[rank] for rank in ranks}), *values)
        for values, ranks in alike[:_MOST_ROWS]
    ]
    return [("rank", "host", *shown), *body], len(alike) - len(body)
