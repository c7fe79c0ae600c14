"""Reports a collective that has ended although ranks had called different ones: NCCL compares neither op nor size.

Such a training does not hang, or only much later: it continues with wrong results. Rank 0 prints which calls they were.
Of the ranks that made the same call, the lowest prints its line.
"""

from itertools import chain

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.collectives.recording import size_bytes
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.wording import capitalised, group_words, location_of, ranks_words, size_words
from lightning_ncclsafe.probes.process.stacks import call_site, with_source
from lightning_ncclsafe.recorder.model import backend_of, group_of, seq_of
from lightning_ncclsafe.report.lines import safe
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame
from lightning_ncclsafe.timing.matching import Mispairing, PairedCall


def mispairing_words(found: Mispairing) -> str:
    """What ranks have called, what follows and what to do, in one line."""
    calls = [f"{_call_words(call)} on {ranks_words(call.ranks)}" for call in found.calls]
    if found.other_ranks:
        calls.append(f"something else on {found.other_ranks:,} more rank{'s' * (found.other_ranks > 1)}")
    return safe(
        f"different collectives have completed with each other: number {found.seq} of "
        f"{group_words(found.group, found.description)}, at training batch {found.step}, is "
        f"{', '.join(calls[:-1])} and {calls[-1]}. NCCL does not compare calls, so this is no error, but the results "
        f"are wrong from there on. Stop the run, and resume from a checkpoint that was saved before."
    )


def own_call_words(found: Mispairing, rank: int) -> str:
    """Where this rank has made its call, if it is the lowest of the ranks that made the same call; otherwise empty.

    Reads source files, and takes some 10 µs for each entry of the recorders. Empty also where the recorder has
    forgotten the call.
    """
    own = next((call for call in found.calls if call.ranks[0] == rank), None)
    frames = _stack(found, own) if own is not None else ()
    if own is None or not frames:
        return ""
    at = deepest_user_frame(frames) or frames[-1]
    code = f": {at.code}" if at.code else ""
    return safe(f"{capitalised(ranks_words([rank]))} called its {_call_words(own)} in {location_of(at)}{code}")


def _stack(found: Mispairing, own: PairedCall) -> tuple[Frame, ...]:
    for entry in chain.from_iterable(recorders.entries(stacks=True)):
        is_it = group_of(entry)[0] == found.group and seq_of(entry) == found.seq and not entry.get("is_p2p")
        if is_it and backend_of(entry)[1] == own.op and size_bytes(entry) == own.size_bytes:
            frames = entry.get("frames") or ()
            _, stack = call_site((frame["filename"], frame["line"], frame["name"]) for frame in frames)
            return with_source(stack)
    return ()


def _call_words(call: PairedCall) -> str:
    return f"{call.op} of {size_words(call.size_bytes)}" if call.size_bytes else call.op
