"""The cause different-settings: ranks have been given different settings of NCCL, gloo or torch."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, Groups, spread
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# What decides how ranks talk to each other: NCCL, torch, gloo, CUDA and the libraries below them.
_READ = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "UCX_", "UCC_", "FI_")
# Which devices this rank takes, and where and how much this rank alone writes: of each rank's own.
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
# What the hardware of a host is called: may differ between hosts.
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
        "or in the container image; look into ~/.bashrc and /etc/nccl.conf of the hosts that deviate."
    ),
)
def different_settings(view: Checked) -> Iterator[Problem]:
    """A variable that NCCL, gloo or torch's distributed part reads has not the same value on all ranks.

    Symptom:
        Ranks choose different transports or algorithms and hang in the first collective, or in the first one of some
        size; or only some of them end a collective that takes too long.

    Cause:
        Variables that are set in a shell's start-up file of some hosts, or in Python under a condition on the rank.

    Remedy:
        Set them for all ranks alike.

    Cannot see:
        /etc/nccl.conf, and what was changed after the check.
    """
    for name, groups in differing_settings(view).items():
        yield Problem(ranks=groups.deviating, text=f"{name} is {spread(groups)}")


def differing_settings(view: Checked) -> dict[str, Groups[str]]:
    """Ranks by value, for each variable that has to be the same and is not."""
    every = {name for facts in view.facts.values() for name in facts.settings}
    names = sorted(name for name in every - _OF_RANKS if name.startswith(_READ))
    found = {name: view.by(lambda facts, name=name: facts.settings.get(name, _UNSET)) for name in names}  # type: ignore[misc]
    return {name: groups for name, groups in found.items() if groups.differ and not _may_differ(view, name)}


def _may_differ(view: Checked, name: str) -> bool:
    """Names of a host's own hardware have to be the same on its ranks only."""
    if name not in _OF_HOSTS:
        return False
    values = ({facts.settings.get(name, _UNSET) for facts in host.facts.values()} for host in view.hosts)
    return all(len(found) == 1 for found in values)
