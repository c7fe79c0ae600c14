"""The cause ignored-settings: a variable that nothing reads, or that has another name by now."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_TIMEOUT = "is read by neither NCCL nor torch; pass timeout=timedelta(...) to the strategy"
_LOST = "is read by nothing"

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
# Names that exist with the other prefix only: torch's own (the same header) and NCCL's own (its user guide).
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


@check(after="harmful-settings", remedy="Remove the variable, or use what the sentence names instead.")
def ignored_settings(view: Checked) -> Iterator[Problem]:
    """A variable is set that has no effect, or is only read under an old name.

    Symptom:
        A timeout, an interface or a debug level that does not change, whatever is set.

    Cause:
        Advice from old threads, names that were changed (torch 2.2 put TORCH_ before its own), misspellings.

    Remedy:
        Use the name that is read, or the argument that takes its place.

    Cannot see:
        Misspellings nobody has thought of.
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
