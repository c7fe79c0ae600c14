"""Which sends and receives the main thread waits for, and where they were begun."""

import linecache
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from polling import until
from torch.distributed import Work

from lightning_ncclsafe._torch import works
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
    ],
)
def test_a_send_or_receive_is_told_with_where_it_was_begun(
    wait: Callable[..., None], numbers: list[int], kinds: tuple[str, ...]
) -> None:
    assert told(wait, *numbers) == (kinds, place(wait.__name__))


def test_where_one_that_was_given_was_begun_is_unknown() -> None:
    assert told(of_what_was_given, RECEIVE) == (("recv",), "")


@pytest.mark.parametrize(("wait", "numbers"), [(of_a_variable, [ALL_REDUCE]), (of_a_list, [SEND, ALL_REDUCE])])
def test_a_collective_is_none_of_them(wait: Callable[..., None], numbers: list[int]) -> None:
    assert told(wait, *numbers) == ((), "")


def test_what_waits_for_no_operation_awaits_none() -> None:
    assert awaited() == ((), "")
    assert works.operation(threading.Event()) == ""
