"""The cause swap-in-use: the host keeps memory in its swap space, or swaps at this moment."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, most, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_USED_ABOVE = 0.01
# Single pages are moved on healthy hosts too.
_MOVED_ABOVE = 1_000_000


@check(
    after="swap-on-network",
    remedy=(
        "Free memory on this host before training: end what else runs there, lower num_workers, prefetch_factor or the "
        "batch size, load the dataset once per host; then switch swap off and on again (swapoff -a; swapon -a) to get "
        "rid of what is in it."
    ),
)
def swap_in_use(view: Checked) -> Iterator[Problem]:
    """Swap space is in use for more than 1 % of the host's memory, or pages were swapped while the check ran.

    Symptom:
        A rank needs minutes for what others do in seconds, with no single line of code to blame.

    Cause:
        More is held in memory than there is, by this job, an earlier one or someone else's.

    Remedy:
        Free memory; hold fewer batches and copies of the dataset.

    Cannot see:
        Whose pages are swapped out.
    """
    for host in view.hosts:
        used = most((one.swap.used_bytes for one in host.facts.values()), 0)
        memory = most((one.capacity.memory_total_bytes for one in host.facts.values()), 0)
        out = most((one.swap.swapped_out_bytes for one in host.facts.values()), 0)
        back = most((one.swap.swapped_in_bytes for one in host.facts.values()), 0)
        words = []
        if memory and used > _USED_ABOVE * memory:
            words.append(f"{size_words(used)} of swap in use on a host with {size_words(memory)} of memory")
        if out + back > _MOVED_ABOVE:
            words.append(f"{size_words(out)} swapped out and {size_words(back)} read back while the check ran")
        if words:
            yield Problem(ranks=host.ranks, text=", ".join(words), badness=float(used + out + back))
