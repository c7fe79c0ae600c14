"""The cause file-lock: a rank waits for a lock on a file that a rank or another process holds."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from lightning_ncclsafe.code.libraries import CONTEXTS
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Findings,
    Plan,
    Timeline,
    clause,
    deepest_user_frame,
    finding,
    hang_rule,
    how_we_know,
    location_of,
    ranks_words,
    short_place,
    straggler_finding,
    user_location,
    wait_words,
    where_words,
    while_others_wait,
)

_REMEDY_WORK = (
    "Do the work under the lock once and ahead of the job, or in prepare_data, for which Lightning lets the other "
    "ranks wait without limit; or hold the lock only for the moment in which the file changes."
)
_REMEDY_CIRCLE = (
    "Release the lock before any collective, barrier or save, and before another lock is taken: a call that needs all "
    "ranks cannot be under a lock that only one of them can hold."
)
_REMEDY_KEPT = (
    "Start no process, such as the worker of a dataloader, while the lock is held: a forked process keeps the lock "
    "until it ends, even if its parent has closed the file. Or end that process before any call that needs all ranks."
)
_REMEDY_OTHERS = (
    "Look at that process: wait for it, end it, or give this job its own path (cache folder, lock file). Wait for "
    "locks with a timeout, so that a message names the file."
)
_REMEDY_UNKNOWN = (
    "Find out who holds it: fuser or lsof with that path on every host that shares it. If nobody does, remove the "
    "file: it was left behind. Wait for locks with a timeout, so that a message names the file."
)
_REMEDY_OWN = (
    "Take the lock only once in a process, because each open file has its own lock, and close the file in child "
    "processes: a file that they inherit keeps the lock after it is closed here."
)
_REMEDY_PROGRAM = (
    "Wait until that program has ended before you take the lock, or let it take another one: as it is, the rank waits "
    "for as long as the program works. Wait for locks with a timeout, so that a message names the file."
)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``stop`` if ranks wait for each other, one of them for a lock; else ``unknown``."""
    return Plan.STOP if finding.remedy in (_REMEDY_CIRCLE, _REMEDY_KEPT) else Plan.UNKNOWN


def _is_explained(finding: Finding, others: Findings) -> bool:
    """Whether another cause explains what the holder does under the lock, which is the better answer."""
    if finding.remedy != _REMEDY_WORK:
        return False
    generic = ("file-lock", "rank-behind", "timeout-misuse")
    specific = (other for rule, other in others.every if rule.name not in generic)
    explained = {rank for other in specific if other.confidence is not Confidence.POSSIBLE for rank in other.ranks}
    return explained.issuperset(finding.ranks)


@hang_rule(after="at-breakpoint", superseded=_is_explained, plan=_plan)
def file_lock(view: Timeline) -> Iterator[Finding]:
    """A rank waits for the lock on a file, and others wait for that rank.

    Symptom:
        One rank or more wait in a download, a cache, the build of an extension, or a database: in fcntl.flock or
        lockf, in filelock's acquire (HuggingFace datasets and hub), in FileBaton.wait (torch.utils.cpp_extension).

    Cause:
        A rank that holds the lock works for long; it waits in a collective for those that wait for its lock, a
        deadlock; another job or a child process holds it; or a process that was killed has left the lock file behind.

    Remedy:
        Prepare files ahead of the job or in prepare_data; enter no collective with a lock held; remove a lock file that
        nobody holds.

    Cannot see:
        Who holds a lock in another container, or on another host (NFS, Lustre) if it is no rank of the job. A loop in
        the user's code that opens and closes the file for each attempt. Which thread of a process holds the lock.
    """
    roots: dict[int, set[int]] = defaultdict(set)
    circles: set[tuple[int, ...]] = set()
    outside: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, wait in sorted(view.lock_waits.items()):
        path = _chain(view, rank)
        root = path[-1]
        if root in path[:-1]:
            circles.add(tuple(sorted(path[path.index(root) : -1])))
        elif root in view.lock_waits:
            last = view.lock_waits[root]
            held = outside[last.lock.path, last.holder_words]
            # Whoever waits for a rank that holds its own lock is held up by that.
            who = root if last.holder == root else rank
            held += [who] if who not in held else []
        elif wait.holder == root:
            roots[root].add(rank)
    yield from (_circle(view, ranks) for ranks in sorted(circles))
    yield from (_held_by_rank(view, holder, tuple(sorted(ranks))) for holder, ranks in sorted(roots.items()))
    yield from (_held_outside(view, tuple(ranks)) for ranks in outside.values())


def _chain(view: Timeline, rank: int) -> list[int]:
    """A rank, the rank that holds its lock, and so on; in a circle, the last rank appears twice."""
    chain = [rank]
    while (wait := view.lock_waits.get(chain[-1])) is not None and wait.is_for_peer and chain[-1] not in chain[:-1]:
        assert wait.holder is not None
        chain.append(wait.holder)
    return chain


def _circle(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """Each of these ranks holds the lock that another one waits for."""
    lines = (f"{_waits_words(view, (rank,))} {where_words(view, rank)}" for rank in ranks)
    text = f"{'; '.join(lines)}: none of them can continue{while_others_wait(view, ranks)}."
    return finding(view, ranks, text, remedy=_REMEDY_CIRCLE)


def _held_by_rank(view: Timeline, holder: int, ranks: tuple[int, ...]) -> Finding:
    """A rank of the job holds the lock, or started the process that does."""
    wait = view.lock_waits[ranks[0]]
    if holder not in view.facts:
        text = f"{_waits_words(view, ranks)} and rank {holder} does not answer{while_others_wait(view, ranks)}."
        return finding(view, (holder,), text, remedy=_REMEDY_WORK, evidence=how_we_know(view, ranks))
    evidence = how_we_know(view, (holder, *ranks))
    if not view.waits(holder):
        is_own = wait.process is None
        whose = "" if wait.process is None else f" (process {wait.process.pid}, which it has started)"
        words = "holds|hold a file lock" if is_own else "keeps|keep a file lock"
        return straggler_finding(view, (holder,), f"{words}{whose}", evidence=evidence, remedy=_REMEDY_WORK)
    needs = any(group.oldest.get(holder) and not {*ranks}.isdisjoint(group.behind) for group in view.groups)
    whose = "" if wait.process is None else f"process {wait.process.pid} of "
    awaits = f"{whose}rank {holder} holds it, and rank {holder} waits in {wait_words(view, holder)}"
    end = f" for {ranks_words(ranks)}: none of them can continue" if needs else ""
    path = wait.lock.path
    text = (
        f"{clause(ranks, 'waits|wait')} in line for the lock on {path}, {where_words(view, ranks[0])}; {awaits}{end}."
    )
    culprits, remedy = (ranks, _REMEDY_CIRCLE) if wait.process is None else ((holder,), _REMEDY_KEPT)
    location = user_location(view, ranks)
    if wait.process is None and wait.lock.left_open_at and not _is_there(view, holder, ranks[0]):
        culprits, location = (holder,), wait.lock.left_open_at
        text = f"{text} The transaction that is begun at {short_place(location)} may have been left open."
    # Never certain: the kernel names only the process, and another of its threads may hold the lock and release it.
    return finding(view, culprits, text, location=location, evidence=evidence, remedy=remedy)


def _is_there(view: Timeline, holder: int, rank: int) -> bool:
    """Whether the holder of a lock is in the very function in which a rank waits for it."""
    frame = deepest_user_frame(view.facts[rank].stack)
    entered = {(one.file, one.function) for one in view.facts[holder].stack if one.user}
    return frame is None or (frame.file, frame.function) in entered


def _held_outside(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """A process outside of the job holds the lock, or a process of the waiting rank itself, or it is unknown which."""
    last = view.lock_waits[_chain(view, ranks[0])[-1]]
    text = f"{_waits_words(view, ranks)} {where_words(view, ranks[0])}; {last.holder_words}"
    remedy_outside = _REMEDY_UNKNOWN if last.process is None else _REMEDY_OTHERS
    is_programs = last.process is not None and not last.is_inherited
    remedy_own = _REMEDY_PROGRAM if is_programs else _REMEDY_OWN
    remedy = remedy_outside if last.holder is None else remedy_own
    # Of the first rank, the summary says all that is known about its lock.
    is_in_summary = view.lock_waits[ranks[0]] is last
    known = (item for item in how_we_know(view, ranks) if item.source != "file lock" or item.rank != ranks[0])
    evidence = known if is_in_summary else how_we_know(view, ranks)
    text = f"{text}{while_others_wait(view, ranks)}."
    is_own = last.holder == last.rank and last.process is None
    # The helper that takes locks is right, and so is the first of its calls.
    location = location_of(_outside_helper(view.facts[last.rank].stack)) if is_own else ""
    return finding(view, ranks, text, location=location or None, evidence=evidence, remedy=remedy)


def _outside_helper(stack: tuple[Frame, ...]) -> Frame | None:
    """The user's line that has entered the user's own context manager, if the rank waits in that."""
    entered = max((depth for depth, frame in enumerate(stack) if CONTEXTS.has(frame.file, frame.function)), default=0)
    is_in_helper = any(frame.user for frame in stack[entered:])
    return deepest_user_frame(stack[:entered]) if is_in_helper else None


def _waits_words(view: Timeline, ranks: Sequence[int]) -> str:
    return f"{clause(ranks, 'waits|wait in')} {wait_words(view, ranks[0])},"
