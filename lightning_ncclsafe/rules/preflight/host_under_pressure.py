"""The cause host-under-pressure: tasks on the host wait for memory or storage before training has begun."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, most
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_ABOVE = 0.1


@check(
    after="too-few-open-files",
    remedy=(
        "See what else runs on this host (top, iotop) and end it or wait for it; where it is this job itself, start "
        "with fewer workers and load less at once."
    ),
)
def host_under_pressure(view: Checked) -> Iterator[Problem]:
    """By the kernel's pressure figures (PSI), tasks of the host waited for more than a tenth of the check's time.

    Symptom:
        All threads of a rank are slow, also those that do nothing but communicate.

    Cause:
        Other work on the host, memory that is short, a disk that is busy.

    Remedy:
        Find out what else runs there.

    Cannot see:
        Who waits for whom; hosts without /proc/pressure; cores that are short, as every start keeps them all busy.
    """
    for host in view.hosts:
        shares = {
            "all tasks waited for memory": most((one.swap.memory_stalled for one in host.facts.values()), 0.0),
            "all tasks waited for storage": most((one.swap.io_stalled for one in host.facts.values()), 0.0),
        }
        words = [f"{what} {share:.0%} of the time" for what, share in shares.items() if share > _ABOVE]
        if words:
            yield Problem(ranks=host.ranks, text=", ".join(words), badness=max(shares.values()))
