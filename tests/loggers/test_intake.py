"""What training hands over is bounded in bytes, and nothing is dropped uncounted."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any, get_args

import pytest

from lightning_ncclsafe.loggers.intake import MARKER, Entry, Intake, LoggedCall, LoggedScalars
from lightning_ncclsafe.settings import Overflow

LONG_S = 20.0
POLICIES = get_args(Overflow)


def scalars(step: int, **values: float) -> LoggedScalars:
    return LoggedScalars(step=step, values=values or {"loss": float(step)}, created=float(step))


def call(name: str, data_bytes: int = 0, keep: bool = False, is_media: bool = False) -> LoggedCall:
    return LoggedCall(name=name, kwargs={}, created=0.0, data_bytes=data_bytes, keep=keep, is_media=is_media)


SCALARS = scalars(0).size_bytes
CALL = call("").size_bytes


def intake(limit_bytes: int = 1 << 20, overflow: Overflow = "thin", block_s: float = 0.01) -> Intake:
    return Intake(limit_bytes, overflow, block_s)


def taken(queue: Intake) -> list[Entry]:
    """Everything that waits, media last."""
    queue.close()
    media = []
    while (one := queue.take_media()) is not None:
        media.append(one)
    return [*queue.take(), *media]


def steps(entries: list[Entry]) -> list[int | None]:
    return [entry.step for entry in entries if isinstance(entry, LoggedScalars)]


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries if isinstance(entry, LoggedCall)]


def in_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_until_blocked(queue: Intake, waiting: int = 1) -> None:
    """Until so many threads wait for the queue to change."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        with queue._changed:
            if len(queue._changed._waiters) >= waiting:  # type: ignore[attr-defined]
                return
    pytest.fail("nobody waits")


def test_all_entries_are_taken_at_once_in_order() -> None:
    queue = intake()
    entries: list[Entry] = [scalars(0), call("add_text"), scalars(1), MARKER, scalars(2)]
    for entry in entries:
        queue.put(entry)
    assert queue.take() == entries
    assert queue.take() == []


def test_media_have_their_own_queue() -> None:
    queue = intake()
    image, text = call("add_image", 1000, is_media=True), call("add_text")
    queue.put(image)
    queue.put(text)
    assert queue.take() == [text]
    assert queue.take_media() == image


def test_bytes_are_held_until_done() -> None:
    queue = intake()
    queue.put(scalars(0))
    queue.put(call("add_image", 1000, is_media=True))
    assert queue.pending_bytes == SCALARS + CALL + 1000
    entries, image = queue.take(), queue.take_media()
    assert image is not None
    assert queue.pending_bytes == SCALARS + CALL + 1000
    queue.done(entries)
    assert queue.pending_bytes == CALL + 1000
    queue.done([image])
    assert queue.pending_bytes == 0


@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_limit_holds_with_everything_counted_and_in_order(overflow: Overflow, seed: int) -> None:
    limit = 20 * SCALARS
    queue, chance = intake(limit, overflow, block_s=0.0), random.Random(seed)
    points, records = 0, 0
    kept: list[str] = []
    left: list[Entry] = []
    held: list[Entry] = []
    for step in range(600):
        kind = chance.choice("sssssstik")
        if kind == "s":
            queue.put(scalars(step, **{tag: chance.random() for tag in chance.sample("abc", 2)}))
            points += 2
        elif kind == "k" and step % 7 == 0:
            kept.append(f"kept {step}")
            queue.put(call(kept[-1], keep=True))
        else:
            queue.put(call(str(step), chance.randrange(2000), is_media=kind == "i"))
            records += 1
        assert queue.pending_bytes <= limit + len(kept) * CALL
        if step % 60 == 0:
            queue.done(held)
            held = queue.take()
            left += held
    left += taken(queue)
    line = [entry for entry in left if not (isinstance(entry, LoggedCall) and entry.is_media)]
    order = [entry.step if isinstance(entry, LoggedScalars) else int(entry.name.split()[-1]) for entry in line]
    assert order == sorted(order, key=lambda step: step or 0)
    assert [name for name in names(left) if name.startswith("kept")] == kept
    assert len(names(left)) - len(kept) + queue.dropped_records == records
    assert sum(len(entry.values) for entry in left if isinstance(entry, LoggedScalars)) == (
        points - queue.thinned - queue.dropped_points
    )
    assert (queue.thinned > 0) == (overflow != "drop_oldest")
    assert queue.dropped_records > 0


def test_a_full_queue_is_thinned_to_about_half() -> None:
    queue = intake(100 * SCALARS)
    for step in range(101):
        queue.put(scalars(step, loss=float(-((step - 60) ** 2))))
    left = steps(queue.take())
    assert queue.dropped_points == 0
    assert queue.thinned == 101 - len(left)
    assert 20 <= len(left) <= 51
    assert {0, 60, 100} <= set(left)


def test_thinned_points_stay_in_order_among_calls() -> None:
    queue = intake(30 * SCALARS)
    for step in range(23):
        queue.put(scalars(step) if step % 2 else scalars(step, loss=0.0, acc=1.0))
        if step % 7 == 0:
            queue.put(call(str(step)))
    queue.mark()
    for step in range(23, 40):
        queue.put(scalars(step))
    assert queue.thinned > 0
    left = queue.take()
    places = [entry.step if isinstance(entry, LoggedScalars) else int(entry.name or 22) for entry in left]
    assert places == sorted(places, key=lambda place: place or 0)
    assert names(left) == ["0", "7", "14", "21", ""]
    assert len(steps(left)) == len(set(steps(left)))


def test_thinned_points_keep_their_missing_steps() -> None:
    queue = intake(12 * SCALARS)
    for value in range(13):
        queue.put(LoggedScalars(step=None, values={"loss": float(value)}, created=float(value)))
    left = [entry for entry in queue.take() if isinstance(entry, LoggedScalars)]
    assert queue.thinned > 0
    assert {entry.step for entry in left} == {None}
    assert [entry.created for entry in left] == [entry.values["loss"] for entry in left]
    assert left[0].created == 0.0
    assert left[-1].created == 12.0


def test_drop_oldest_drops_the_oldest() -> None:
    queue = intake(10 * SCALARS, "drop_oldest")
    for step in range(11):
        queue.put(scalars(step))
    assert steps(queue.take()) == [5, 6, 7, 8, 9, 10]
    assert (queue.dropped_points, queue.thinned) == (5, 0)


@pytest.mark.parametrize("overflow", POLICIES)
def test_media_are_dropped_before_scalars(overflow: Overflow) -> None:
    queue = intake(40 * SCALARS, overflow, block_s=0.0)
    for step in range(5):
        queue.put(scalars(step))
    for number in range(20):
        queue.put(call(f"image {number}", 4 * SCALARS, is_media=True))
    left = taken(queue)
    assert steps(left) == [0, 1, 2, 3, 4]
    assert names(left)[-1] == "image 19"
    assert queue.dropped_records == 20 - len(names(left)) > 0
    assert (queue.thinned, queue.dropped_points) == (0, 0)


def test_scalars_that_fill_the_queue_are_thinned_before_media_drop() -> None:
    queue = intake(100 * SCALARS)
    queue.put(call("image", SCALARS, is_media=True))
    for step in range(200):
        queue.put(scalars(step))
    assert queue.thinned > 0
    assert names(taken(queue)) == ["image"]


@pytest.mark.parametrize("overflow", POLICIES)
def test_kept_entries_are_never_dropped(overflow: Overflow) -> None:
    queue = intake(3 * CALL, overflow, block_s=0.0)
    for number in range(10):
        queue.put(call(str(number), keep=True))
        queue.put(call("other"))
    queue.put(call("large", 100 * CALL, keep=True))
    left = taken(queue)
    assert [name for name in names(left) if name != "other"] == [*map(str, range(10)), "large"]
    assert queue.dropped_records == 10 - names(left).count("other")


@pytest.mark.parametrize("overflow", POLICIES)
def test_an_entry_that_cannot_fit_drops_no_others(overflow: Overflow) -> None:
    queue = intake(10 * SCALARS, overflow, block_s=LONG_S)
    for step in range(9):
        queue.put(scalars(step))
    began = time.monotonic()
    queue.put(call("image", 11 * SCALARS, is_media=True))
    assert time.monotonic() - began < LONG_S / 2
    assert steps(taken(queue)) == list(range(9))
    assert (queue.dropped_records, queue.dropped_points, queue.thinned) == (1, 0, 0)


@pytest.mark.parametrize("overflow", POLICIES)
def test_a_marker_drops_nothing_and_does_not_wait(overflow: Overflow) -> None:
    queue = intake(10 * SCALARS, overflow, block_s=LONG_S)
    for step in range(10):
        queue.put(scalars(step))
    began = time.monotonic()
    queue.mark()
    queue.mark()
    assert time.monotonic() - began < LONG_S / 2
    left = queue.take()
    assert steps(left) == list(range(10))
    assert left[-2:] == [MARKER, MARKER]


def test_entries_in_progress_do_not_empty_the_queue() -> None:
    queue = intake(20 * SCALARS)
    for step in range(12):
        queue.put(scalars(step))
    held = queue.take()
    for step in range(12, 21):
        queue.put(scalars(step))
    assert queue.dropped_points == 0
    assert len(queue.take()) > 2
    queue.done(held)


def test_an_entry_that_cannot_fit_beside_work_in_progress_drops_no_others() -> None:
    queue = intake(20 * SCALARS)
    for step in range(15):
        queue.put(scalars(step))
    held = queue.take()
    for step in range(15, 19):
        queue.put(scalars(step))
    queue.put(call("text", 6 * SCALARS))
    assert (steps(queue.take()), queue.dropped_records, queue.dropped_points) == ([15, 16, 17, 18], 1, 0)
    queue.done(held)


def test_an_entry_of_more_than_half_the_queue_fits() -> None:
    queue = intake(20 * SCALARS)
    for step in range(20):
        queue.put(scalars(step))
    queue.put(call("text", 15 * SCALARS))
    assert queue.pending_bytes <= 20 * SCALARS
    assert names(queue.take()) == ["text"]


def test_only_the_newest_is_dropped_if_all_are_in_progress() -> None:
    queue = intake(10 * SCALARS)
    for step in range(10):
        queue.put(scalars(step))
    assert len(queue.take()) == 10
    queue.put(scalars(10))
    assert (queue.take(), queue.dropped_points) == ([], 1)


def test_training_waits_up_to_the_limit_before_points_are_thinned() -> None:
    queue = intake(10 * SCALARS, "block", block_s=0.05)
    for step in range(10):
        queue.put(scalars(step))
    assert queue.thinned == 0
    began = time.monotonic()
    queue.put(scalars(10))
    assert 0.05 <= time.monotonic() - began < LONG_S
    assert queue.thinned > 0
    assert steps(queue.take())[-1] == 10


def test_training_continues_as_soon_as_there_is_room() -> None:
    queue = intake(10 * SCALARS, "block", block_s=LONG_S)
    for step in range(10):
        queue.put(scalars(step))
    thread = in_thread(lambda: queue.put(scalars(10)))
    wait_until_blocked(queue)
    began = time.monotonic()
    entries = queue.take()
    assert thread.is_alive()
    queue.done(entries)
    thread.join(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert steps(entries + queue.take()) == list(range(11))
    assert (queue.thinned, queue.dropped_points) == (0, 0)


@pytest.mark.parametrize("overflow", ["thin", "drop_oldest"])
def test_training_does_not_wait_without_block(overflow: Overflow) -> None:
    queue = intake(3 * SCALARS, overflow, block_s=LONG_S)
    began = time.monotonic()
    for step in range(10):
        queue.put(scalars(step))
    assert time.monotonic() - began < LONG_S / 2


def test_kept_entries_do_not_wait() -> None:
    queue = intake(SCALARS, "block", block_s=LONG_S)
    queue.put(scalars(0))
    began = time.monotonic()
    queue.put(call("kept", keep=True))
    assert time.monotonic() - began < LONG_S / 2
    assert names(queue.take()) == ["kept"]


def test_a_marker_wakes_the_waiting_thread() -> None:
    queue = intake()
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(queue.wait_for_entries(LONG_S)))
    wait_until_blocked(queue)
    queue.mark()
    thread.join(LONG_S)
    assert answers == [True]
    queue.done(queue.take())
    assert queue.pending_bytes == 0


def test_entries_can_be_taken_after_closing() -> None:
    queue = intake()
    queue.put(scalars(0))
    queue.close()
    assert queue.wait_for_entries(None)
    assert steps(queue.take()) == [0]
    assert not queue.wait_for_entries(None)


def test_the_first_entry_wakes_the_waiting_thread() -> None:
    queue = intake()
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(queue.wait_for_entries(LONG_S)))
    wait_until_blocked(queue)
    queue.put(scalars(0))
    thread.join(LONG_S)
    assert answers == [True]


def test_waiting_for_media_is_separate_from_other_entries() -> None:
    queue = intake()
    found: list[LoggedCall | None] = []
    thread = in_thread(lambda: found.append(queue.take_media()))
    wait_until_blocked(queue)
    queue.put(scalars(0))
    wait_until_blocked(queue)
    queue.put(call("image", is_media=True))
    thread.join(LONG_S)
    assert [one.name for one in found if one] == ["image"]
    queue.take()
    queue.put(call("image", is_media=True))
    assert queue.wait_for_entries(0.0)
    assert queue.take() == []


def test_closing_wakes_all_waiting_threads() -> None:
    queue = intake()
    answers: list[Any] = []
    threads = [
        in_thread(lambda: answers.append(queue.take_media())),
        in_thread(lambda: answers.append(queue.wait_for_entries(None))),
    ]
    wait_until_blocked(queue, waiting=2)
    queue.close()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(answers, key=str) == [False, None]


def test_a_closed_queue_does_not_block_training() -> None:
    queue = intake(SCALARS, "block", block_s=10 * LONG_S)
    queue.put(scalars(0))
    thread = in_thread(lambda: queue.put(scalars(1)))
    wait_until_blocked(queue)
    queue.close()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_empty_means_all_entries_are_done() -> None:
    queue = intake()
    assert queue.wait_until_empty(time.monotonic())
    queue.put(scalars(0))
    queue.put(call("image", is_media=True))
    assert not queue.wait_until_empty(time.monotonic())
    entries, image = queue.take(), queue.take_media()
    assert image is not None
    queue.done(entries)
    assert not queue.wait_until_empty(time.monotonic() + 0.01)
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(queue.wait_until_empty(time.monotonic() + LONG_S)))
    wait_until_blocked(queue)
    queue.done([image])
    thread.join(LONG_S)
    assert answers == [True]
