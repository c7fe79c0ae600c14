"""Calls that may never return: each within its time, and never a second one beside the first."""

import threading
from collections.abc import Iterator

import pytest
from own_threads import join_own_threads, own_threads

from lightning_ncclsafe.code.side_thread import NoThreadError, SideThread, UnansweredError

AMPLE_S = 30.0


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """What a call waits for that does not return."""
    event = threading.Event()
    yield event
    event.set()
    join_own_threads("aside")


def test_results_and_errors_are_passed_on_and_no_thread_is_left() -> None:
    side = SideThread("ncclsafe-aside")
    assert side.call(lambda: threading.current_thread().name, AMPLE_S) == "ncclsafe-aside"

    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own") as raised:
        side.call(fail, AMPLE_S)
    assert not isinstance(raised.value, UnansweredError)
    assert not side.is_busy and not own_threads("aside")


def test_no_second_call_starts_before_the_first_returns(answers: threading.Event) -> None:
    side, made = SideThread("ncclsafe-aside"), list[str]()

    def call() -> str:
        made.append("first")
        answers.wait(AMPLE_S)
        return "late"

    with pytest.raises(UnansweredError, match=r"did not answer within 0\.1 s"):
        side.call(call, 0.1)
    with pytest.raises(UnansweredError, match="has not answered yet"):
        side.call(lambda: made.append("second"), AMPLE_S)
    side.begin(lambda: made.append("third"))
    assert side.is_busy and made == ["first"] and len(own_threads("aside")) == 1
    answers.set()
    assert side.answer(AMPLE_S) == "late"
    assert side.call(lambda: "again", AMPLE_S) == "again"


def test_each_thread_gets_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    side, join, others = SideThread("ncclsafe-aside"), threading.Thread.join, list[str]()

    def join_and_ask(thread: threading.Thread, timeout: float | None = None) -> None:
        """Another thread asks just when the first one has been answered."""
        join(thread, timeout)
        if not others:
            others.append("asked")
            others.append(side.call(lambda: "to another thread", AMPLE_S))

    monkeypatch.setattr(threading.Thread, "join", join_and_ask)
    assert side.call(lambda: "to this one", AMPLE_S) == "to this one"
    assert others == ["asked", "to another thread"]


def test_asking_while_another_call_starts_gets_the_earlier_answer() -> None:
    """The answer of the earlier call, as the starting one has not returned."""

    class Between(SideThread):
        """Another call begins just when the thread of the first one has been looked up."""

        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if name in ("_thread", "_last") and self.__dict__.pop("is_between", False):
                self.begin(lambda: "second")
            return found

    side = Between("ncclsafe-aside")
    side.begin(lambda: "first")
    join_own_threads("aside")
    side.__dict__["is_between"] = True
    assert side.answer(AMPLE_S) == "first"


def test_the_thread_is_a_daemon(answers: threading.Event) -> None:
    SideThread("ncclsafe-aside").begin(lambda: answers.wait(AMPLE_S))
    assert [thread.daemon for thread in own_threads("aside")] == [True]


def test_a_missing_answer_and_a_failed_thread_start_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    side = SideThread("ncclsafe-aside")
    with pytest.raises(UnansweredError):
        side.answer(0.0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThreadError, match="can't start new thread"):
        side.call(lambda: None, AMPLE_S)
    assert not side.is_busy
