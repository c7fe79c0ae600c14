"""The cause clocks-apart: the clocks of hosts differ so much that times cannot be compared."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, duration_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_APART_S = 1.0


@check(
    after="slow-directory",
    remedy="Synchronise the clocks of all hosts (chronyc tracking, timedatectl), with the same server.",
)
def clocks_apart(view: Checked) -> Iterator[Problem]:
    """A host's clock is more than a second ahead of or behind rank 0's.

    Symptom:
        Log files cannot be put in one order, certificates and tokens are refused, files on shared storage seem to be
        from the future, as do checkpoints and caches that are compared by time.

    Cause:
        No time service on that host, or one that cannot reach its server.

    Remedy:
        Synchronise the clocks.

    Cannot see:
        Clocks that drift apart later.
    """
    for host in view.hosts:
        offsets = [
            (abs(one.clock_offset_s) - (one.clock_error_s or 0.0), one.clock_offset_s)
            for one in host.facts.values()
            if one.clock_offset_s is not None
        ]
        certain_s, offset_s = max(offsets, default=(0.0, 0.0))
        if certain_s > _APART_S:
            text = f"the clock is {duration_words(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} rank 0's"
            yield Problem(ranks=host.ranks, text=text, badness=certain_s)
