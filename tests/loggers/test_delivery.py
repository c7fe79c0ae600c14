"""Frames are delivered in the background, and tried again for as long as storage refuses."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from own_threads import own_threads

from lightning_ncclsafe.loggers import delivery as delivery_module
from lightning_ncclsafe.loggers import store as store_module
from lightning_ncclsafe.loggers.delivery import Delivery
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store

LONG_S = 20.0


class Storage:
    """Takes what it is given, unless it refuses or does not answer."""

    pace_s = 0.001

    def __init__(self) -> None:
        self.frames: list[StagedFrame] = []
        self.tries: list[float] = []
        self.refusals: list[Exception] = []
        self.answers = threading.Event()
        self.answers.set()
        self.is_asked = threading.Event()

    def deliver(self, frames: Sequence[StagedFrame]) -> None:
        self.tries.append(time.monotonic())
        self.is_asked.set()
        assert self.answers.wait(LONG_S)
        if self.refusals:
            raise self.refusals.pop(0)
        self.frames += frames

    @property
    def bodies(self) -> list[bytes]:
        return [frame.body for frame in self.frames]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests do not wait as long as training would."""
    monkeypatch.setattr(delivery_module, "_PACE_TIMES", 0.0)
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.002)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.004)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "staging")


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def told() -> list[str]:
    """The errors that the user was told of."""
    return []


@pytest.fixture
def delivery(store: Store, storage: Storage, told: list[str]) -> Iterator[Delivery]:
    made = Delivery(
        store,
        storage,
        name="Logger",
        on_fault=lambda error: told.append(str(error)),
        on_lost=lambda error: told.append(f"lost: {error}"),
    )
    yield made
    storage.answers.set()
    made.close()
    for thread in own_threads("write"):
        thread.join(LONG_S)


def soon() -> float:
    return time.monotonic() + LONG_S


def stage(store: Store, *bodies: bytes) -> None:
    store.append([StagedFrame(kind="append", file="f", body=body, points=2, records=1) for body in bodies])


def wait_for(delivery: Delivery, condition: Callable[[], bool]) -> None:
    """Fails, and does not hang, where the condition never holds."""
    with delivery._changed:
        assert delivery._changed.wait_for(condition, LONG_S)


def test_waking_delivers_staged_frames_in_order(store: Store, storage: Storage, delivery: Delivery) -> None:
    stage(store, b"a", b"b")
    delivery.wake()
    wait_for(delivery, lambda: not store.pending_bytes)
    stage(store, b"c")
    delivery.wake()
    wait_for(delivery, lambda: not store.pending_bytes)
    assert storage.bodies == [b"a", b"b", b"c"]
    assert (delivery.points, delivery.records, delivery.faults, delivery.last_fault) == (6, 3, 0, None)


def test_a_refused_write_is_retried_and_reported_once_per_series(
    store: Store, storage: Storage, delivery: Delivery, told: list[str]
) -> None:
    storage.refusals = [OSError("first"), ValueError("second"), OSError("third")]
    stage(store, b"a")
    assert delivery.flush(soon())
    assert storage.bodies == [b"a"]
    assert (delivery.faults, str(delivery.last_fault), told) == (3, "third", ["first"])
    assert (delivery.points, delivery.records) == (2, 1)
    storage.refusals = [OSError("fourth")]
    stage(store, b"b")
    assert delivery.flush(soon())
    assert (delivery.faults, told) == (4, ["first", "fourth"])


def test_a_retry_includes_newer_frames(store: Store, storage: Storage, delivery: Delivery) -> None:
    storage.answers.clear()
    storage.refusals = [OSError("no")]
    stage(store, b"a")
    delivery.wake()
    assert storage.is_asked.wait(LONG_S)
    stage(store, b"b")
    storage.answers.set()
    assert delivery.flush(soon())
    assert storage.bodies == [b"a", b"b"]
    assert len(storage.tries) == 2


def test_retries_slow_down_to_a_limit(
    store: Store, storage: Storage, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.04)
    storage.refusals = [OSError("no") for _ in range(5)]
    stage(store, b"a")
    delivery.wake()
    wait_for(delivery, lambda: not store.pending_bytes)
    waits = [later - sooner for sooner, later in zip(storage.tries, storage.tries[1:], strict=False)]
    for waited, least in zip(waits, [0.01, 0.02, 0.04, 0.04, 0.04], strict=True):
        assert least <= waited
    assert sum(waits) < LONG_S / 2


def test_retries_do_not_slow_down_beyond_the_limit(store: Store, storage: Storage, delivery: Delivery) -> None:
    storage.refusals = [OSError("no") for _ in range(100)]
    stage(store, b"a")
    delivery.wake()
    wait_for(delivery, lambda: delivery.faults >= 5)
    assert delivery._retry_s == 0.004


def test_deliveries_keep_their_pace(store: Store, storage: Storage, delivery: Delivery) -> None:
    storage.pace_s = 0.05
    for body in (b"a", b"b"):
        stage(store, body)
        delivery.wake()
        wait_for(delivery, lambda: not store.pending_bytes)
    assert storage.tries[1] - storage.tries[0] >= 0.05


def test_a_flush_ignores_the_pace(
    store: Store, storage: Storage, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.pace_s = 10 * LONG_S
    monkeypatch.setattr(delivery_module, "_LONGEST_PACE_S", 10 * LONG_S)
    for body in (b"a", b"b", b"c"):
        stage(store, body)
        assert delivery.flush(soon())
    assert storage.bodies == [b"a", b"b", b"c"]


def test_a_flush_makes_many_deliveries_without_a_pause(
    store: Store, storage: Storage, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SEGMENT_BYTES", 1)
    storage.pace_s = 10 * LONG_S
    monkeypatch.setattr(delivery_module, "_LONGEST_PACE_S", 10 * LONG_S)
    for body in (b"a", b"b", b"c"):
        stage(store, body)
    assert delivery.flush(soon())
    assert (storage.bodies, len(storage.tries)) == ([b"a", b"b", b"c"], 3)


def test_a_flush_waits_for_the_running_job(delivery: Delivery) -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    def job() -> None:
        is_asked.set()
        assert_waits(goes_on)

    delivery.add_job(job)
    assert_waits(is_asked)
    assert not delivery.flush(time.monotonic() + 0.02)
    goes_on.set()
    assert delivery.flush(soon())


@pytest.fixture
def refused_once(store: Store, storage: Storage, delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    """One portion, which will be tried again long after the test."""
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 10 * LONG_S)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 10 * LONG_S)
    storage.refusals = [OSError("no")]
    stage(store, b"a")
    delivery.wake()
    wait_for(delivery, lambda: delivery.faults == 1)


@pytest.mark.usefixtures("refused_once")
def test_a_flush_does_not_wait_for_the_next_retry(storage: Storage, delivery: Delivery) -> None:
    assert delivery.flush(soon())
    assert storage.bodies == [b"a"]


def test_a_flush_of_nothing_is_done_at_once(delivery: Delivery) -> None:
    assert delivery.flush(soon())
    assert delivery.flush(time.monotonic() + 1.0)


def test_a_flush_of_unresponsive_storage_ends_at_its_deadline(
    store: Store, storage: Storage, delivery: Delivery
) -> None:
    storage.answers.clear()
    stage(store, b"a")
    began = time.monotonic()
    assert not delivery.flush(began + 0.05)
    assert 0.05 <= time.monotonic() - began < LONG_S / 2
    assert storage.is_asked.wait(LONG_S)
    assert 0 < delivery.writing_s < LONG_S
    storage.answers.set()
    assert delivery.flush(soon())
    assert storage.bodies == [b"a"]
    assert delivery.writing_s == 0.0
    assert delivery.longest_write_s >= storage.tries[0] - began


def test_a_flush_of_refusing_storage_ends_at_its_deadline(
    store: Store, storage: Storage, delivery: Delivery, told: list[str]
) -> None:
    storage.refusals = [OSError("no") for _ in range(100_000)]
    stage(store, b"a")
    assert not delivery.flush(time.monotonic() + 0.3)
    assert delivery.faults
    assert told == ["no"]
    assert store.pending_bytes


def test_jobs_run_once_in_order_after_earlier_frames(store: Store, storage: Storage, delivery: Delivery) -> None:
    done: list[str] = []
    blocks = threading.Event()
    jobs = [lambda name=name: done.append(f"{name} {len(storage.frames)}") for name in ("one", "two")]
    stage(store, b"a")
    delivery.add_job(lambda: assert_waits(blocks))
    for job in [*jobs, *jobs]:
        delivery.add_job(job)
    blocks.set()
    assert delivery.flush(soon())
    assert done == ["one 1", "two 1"]
    delivery.add_job(jobs[0])
    assert delivery.flush(soon())
    assert done == ["one 1", "two 1", "one 1"]


def test_job_bytes_count_until_the_job_is_done(delivery: Delivery) -> None:
    blocks, is_begun = threading.Event(), threading.Event()

    def block() -> None:
        is_begun.set()
        assert_waits(blocks)

    delivery.add_job(block, 100)
    assert_waits(is_begun)
    delivery.add_job(lambda: None, 10)
    delivery.add_job(lambda: None, 20)
    assert delivery.jobs_bytes == 30
    blocks.set()
    assert delivery.flush(soon())
    assert delivery.jobs_bytes == 0


def assert_waits(event: threading.Event) -> None:
    assert event.wait(LONG_S)


def test_a_failed_job_is_retried_before_later_ones(delivery: Delivery, told: list[str]) -> None:
    refusals, done = [OSError("no"), OSError("no again")], list[str]()

    def job() -> None:
        if refusals:
            raise refusals.pop(0)
        done.append("job")

    delivery.add_job(job)
    delivery.add_job(lambda: done.append("next"))
    assert delivery.flush(soon())
    assert done == ["job", "next"]
    assert (delivery.faults, told) == (2, ["no"])


def test_a_non_storage_failure_of_a_job_blocks_nothing(
    store: Store, storage: Storage, delivery: Delivery, told: list[str]
) -> None:
    tries: list[int] = []

    def job() -> None:
        tries.append(1)
        raise ValueError("nonsense")

    delivery.add_job(job)
    stage(store, b"a")
    assert delivery.flush(soon())
    assert (len(tries), told, delivery.faults, storage.bodies) == (1, ["lost: nonsense"], 0, [b"a"])


def test_a_job_with_an_impossible_path_is_given_up_after_three_tries(
    store: Store, storage: Storage, delivery: Delivery, told: list[str]
) -> None:
    tries: list[int] = []

    def job() -> None:
        tries.append(1)
        raise OSError(errno.ENAMETOOLONG, "too long")

    delivery.add_job(job)
    stage(store, b"a")
    assert delivery.flush(soon())
    assert (len(tries), storage.bodies) == (3, [b"a"])
    assert told[-1].startswith("lost: ")


def test_the_rest_of_an_earlier_offload_is_delivered_first(store: Store, storage: Storage) -> None:
    before = threading.Event()
    late = Delivery(store, storage, name="test", on_fault=lambda _: None, after=before)
    stage(store, b"a")
    assert not late.flush(time.monotonic() + 0.05)
    assert storage.bodies == []
    before.set()
    assert late.flush(soon())
    assert storage.bodies == [b"a"]
    late.close()


def test_a_job_added_while_it_runs_runs_again(delivery: Delivery) -> None:
    is_asked, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def job() -> None:
        is_asked.set()
        assert_waits(goes_on)
        done.append("job")

    delivery.add_job(job)
    assert_waits(is_asked)
    delivery.add_job(job)
    delivery.add_job(job)
    goes_on.set()
    assert delivery.flush(soon())
    assert done == ["job", "job"]


def test_a_failing_job_added_again_is_not_repeated_twice(delivery: Delivery) -> None:
    is_asked, goes_on, tries = threading.Event(), threading.Event(), list[int]()

    def job() -> None:
        tries.append(1)
        is_asked.set()
        assert_waits(goes_on)
        if len(tries) == 1:
            raise OSError("no")

    delivery.add_job(job)
    assert_waits(is_asked)
    delivery.add_job(job)
    goes_on.set()
    assert delivery.flush(soon())
    assert len(tries) == 2


def test_wait_until_checks_after_each_delivery(store: Store, storage: Storage, delivery: Delivery) -> None:
    storage.answers.clear()
    stage(store, b"a")
    delivery.wake()
    thread = threading.Thread(target=delivery.wait_until, args=(lambda: not store.pending_bytes,), daemon=True)
    thread.start()
    assert storage.is_asked.wait(LONG_S)
    assert thread.is_alive()
    storage.answers.set()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_wait_until_ends_when_the_delivery_closes(delivery: Delivery) -> None:
    thread = threading.Thread(target=delivery.wait_until, args=(lambda: False,), daemon=True)
    thread.start()
    delivery.close()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_closing_ends_the_thread(store: Store, storage: Storage, delivery: Delivery) -> None:
    stage(store, b"a")
    assert delivery.flush(soon())
    (thread,) = own_threads("write")
    assert thread.daemon
    delivery.close()
    assert own_threads("write") == []


def test_closing_does_not_wait_for_unresponsive_storage(store: Store, storage: Storage, delivery: Delivery) -> None:
    storage.answers.clear()
    stage(store, b"a")
    delivery.wake()
    assert storage.is_asked.wait(LONG_S)
    began = time.monotonic()
    delivery.close()
    assert time.monotonic() - began < LONG_S
    storage.answers.set()
    for thread in own_threads("write"):
        thread.join(LONG_S)
    assert own_threads("write") == []


@pytest.mark.usefixtures("refused_once")
def test_closing_leaves_undelivered_frames_in_staging(store: Store, delivery: Delivery) -> None:
    delivery.close()
    assert own_threads("write") == []
    portion = Store(store.folder).read()
    assert portion is not None
    assert [frame.body for frame in portion.frames] == [b"a"]
