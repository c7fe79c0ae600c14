"""Stacks: which lines are the user's, and which run on some ranks only."""

import json
import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_threads import join_own_threads
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process import stacks
from lightning_ncclsafe.probes.process.caught import CaughtExceptions
from lightning_ncclsafe.probes.process.main_thread import look_at_main_thread
from lightning_ncclsafe.probes.source.control_flow import control_flow

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
        (6, "past return under if not is_master(args):  (line 4)"),
        (9, ""),
        (13, "if self.trainer.is_global_zero:  (line 10)"),
        (15, "else of if self.trainer.is_global_zero:  (line 10)"),
        (17, ""),
        (20, "if dist.get_rank() == 0 and self.fast:  (line 18)"),
        (22, "if dist.get_rank() == 0 and self.fast:  (line 18)"),
        (23, ""),
    ],
)
def test_the_rank_condition_around_a_line_is_found(source: str, line: int, condition: str) -> None:
    assert control_flow(source).around(line).rank_condition == condition


CAUGHT = """\
def average(values):
    try:
        check(values)
        for value in values:
            reduce(value)              # line 5, on every way but one
    except ValueError:
        log()                          # line 7
    except KeyError as error:
        raise
    with suppress(OSError), lock:
        upload()                       # line 11
    try:
        reduce(values)                 # line 13
    except RuntimeError:
        log()
        raise
    try:
        return next(values)            # line 18
    except StopIteration:
        return None
    try:
        try:
            reduce(values)             # line 23
        finally:
            close()
    except Exception:
        return None
    try:
        if values:
            reduce(values)             # line 30
        else:
            pause()                    # line 32
        reduce(values)                 # line 33

        def later():
            reduce(values)             # line 36

    except Exception:
        reduce(values)                 # line 39
    if values:
        try:
            reduce(values)             # line 42
        except Exception:
            pass
"""


@pytest.mark.parametrize(
    ("line", "handler"),
    [
        (3, "except ValueError:  (line 6)"),
        (5, "except ValueError:  (line 6)"),
        (7, ""),
        (11, "with suppress(OSError), lock:  (line 10)"),
        (13, ""),
        (18, ""),
        (23, "except Exception:  (line 26)"),
        (30, ""),
        (32, ""),
        (33, "except Exception:  (line 38)"),
        (36, ""),
        (39, ""),
        (42, ""),
    ],
)
def test_the_exception_handler_around_a_line_is_found(tmp_path: Path, line: int, handler: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(CAUGHT)
    frame = stacks.seen_frame(str(path), line, "average")
    assert stacks.with_source([frame])[0].handler == handler
    assert stacks.with_source([replace(frame, user=False)])[0].handler == ""


def test_unreadable_or_invalid_source_has_no_condition(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("if rank == 0\n    work()\n")
    assert control_flow(str(broken)).around(2).rank_condition == ""
    assert control_flow(str(tmp_path / "absent.py")).around(2).rank_condition == ""


def test_only_user_files_are_user_code() -> None:
    assert stacks.is_user_code(__file__)
    assert stacks.is_user_code("<ipython-input-3-0ab1>")
    for file in (threading.__file__, pytest.__file__, stacks.__file__, "<frozen runpy>", "<string>"):
        assert not stacks.is_user_code(file), file


def test_a_training_thread_other_than_the_main_one_is_examined() -> None:
    """As in Ray's workers, whose main thread serves Ray; a finished thread no longer trains."""
    trains, seen = threading.Event(), threading.Event()

    def train() -> None:
        stacks.train_here()
        trains.set()
        seen.wait(30)  # <- it trains

    thread = threading.Thread(target=train)
    thread.start()
    assert trains.wait(30)
    stack = stacks.with_source(stacks.main_thread_stack())
    look = look_at_main_thread(thread=stacks.training_thread().native_id)
    seen.set()
    thread.join()
    assert [frame.function for frame in stack if frame.user] == ["train"]
    assert look.state and look.ran_s is not None and look.ran_s < look_at_main_thread().ran_s  # type: ignore[operator]
    assert stacks.training_thread() is threading.main_thread()


def test_another_thread_can_read_the_main_threads_line() -> None:
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


def test_source_on_unresponsive_storage_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be waiting for that storage; the watchdog's thread would then wait as well."""
    file, asked, answers = str(tmp_path / "user.py"), list[str](), threading.Event()
    there, goes_on = threading.Lock(), threading.Lock()
    Path(file).write_text("def wait(there, lock):\n    there.release(); lock.acquire()\n")
    found: dict[str, Any] = {}
    exec(compile(Path(file).read_text(), file, "exec"), found)
    getlines = linecache.getlines

    def late(filename: str, *args: Any) -> list[str]:
        if filename == file:
            asked.append(filename)
            answers.wait(30)
        return getlines(filename, *args)

    monkeypatch.setattr(linecache, "getlines", late)
    monkeypatch.setattr(stacks, "_READ_S", 0.1)
    there.acquire()
    goes_on.acquire()
    thread = threading.Thread(target=found["wait"], args=(there, goes_on), daemon=True)
    thread.start()
    assert there.acquire(timeout=30)
    try:
        for _ in range(2):
            stack = stacks.thread_stack(thread.ident or 0)
            assert [stack[-1].file, stack[-1].line, stack[-1].code] == [file, 2, ""]
            assert stacks.with_source_in_time(stack)[-1].code == ""
        assert len(asked) == 1, "no second thread waits for it"
        answers.set()
        join_own_threads("source")
        assert stacks.thread_stack(thread.ident or 0)[-1].code == "there.release(); lock.acquire()"
        assert stacks.with_source_in_time(stack)[-1].code == "there.release(); lock.acquire()"
    finally:
        answers.set()
        goes_on.release()
        thread.join(30)


def test_another_thread_in_a_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done = threading.Event(), threading.Event()

    def count() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    assert stacks.calling_thread_stack() == ()
    in_threading = SimpleNamespace(has_any=lambda stack: any(frame.file == threading.__file__ for frame in stack))
    monkeypatch.setattr(stacks, "COLLECTIVES", in_threading)
    found = stacks.calling_thread_stack()
    done.set()
    thread.join()
    assert "count" in [frame.function for frame in found]
    assert not any(frame.function == "test_another_thread_in_a_collective_is_found" for frame in found)


ENGINE = Frame(file="/venv/site-packages/torch/autograd/graph.py", line=869, function="_engine_run_backward")
HOOK = Frame(file="/home/me/train.py", line=7, function="histogram", user=True)
OF_PYTHON = Frame(file="/usr/lib/python3.12/threading.py", line=1012, function="_bootstrap")


def test_a_backward_pass_on_a_gpu_goes_on_in_autograds_thread() -> None:
    fit = Frame(file="/home/me/train.py", line=1, function="main", user=True)
    program = Frame(file="/home/me/train.py", line=9, function="<module>", user=True)
    others = [(), (OF_PYTHON, fit), (program, fit), (HOOK,), (fit,)]
    assert stacks.with_backward((fit, ENGINE), others) == (fit, ENGINE, HOOK)
    assert stacks.with_backward((fit, ENGINE), others[:3]) == (fit, ENGINE)
    # The pass runs in the main thread, as on a CPU; or there is none.
    for main in ((fit, ENGINE, HOOK), (fit,), ()):
        assert stacks.with_backward(main, others) == main


def test_the_main_thread_is_where_autograds_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own thread has not been started by Python."""
    mine = threading.get_ident()
    seen = {mine: (HOOK, ENGINE), mine + 1: (OF_PYTHON, HOOK), mine + 2: (HOOK,)}
    monkeypatch.setattr(stacks, "current_frames", lambda: seen)
    monkeypatch.setattr(stacks, "thread_stack", seen.__getitem__)
    assert stacks.main_thread_stack() == (HOOK, ENGINE)
    monkeypatch.setattr(stacks.sys.modules["torch.cuda"], "is_initialized", lambda: True)
    assert stacks.main_thread_stack() == (HOOK, ENGINE, HOOK)
    # What the pass calls is called by the main thread.
    monkeypatch.setattr(stacks, "stack_in_collective", list)
    assert stacks.calling_thread_stack() == [(OF_PYTHON, HOOK)]
    seen[mine] = (HOOK,)
    assert stacks.main_thread_stack() == (HOOK,)
    assert stacks.calling_thread_stack() == [(OF_PYTHON, HOOK), (HOOK,)]


def test_an_exception_has_its_origin_and_is_truncated() -> None:
    try:
        raise ValueError("x" * 5000)
    except ValueError as error:
        facts = stacks.exception_facts(error, is_consequence=False)
    assert facts.type == "ValueError"
    assert len(facts.message) == 2000
    assert facts.stack[-1].function == "test_an_exception_has_its_origin_and_is_truncated"


class Unspeakable(RuntimeError):
    """One whose author has not tried to print it."""

    def __str__(self) -> str:
        raise AttributeError("there is no text")


def test_an_exception_without_text_is_handled() -> None:
    """Otherwise the guard would switch itself off just when a rank fails."""
    error = Unspeakable()
    assert not process_groups.is_communication_error(error)
    assert stacks.exception_facts(error, is_consequence=False).message == "<exception str() failed>"
    caught = CaughtExceptions(process_groups.is_communication_error)
    caught.note(error, passed="Trainer.fit", callers=sys._getframe())
    assert [one.message for one in caught.facts(0.0)] == ["<exception str() failed>"]


@pytest.mark.parametrize(
    ("kind", "handled"), [(SystemExit, "EOFError: Ran out of input"), (ValueError, "")], ids=["an exit", "an error"]
)
def test_an_exit_has_what_was_being_handled(kind: type[BaseException], handled: str) -> None:
    with pytest.raises(kind) as raised:
        try:
            raise EOFError("Ran out of input")
        except EOFError:
            raise kind from None
    assert stacks.exception_facts(raised.value, is_consequence=False).handled == handled
    assert not stacks.exception_facts(SystemExit(), is_consequence=False).handled


def test_a_generators_runtimeerror_has_the_line_of_its_stopiteration() -> None:
    def rows() -> Iterator[int]:
        yield next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        # The library's line is the last one of the traceback.
        calls(DATASETS, lambda: next(rows()))()
    assert raised.value.__traceback__ is not None
    stack = stacks.exception_facts(raised.value, is_consequence=False).stack
    assert [frame.function for frame in stack if frame.user][-1] == "rows"


def test_a_reraised_exception_has_the_users_line() -> None:
    with pytest.raises(ValueError, match="no such setting") as raised:
        try:
            {}["lr"]
        except KeyError as error:
            raise ValueError("no such setting") from error
    stack = stacks.exception_facts(raised.value, is_consequence=False).stack
    assert stack[-1].function == "test_a_reraised_exception_has_the_users_line"
    assert len(stack) == 1


def test_a_frame_without_a_line_is_at_the_first_of_its_function() -> None:
    """Python has none for code that its compiler adds, as at the end of a ``with`` statement."""

    def fail() -> None:
        raise ValueError("broken")

    first = fail.__code__.co_firstlineno
    fail.__code__ = fail.__code__.replace(co_linetable=b"")
    try:
        fail()
    except ValueError as error:
        *_, frame = stacks.exception_facts(error, is_consequence=False).stack
    assert (frame.function, frame.line) == ("fail", first)
    assert stacks.with_source([frame])[0].code.startswith("def fail")


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


OURS = f"{Path(stacks.__file__).parents[2]}/made.py"
LIGHTNING = "/x/site-packages/lightning/pytorch/strategies/strategy.py"
DATASETS = "/x/site-packages/datasets/iterable_dataset.py"


def calls(file: str, act: Callable[[], object]) -> Callable[[], object]:
    """A function of another file that calls another."""
    names: dict[str, Any] = {"act": act}
    exec(compile("def call():\n    return act()", file, "exec"), names)
    made: Callable[[], object] = names["call"]
    return made


def fail() -> None:
    raise ValueError("the user's")


def fail_for_a_reason() -> None:
    try:
        calls(OURS, fail)()
    except ValueError as error:
        raise KeyError("another") from error


def files_after_trimming(act: Callable[[], object]) -> list[list[str]]:
    """The files of the tracebacks of an exception and of its causes, from here on."""
    with pytest.raises(Exception) as raised:
        act()
    stacks.drop_passing_frames(raised.value)
    error: BaseException | None = raised.value
    found = []
    while error is not None:
        found.append([frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)])
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("above", [LIGHTNING, DATASETS])
def test_own_frames_that_forward_a_call_are_removed(above: str) -> None:
    act = calls(LIGHTNING, calls(OURS, calls(OURS, calls(above, calls(OURS, fail)))))
    assert files_after_trimming(act) == [[__file__, LIGHTNING, above, __file__]]


def test_own_frames_of_causes_are_removed_too() -> None:
    error, cause = files_after_trimming(calls(LIGHTNING, fail_for_a_reason))
    assert OURS not in [*error, *cause]
    assert error[-1] == cause[-1] == __file__


def test_own_frames_between_loader_and_dataset_are_removed() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError("the user's")

    loader = iter(DataLoader(Broken()))
    (files,) = files_after_trimming(calls(OURS, loader.__next__))
    assert OURS not in files and files[-1] == __file__


@pytest.mark.parametrize("own", ["json.loads('{')", "torch.load('/no/such/file')", "torch.empty(2) @ torch.empty(3)"])
def test_own_code_that_fails_by_itself_is_not_hidden(own: str) -> None:
    made: dict[str, Any] = {"json": json, "torch": torch}
    exec(compile(f"call = lambda: {own}", OURS, "exec"), made)
    (files,) = files_after_trimming(calls(LIGHTNING, made["call"]))
    assert OURS in files


def test_an_exception_raised_by_own_code_is_not_hidden() -> None:
    made: dict[str, Any] = {}
    exec(compile("def call():\n    raise RuntimeError", OURS, "exec"), made)
    (files,) = files_after_trimming(calls(LIGHTNING, calls(OURS, made["call"])))
    assert files[-2:] == [OURS, OURS]


def test_a_call_site_keeps_lines_with_branches_around_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def check(self):\n    if not self.pending:\n        return\n    reduce(self)\n\n\n"
        "def helper(self):\n    check(self)\n\n\ndef hook(self):\n    for one in self:\n        helper(one)\n"
    )
    library = f"{sysconfig.get_path('purelib')}/torch/distributed"
    places = [
        (f"{library}/distributed_c10d.py", 9, "all_reduce"),
        (str(path), 4, "check"),
        (str(path), 8, "helper"),
        (str(path), 13, "hook"),
    ]
    _, stack = stacks.call_site(places)
    _, past = stacks.call_site([places[0], (str(path), 4, "unknown"), places[2], (str(path), 14, "hook")])
    told, told_past = stacks.frames_to_show([stack, past])
    assert [(frame.function, [branch.line for branch in frame.branches]) for frame in told] == [
        ("hook", [12]),
        ("check", [3]),
    ]
    assert [(frame.function, frame.line) for frame in told_past] == [("hook", 14), ("unknown", 4)]
    assert [frame.function for frame in stacks.frames_to_show([past])[0]] == ["unknown"]
    join, ddp = f"{library}/algorithms/join.py", f"{library.removesuffix('distributed')}nn/parallel/distributed.py"
    joins = [places[0], (ddp, 9, "_match"), (join, 5, "main_hook"), (join, 7, "__exit__"), places[3]]
    assert [frame.function for frame in stacks.call_site(joins)[1]] == ["hook", "__exit__", "_match"]


def test_a_function_is_shown_where_call_sites_are_at_different_lines_of_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def reduce(self):\n    dist.all_reduce(self)\n\n\ndef step(self):\n    reduce(self)\n    reduce(self)\n\n\n"
        "def fit(self):\n    step(self)\n    for one in self:\n        step(one)\n"
    )

    def shown(*sites: tuple[int, int]) -> list[list[tuple[str, int]]]:
        """What is shown of the calls from these lines of fit and step."""
        lines = [(("fit", fit), ("step", step), ("reduce", 2)) for fit, step in sites]
        every = [[Frame(file=str(path), line=line, function=name, user=True) for name, line in one] for one in lines]
        return [[(frame.function, frame.line) for frame in told] for told in stacks.frames_to_show(every)]

    assert shown((11, 6), (11, 7)) == [[("step", 6), ("reduce", 2)], [("step", 7), ("reduce", 2)]]
    assert shown((11, 6), (11, 6)) == [[("reduce", 2)]] * 2
    assert shown((13, 6)) == [[("fit", 13), ("reduce", 2)]]
