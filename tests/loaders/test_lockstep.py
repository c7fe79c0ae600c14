"""Data of unequal length in lockstep, on ranks that are threads: who gets which batches, and how it ends."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any

import pytest
from thread_votes import ThreadVotes, as_ranks

from lightning_ncclsafe.loaders.lockstep import BatchesRead, Lockstep, until
from lightning_ncclsafe.probes.data.fingerprints import digest_of_batch
from lightning_ncclsafe.settings import OnUneven

LENGTHS = (5, 3, 4)
# Of what iterates in a test; see the fixture.
OPTIONS: dict[str, bool] = {}


def lockstep(*given: Any, **more: Any) -> Iterator[Any]:
    return iter(Lockstep(*given, **OPTIONS, **more))


class End(Exception):
    """Stands for the error that names the short rank."""


class Rank:
    """One rank that reads ``length`` batches, ``(rank, pass, batch)``."""

    def __init__(self, rank: int, length: int, votes: ThreadVotes, on_uneven: OnUneven) -> None:
        self.rank, self.length, self.votes, self.on_uneven = rank, length, votes, on_uneven
        self.passes = count()
        self.told: list[list[BatchesRead]] = []
        self.compared: list[tuple[int, int]] = []

    def begin(self) -> Iterator[tuple[int, int, int]]:
        number = next(self.passes)
        return iter([(self.rank, number, batch) for batch in range(self.length)])

    def tell(self, readings: list[BatchesRead]) -> Exception:
        self.told.append(readings)
        return End()

    def iterator(self) -> Iterator[Any]:
        return lockstep(self.begin, self.votes, self.on_uneven, self.tell)


@pytest.fixture(params=[False, True], ids=["fetches when asked", "looks ahead"], autouse=True)
def looks_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What holds of the one holds of the other, unless a test says so."""
    monkeypatch.setitem(OPTIONS, "looks_ahead", request.param)
    return bool(request.param)


def read(on_uneven: OnUneven, lengths: tuple[int, ...] = LENGTHS, epochs: int = 1) -> list[Any]:
    def body(rank: int, votes: ThreadVotes) -> tuple[Rank, list[list[Any]]]:
        reader = Rank(rank, lengths[rank], votes, on_uneven)
        return reader, [list(reader.iterator()) for _ in range(epochs)]

    return as_ranks(len(lengths), body)


@pytest.mark.parametrize("on_uneven", ["raise", "stop_together", "repeat"])
def test_equal_lengths_are_read_to_the_end(on_uneven: OnUneven) -> None:
    for rank, (reader, epochs) in enumerate(read(on_uneven, (3, 3, 3), epochs=2)):
        assert epochs == [[(rank, number, batch) for batch in range(3)] for number in (0, 1)]
        assert reader.told == []


def test_stop_together_ends_with_the_shortest_and_reports_each_rank() -> None:
    for rank, (reader, epochs) in enumerate(read("stop_together", epochs=2)):
        assert epochs == [[(rank, number, batch) for batch in range(3)] for number in (0, 1)]
        readings = [
            BatchesRead(batches=4, ended=False),
            BatchesRead(batches=3, ended=True),
            BatchesRead(batches=4, ended=False),
        ]
        assert reader.told == [readings, readings]


def test_each_rank_tells_the_line_that_decides_once_the_data_of_one_has_ended() -> None:
    asked = []

    def body(rank: int, votes: ThreadVotes) -> list[list[BatchesRead]]:
        def place() -> int:
            asked.append(rank)
            return 7 + rank // 2

        reader = Rank(rank, LENGTHS[rank], votes, "repeat")
        batches = lockstep(reader.begin, votes, "repeat", reader.tell, place=place)
        before = [next(batches) for _ in range(2)]
        assert len(before) == 2
        assert rank not in asked
        list(batches)
        return reader.told

    for (readings,) in as_ranks(3, body):
        assert [reading.place for reading in readings] == [7, 7, 8]
    assert sorted(asked) == [0, 1, 2]


def test_raise_raises_on_all_ranks_before_the_same_batch() -> None:
    def body(rank: int, votes: ThreadVotes) -> list[Any]:
        got = []
        iterator = Rank(rank, LENGTHS[rank], votes, "raise").iterator()
        with pytest.raises(End):
            for batch in iterator:
                got.append(batch)
        assert next(iterator, "over") == "over"
        return got

    assert as_ranks(3, body) == [[(rank, 0, batch) for batch in range(3)] for rank in range(3)]


def test_repeat_runs_to_the_longest_and_restarts_the_others() -> None:
    outcome = [epochs[0] for _, epochs in read("repeat")]
    assert outcome[0] == [(0, 0, batch) for batch in range(5)]
    assert outcome[1] == [(1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1, 0), (1, 1, 1)]
    assert outcome[2] == [(2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 3), (2, 1, 0)]


def test_repeat_reports_each_rank_once_at_the_first_end() -> None:
    readings = [
        BatchesRead(batches=4, ended=False),
        BatchesRead(batches=3, ended=True),
        BatchesRead(batches=4, ended=False),
    ]
    assert [reader.told for reader, _ in read("repeat")] == [[readings]] * 3


def test_repeat_restarts_short_data_as_often_as_needed() -> None:
    outcome = [epochs[0] for _, epochs in read("repeat", (7, 2))]
    assert [batch[1:] for batch in outcome[1]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


def test_repeat_starts_another_pass_only_if_needed() -> None:
    for (reader, _), passes in zip(read("repeat", (4, 2, 4)), (1, 2, 1), strict=True):
        assert next(reader.passes) == passes


def test_one_shot_data_cannot_be_repeated() -> None:
    def body(rank: int, votes: ThreadVotes) -> int:
        once = iter(range(4 if rank == 0 else 2))
        iterator = lockstep(lambda: once, votes, "repeat", lambda readings: End())
        if rank == 0:
            return sum(1 for _ in zip(iterator, range(2), strict=False))
        return len(list(iterator))

    outcome = as_ranks(2, body)
    assert outcome[0] == 2
    assert type(outcome[1]) is RuntimeError, "only this rank has failed"
    assert "after 2 batches and cannot start over" in str(outcome[1])


@pytest.mark.parametrize("on_uneven", ["raise", "stop_together", "repeat"])
def test_a_rank_without_data_follows_on_uneven(on_uneven: OnUneven) -> None:
    outcome = read(on_uneven, (2, 0))
    if on_uneven == "stop_together":
        assert [epochs for _, epochs in outcome] == [[[]], [[]]]
    elif on_uneven == "raise":
        assert [type(error) for error in outcome] == [End, End]
    else:
        assert type(outcome[1]) is RuntimeError


def test_a_batch_may_be_none() -> None:
    def body(rank: int, votes: ThreadVotes) -> list[None]:
        return list(lockstep(lambda: iter([None, None]), votes, "raise", lambda readings: End()))

    assert as_ranks(2, body) == [[None, None], [None, None]]


def test_look_ahead_starts_the_next_vote_without_waiting() -> None:
    """The second rank takes no batch, so it votes only once: the other rank gets one batch."""

    def body(rank: int, votes: ThreadVotes) -> int:
        iterator = iter(Lockstep(lambda: iter(range(3)), votes, "raise", lambda readings: End(), looks_ahead=True))
        if rank == 0:
            next(iterator)
        return votes.calls

    assert as_ranks(2, body) == [2, 1]


def test_a_batch_is_fetched_at_most_one_ahead(looks_ahead: bool) -> None:
    def body(rank: int, votes: ThreadVotes) -> list[int]:
        fetched: list[int] = []

        def begin() -> Iterator[int]:
            for batch in range(10):
                fetched.append(batch)
                yield batch

        iterator = lockstep(begin, votes, "raise", lambda readings: End())
        before = len(fetched)
        return [before, *((next(iterator) and len(fetched)) or len(fetched) for _ in range(3))]

    assert as_ranks(2, body) == [[1, 2, 3, 4] if looks_ahead else [0, 1, 2, 3]] * 2


def test_a_data_error_is_raised_when_its_batch_is_due() -> None:
    """The other rank gets as far as it would without looking ahead."""

    def body(rank: int, votes: ThreadVotes) -> Any:
        def begin() -> Iterator[int]:
            yield from range(2)
            if rank == 1:
                raise OSError("the disk is gone")
            yield from range(2, 9)

        got = []
        iterator = lockstep(begin, votes, "raise", lambda readings: End())
        with suppress(OSError):
            for batch in islice(iterator, 3):
                got.append(batch)
        return got

    assert as_ranks(2, body) == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("on_uneven", ["raise", "stop_together"])
def test_a_data_error_is_raised_even_if_another_rank_has_ended(on_uneven: OnUneven) -> None:
    def body(rank: int, votes: ThreadVotes) -> Any:
        def begin() -> Iterator[int]:
            yield 0
            if rank == 1:
                raise OSError("the disk is gone")

        return list(lockstep(begin, votes, on_uneven, lambda readings: End()))

    whole, broken = as_ranks(2, body)
    if on_uneven == "raise":
        assert isinstance(whole, End)
        assert isinstance(broken, End) and isinstance(broken.__cause__, OSError)
    else:
        assert whole == [0]
        assert isinstance(broken, OSError)


def test_no_rank_votes_again_after_an_error() -> None:
    def body(rank: int, votes: ThreadVotes) -> int:
        def begin() -> Iterator[int]:
            if rank == 1:
                raise OSError("the disk is gone")
            yield 0

        iterator = lockstep(begin, votes, "raise", lambda readings: End())
        with suppress(OSError):
            next(iterator)
        calls = votes.calls
        if rank == 1:
            assert next(iterator, "over") == "over"
            assert votes.calls == calls
        return calls

    outcome = as_ranks(2, body)
    assert not any(isinstance(one, Exception) for one in outcome)


def test_look_ahead_stops_at_the_batch_limit() -> None:
    def body(rank: int, votes: ThreadVotes) -> tuple[list[int], int]:
        own = iter(range(10))
        got = list(islice(lockstep(lambda: own, votes, "raise", lambda readings: End(), most=3), 3))
        return got, next(own)

    assert as_ranks(2, body) == [([0, 1, 2], 3)] * 2


def test_the_first_two_batches_are_compared_once_all_ranks_have_them() -> None:
    compared: list[tuple[int, ...]] = []

    def body(rank: int, votes: ThreadVotes) -> list[str]:
        def begin() -> Iterator[str]:
            return iter([f"batch {batch} of rank {rank}" for batch in range(4)])

        iterator = lockstep(begin, votes, "raise", lambda r: End(), lambda *both: compared.append(both))
        return list(iterator)

    as_ranks(2, body)
    batches = [[f"batch {batch} of rank {rank}" for batch in range(2)] for rank in range(2)]
    assert sorted(compared) == sorted(tuple(map(digest_of_batch, own)) for own in batches)
    assert all(map(all, compared))


def test_an_unreadable_batch_is_compared_as_zero() -> None:
    compared: list[tuple[int, ...]] = []

    def begin() -> Iterator[str]:
        yield "d"
        raise OSError("the disk is gone")

    def body(rank: int, votes: ThreadVotes) -> list[str]:
        own = begin if rank else lambda: iter("abc")
        iterator = lockstep(own, votes, "raise", lambda r: End(), lambda *both: compared.append(both))
        return list(islice(iterator, 2))

    assert [type(outcome) for outcome in as_ranks(2, body)] == [list, OSError]
    assert {*compared} == {(digest_of_batch("a"), digest_of_batch("b")), (digest_of_batch("d"), 0)}


def test_a_rank_with_one_batch_prevents_the_comparison() -> None:
    compared: list[tuple[int, ...]] = []

    def body(rank: int, votes: ThreadVotes) -> list[int]:
        batches = [rank] if rank else [rank, rank]
        return list(
            lockstep(lambda: iter(batches), votes, "stop_together", lambda r: End(), lambda *b: compared.append(b))
        )

    assert as_ranks(2, body) == [[0], [1]]
    assert compared == []


def test_sized_data_is_cut_at_the_agreed_length() -> None:
    assert list(until(lambda: iter("abcde"), 3)) == ["a", "b", "c"]


def test_sized_data_restarts_up_to_the_agreed_length() -> None:
    assert list(until(lambda: iter("ab"), 5, repeat=True)) == list("ababa")


def test_sized_data_that_cannot_restart_is_an_error() -> None:
    once = iter("ab")
    with pytest.raises(RuntimeError, match="after 2 batches"):
        list(until(lambda: once, 5, repeat=True))


def test_sized_data_can_end_in_an_agreed_error() -> None:
    iterator = until(lambda: iter("abc"), 2, error=End)
    assert [next(iterator), next(iterator)] == ["a", "b"]
    with pytest.raises(End):
        next(iterator)


def test_sized_data_is_started_when_the_iterator_is_created() -> None:
    begun: list[str] = []

    def begin() -> Iterator[str]:
        begun.append("begun")
        return iter("a")

    until(begin, 1)
    assert begun == ["begun"]


class Parting(Rank):
    """A rank that evaluates; in each of its batches it may call a collective."""

    def __init__(self, rank: int, length: int, votes: ThreadVotes, calls: int) -> None:
        super().__init__(rank, length, votes, "raise")
        self.calls, self.called = calls, 7

    def iterator(self) -> Iterator[Any]:
        return lockstep(self.begin, self.votes, "raise", self.tell, called=lambda: self.called)

    def evaluate(self) -> int:
        batches = 0
        for _ in self.iterator():
            batches += 1
            self.called += self.calls
        return batches


def evaluated(lengths: tuple[int, ...], calls: tuple[int, ...] = (0, 0, 0)) -> list[Any]:
    return as_ranks(3, lambda rank, votes: Parting(rank, lengths[rank], votes, calls[rank]).evaluate())


@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 2, 9), (2, 2, 2)])
def test_independent_ranks_continue_when_one_ends(lengths: tuple[int, ...]) -> None:
    assert evaluated(lengths) == [*lengths]


@pytest.mark.parametrize(("lengths", "calls"), [((5, 3, 4), (0, 0, 1)), ((5, 0, 4), (0, 0, 0))])
def test_an_uneven_end_is_reported_if_any_rank_may_wait(lengths: tuple[int, ...], calls: tuple[int, ...]) -> None:
    """Even if a rank has no data at all: the others reduce what it never logs."""
    assert [type(outcome) for outcome in evaluated(lengths, calls)] == [End] * 3


def test_a_call_at_the_first_batch_may_belong_to_the_previous_loader() -> None:
    """Lightning reduces its results after fetching two batches of the next loader."""

    def body(rank: int, votes: ThreadVotes) -> int:
        reader = Parting(rank, LENGTHS[rank], votes, 0)
        batches = reader.iterator()
        next(batches)
        reader.called += 2
        return 1 + sum(1 for _ in batches)

    assert as_ranks(3, body) == [*LENGTHS]


class Own:
    """A loader that is its own iterator, and notes how often it is begun."""

    def __init__(self, length: int) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> "Own":
        self.begun += 1
        self.left = list(range(self.length))
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_a_loader_that_is_its_own_iterator_is_not_begun_again_when_its_rank_continues_alone() -> None:
    def body(rank: int, votes: ThreadVotes) -> list[int]:
        own = Own(LENGTHS[rank])
        return list(lockstep(lambda: iter(own), votes, "raise", lambda readings: End(), called=lambda: 7))

    assert as_ranks(3, body) == [list(range(length)) for length in LENGTHS]


def test_a_loader_that_is_its_own_iterator_is_begun_once_for_each_pass_of_an_agreed_length() -> None:
    own = Own(3)
    assert list(until(lambda: iter(own), 2)) == [0, 1]
    assert own.begun == 1
    assert list(until(lambda: iter(own), 5, repeat=True)) == [0, 1, 2, 0, 1]
    assert own.begun == 3


def test_each_pass_is_voted_on() -> None:
    def body(rank: int, votes: ThreadVotes) -> list[int]:
        reader = Parting(rank, LENGTHS[rank], votes, 0)
        return [reader.evaluate(), reader.evaluate()]

    assert as_ranks(3, body) == [[length, length] for length in LENGTHS]
