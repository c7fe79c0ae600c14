"""The cause crossed-groups: ranks entered process groups in different orders and wait for each other in a circle.

``circles`` has the orders in which ranks enter their groups, ``creation`` those in which they create them.
"""

from collections.abc import Iterator

from lightning_ncclsafe.rules.hang.crossed_groups.circles import entered_in_circle
from lightning_ncclsafe.rules.hang.crossed_groups.creation import created_differently
from lightning_ncclsafe.rules.kit import Finding, Plan, Timeline, hang_rule


@hang_rule(
    after="uneven-batches",
    remedy=(
        "Call the collectives of several groups in one order on all ranks: the same list of groups, sorted alike, and "
        "no group entered under a condition on the rank before another one. With NCCL, this applies to asynchronous "
        "collectives, too: each waits on the device for those before it. A call without group= waits for all ranks: if "
        "only some are meant, pass their group."
    ),
    plan=Plan.STOP,
)
def crossed_groups(view: Timeline) -> Iterator[Finding]:
    """Ranks wait for each other in different process groups, or create groups in different orders.

    Symptom:
        Each process group reports its own timeout, and in each some members have called nothing. Or all ranks wait in
        new_group.

    Cause:
        Overlapping groups (data and tensor parallel, experts, pipeline stages) that are entered in an order that
        depends on the rank; groups that only their members create, so that ranks number them differently from then on.

    Remedy:
        Use one order of groups on all ranks; call new_group on all ranks for every group, members or not.

    Cannot see:
        Which group is created out of order, unless a condition on the rank precedes it in a function that ranks are in,
        or new_group is called at one line only; that ranks number groups differently, as long as all of them work.
        Sends and receives that wait for each other in a circle cross no groups: see unmatched-p2p.
    """
    found = (entered_in_circle(view), created_differently(view))
    yield from (one for one in found if one is not None)
