"""Whether hosts reach each other where their back ends send data, which may be another network than the store's."""

from lightning_ncclsafe.facts import IncidentKind, InterfaceFacts, JobFacts, RankFacts, TriedAddress
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.network.reach import reach
from lightning_ncclsafe.rules.kit.activity import activity

# Of a larger job the first hosts are tried: a cut that matters is mostly that of one host, or of this one.
_MOST = 64
# The kernel needs 3 s to find that nobody has an address of a network that it is in itself.
_DEADLINE_S = 3.5
_STANDSTILLS = (IncidentKind.SUSPECT, IncidentKind.TIMEOUT)


def try_addresses(job: JobFacts, here: str) -> tuple[TriedAddress, ...]:
    """Tries the other hosts of a job at the addresses that their back ends use, for 3.5 s in all.

    Nothing is tried of a job on one host, nor unless all ranks have answered and wait for one another.

    Args:
        job: The facts of all ranks that answered.
        here: Name of this host.
    """
    if job.incident.kind not in _STANDSTILLS or job.silent or not all(map(_waits, job.ranks)):
        return ()
    own = {address for facts in job.ranks if facts.host == here for address in _address(facts.machine.interface)}
    others = {
        facts.host: address
        for facts in job.ranks
        if facts.host not in ("", here)
        for address in _address(facts.machine.interface)
        if address not in own
    }
    chosen = dict([*others.items()][:_MOST])
    found = or_none(lambda: reach(chosen.values(), deadline_s=_DEADLINE_S)) or {} if chosen else {}
    return tuple(
        TriedAddress(
            host=host, address=address, answers=found[address].answers, seen_from=here, tried=found[address].tried
        )
        for host, address in chosen.items()
        if address in found
    )


def _waits(facts: RankFacts) -> bool:
    return facts.exception is None and activity(facts).waits_for_peers


def _address(interface: InterfaceFacts | None) -> list[str]:
    return [interface.address] if interface is not None and interface.address and not interface.is_loopback else []
