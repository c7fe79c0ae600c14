"""The cause socket-fallback: InfiniBand is there, and NCCL would send over sockets, on some hosts or on all."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check
from lightning_ncclsafe.rules.preflight.settings import switched_on


@check(
    after="different-settings",
    remedy=(
        "Let NCCL use InfiniBand on every host: devices under /dev/infiniband and libibverbs in the container, all "
        "ports active (ibstat), locked memory unlimited (ulimit -l); NCCL_DEBUG=INFO on one rank tells what it takes."
    ),
)
def socket_fallback(view: Checked) -> Iterable[Problem]:
    """Active InfiniBand ports are not used, or hosts have different numbers of them.

    Symptom:
        Collectives are many times slower than they should be; or the first one hangs, as some ranks wait on
        InfiniBand and others on sockets.

    Cause:
        A container without the devices or libraries of InfiniBand, a port that is down, a host of another kind.

    Remedy:
        The same working ports on all hosts.

    Cannot see:
        Whether the ports reach each other; other fast networks than InfiniBand and RoCE.
    """
    return (*_unused(view), *_unequal(view)) if view.several else ()


def _unused(view: Checked) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        network = facts.network
        # Where the variable says so, it is told of as what it is: a harmful setting.
        if network.infiniband_active > 0 and network.infiniband_off and not switched_on(facts, "NCCL_IB_DISABLE"):
            text = f"NCCL would not use {_ports(network.infiniband_active)}: {network.infiniband_off.rstrip('.')}"
            yield Problem(ranks=(rank,), text=text, badness=1.0)


def _unequal(view: Checked) -> Iterator[Problem]:
    groups = view.by(lambda facts: facts.network.infiniband_active)
    usual = groups.parts[0][0] if groups.parts else 0
    for count, ranks in groups.parts[1:]:
        yield Problem(ranks=ranks, text=f"{_ports(count)}, other hosts have {usual:,}", badness=float(count == 0))


def _ports(count: int) -> str:
    return f"{count or 'no':} active InfiniBand {'port' if count == 1 else 'ports'}"
