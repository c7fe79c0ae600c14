"""Which sends and receives the main thread waits for, and where they were begun."""

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from polling import until
from torch.distributed import Work

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.trainer.awaited_works import awaited

SEND, RECEIVE, ALL_REDUCE = 12, 13, 1
gate = threading.Lock()


class Operation(Work):
    """Is over when the gate is open; its ``wait`` has no frame in Python, as that of torch."""

    wait = gate.acquire

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def _get_op_type(self) -> int:
        return self.number


def in_a_loop(*numbers: int) -> None:
    begun = [Operation(number) for number in numbers]  # <- in_a_loop
    for work in begun:
        work.wait()


def in_a_loop_over_calls(*numbers: int) -> None:
    for work in (Operation(numbers[0]), Operation(numbers[1])):  # <- in_a_loop_over_calls
        work.wait()


def of_a_list(*numbers: int) -> None:
    begun = [Operation(number) for number in numbers]  # <- of_a_list
    begun[0].wait()


def of_a_variable(number: int) -> None:
    work = Operation(number)  # <- of_a_variable
    work.wait()


def of_what_was_given(number: int) -> None:
    handed = [Operation(number)]

    def finish(work: Operation) -> None:
        work.wait()

    finish(handed[0])


def in_the_second_of_two_loops(*numbers: int) -> None:
    first = [Operation(number) for number in numbers]
    second = [Operation(number) for number in numbers]  # <- in_the_second_of_two_loops
    for work in first[:0]:
        work.wait()
    for work in second:
        work.wait()


def in_a_comprehension(*numbers: int) -> None:
    begun = [Operation(number) for number in numbers]  # <- in_a_comprehension
    _ = [
        work.wait()  # type: ignore[func-returns-value]
        for work in begun
    ]


def in_a_loop_of_the_same_name(*numbers: int) -> None:
    work = [Operation(number) for number in numbers]  # <- in_a_loop_of_the_same_name
    for work in work:  # type: ignore[assignment]  # noqa: B020
        work.wait()  # type: ignore[attr-defined]


def in_reverse(*numbers: int) -> None:
    begun = [Operation(number) for number in numbers]
    for work in reversed(begun):
        work.wait()


def of_an_item(*numbers: int) -> None:
    begun = [Operation(number) for number in numbers]
    work = begun[0]
    work.wait()


class Held:
    def __init__(self, number: int) -> None:
        self.work = Operation(number)


def of_an_attribute(*numbers: int) -> None:
    work, held = Operation(SEND), Held(numbers[0])
    held.work.wait()
    assert work is not held.work


def of_two_in_a_line(*numbers: int) -> None:
    work, other = Operation(SEND), Operation(numbers[0])
    (work.wait(), other.wait())  # type: ignore[func-returns-value]


def told(wait: Callable[..., None], *numbers: int) -> tuple[tuple[str, ...], str]:
    """What is told of the main thread while it waits; the gate is opened after that."""
    found: list[tuple[tuple[str, ...], str]] = []

    def waits() -> bool:
        frame = next(main_thread_frames())
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_code.co_filename == __file__ and ".wait()" in line

    def ask() -> None:
        try:
            until(waits, within_s=10.0)
            found.append(awaited())
        finally:
            for _ in numbers:
                until(gate.locked, within_s=10.0)
                gate.release()

    gate.acquire()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait(*numbers)
    finally:
        asking.join(30)
        if gate.locked():
            gate.release()
    return found[0]


def place(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))
    return f"{__file__}:{number} in {mark}"


@pytest.mark.parametrize(
    ("wait", "numbers", "kinds"),
    [
        (of_a_variable, [SEND], ("send",)),
        (of_a_variable, [RECEIVE], ("recv",)),
        (of_a_list, [SEND, RECEIVE], ("send", "recv")),
        (in_a_loop, [SEND], ("send",)),
        (in_a_loop_over_calls, [RECEIVE, RECEIVE], ("recv",)),
        (in_the_second_of_two_loops, [RECEIVE], ("recv",)),
        (in_a_loop_of_the_same_name, [SEND], ("send",)),
    ],
)
def test_a_send_or_receive_is_told_with_where_it_was_begun(
    wait: Callable[..., None], numbers: list[int], kinds: tuple[str, ...]
) -> None:
    assert told(wait, *numbers) == (kinds, place(wait.__name__))


@pytest.mark.parametrize("wait", [of_what_was_given, in_reverse, of_an_item])
def test_where_one_that_was_handed_on_was_begun_is_unknown(wait: Callable[..., None]) -> None:
    assert told(wait, RECEIVE) == (("recv",), "")


def test_before_python_3_12_a_comprehension_does_not_show_where_its_items_were_begun() -> None:
    known = place("in_a_comprehension") if sys.version_info >= (3, 12) else ""
    assert told(in_a_comprehension, SEND) == (("send",), known)


def test_an_operation_is_not_taken_for_another_one_of_its_name_or_line() -> None:
    assert told(of_an_attribute, ALL_REDUCE) == ((), "")
    assert told(of_two_in_a_line, ALL_REDUCE, ALL_REDUCE) == ((), "")


@pytest.mark.parametrize(("wait", "numbers"), [(of_a_variable, [ALL_REDUCE]), (of_a_list, [SEND, ALL_REDUCE])])
def test_a_collective_is_none_of_them(wait: Callable[..., None], numbers: list[int]) -> None:
    assert told(wait, *numbers) == ((), "")


def test_what_waits_for_no_operation_awaits_none() -> None:
    assert awaited() == ((), "")
    assert process_groups.operation(threading.Event()) == ""
