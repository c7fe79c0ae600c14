"""How the facts of many ranks meet: ranks as threads on a shared memory."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from polling import until

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import (
    Collective,
    Frame,
    Incident,
    IncidentKind,
    JobFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    codec,
)
from lightning_ncclsafe.guard import gathering
from lightning_ncclsafe.guard.gathering import Gathering, report_deadline_s
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key

INCIDENT = Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0)


class CountedMemory(MemoryExchange):
    """Counts the keys that one rank has asked for, by the beginning of their names."""

    def __init__(self, shared: SharedMemory, asked: dict[str, int]) -> None:
        super().__init__(shared)
        self._asked = asked

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        for key in wanted:
            name = key.rstrip("0123456789")
            self._asked[name] = self._asked.get(name, 0) + 1
        return super().get_many(wanted)


def facts_of(rank: int, **more: object) -> RankFacts:
    return RankFacts(rank=rank, progress=Progress(phase=Phase.TRAIN), **more)  # type: ignore[arg-type]


def part_of(
    exchange: MemoryExchange,
    rank: int,
    world_size: int,
    round_number: int = 0,
    has_moved: Callable[[], bool] = bool,
) -> Gathering:
    return Gathering(
        exchange,
        round_number=round_number,
        rank=rank,
        world_size=world_size,
        peers=(),
        witness=lambda _: [],
        is_dropped=bool,
        has_moved=has_moved,
    )


def told(job: JobFacts) -> Verdict:
    return Verdict(incident=job.incident, answer=f"{len(job.ranks)} of {job.world_size}: {' '.join(job.missing)}")


def hold_all(world_size: int, ranks: Sequence[int], make: Callable[[int], MemoryExchange]) -> dict[int, Verdict | None]:
    verdicts: dict[int, Verdict | None] = {}
    # On a busy machine the first threads would else have given up on the last ones before these have begun.
    all_have_published = threading.Barrier(len(ranks))

    def take_part(rank: int) -> None:
        part = part_of(make(rank), rank, world_size)
        part.publish(facts_of(rank))
        all_have_published.wait(30)
        verdicts[rank] = part.hold(INCIDENT, told)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return verdicts


def test_all_of_many_ranks_are_heard_and_hear() -> None:
    shared = SharedMemory()
    verdicts = hold_all(100, range(100), lambda _: MemoryExchange(shared))
    assert {verdict.answer for verdict in verdicts.values() if verdict} == {"100 of 100: "}
    assert len(verdicts) == 100
    # What has been judged is taken back: the store is memory of rank 0.
    assert not any(f"round/0/{said}/{rank}" in shared.values for said in ("facts", "here") for rank in range(100))


def test_rounds_leave_a_few_keys_each_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after the other: the reporter need not wait for those that come after it.
    monkeypatch.setattr(gathering, "SEEN_S", 0.0)
    shared = SharedMemory()
    exchange = MemoryExchange(shared)
    for number in range(6):
        parts = [part_of(exchange, rank, 20, number) for rank in range(20)]
        for rank, part in enumerate(parts):
            part.publish(facts_of(rank))
        assert {verdict.answer for part in parts if (verdict := part.hold(INCIDENT, told))} == {"20 of 20: "}
    left = {key.removeprefix("round/") for key in shared.values}
    of_each = {f"{number}/{name}" for number in range(6) for name in ("verdict", "reporter/0")}
    assert left == of_each | {f"5/seen/{rank}" for rank in range(1, 20)}


def test_where_rank_0_is_silent_the_others_do_not_read_one_anothers_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ANSWER_S", 0.3)
    monkeypatch.setattr(gathering, "PATIENCE_S", 1.0)
    shared, asked = SharedMemory(), [dict[str, int]() for _ in range(40)]
    verdicts = hold_all(40, range(1, 40), lambda rank: CountedMemory(shared, asked[rank]))
    assert {verdict.answer for verdict in verdicts.values() if verdict} == {"39 of 40: "}
    assert asked[1]["round/0/facts/"] >= 39
    assert all("round/0/facts/" not in asked[rank] for rank in range(2, 40))
    # Once it knows that a lower one has answered, it does not ask again.
    assert all(asked[rank].get("round/0/here/", 0) <= 40 for rank in range(2, 40))


def test_an_answer_that_comes_while_others_are_read_is_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading those of a large job takes longer than ranks are waited for."""
    monkeypatch.setattr(gathering, "ANSWER_S", 0.0)
    monkeypatch.setattr(gathering, "PATIENCE_S", 0.05)
    shared = SharedMemory()
    exchange = MemoryExchange(shared)
    late = codec.encode(facts_of(1))

    class SlowExchange(MemoryExchange):
        def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
            found = exchange.get_many(keys)
            if "round/0/facts/1" not in shared.values:
                time.sleep(0.1)  # stands for the reading of many
                exchange.set("round/0/facts/1", late)
            return found

    part = part_of(SlowExchange(shared), 0, 2)
    part.publish(facts_of(0))
    assert part.hold(INCIDENT, told) == Verdict(incident=INCIDENT, answer="2 of 2: ")


def test_an_answer_that_cannot_be_read_is_named_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = MemoryExchange()
    exchange.set("round/0/facts/1", b'{"rank": "one"}')
    part = part_of(exchange, 0, 2)
    part.publish(facts_of(0))
    verdict = part.hold(INCIDENT, told)
    assert verdict is not None
    assert verdict.answer.startswith("1 of 2: The answer of rank 1 could not be read: RankFacts.rank: found 'one'")


def test_facts_that_are_too_long_are_shortened_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory()
    line = Frame(file="generated.py", line=1, function="f", code="x" * 5_000_000, user=True)
    calls = tuple(Collective(group="0", seq=seq, op="all_reduce") for seq in range(1000))
    part_of(MemoryExchange(shared), 3, 4).publish(facts_of(3, stack=(line,), collectives=calls))
    found = codec.decode(RankFacts, shared.values["round/0/facts/3"])
    assert found.stack == (replace(line, code=""),)
    assert found.collectives[-1].seq == 999
    assert "too large to share (5." in found.missing[0]
    assert len(shared.values["round/0/facts/3"]) < 100_000


def test_the_more_ranks_the_longer_the_reporter_is_waited_for() -> None:
    assert report_deadline_s(2) < 7
    assert report_deadline_s(1024) > 15


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_seen_to_be_gone_are_not_waited_for(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may kill all others within a second."""
    monkeypatch.setattr(gathering, "ANSWER_S", 60.0)
    gone = ProcessFacts(pid=7, rank=1 - rank, state="zombie")
    part = part_of(MemoryExchange(), rank, 2)
    began = time.monotonic()
    part.publish(facts_of(rank, peers=(gone,)))
    assert part.hold(INCIDENT, told) == Verdict(incident=INCIDENT, answer="1 of 2: ")
    assert time.monotonic() - began < 30.0


def test_a_process_that_ends_while_it_is_looked_at_has_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran when its connections broke; by the time that all others have answered, gloo has ended it."""
    monkeypatch.setattr(gathering, "ANSWER_S", 0.05)
    monkeypatch.setattr(gathering, "PATIENCE_S", 0.1)
    peer = RankInfo(rank=1, host="node-1", pid=2**22 + 1)
    looks = [ProcessFacts(pid=peer.pid, rank=1, state="running")]
    looks.append(replace(looks[0], state="gone", ended_by="SIGABRT", said="too much"))
    jobs: list[JobFacts] = []

    def report(job: JobFacts) -> Verdict:
        jobs.append(job)
        return told(job)

    part = Gathering(
        MemoryExchange(), round_number=0, rank=0, world_size=2, peers=[peer], witness=lambda _: [looks.pop(0)]
    )
    part.publish(facts_of(0))
    part.hold(INCIDENT, report)
    assert [(seen.state, seen.ended_by, seen.said) for seen in jobs[0].witnessed] == [("gone", "SIGABRT", "too much")]


@pytest.mark.parametrize(("gil_held", "has_stack"), [(True, True), (False, True), (False, False)])
def test_what_was_seen_of_a_rank_is_reported_although_it_answers(
    gil_held: bool, has_stack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal by which it is asked for its stack ends a call such as sleep(); then it can answer.

    One that hardly gets a core answers, but without its stack.
    """
    monkeypatch.setattr(gathering, "ANSWER_S", 0.05)
    shared, peer = SharedMemory(), RankInfo(rank=1, host="node-1", pid=2**22 + 1)
    jobs: list[JobFacts] = []

    def witness(_: Iterable[RankInfo]) -> list[ProcessFacts]:
        stack = (Frame(file="train.py", line=1, function="main"),) if has_stack else ()
        part_of(MemoryExchange(shared), 1, 2).publish(replace(facts_of(1), stack=stack))
        return [ProcessFacts(pid=peer.pid, rank=1, state="sleeping", gil_held=gil_held)]

    def report(job: JobFacts) -> Verdict:
        jobs.append(job)
        return told(job)

    part = Gathering(MemoryExchange(shared), round_number=0, rank=0, world_size=2, peers=[peer], witness=witness)
    part.publish(facts_of(0))
    part.hold(INCIDENT, report)
    assert [facts.rank for facts in jobs[0].ranks] == [0, 1]
    assert len(jobs[0].witnessed) == (gil_held or not has_stack)


@pytest.mark.parametrize(("publish_info", "absent"), [(True, (2,)), (False, ())])
def test_ranks_that_have_not_begun_to_watch_are_not_taken_for_silent_ones(
    publish_info: bool, absent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ranks share the job's store nobody has a card in what they share."""
    monkeypatch.setattr(gathering, "ANSWER_S", 0.05)
    monkeypatch.setattr(gathering, "PATIENCE_S", 0.1)
    exchange = MemoryExchange()
    for rank in (0, 1):
        exchange.set(info_key(rank), b"")
    jobs: list[JobFacts] = []

    def report(job: JobFacts) -> Verdict:
        jobs.append(job)
        return told(job)

    part = Gathering(
        exchange, round_number=0, rank=0, world_size=3, peers=(), witness=lambda _: [], publish_info=publish_info
    )
    part.publish(facts_of(0))
    part.hold(INCIDENT, report)
    assert (jobs[0].silent, jobs[0].absent) == ((1, 2), absent)


class BusyExchange(MemoryExchange):
    """Misses a third of its deadlines."""

    def __init__(self, shared: SharedMemory, rank: int) -> None:
        super().__init__(shared)
        self._random = random.Random(rank)

    def _check_open(self) -> None:
        if self._random.random() < 1 / 3:
            raise ExchangeError("The job's store cannot be used: its host did not answer within 2 s.")


def test_a_deadline_that_is_missed_costs_no_answer_and_no_second_report() -> None:
    shared = SharedMemory()
    verdicts = hold_all(6, range(6), lambda rank: BusyExchange(shared, rank))
    assert {verdict.answer for verdict in verdicts.values() if verdict} == {"6 of 6: "}
    assert len(verdicts) == 6


@pytest.mark.parametrize("mover", [0, 1])
@pytest.mark.parametrize(
    ("later_s", "is_early"),
    [
        pytest.param(0.0, False, id="all answers are as old as its own"),
        pytest.param(0.5, True, id="one is newer, but older than the note of its move"),
        pytest.param(60.0, True, id="one is newer than the note"),
    ],
)
def test_progress_before_the_last_answer_is_noted(mover: int, later_s: float, is_early: bool) -> None:
    shared, ranks = SharedMemory(), range(3)
    taken_ns = dict.fromkeys(ranks, time.time_ns() - 1_000_000_000)
    taken_ns[2] += int(later_s * 1e9)
    # Its own answer is of before it moved, or the mover is not one.
    parts = [part_of(MemoryExchange(shared), rank, 3, has_moved=lambda rank=rank: rank == mover) for rank in ranks]
    for rank, part in enumerate(parts):
        part.publish(facts_of(rank, taken_ns=taken_ns[rank]))
    jobs: list[JobFacts] = []

    def reported(job: JobFacts) -> Verdict:
        jobs.append(job)
        return told(job)

    threads = [threading.Thread(target=part.hold, args=(INCIDENT, reported)) for part in parts]
    for thread in reversed(threads):
        thread.start()
        if thread is threads[1] and mover == 1:
            until(lambda: "round/0/moved" in shared.values)
    for thread in threads:
        thread.join(30)
    assert [job.moved for job in jobs] == [mover if is_early else None]
    assert "round/0/moved" not in shared.values
