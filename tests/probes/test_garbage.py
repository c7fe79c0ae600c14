"""How Python's garbage collector delays this process, and that another one is in it."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts import GarbageFacts
from lightning_ncclsafe.probes.process.garbage import GarbageWatch, collects_garbage


@contextmanager
def seen_while_collecting(pid: int) -> Iterator[dict[str, bool]]:
    """Whether a process seems to collect garbage at the beginning and at the end of this one's full collections."""
    seen = {}

    def look(phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2:
            seen[phase] = collects_garbage(pid)

    gc.callbacks.append(look)
    try:
        yield seen
    finally:
        gc.callbacks.remove(look)


def test_only_full_collections_are_timed() -> None:
    before = [*gc.callbacks]
    watch = GarbageWatch()
    watch.start()
    gc.collect(0)
    assert watch.read().count == 0
    gc.collect()
    watch.close()
    watch.close()
    found = watch.read()
    assert (found.count, found.running_s) == (1, 0.0)
    assert 0 < found.longest_s <= found.total_s + 0.001
    assert found.blocks
    assert gc.callbacks == before


def test_running_and_outdated_collections_are_handled() -> None:
    now = 0.0
    watch = GarbageWatch(clock=lambda: now)
    for begins, ends in ((0.0, 30.0), (40.0, 42.0), (70.0, 71.0)):
        now = begins
        watch._notice("start", {"generation": 2})
        now = ends
        watch._notice("stop", {"generation": 2})
    now = 95.0
    watch._notice("start", {"generation": 2})
    now = 98.5
    found = watch.read()
    # The first ended more than a minute ago.
    assert found == GarbageFacts(
        running_s=3.5, longest_s=2.0, ended_ago_s=56.5, total_s=3.0, count=2, blocks=found.blocks
    )


def test_other_processes_see_that_this_one_collects_garbage() -> None:
    watch = GarbageWatch()
    watch.start()
    with seen_while_collecting(os.getpid()) as seen:
        gc.collect()
    assert seen == {"start": True, "stop": False}
    watch.close()
    with seen_while_collecting(os.getpid()) as seen:
        gc.collect()
    assert seen == {"start": False, "stop": False}


def test_the_collections_of_a_fork_are_not_those_of_its_parent() -> None:
    watch = GarbageWatch()
    watch.start()
    parent = os.getpid()
    fork = os.fork()
    if not fork:
        with seen_while_collecting(parent) as seen:
            gc.collect()
        os._exit(0 if seen == {"start": False, "stop": False} else 1)
    assert os.waitpid(fork, 0)[1] == 0
    watch.close()


def test_a_collection_in_the_midst_of_which_it_is_closed_raises_nothing() -> None:
    class ClosedMeanwhile(GarbageWatch):
        """Closed by another thread as soon as what it shares is read."""

        is_watched = False

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "_shared" and self.is_watched:
                self.is_watched = False
                self.close()
            return value

    watch = ClosedMeanwhile()
    watch.start()
    watch.is_watched = True
    watch._notice("start", {"generation": 2})
    assert watch._shared is None


def test_a_descriptor_that_belongs_to_another_file_now_stays_open() -> None:
    watch = GarbageWatch()
    watch.start()
    names = [name for name in Path("/proc/self/fd").iterdir() if "ncclsafe-garbage" in str(name.resolve())]
    (number,) = [int(name.name) for name in names]
    with open(os.devnull, "rb") as other:
        os.dup2(other.fileno(), number)
    try:
        gc.collect()
        watch.close()
        del watch
        gc.collect()
        os.fstat(number)
    finally:
        os.close(number)


def test_nothing_is_known_of_a_process_that_shares_nothing() -> None:
    assert not collects_garbage(os.getpid())
    assert not collects_garbage(2**22 + 1)
