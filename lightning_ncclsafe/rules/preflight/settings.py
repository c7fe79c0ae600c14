"""Versions and environment variables that differ between ranks, are harmful, or are read by nothing."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Groups, Host, JobHosts, Severity, spread_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_OFF = {"", "0", "false", "no", "n", "off"}


def switched_on(facts: PreflightFacts, name: str) -> bool:
    """Whether a variable is set to anything but "off"."""
    return facts.settings.get(name, "").strip().lower() not in _OFF


def value_of(facts: PreflightFacts, name: str) -> str:
    """A variable's value in upper case, as NCCL and torch compare it; empty if it is not set."""
    return facts.settings.get(name, "").strip().upper()


# Major versions of these differ in wire format or order of collectives.
_TOGETHER = ("torch", "nccl")


@check(
    after="memory-short",
    remedy=(
        "Start all ranks in the same environment: one container image or one shared virtual environment, the same "
        "module loads, and the same driver on all hosts."
    ),
)
def different_versions(view: JobHosts) -> Iterator[Problem]:
    """Versions of torch, NCCL, CUDA, the driver, Lightning or Python, or the models of the GPUs, differ between ranks.

    Symptom:
        Ranks hang in their first collective or fail in it with an error that names no version; or some are slower.

    Cause:
        An environment that was updated on some hosts only, a different image, hosts of different generations.

    Remedy:
        Use the same environment everywhere.

    Cannot see:
        Different code of the user's own.
    """
    for name, groups in versions_of(view).items():
        if groups.differ:
            severity = Severity.ERROR if _incompatible(name, groups) else Severity.WARNING
            yield Problem(ranks=groups.deviating, text=f"{name} is {spread_words(groups)}", severity=severity)


def versions_of(view: JobHosts) -> dict[str, Groups[str]]:
    """Ranks grouped by version, for everything that any rank reports, including the GPU's model and driver."""
    names = dict.fromkeys(name for facts in view.facts.values() for name in _versions(facts))
    return {name: view.known(lambda facts, name=name: _versions(facts).get(name)) for name in names}  # type: ignore[misc]


def _versions(facts: PreflightFacts) -> dict[str, str]:
    gpu = {"GPU": facts.gpu.name, "driver": facts.gpu.driver} if facts.gpu is not None else {}
    return gpu | facts.versions


def _incompatible(name: str, groups: Groups[str]) -> bool:
    majors = {version.partition(".")[0] for version, _ in groups.parts}
    return name.lower() in _TOGETHER and len(majors) > 1


# Variables of NCCL, torch, gloo, CUDA and the libraries below them.
_READ = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "UCX_", "UCC_", "FI_")
# Each rank's own: which devices it uses, and where and how much it logs.
_OF_RANKS = {
    "CUDA_VISIBLE_DEVICES",
    "NCCL_COMM_ID",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_HOSTID",
    "NCCL_TOPO_DUMP_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
# Names of a host's hardware, which may differ between hosts.
_OF_HOSTS = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_GRAPH_FILE",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
    "OMP_NUM_THREADS",
    "UCX_NET_DEVICES",
}
_UNSET = "not set"


@check(
    after="gpu-shared",
    remedy=(
        "Set it in one place for all ranks: exported by the job script before srun, torchrun or mpirun -x starts them, "
        "or in the container image; check ~/.bashrc and /etc/nccl.conf of the hosts that differ."
    ),
)
def different_settings(view: JobHosts) -> Iterator[Problem]:
    """A variable that NCCL, gloo or torch.distributed reads differs between ranks.

    Symptom:
        Ranks choose different transports or algorithms and hang in the first collective, or in the first one of some
        size; or only some of them end a collective that takes too long.

    Cause:
        Variables that are set in a shell's start-up file of some hosts, or in Python under a condition on the rank.

    Remedy:
        Set them identically on all ranks.

    Cannot see:
        /etc/nccl.conf, and what was changed after the check.
    """
    for name, groups in differing_settings(view).items():
        yield Problem(ranks=groups.deviating, text=f"{name} is {spread_words(groups)}")


def differing_settings(view: JobHosts) -> dict[str, Groups[str]]:
    """Ranks grouped by value, for each variable that should be the same on all ranks and is not."""
    every = {name for facts in view.facts.values() for name in facts.settings}
    names = sorted(name for name in every - _OF_RANKS if name.startswith(_READ))
    values = {name: view.by(lambda facts, name=name: facts.settings.get(name, _UNSET)) for name in names}  # type: ignore[misc]
    return {name: groups for name, groups in values.items() if groups.differ and not _may_differ(view, name)}


def _may_differ(view: JobHosts, name: str) -> bool:
    """Whether a variable names a host's hardware and is the same on all ranks of each host."""
    if name not in _OF_HOSTS:
        return False
    values = ({facts.settings.get(name, _UNSET) for facts in host.facts.values()} for host in view.hosts)
    return all(len(found) == 1 for found in values)


# Effects according to NCCL's user guide, "Environment Variables", and torch.distributed's documentation, "Debugging".
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait for every kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
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
        "Remove what is no longer needed: according to NCCL's guide, a run may be slow, crash or hang if its debugging "
        "variables stay set. For thread pools, set OMP_NUM_THREADS to a rank's cores minus its workers."
    ),
)
def harmful_settings(view: JobHosts) -> Iterator[Problem]:
    """Variables are set that disable fast paths, log a lot, or check every call.

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
        shares = host.core_shares()
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


def _of_job(facts: PreflightFacts, view: JobHosts, verbose: int) -> Iterator[str]:
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


_TIMEOUT = "is read by neither NCCL nor torch; pass timeout=timedelta(...) to the strategy"
_LOST = "has no effect, because nothing reads it"

# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and FlightRecorder.hpp (2.13) list the second name of each of these
# as an alias: read with a warning, and overruled where both are set (getCvarString in Utils.hpp).
_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
}
# Names that exist only with the other prefix: torch's own (the same header) and NCCL's own (its user guide).
_WRONG_PREFIX = {
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_ENABLE_MONITORING": "TORCH_NCCL_ENABLE_MONITORING",
    "NCCL_HEARTBEAT_TIMEOUT_SEC": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "NCCL_HIGH_PRIORITY": "TORCH_NCCL_HIGH_PRIORITY",
    "NCCL_NAN_CHECK": "TORCH_NCCL_NAN_CHECK",
    "NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG": "NCCL_DEBUG",
    "TORCH_NCCL_IB_DISABLE": "NCCL_IB_DISABLE",
    "TORCH_NCCL_P2P_DISABLE": "NCCL_P2P_DISABLE",
    "TORCH_NCCL_SOCKET_IFNAME": "NCCL_SOCKET_IFNAME",
}
_MISSPELT = {
    "GLOO_IFNAME": "GLOO_SOCKET_IFNAME",
    "GLOO_SOCKET_IFACE": "GLOO_SOCKET_IFNAME",
    "GLOO_SOCKET_IF_NAME": "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG_LEVEL": "NCCL_DEBUG",
    "NCCL_IB_DISABLED": "NCCL_IB_DISABLE",
    "NCCL_IFNAME": "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLED": "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLED": "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFACE": "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_IF_NAME": "NCCL_SOCKET_IFNAME",
}
# cases: open_clip#1087 set NCCL_TIMEOUT=7200 and asked why the time was still 1,800 s.
_IGNORED = {
    "NCCL_TIMEOUT": _TIMEOUT,
    "NCCL_TIMEOUT_MS": _TIMEOUT,
    "NCCL_COMM_TIMEOUT": _TIMEOUT,
    "TORCH_NCCL_TIMEOUT": _TIMEOUT,
    "TORCH_DISTRIBUTED_TIMEOUT": _TIMEOUT,
    "GLOO_TIMEOUT": _TIMEOUT,
    # Lightning 2 reads PL_GLOBAL_SEED, PL_SEED_WORKERS and its command line's PL_TRAINER__...; these it did before.
    "PL_TORCH_DISTRIBUTED_BACKEND": "is no longer read; pass process_group_backend to the strategy",
    "PL_FAULT_TOLERANT_TRAINING": "is no longer read; make the loader stateful to resume within an epoch",
    "PL_RECONCILE_PROCESS": "is no longer read",
    "PL_INTER_BATCH_PARALLELISM": "is no longer read",
}


@check(after="harmful-settings", remedy="Remove the variable, or use what the finding names instead.")
def ignored_settings(view: JobHosts) -> Iterator[Problem]:
    """A variable is set that has no effect, or is read only under an old name.

    Symptom:
        A timeout, an interface or a debug level that does not change, whatever is set.

    Cause:
        Advice from old threads, names that were changed (torch 2.2 put TORCH_ before its own), misspellings.

    Remedy:
        Use the name that is read, or the argument that takes its place.

    Cannot see:
        Misspellings that nobody thought of.
    """
    for rank, facts in view.facts.items():
        for name, value in facts.settings.items():
            why = _why(name)
            if why:
                yield Problem(ranks=(rank,), text=f"{name}={value} {why}", badness=float(name in _IGNORED))


def _why(name: str) -> str:
    if name in _RENAMED:
        return f"is deprecated and overruled by its new name, {_RENAMED[name]}"
    meant = _WRONG_PREFIX.get(name) or _MISSPELT.get(name)
    return f"{_LOST}; the name is {meant}" if meant else _IGNORED.get(name, "")
