"""Iterates data of unknown length in lockstep: every rank gets its next batch, or all of them are at the end.

Before each batch, ranks vote on whether all of them have it. A batch is fetched when Lightning asks for it and no
sooner, since a generator may depend on what has been trained until then; ranks wait for the vote. Where worker
processes make the batches, fetching one early makes no difference to them: the vote on a batch starts when the previous
batch is handed out and runs while that one is trained on. Ranks then wait for it only if one of them is late with its
data; they would wait in the next all-reduce anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_ncclsafe.loaders.iteration import Begin
from lightning_ncclsafe.probes.data.fingerprints import digest_of_batch
from lightning_ncclsafe.settings import OnUneven


class Votes(Protocol):
    """How ranks vote; see :class:`lightning_ncclsafe._torch.VoteGroup`."""

    def start(self, flags: int) -> Callable[[], int]:
        """Starts a vote; the returned function waits for it and returns the flags that any rank has set."""

    def gather(self, *values: int) -> list[list[int]]:
        """The values of every rank, by rank."""


# Flags of a vote: a rank has no next batch, or one that it has not read before in this pass.
_ENDED, _GOES_ON = 1, 2
# Lightning reads one batch ahead: it reduces the results of the previous loader once two batches of this one are
# fetched.
_STEADY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesRead:
    """What one rank has read of a loader when some rank's data ends.

    Attributes:
        batches: Batches that it has had.
        ended: Whether its data has ended.
        place: A number for the line that decides how much data it has; 0 if that is not known.
    """

    batches: int
    ended: bool
    place: int = 0


class Lockstep:
    """One epoch of a loader on one rank, to be iterated once.

    Args:
        begin: Begins the rank's own data; called again if a short rank starts over.
        votes: How ranks vote.
        on_uneven: What happens if one rank's data ends before another's.
        report: Called on all ranks when that happens, with what each rank has read; its result is raised if
            ``on_uneven`` is ``"raise"``.
        compare: Called on all ranks once each has two batches, with a digest of each; None for no comparison.
        looks_ahead: Whether each batch is fetched when the previous one is handed out; the same on all ranks.
        most: Number of batches after which Lightning asks for no more; None if unknown. Nothing beyond it is fetched
            ahead.
        called: Counts the collectives that this rank has called so far, votes aside. If one rank's data ends before
            another's and no rank has called any for its batches, each continues alone, since nothing waits for the
            others. None to report uneven data in any case.
        place: Gives the number for the line that decides how much data this rank has, see :class:`BatchesRead`; called
            once the data of some rank has ended.
    """

    def __init__(
        self,
        begin: Begin,
        votes: Votes,
        on_uneven: OnUneven,
        report: Callable[[list[BatchesRead]], Exception],
        compare: Callable[[int, int], None] | None = None,
        *,
        looks_ahead: bool = False,
        most: int | None = None,
        called: Callable[[], int] | None = None,
        place: Callable[[], int] = lambda: 0,
    ) -> None:
        self._begin = begin
        self._votes = votes
        self._on_uneven = on_uneven
        self._report = report
        self._compare = compare
        self._digests: list[int] = []
        self._looks_ahead = looks_ahead
        self._most = most
        self._called = called
        self._place = place
        self._called_before = 0
        self._given = 0
        self._ended = self._reported = self._goes_alone = False
        self._own = begin()
        self._ahead = self._fetch() if looks_ahead and most != 0 else None

    def __iter__(self) -> Iterator[Any]:
        while not self._goes_alone:
            (vote, batches, error), self._ahead = self._ahead or self._fetch(), None
            goes_on = self._all_go_on(vote(), error)
            # Raised when its batch is due, and not before.
            if error is not None:
                raise error
            if not goes_on:
                return
            if not batches:
                batches.append(self._start_over())
            self._given += 1
            if self._looks_ahead and self._given != self._most and not self._goes_alone:
                self._ahead = self._fetch()
            yield batches.pop()  # so that nothing here keeps it
        # Some loaders are their own iterators: another iter() would start them again.
        with suppress(StopIteration):
            while True:
                yield next(self._own)

    def _fetch(self) -> tuple[Callable[[], int], list[Any], Exception | None]:
        """Fetches this rank's next batch and starts the vote on it.

        Returns:
            The vote, the batch in a list that is empty if there is none, and why it could not be read.
        """
        if self._given == _STEADY and self._called is not None:
            self._called_before = self._called()
        batches, failure = list[Any](), None
        try:
            batches.append(next(self._own))
        except StopIteration:
            self._ended = True
        except Exception as error:
            failure = error
        if self._compare is not None:
            self._digests += map(digest_of_batch, batches)
        return self._votes.start(_ENDED if self._ended else _GOES_ON), batches, failure

    def _all_go_on(self, outcome: int, error: Exception | None) -> bool:
        """Whether this rank goes on, given the outcome of a vote and why its own batch could not be read."""
        if not outcome & _ENDED:
            self._compare_first_batches()
            return True
        if not outcome & _GOES_ON:
            return False
        self._goes_alone = self._can_part()
        if self._goes_alone:
            return not self._ended
        if not self._reported:
            self._reported = True
            read = self._votes.gather(self._given + (not self._ended), self._ended, self._place())
            uneven = self._report(
                [BatchesRead(batches=batches, ended=bool(ended), place=place) for batches, ended, place in read]
            )
            if self._on_uneven == "raise":
                raise uneven from error
        return self._on_uneven == "repeat"

    def _can_part(self) -> bool:
        """Whether every rank has had a batch and called no collective for it; the answer is the same on all ranks."""
        if self._called is None:
            return False
        since = self._called() - self._called_before if self._given >= _STEADY else 0
        return all(given and not calls for given, calls in self._votes.gather(self._given, since))

    def _compare_first_batches(self) -> None:
        if self._compare is not None and self._given == 1:
            compare, self._compare = self._compare, None
            # A batch that could not be read has no digest; its error is raised in a moment.
            first, second = (*self._digests, 0, 0)[:2]
            compare(first, second)

    def _start_over(self) -> Any:
        """Begins another pass over this rank's data, as another rank still has some, and returns its first batch."""
        self._own = self._begin()
        try:
            return next(self._own)
        except StopIteration:
            raise _nothing_to_repeat(self._given) from None


def until(
    begin: Begin, length: int, *, repeat: bool = False, error: Callable[[], Exception] | None = None
) -> Iterator[Any]:
    """Iterates data of known length up to an agreed one.

    Args:
        begin: Begins the rank's own data.
        length: Number of batches after which it ends.
        repeat: Whether shorter data starts over.
        error: Creates what is raised at the end, if reaching the end is an error.
    """
    # Not in the generator: workers start when the iterator is created.
    first = begin()

    def batches() -> Iterator[Any]:
        own, given = first, 0
        while True:
            before = given
            # Without another iter() here, too.
            with suppress(StopIteration):
                while given < length:
                    yield next(own)
                    given += 1
            if given == length or not repeat:
                break
            if given == before:
                raise _nothing_to_repeat(given)
            own = begin()
        if error is not None:
            raise error()

    return batches()


def _nothing_to_repeat(given: int) -> RuntimeError:
    # Not an UnevenDataError, which all ranks raise: this rank alone fails.
    return RuntimeError(
        f"This rank's data ended after {given} batches and cannot start over, which on_uneven='repeat' requires: "
        "iterating it again yields nothing. Give the dataset an __iter__ that starts from the beginning, or use "
        "on_uneven='stop_together'."
    )
