"""What is caught, and what ends threads, is seen without anything being called while nothing is raised."""

import ast
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from polling import until

from lightning_ncclsafe.facts import CaughtException, ExceptionFacts
from lightning_ncclsafe.probes.process import caught
from lightning_ncclsafe.probes.process.caught import CaughtExceptions

LOG = logging.getLogger("a users")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[CaughtExceptions]:
    # What is seen in every version of Python.
    monkeypatch.setattr(caught, "_MONITORING", None)
    watch = CaughtExceptions(lambda error: "gloo/" in str(error))
    before = threading.excepthook, logging.getLogRecordFactory()
    watch.start()
    yield watch
    watch.close()
    assert (threading.excepthook, logging.getLogRecordFactory()) == before


def only(watch: CaughtExceptions) -> CaughtException:
    (found,) = watch.facts(0.0)
    return found


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))


def test_an_exception_logged_while_handled_is_noted(watch: CaughtExceptions) -> None:
    def upload() -> None:
        raise OSError(28, "No space left on device")  # <- upload

    try:
        upload()
    except OSError as error:
        LOG.warning("not uploaded: %s", error)  # <- logged
    found = only(watch)
    assert (found.type, found.message, found.count) == ("OSError", "[Errno 28] No space left on device", 1)
    assert [frame.line for frame in found.stack][-1] == line_of("upload")
    assert found.caught_at is not None and found.caught_at.line == line_of("logged")
    assert not found.is_held and not found.thread and not found.passed and not found.is_consequence


def test_an_exception_logged_later_with_exc_info_is_noted(watch: CaughtExceptions) -> None:
    kept: Exception | None = None
    try:
        raise KeyError("lr")
    except KeyError as error:
        kept = error
    LOG.error("not found", exc_info=kept)
    assert only(watch).type == "KeyError"


def test_unlogged_exceptions_and_non_errors_are_ignored(watch: CaughtExceptions) -> None:
    with suppress(KeyError):
        raise KeyError("miss")
    try:
        next(iter(()))
    except StopIteration:
        LOG.warning("at the end")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        LOG.warning("interrupted")
    LOG.warning("all is well")
    assert watch.facts(0.0) == ()


def test_similar_exceptions_are_merged_and_the_ring_is_bounded(watch: CaughtExceptions) -> None:
    for attempt in range(40):
        try:
            raise TimeoutError(f"attempt {attempt}")
        except TimeoutError:
            LOG.warning("once more")
    assert only(watch).count == 40
    for number in range(40):
        kind = type(f"Error{number}", (RuntimeError,), {})
        watch.note(raised(kind()))
    assert len(watch.facts(0.0)) == 16


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as same:
        return same


def test_an_exception_from_a_collective_has_its_name(watch: CaughtExceptions) -> None:
    """As torch.distributed logs it, within its own ``except``."""
    collective = foreign(
        "def all_reduce(logger):\n"
        "    try:\n"
        "        raise RuntimeError('[/gloo/pair.cc] Connection closed by peer')\n"
        "    except Exception as error:\n"
        "        logger.debug({'func_name': 'all_reduce', 'error': str(error)})\n"
        "        raise\n"
    )
    logger = logging.getLogger("c10d-NullHandler-test")
    logger.setLevel(logging.DEBUG)
    with suppress(RuntimeError):
        collective["all_reduce"](logger)  # <- collective
    found = only(watch)
    assert (found.type, found.passed, found.is_consequence) == ("RuntimeError", "all_reduce", True)
    assert [frame.line for frame in found.stack if frame.user][-1] == line_of("collective")


def foreign(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", "exec"), names)
    return names


def test_exceptions_handled_inside_a_library_are_ignored(watch: CaughtExceptions) -> None:
    library = foreign(
        "def get(logger):\n"
        "    try:\n"
        "        raise ConnectionError('retry 1')\n"
        "    except ConnectionError:\n"
        "        logger.warning('once more')\n"
    )
    library["get"](LOG)
    assert watch.facts(0.0) == ()


def test_an_exception_that_leaves_several_actions_counts_once(watch: CaughtExceptions) -> None:
    def step() -> None:
        try:
            raise ValueError("no faces")
        except ValueError as error:
            watch.note(error, passed="[Strategy]SafeDDP.training_step")
            raise

    try:
        step()
    except ValueError as error:
        watch.note(error, passed="run_training_batch")
    assert (only(watch).passed, only(watch).count) == ("run_training_batch", 1)


def end(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_an_exception_that_ends_a_thread_is_noted_and_still_printed(
    watch: CaughtExceptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []

    def feed() -> None:
        raise KeyError("label")  # <- feed

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", partial(watch._thread_ended, watch._begun, printed.append))
        end(threading.Thread(target=feed, name="feeder"))
    found = only(watch)
    assert (found.type, found.message, found.thread) == ("KeyError", "'label'", "feeder")
    assert [frame.line for frame in found.stack if frame.user][-1] == line_of("feed")
    assert [told.exc_type for told in printed] == [KeyError]


def test_a_thread_that_calls_sys_exit_is_noted(watch: CaughtExceptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", partial(watch._thread_ended, watch._begun, lambda told: None))
        end(threading.Thread(target=sys.exit, name="feeder"))
    assert only(watch).type == "SystemExit"


def test_an_exception_being_handled_is_marked_as_held(watch: CaughtExceptions) -> None:
    found: list[tuple[CaughtException, ...]] = []
    asker = threading.Thread(target=lambda: found.append(watch.facts(30.0)))
    try:
        raise OSError("No space left on device")
    except OSError:
        asker.start()
        asker.join()  # <- held
    (held,) = found[0]
    assert (held.type, held.is_held, held.ago_s) == ("OSError", True, 30.0)
    assert held.caught_at is not None and held.caught_at.line in (line_of("held") - 1, line_of("held"))
    assert not only(watch).is_held


def test_an_exception_passing_through_lightning_is_not_caught_yet(watch: CaughtExceptions) -> None:
    """Peers may ask at the very moment a rank fails."""
    found: list[tuple[CaughtException, ...]] = []
    lightning = foreign(
        "def call(step, ask):\n"
        "    try:\n"
        "        step()\n"
        "    except Exception as error:\n"
        "        try:\n"
        "            raise RuntimeError('stopped') from error\n"
        "        except RuntimeError:\n"
        "            ask()\n"
    )

    def step() -> None:
        try:
            raise ValueError("no faces")
        except ValueError as error:
            watch.note(error, passed="training_step")
            raise

    def ask() -> None:
        end(threading.Thread(target=lambda: found.append(watch.facts(0.0))))

    lightning["call"](step, ask)
    assert found == [()]
    assert only(watch).type == "ValueError"


def test_an_exception_whose_id_is_reused_counts_as_caught(
    watch: CaughtExceptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ValueError("no faces in this image")
    except ValueError as error:
        logging.getLogger(__name__).warning("left out: %s", error)
    under_way = RuntimeError("Connection closed by peer")
    monkeypatch.setattr(caught, "handled_now", lambda: under_way)
    watch._ring[-1].number = id(under_way)
    assert only(watch).type == "ValueError"


def test_the_exception_that_ends_the_trainer_is_not_caught(watch: CaughtExceptions) -> None:
    watch.note(raised(ValueError("no faces")), passed="training_step")
    assert watch.facts(0.0, besides=ExceptionFacts(type="ValueError", message="no faces")) == ()


def test_a_hook_replaced_by_others_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caught, "_MONITORING", None)
    watch, before = CaughtExceptions(), (threading.excepthook, logging.getLogRecordFactory())
    watch.start()
    ours = threading.excepthook

    def theirs(told: Any) -> None:
        ours(told)

    threading.excepthook = theirs
    watch.close()
    assert threading.excepthook is theirs
    threading.excepthook = before[0]
    assert logging.getLogRecordFactory() is before[1]


def test_wrapped_hooks_still_work_in_the_next_trainer_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing libraries wrap hooks like this; each logged line could make the two call each other forever."""
    monkeypatch.setattr(caught, "_MONITORING", None)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    watch, factory = CaughtExceptions(), logging.getLogRecordFactory()
    watch.start()
    hook, make = threading.excepthook, logging.getLogRecordFactory()
    theirs = (lambda told: hook(told), lambda *args, **kwargs: make(*args, **kwargs))
    threading.excepthook = theirs[0]
    logging.setLogRecordFactory(theirs[1])
    try:
        watch.close()
        watch.start()
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            LOG.warning("not uploaded")
        end(threading.Thread(target=lambda: 1 / 0))
        assert {(one.type, one.count) for one in watch.facts(0.0)} == {("OSError", 1), ("ZeroDivisionError", 1)}
        watch.close()
        assert (threading.excepthook, logging.getLogRecordFactory()) == theirs
    finally:
        logging.setLogRecordFactory(factory)


def test_nested_starts_install_the_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caught, "_MONITORING", None)
    watch, before, started = CaughtExceptions(), threading.excepthook, []
    monkeypatch.setattr(watch._handlers, "start", lambda: started.append(True))
    watch.start()
    watch.start()
    assert started == [True]
    watch.close()
    assert threading.excepthook is watch._thread_hook
    watch.close()
    assert threading.excepthook is before


MODULE = """
def lookup(cache, key):
    try:
        return cache[key]
    except KeyError:
        return None

class Net:
    def step(self):
        def inner():
            try:
                raise RuntimeError("no faces")
            except (ValueError, RuntimeError) as error:
                seen = error
        inner()

def quiet():
    return 1

class Options:
    def __getattr__(self, name):
        raise LookupError(name)

    @staticmethod
    def first(keys):
        try:
            return keys[0]
        except IndexError:
            return None

options = Options()
"""


@pytest.fixture
def module(tmp_path: Any) -> ModuleType:
    file = tmp_path / "train.py"
    file.write_text(MODULE)
    module = ModuleType("train_of_a_user")
    module.__file__ = str(file)
    exec(compile(MODULE, str(file), "exec"), vars(module))
    for member in (module.lookup, module.quiet, module.Net):
        member.__module__ = module.__name__
    return module


def test_only_code_with_handlers_is_monitored(module: ModuleType) -> None:
    lines: dict[str, frozenset[int]] = {}
    names = {code.co_name for code in caught.codes_with_handlers([module], lines)}
    assert {"lookup", "inner", "first"} <= names and "quiet" not in names
    assert lines == {module.__file__: frozenset({6, 14, 29})}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_frequent_handlers_are_no_longer_reported(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caught, "user_modules", lambda: [module])
    told: list[str] = []
    watch = caught.HandlerWatch(lambda error: told.append(repr(error)))
    watch.start()
    until(lambda: watch._tool >= 0)
    module.Net().step()
    assert told == ["RuntimeError('no faces')"]
    told.clear()
    for key in range(100):
        module.lookup({}, key)
    assert told == [f"KeyError({key})" for key in range(8)]
    watch.close()
    module.Net().step()
    assert len(told) == 8
    assert all(caught._MONITORING.get_tool(tool) is None for tool in (3, 4))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_the_thread_that_reads_source_files_ends_with_the_file_it_reads(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, goes_on, read = threading.Event(), threading.Event(), []

    def tree(file: str) -> ast.AST:
        reads.set()
        assert goes_on.wait(20)
        read.append(file)
        return ast.parse("")

    monkeypatch.setattr(caught, "_LAST_FILE_S", 20.0)
    monkeypatch.setattr(caught, "syntax_tree", tree)
    other = ModuleType("other")
    other.__file__ = "other.py"
    monkeypatch.setattr(caught, "user_modules", lambda: [module, other])
    watch = caught.HandlerWatch(lambda _: None)
    watch.start()
    assert reads.wait(20)
    # Whoever closes it waits for that file, which is read only once it is being closed.
    threading.Thread(target=lambda: watch._ended.wait(20) and goes_on.set(), daemon=True).start()
    watch.close()
    assert read == [module.__file__]
    assert not any(thread.name == "ncclsafe-handlers" for thread in threading.enumerate())
