"""The cause swap-on-network: the host swaps to a disk behind a network."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, most, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check


@check(
    after="unreachable-interface",
    remedy=(
        "Put swap space on a local disk, or switch it off (swapoff), and make what is held in memory fit without it."
    ),
)
def swap_on_network(view: Checked) -> Iterator[Problem]:
    """Swap space lies on a network file system or device.

    Symptom:
        A rank that runs out of memory stands still for minutes, and the others time out, at start-up often with
        "store->get('0') got error: Socket Timeout".

    Cause:
        A swap file or device that is mounted from elsewhere: each page that is read back crosses the network.

    Remedy:
        Swap to a local disk, or not at all.

    Cannot see:
        Network disks that the host sees as local ones, as in some virtual machines.
    """
    for host in view.hosts:
        devices = sorted({device for one in host.facts.values() for device in one.swap.on_network})
        if devices:
            used = most((one.swap.used_bytes for one in host.facts.values()), 0)
            text = f"swap is on a network ({', '.join(devices)}), {size_words(used)} of it in use"
            yield Problem(ranks=host.ranks, text=text, badness=float(used))
