"""Clocks of hosts that are known to nanoseconds: what is claimed of them is always true, and soon useful.

Ranks are threads in a world of their own time: only one runs at a time, and only sleeping makes time pass.
"""

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from lightning_ncclsafe.collectives import alignment
from lightning_ncclsafe.collectives.alignment import Alignment, Reading, Round, aligned, oscillator_s
from lightning_ncclsafe.collectives.clocks import ClockSync, numbers, read_alignment
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.timing.windows import Clock

MS = 1_000_000
S = 1_000_000_000


class World:
    """Threads that take turns: whoever sleeps the shortest goes on next."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S
        self._sleepers: list[tuple[int, int, threading.Event]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._until_ns = 0
        self.failures: list[BaseException] = []

    def sleep(self, seconds: float) -> None:
        mine = threading.Event()
        with self._lock:
            heapq.heappush(self._sleepers, (self.now_ns + int(seconds * 1e9), next(self._order), mine))
        self._wake_next()
        mine.wait()

    def _wake_next(self) -> None:
        with self._lock:
            if not self._sleepers:
                return
            self.now_ns, _, sleeper = heapq.heappop(self._sleepers)
        sleeper.set()

    def run(self, works: Iterable[Callable[[], None]], seconds: float) -> None:
        """Runs all of them, each until it finds that time is over."""
        self._until_ns = self.now_ns + int(seconds * 1e9)
        threads = [threading.Thread(target=self._work, args=(work,), daemon=True) for work in works]
        ready = []
        for _ in threads:
            event = threading.Event()
            heapq.heappush(self._sleepers, (self.now_ns, next(self._order), event))
            ready.append(event)
        self._ready = dict(zip(threads, ready, strict=True))
        for thread in threads:
            thread.start()
        self._wake_next()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not self.failures, self.failures

    @property
    def goes_on(self) -> bool:
        return self.now_ns < self._until_ns

    def _work(self, work: Callable[[], None]) -> None:
        self._ready[threading.current_thread()].wait()
        try:
            work()
        except BaseException as failure:
            self.failures.append(failure)
        self._wake_next()


@dataclass
class Host:
    world: World
    boot_id: str
    ahead_ns: int = 0
    drift: float = 0.0
    oscillator: float = 0.0
    born_ns: int = field(init=False)
    drifts_since_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.born_ns = self.drifts_since_ns = self.world.now_ns

    def wall_ns(self) -> int:
        return self.world.now_ns + self.ahead_ns + int((self.world.now_ns - self.drifts_since_ns) * self.drift)

    def steady_s(self) -> float:
        return (self.world.now_ns - self.born_ns) * (1 + self.oscillator) / 1e9

    def slew(self, drift: float) -> None:
        """From now on the wall clock runs so much faster."""
        self.ahead_ns = self.wall_ns() - self.world.now_ns
        self.drifts_since_ns, self.drift = self.world.now_ns, drift


class SlowExchange(MemoryExchange):
    """One whose calls take time, more on one way than on the other, and sometimes fail."""

    def __init__(self, shared: SharedMemory, world: World, *, way_s: tuple[float, float], seed: int) -> None:
        super().__init__(shared)
        self._world, self._way_s, self._random = world, way_s, random.Random(seed)
        self.fails = 0.0
        self.calls = 0

    def _pass(self, seconds: float) -> None:
        self._world.sleep(seconds * self._random.uniform(0.5, 2.0))

    def _call(self) -> None:
        self.calls += 1
        if self._random.random() < self.fails:
            raise ExchangeError("it did not answer")

    def set(self, key: str, value: bytes) -> None:
        self._pass(self._way_s[0])
        self._call()
        super().set(key, value)
        self._pass(self._way_s[1])

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self._pass(self._way_s[0])
        self._call()
        return super().set_if_absent(key, value)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        self._pass(self._way_s[0])
        self._call()
        found = super().get_many(keys)
        self._pass(self._way_s[1])
        return found


class Job:
    """Ranks that tick, and whose clocks are looked at after each of their ticks."""

    def __init__(self, hosts: list[Host], world: World, *, seed: int = 0, way_s: tuple[float, float] = (1e-4, 1e-4)):
        self.world, self.hosts, self.shared = world, hosts, SharedMemory()
        self.random = random.Random(seed)
        self.exchanges = [SlowExchange(self.shared, world, way_s=way_s, seed=seed + rank) for rank in range(len(hosts))]
        self.syncs = [
            ClockSync(
                self.exchanges[rank],
                rank=rank,
                world_size=len(hosts),
                boot_id=host.boot_id,
                now_ns=host.wall_ns,
                sleep=world.sleep,
                monotonic=host.steady_s,
            )
            for rank, host in enumerate(hosts)
        ]
        self.seen: list[list[Clock]] = [[] for _ in hosts]
        self.wrong: list[str] = []
        self.longest_tick_s = [0.0] * len(hosts)

    def run(self, seconds: float, *, every_s: float = 1.0, silent: frozenset[int] = frozenset()) -> None:
        works = [self._rank(rank, every_s) for rank in range(len(self.hosts)) if rank not in silent]
        self.world.run(works, seconds)

    def _rank(self, rank: int, every_s: float) -> Callable[[], None]:
        def work() -> None:
            self.world.sleep(self.random.uniform(0, every_s))
            while self.world.goes_on:
                began_ns = self.world.now_ns
                self.syncs[rank].tick()
                self.longest_tick_s[rank] = max(self.longest_tick_s[rank], (self.world.now_ns - began_ns) / 1e9)
                self.look(rank)
                self.world.sleep(every_s * self.random.uniform(0.8, 1.2))
                self.look(rank)

        return work

    def look(self, rank: int) -> None:
        clock = self.syncs[rank].clock()
        self.seen[rank].append(clock)
        error_ns = abs(self.ahead_ns(rank) - clock.offset_ns)
        if 0 <= clock.uncertainty_ns < error_ns:
            self.wrong.append(f"rank {rank}: {clock} is wrong by {error_ns} ns")

    def ahead_ns(self, rank: int) -> int:
        return self.hosts[rank].wall_ns() - self.hosts[0].wall_ns()

    def clock(self, rank: int) -> Clock:
        return self.syncs[rank].clock()


def hosts_of(world: World, ahead_ns: Iterable[int], drift: Iterable[float] = ()) -> list[Host]:
    drifts = itertools.chain(drift, itertools.repeat(0.0))
    return [Host(world, f"boot-{n}", ahead, next(drifts)) for n, ahead in enumerate(ahead_ns)]


@pytest.mark.parametrize("seed", range(12))
def test_the_true_offset_is_always_within_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    ahead = [0, *(chance.randint(-5 * S, 5 * S) for _ in range(3))]
    drift = [chance.uniform(-15e-6, 15e-6) for _ in ahead]
    ways = chance.choice([(1e-4, 1e-4), (1e-5, 3e-3), (3e-3, 1e-5)])
    job = Job(hosts_of(world, ahead, drift), world, seed=seed, way_s=ways)
    for host in job.hosts:
        host.oscillator = chance.uniform(-50e-6, 50e-6)

    job.run(150)

    assert job.wrong == []
    assert all(job.clock(rank).uncertainty_ns > 0 for rank in (1, 2, 3))


def test_a_nearby_store_aligns_hosts_to_a_millisecond_within_a_few_ticks() -> None:
    world = World()
    job = Job(hosts_of(world, [0, 3 * S, -7 * MS]), world)
    job.run(8)
    assert [0 < job.clock(rank).uncertainty_ns < MS for rank in (1, 2)] == [True, True]
    assert abs(job.clock(1).offset_ns - 3 * S) < MS
    assert abs(job.clock(2).offset_ns + 7 * MS) < MS


def test_ranks_on_one_host_share_a_measurement() -> None:
    world = World()
    here, there = Host(world, "here"), Host(world, "there", 2 * S)
    job = Job([here, there, there, there], world)
    job.run(40)
    assert job.wrong == []
    assert len({job.clock(rank) for rank in (1, 2, 3)}) == 1
    assert sum(f"clock/ping/{rank}" in job.shared.values for rank in (1, 2, 3)) == 1


def test_ranks_on_the_host_of_rank_0_need_no_alignment() -> None:
    world = World()
    here = Host(world, "here", 5 * S)
    job = Job([here, here, here], world)
    job.run(100)
    assert job.clock(0) == job.clock(1) == job.clock(2) == Clock(offset_ns=0, uncertainty_ns=0)
    # One has come before rank 0 had said where it is.
    assert max(job.exchanges[1].calls, job.exchanges[2].calls) <= 3


def test_a_single_rank_is_its_own_reference() -> None:
    world = World()
    job = Job(hosts_of(world, [0]), world)
    assert job.clock(0) == Clock(offset_ns=0, uncertainty_ns=0)


def test_clocks_are_unknown_before_the_first_alignment() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    assert job.clock(1).uncertainty_ns < 0


def test_the_bound_grows_by_50_ppm_until_the_next_session() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(30)
    fresh = job.clock(1)
    world.now_ns += 20 * S
    assert job.clock(1).uncertainty_ns - fresh.uncertainty_ns == pytest.approx(20 * S * 50e-6, abs=2)
    assert job.clock(1).offset_ns == fresh.offset_ns


def test_a_clock_is_realigned_after_a_minute() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S], drift=[0, 40e-6]), world)
    job.run(200)
    assert job.wrong == []
    sharp = [number for number, clock in enumerate(job.seen[1]) if 0 <= clock.uncertainty_ns < 2 * MS]
    assert sharp[0] < 20 and sharp[-1] > len(job.seen[1]) * 0.6
    # Two looks a second: some in each minute.
    assert max(b - a for a, b in itertools.pairwise(sharp)) < 150


@pytest.mark.parametrize("step_ns", [-3 * S, -10 * MS, 50 * MS])
def test_a_set_wall_clock_is_unknown_until_realigned(step_ns: int) -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(10)
    assert job.clock(1).uncertainty_ns > 0

    job.hosts[1].ahead_ns += step_ns

    assert job.clock(1).uncertainty_ns < 0
    job.run(90)
    assert job.wrong == []
    assert job.clock(1).uncertainty_ns > 0


def test_a_small_correction_widens_the_uncertainty() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(10)
    before = job.clock(1)
    job.hosts[1].ahead_ns += 150_000
    assert job.clock(1).uncertainty_ns >= before.uncertainty_ns + 150_000


def test_a_slewed_wall_clock_soon_becomes_unknown() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(10)
    job.hosts[1].slew(500e-6)
    for _ in range(100):
        world.now_ns += 100 * MS
        job.look(1)
    assert job.wrong == []
    assert job.clock(1).uncertainty_ns < 0


def job_of_two_hosts(world: World) -> Job:
    """Rank 0 alone, two ranks on another host, and one on a third."""
    here, there, far = Host(world, "here"), Host(world, "there", S), Host(world, "far", -S)
    return Job([here, there, there, far], world)


def test_setting_the_clock_of_rank_0_invalidates_all_alignments() -> None:
    world = World()
    job = job_of_two_hosts(world)
    job.run(15)
    assert all(job.clock(rank).uncertainty_ns > 0 for rank in (1, 2, 3))
    job.hosts[0].ahead_ns += S
    # What does not measure itself looks every 5 seconds.
    world.now_ns += 6 * S
    world.run([job.syncs[0].tick], 1)
    for sync in job.syncs[1:]:
        world.run([sync.tick], 1)
    assert [job.clock(rank).uncertainty_ns for rank in (1, 2, 3)] == [-1, -1, -1]


def test_setting_the_clock_of_rank_0_realigns_all_hosts_at_once() -> None:
    world = World()
    job = job_of_two_hosts(world)
    job.run(15)
    job.hosts[0].ahead_ns += S
    job.run(20)
    assert all(abs(job.ahead_ns(rank) - job.clock(rank).offset_ns) < 2 * MS for rank in (1, 2, 3))
    assert all(job.clock(rank).uncertainty_ns > 0 for rank in (1, 2, 3))


def test_a_silent_rank_0_delays_no_rank() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S, S]), world)
    job.run(60, silent=frozenset({0}))
    assert job.clock(1).uncertainty_ns == job.clock(2).uncertainty_ns == -1
    assert max(job.longest_tick_s) < 0.01


def test_a_dead_host_does_not_delay_the_others() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S, 2 * S]), world)
    # It says that it is there, and never comes again.
    world.run([job.syncs[0].tick, job.syncs[1].tick], 1)
    world.run([job.syncs[1].tick], 1)
    job.run(200, silent=frozenset({1}))
    assert job.wrong == []
    assert job.clock(2).uncertainty_ns > 0
    assert job.longest_tick_s[0] < 0.4


def test_dead_hosts_make_room_for_live_ones() -> None:
    world = World()
    job = Job(hosts_of(world, range(0, 12 * S, S)), world)
    dead = range(1, 11)
    for rank in (0, *dead, *dead):
        world.run([job.syncs[rank].tick], 1)
    job.run(120, silent=frozenset(dead))
    assert job.clock(11).uncertainty_ns > 0


def test_an_expired_turn_causes_no_further_wait() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(10)
    # As it stays where rank 0 has died.
    job.shared.values["clock/turn"] = b"1000000000 1 1"
    began_ns = world.now_ns
    world.run([job.syncs[1].tick], 1)
    assert world.now_ns - began_ns < 10 * MS


def test_an_invitation_contains_the_tick_interval_of_rank_0() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    for rank in (0, 1, 1, 0):
        world.run([job.syncs[rank].tick], 1)
    assert numbers(job.shared.values["clock/turn"].decode())[1:] == (1, 1)
    world.now_ns += 8 * S
    world.run([job.syncs[0].tick], 1)
    told = numbers(job.shared.values["clock/turn"].decode())
    assert told[0] == pytest.approx(8 * S, rel=0.01) and told[1:] == (1, 1)


def test_the_answers_of_rank_0_are_time_bounded_for_many_hosts() -> None:
    world = World()
    job = Job(hosts_of(world, range(0, 40 * S, S)), world, way_s=(2e-3, 2e-3))
    job.run(90)
    assert job.wrong == []
    assert sum(job.clock(rank).uncertainty_ns > 0 for rank in range(1, 40)) == 39
    # 0.3 s of answers, and the calls that ask who is there.
    assert job.longest_tick_s[0] < 0.3 + 40 * 0.01 + 0.1


def test_keys_do_not_grow_with_time() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    job.run(20)
    keys = set(job.shared.values)
    job.run(200)
    assert set(job.shared.values) == keys


def test_failed_exchange_calls_are_retried() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    for exchange in job.exchanges:
        exchange.fails = 0.05
    job.run(200)
    assert job.wrong == []
    for exchange in job.exchanges:
        exchange.fails = 0.0
    job.run(100)
    assert job.clock(1).uncertainty_ns > 0


def test_unreadable_messages_are_skipped() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    for key in ("clock/turn", "clock/pong/1", "clock/ping/1", "clock/alignment/boot-1"):
        job.shared.values[key] = b"\xffnonsense 1 2"
    job.run(10)
    assert job.clock(1).uncertainty_ns > 0


def test_a_stopping_rank_does_not_wait_for_its_turn() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)

    def waiting() -> Iterator[None]:
        job.syncs[0].tick()
        yield from (job.syncs[1].tick() for _ in range(3))

    def stopping() -> None:
        world.sleep(0.3)
        job.syncs[1].stop()

    # Rank 0 ticks once more, which invites, and never again.
    def ranks() -> None:
        list(waiting())
        job.syncs[0].tick()
        began_ns = world.now_ns
        job.syncs[1].tick()
        assert (world.now_ns - began_ns) / 1e9 < 0.4

    world.run([ranks, stopping], 5)


class EndsAfter(threading.Event):
    """Set after so many waits; none of them takes time."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.left = waits

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


def test_the_thread_ticks_until_it_is_ended_or_stopped() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    world.run([lambda: job.syncs[0].run(EndsAfter(3))], 5)
    # Each reads one slot at least, and the first, which waits for nothing, says where rank 0 is.
    assert job.exchanges[0].calls == 5
    job.syncs[0].stop()
    job.syncs[0].run(EndsAfter(10**9))
    assert job.exchanges[0].calls == 5


def test_the_thread_ticks_at_once() -> None:
    world = World()
    job = Job(hosts_of(world, [0, S]), world)
    world.run([lambda: job.syncs[0].run(EndsAfter(0))], 5)
    assert job.exchanges[0].calls == 2


def test_rounds_bound_the_offset_from_both_sides() -> None:
    now = Reading(100 * S, 100 * S)
    # 10 ns ahead; 3 ns on the way there, 7 on the way back; and a slow round that says nothing new.
    found = aligned([Round(110, 103, 104, 121), Round(110, 180, 190, 300)], now, now, epoch=7)
    assert found is not None
    assert (found.offset_ns - found.uncertainty_ns, found.offset_ns + found.uncertainty_ns) == pytest.approx(
        (7, 17), abs=2
    )
    assert found.epoch == 7


def test_inconsistent_rounds_give_no_alignment() -> None:
    now = Reading(100 * S, 100 * S)
    assert aligned([Round(0, 0, 0, 10), Round(2000, 1000, 1000, 2010)], now, now, epoch=0) is None
    assert aligned([], now, now, epoch=0) is None
    assert aligned([Round(0, 0, 0, 10)], now, Reading(101 * S, 100 * S), epoch=0) is None


def test_a_monotonic_clock_of_another_host_is_detected() -> None:
    found = Alignment(0, 10, Reading(100 * S, 50 * S), 0)
    assert found.clock(Reading(101 * S, 20 * S)) == Clock()
    assert found.clock(Reading(71 * S, 21 * S)) == Clock()
    assert found.clock(Reading(101 * S, 51 * S)).uncertainty_ns > 0


def test_texts_without_numbers_are_empty() -> None:
    assert numbers("1 x") == ()
    assert read_alignment("1 2 3") is None
    assert read_alignment("1 -2 3 4 5") is None


def test_the_oscillator_is_read_where_the_system_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(CLOCK_MONOTONIC_RAW=4, clock_gettime={4: 5.0}.__getitem__, monotonic=lambda: 7.0)
    monkeypatch.setattr(alignment, "time", clocks)
    assert oscillator_s() == 5.0
    del clocks.CLOCK_MONOTONIC_RAW, clocks.clock_gettime
    assert oscillator_s() == 7.0
