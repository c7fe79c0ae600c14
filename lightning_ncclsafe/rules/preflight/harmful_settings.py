"""The cause harmful-settings: settings for hunting an error that slow or break a run when they are left in place."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Checked, Host, core_shares
from lightning_ncclsafe.rules.preflight.problem import Problem, check
from lightning_ncclsafe.rules.preflight.settings import switched_on, value_of

# What these do: NCCL's user guide, "Environment Variables", and torch.distributed's documentation, "Debugging".
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for its end",
    "TORCH_NCCL_BLOCKING_WAIT": "makes every collective wait for its end on the CPU",
    "NCCL_BLOCKING_WAIT": "makes every collective wait for its end on the CPU",
}
_SLOW_BETWEEN_GPUS = {
    "NCCL_P2P_DISABLE": "sends data between the GPUs of a host through its memory",
    "NCCL_SHM_DISABLE": "sends data between the GPUs of a host over the network",
}
_FEW_RANKS = 8
_LOOPBACK = {"lo", "=lo"}


@check(
    after="host-under-pressure",
    remedy=(
        "Remove what is no longer needed: NCCL's guide says of its debugging variables that a run may be slow, crash "
        "or hang where they are left set. For thread pools, set OMP_NUM_THREADS to the cores of a rank less its "
        "workers."
    ),
)
def harmful_settings(view: Checked) -> Iterator[Problem]:
    """Variables are set that switch off fast paths, write much, or check every call.

    Symptom:
        Every step is slower than it could be, log files grow, or ranks on other hosts are never reached.

    Cause:
        Advice that helped against another error on another machine and was never removed.

    Remedy:
        Remove the variables.

    Cannot see:
        Whether this machine needs one of them to work at all, as some do NCCL_P2P_DISABLE.
    """
    verbose = [rank for rank, facts in view.facts.items() if value_of(facts, "NCCL_DEBUG") == "INFO"]
    for host in view.hosts:
        shares = core_shares(host)
        for rank, facts in host.facts.items():
            words = [*_of_rank(facts), *_of_host(facts, host), *_of_job(facts, view, len(verbose))]
            words += _thread_words(facts, shares.get(rank))
            yield from (Problem(ranks=(rank,), text=text) for text in words)


def _of_rank(facts: PreflightFacts) -> Iterator[str]:
    yield from _switched_on(facts, _SLOW)
    if value_of(facts, "TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective between all ranks before it runs"
    if value_of(facts, "NCCL_DEBUG") == "TRACE":
        yield "NCCL_DEBUG=TRACE writes a line for every call"


def _of_host(facts: PreflightFacts, host: Host) -> Iterator[str]:
    if facts.is_cuda and len(host.facts) > 1:
        yield from _switched_on(facts, _SLOW_BETWEEN_GPUS)


def _of_job(facts: PreflightFacts, view: Checked, verbose: int) -> Iterator[str]:
    if verbose > _FEW_RANKS and value_of(facts, "NCCL_DEBUG") == "INFO":
        yield f"NCCL_DEBUG=INFO on {verbose:,} ranks writes hundreds of lines each; WARN is enough, or INFO on one rank"
    if view.several and facts.network.infiniband_active > 0:
        yield from _switched_on(facts, {"NCCL_IB_DISABLE": "leaves active InfiniBand ports unused"})
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if view.several and facts.settings.get(name, "").strip() in _LOOPBACK:
            yield f"{name}={facts.settings[name]} reaches none of the other hosts of the job"


def _thread_words(facts: PreflightFacts, share: float | None) -> list[str]:
    pool = facts.load.omp_threads
    if pool is None or share is None or pool <= max(round(share), 1):
        return []
    return [f"{pool:,} threads for each operation of torch (OMP_NUM_THREADS) on a share of {share:.1f} cores"]


def _switched_on(facts: PreflightFacts, names: dict[str, str]) -> Iterator[str]:
    for name, effect in names.items():
        if switched_on(facts, name):
            yield f"{name}={facts.settings[name]} {effect}"
