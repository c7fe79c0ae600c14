"""Which thread the thread that trains waits for, read in real threads."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from pathlib import Path

import pytest
from polling import until

from lightning_ncclsafe.facts import AwaitedThread
from lightning_ncclsafe.probes.process import stacks, thread_waits

HERE = str(Path(__file__))
WAIT_S = 20.0
Training = Callable[[Callable[[], object]], threading.Thread]


class Upload:
    """What a thread does until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.future: Future[None] | None = None

    def run(self) -> None:
        self.has_begun.set()
        self.may_end.wait(WAIT_S)  # <- stands

    @contextmanager
    def in_pool(self) -> Iterator[tuple[ThreadPoolExecutor, "Future[None]"]]:
        with ThreadPoolExecutor(1, thread_name_prefix="uploads") as pool:
            future = pool.submit(self.run)
            assert self.has_begun.wait(WAIT_S)
            yield pool, future
            self.may_end.set()


class Named(threading.Thread):
    """A thread that makes its name, which takes code of the user's."""

    @property
    def name(self) -> str:
        raise AssertionError("this is called")

    @name.setter
    def name(self, name: str) -> None:
        self._name = name


class Joining(threading.Thread):
    """A thread that does more before it is joined."""

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)  # <- joins


class Polling(threading.Condition):
    """A condition with a wait of the user's."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout)


def line_of(mark: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))


def standing_in(function: str) -> None:
    """Waits until the thread that trains sleeps in this function, or in what it has called."""

    def is_there() -> bool:
        inside = any(frame.f_code.co_name == function for frame in stacks.main_thread_frames())
        return inside and next(stacks.main_thread_frames()).f_code.co_filename != HERE

    until(is_there)


def stands(found: AwaitedThread | None, name: str) -> None:
    assert found is not None and found.name == name
    places = [(frame.file, frame.line, frame.function, frame.code) for frame in found.stack if frame.user]
    assert places == [(HERE, line_of("stands"), "run", "self.may_end.wait(WAIT_S)  # <- stands")]
    assert found.stack[0].function == "_bootstrap" and found.stack[-1].function == "wait"


@pytest.mark.parametrize("kind", [threading.Thread, Named, Joining])
def test_a_joined_thread_is_found_with_its_stack(kind: type[threading.Thread], training: Training) -> None:
    upload = Upload()
    thread = kind(target=upload.run, name="uploader")
    thread.start()
    assert upload.has_begun.wait(WAIT_S)
    training(thread.join)
    found = until(thread_waits.awaited_thread)
    upload.may_end.set()
    stands(found, "uploader")


@pytest.mark.parametrize(
    "call",
    [
        lambda _, future: future.result(),
        lambda _, future: future.exception(),
        lambda _, future: future.result(timeout=WAIT_S),
        lambda _, future: wait([future]),
        lambda _, future: list(as_completed([future])),
        lambda pool, _: pool.shutdown(wait=True),
    ],
    ids=["result", "exception", "timeout", "wait", "as_completed", "shutdown"],
)
def test_the_thread_that_runs_an_awaited_task_is_found(
    call: Callable[[ThreadPoolExecutor, "Future[None]"], object], training: Training
) -> None:
    upload, other = Upload(), Upload()
    with other.in_pool(), upload.in_pool() as (pool, future):
        training(lambda: call(pool, future))
        found = until(thread_waits.awaited_thread)
    other.may_end.set()
    stands(found, "uploads_0")


@pytest.mark.parametrize("call", [wait, lambda futures: [*as_completed(futures)]], ids=["wait", "as_completed"])
def test_of_several_tasks_the_one_that_runs_is_found(
    call: Callable[[list["Future[None]"]], object], training: Training
) -> None:
    upload = Upload()
    with upload.in_pool() as (pool, future):
        training(lambda: call([pool.submit(upload.run), future, pool.submit(upload.run)]))
        found = until(thread_waits.awaited_thread)
    stands(found, "uploads_0")


def test_tasks_of_a_map_are_awaited_one_by_one(training: Training) -> None:
    upload, names = Upload(), list[None]()
    with ThreadPoolExecutor(1, thread_name_prefix="uploads") as pool:
        training(lambda: names.extend(pool.map(lambda _: upload.run(), range(2))))
        found = until(thread_waits.awaited_thread)
        upload.may_end.set()
    assert found is not None and found.name == "uploads_0"


def test_a_task_that_no_thread_has_begun_shows_none(training: Training) -> None:
    upload = Upload()
    with upload.in_pool() as (pool, _):
        # That a thread knows the future is not that it runs its task.
        upload.future = pool.submit(upload.run)
        training(upload.future.result)
        standing_in("result")
        assert thread_waits.awaited_thread() is None


def test_a_wait_within_code_of_the_user_is_not_one_for_that_thread(training: Training) -> None:
    upload = Upload()
    with upload.in_pool() as (_, future):
        future._condition = Polling()
        training(future.result)
        standing_in("wait")
        assert thread_waits.awaited_thread() is None
        upload.may_end.set()


def test_the_task_of_an_event_loop_shows_no_thread(training: Training) -> None:
    loop, may_end = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    future = asyncio.run_coroutine_threadsafe(may_end.wait(), loop)
    training(future.exception)
    standing_in("exception")
    found = thread_waits.awaited_thread()
    loop.call_soon_threadsafe(may_end.set)
    assert future.result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()
    assert found is None


def test_a_wait_for_an_event_or_a_queue_shows_no_thread(training: Training) -> None:
    upload, tasks = Upload(), queue.Queue[int]()
    tasks.put(1)
    with upload.in_pool():
        for call, function in ((upload.may_end.wait, "wait"), (tasks.join, "join")):
            training(call)
            standing_in(function)
            assert thread_waits.awaited_thread() is None
        tasks.task_done()


def test_a_thread_that_has_ended_shows_nothing(training: Training) -> None:
    ended = threading.Thread(target=str)
    ended.start()
    ended.join()
    training(ended.join).join()
    assert thread_waits.awaited_thread() is None
