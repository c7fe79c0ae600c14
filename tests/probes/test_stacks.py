"""Stacks: which lines are the user's, and which run on some ranks only."""

import threading
from pathlib import Path

import pytest

from lightning_ncclsafe.probes import stacks

SOURCE = """\
import torch.distributed as dist

def evaluate(model, args):
    if not is_master(args):
        return {}
    return slow(model)                 # line 6: only on the master, by the early return

def on_train_epoch_end(self):
    log(self)                          # line 9: on all ranks
    if self.trainer.is_global_zero:
        prepare()
        for batch in self.data:
            self.net(batch)            # line 13: rank 0
    else:
        wait()                         # line 15: the others
    if self.debug:
        slow(self)                     # line 17: on all ranks
    if dist.get_rank() == 0 and self.fast:
        try:
            slow(self)                 # line 20: rank 0
        finally:
            slow(self)                 # line 22: rank 0
    cranky_ranking(self)               # line 23: on all ranks
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        (6, "if not is_master(args):  (line 4)"),
        (9, ""),
        (13, "if self.trainer.is_global_zero:  (line 10)"),
        (15, "if self.trainer.is_global_zero:  (line 10)"),
        (17, ""),
        (20, "if dist.get_rank() == 0 and self.fast:  (line 18)"),
        (22, "if dist.get_rank() == 0 and self.fast:  (line 18)"),
        (23, ""),
    ],
)
def test_the_condition_on_the_rank_around_a_line_is_found(source: str, line: int, condition: str) -> None:
    assert stacks.rank_condition(source, line) == condition


def test_source_that_cannot_be_read_or_parsed_has_no_condition(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("if rank == 0\n    work()\n")
    assert stacks.rank_condition(str(broken), 2) == ""
    assert stacks.rank_condition(str(tmp_path / "absent.py"), 2) == ""


def test_only_the_users_own_files_are_user_code() -> None:
    assert stacks.is_user_code(__file__)
    assert stacks.is_user_code("<ipython-input-3-0ab1>")
    for file in (threading.__file__, pytest.__file__, stacks.__file__, "<frozen runpy>", "<string>"):
        assert not stacks.is_user_code(file), file


def test_another_thread_sees_the_line_the_main_thread_is_at() -> None:
    seen: list[object] = []
    ready, done = threading.Event(), threading.Event()

    def look() -> None:
        ready.wait()
        seen.extend(stacks.with_source(stacks.main_thread_stack()))
        done.set()

    threading.Thread(target=look).start()
    ready.set()
    done.wait()  # <- the main thread is here
    mine = [frame for frame in seen if getattr(frame, "file", "") == __file__]
    assert getattr(mine[-1], "code", "") in ("done.wait()  # <- the main thread is here", "ready.set()")
    assert getattr(mine[-1], "user", False)


def test_an_exception_tells_where_it_was_raised_and_is_cut() -> None:
    try:
        raise ValueError("x" * 5000)
    except ValueError as error:
        facts = stacks.exception_facts(error, is_consequence=False)
    assert facts.type == "ValueError"
    assert len(facts.message) == 2000
    assert facts.stack[-1].function == "test_an_exception_tells_where_it_was_raised_and_is_cut"


def test_a_very_deep_stack_keeps_both_ends() -> None:
    def dive(depth: int) -> None:
        if depth == 0:
            raise RecursionError("bottom")
        dive(depth - 1)

    try:
        dive(400)
    except RecursionError as error:
        stack = stacks.exception_facts(error, is_consequence=False).stack
    assert len(stack) <= 120
    assert stack[0].function == "test_a_very_deep_stack_keeps_both_ends"
    assert stack[-1].line == stack[-2].line - 1
