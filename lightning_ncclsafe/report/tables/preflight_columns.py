"""What ranks have found on their hosts and stays as it is, as answers to named questions."""

from collections.abc import Callable

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit.data import Groups, grouped
from lightning_ncclsafe.rules.kit.hosts import Checked, core_shares
from lightning_ncclsafe.rules.kit.wording import size_words
from lightning_ncclsafe.rules.preflight.settings import differing_settings, versions_of


def _rough(value: int | None) -> str:
    """A size to two digits: what the firmware of one host keeps for itself makes no difference."""
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


def steady(view: Checked, *, every: bool = False) -> dict[str, Groups[str]]:
    """Ranks by what does not change from one moment to the next, by the names of the questions.

    Args:
        view: What the ranks have found.
        every: All settings, not only those that have to be the same and are not; and the lists behind numbers.
    """
    found = {"cores": _cores(view)} | {name: view.by(ask) for name, ask in _STEADY.items()}
    for role in sorted({one.role for facts in view.facts.values() for one in facts.directories}):
        found[role] = view.by(lambda facts, role=role: _filesystems(facts, role))  # type: ignore[misc]
    found |= {name: _with_unknown(view, groups) for name, groups in versions_of(view).items()}
    return found | (_lists(view) | _settings(view) if every else dict(differing_settings(view)))


def _cores(view: Checked) -> Groups[str]:
    shares = {rank: share for host in view.hosts for rank, share in core_shares(host).items()}
    return grouped({rank: f"{shares[rank]:.1f}" if rank in shares else "" for rank in view.facts})


def _filesystems(facts: PreflightFacts, role: str) -> str:
    return ", ".join(dict.fromkeys(one.filesystem for one in facts.directories if one.role == role and one.filesystem))


def _with_unknown(view: Checked, groups: Groups[str]) -> Groups[str]:
    told = {rank: version for version, ranks in groups.parts for rank in ranks}
    return grouped({rank: told.get(rank, "") for rank in view.facts})


def _lists(view: Checked) -> dict[str, Groups[str]]:
    return {
        "interfaces": view.by(lambda facts: "; ".join(facts.network.interfaces)),
        "interface chosen by": view.by(lambda facts: facts.network.chosen_by),
        "InfiniBand ports": view.by(lambda facts: "; ".join(facts.network.infiniband)),
        "InfiniBand off": view.by(lambda facts: facts.network.infiniband_off),
        "swap devices": view.by(lambda facts: "; ".join(facts.swap.devices)),
    }


def _settings(view: Checked) -> dict[str, Groups[str]]:
    names = sorted({name for facts in view.facts.values() for name in facts.settings})
    return {name: view.by(lambda facts, name=name: facts.settings.get(name, "not set")) for name in names}  # type: ignore[misc]
