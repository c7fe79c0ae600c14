"""Runs the whole suite, in processes of pytest beside one another, and ends whatever a test does to them.

The first process collects everything, as it takes many seconds to import all files and to rewrite their assertions, and
forks the others. Each asks for one file after the other; the files in ``ALONE`` go to the last process that still runs.
A process that dies, or is stuck beyond the limit of its test, ends the run: the test is named, nothing more is waited
for, and no process that a test has started is left.

    python tests/suite.py [OPTION...] [ARGUMENT OF PYTEST...]
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import select
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import huge_pages
import psutil
import pytest
from _pytest.assertion import rewrite
from _pytest.faulthandler import fault_handler_stderr_fd_key

# Its trainings are told from hanging ones by how long they take: other tests would disturb them.
ALONE = ("tests/trainers/test_trainers.py",)
# These take or wait for long: begun first, in this order, and not when all others have ended and a core would have
# nothing to do.
FIRST = (
    "tests/guard/test_guard.py",
    "tests/reading/test_written_incidents.py",
    "tests/trainers/test_conformance.py",
    "tests/test_documentation.py",
    "tests/test_suite_ends.py",
    "tests/timing/test_bounded.py",
    "tests/timing/test_stragglers.py",
    "tests/trainers/test_data.py",
    "tests/trainers/test_launchers.py",
    "tests/trainers/test_sigterm.py",
)
# Times the limit that pytest-timeout gives a test. It ends the process itself, unless this is stopped or holds the
# interpreter's lock, or the test has failed already, as the teardown has no limit then.
SLACK = 1.25
# For faulthandler, to write the stacks of a process that is stuck.
STACKS_S = 2.0
# For the last messages after the limit of the whole run.
LAST_WORDS_S = 10.0
SWEEP_S = 10.0
POLL_S = 0.2
MOST_OF_FAILURE = 4000
PR_SET_CHILD_SUBREAPER = 36


class Hooks:
    @pytest.hookspec
    def pytest_item_before_forks(self, item: pytest.Item) -> None:
        """What is made for an item now, while others are collected, is there for all processes, once."""


class FileRequests:
    """A plugin of pytest that asks for files to run, and reports which test is under way."""

    def __init__(self, own: "PytestEnd", others: list["PytestEnd"]) -> None:
        self._stream = own.stream()
        self._others = others
        # A file that computes with a large tensor while it is imported has OpenMP start threads, which its forks do not
        # have and would wait for. The programs of the tests have as many as ever.
        self._one_thread = "" if "OMP_NUM_THREADS" in os.environ else "OMP_NUM_THREADS"
        if self._one_thread:
            os.environ[self._one_thread] = "1"
        self._worst = "passed"
        # pytest says how tests have failed when it ends, which it never does if the run is ended before.
        self._how = ""
        # What the collection makes stays; to look again and again for garbage among it takes a third of its time.
        gc.disable()
        self.send(at="pytest's start")

    def send(self, **message: Any) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def _claimed(self, files: dict[str, list[pytest.Item]]) -> Iterator[pytest.Item]:
        while True:
            self.send(asks=True)
            if not (name := self._stream.readline().strip()):
                return
            yield from files[name]

    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.add_hookspecs(Hooks)

    def pytest_collection(self, session: pytest.Session) -> None:
        if (between := os.fork()) != 0:
            os.waitpid(between, 0)
        elif os.fork() != 0:
            os._exit(0)
        else:  # Adopted by the process that hands out the files: the tests of this one do not find it.
            with suppress(Exception):
                rewrite_assertions(session.config)
            os._exit(0)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        self.send(at=f"the collection of {collector.nodeid or 'the tests'}")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        with self._many_threads():
            item.config.hook.pytest_item_before_forks(item=item)

    @contextmanager
    def _many_threads(self) -> Iterator[None]:
        """For what programs of the tests are made from."""
        os.environ.pop(self._one_thread, "")
        yield
        if self._one_thread:
            os.environ[self._one_thread] = "1"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # Pytest reports errors of the collection itself.
        files: dict[str, list[pytest.Item]] = {}
        for each in session.items:
            files.setdefault(each.nodeid.partition("::")[0], []).append(each)
        self.send(files={name: len(items) for name, items in files.items()})
        os.environ.pop(self._one_thread, "")
        # The garbage collector need not look at it in any fork, either. After every 700 new objects, as by default, it
        # would look at those of a test so often that this is a quarter of the time of those that make many.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()
        huge_pages.use()
        if self._is_first_after_forks(session.config):
            self.send(all_there=True)
        claimed = self._claimed(files)
        item = next(claimed, None)
        while item is not None:
            following = next(claimed, None)  # Before it runs: what is torn down after it depends on that.
            self._worst, self._how = "passed", ""
            self.send(at=item.nodeid, limit_s=None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.send(done=item.nodeid, outcome=self._worst, how=self._how)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _is_first_after_forks(self, config: pytest.Config) -> bool:
        """Forks the others, and returns in each of them, too."""
        sys.stdout.flush()
        sys.stderr.flush()
        while self._others:
            other = self._others.pop()
            if (between := os.fork()) != 0:
                os.waitpid(between, 0)
                continue
            # Its child is adopted by the process that hands out the files, whose child the first one is, too.
            stream = other.stream()
            if (pid := os.fork()) != 0:
                stream.write(json.dumps({"pid": pid}) + "\n")
                stream.flush()
                os._exit(0)
            self._stream, self._others = stream, []
            os.setsid()
            write_to(other.log, config)
            return False
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        self.send(at=item.nodeid, limit_s=settings.timeout * SLACK)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._worst == "passed"):
            self._worst = report.outcome
        if report.failed:
            self._how = f"{self._how}\n{report.longreprtext}"[-MOST_OF_FAILURE:]

    def pytest_sessionfinish(self) -> None:
        self.send(at="pytest's end")


def rewrite_assertions(config: pytest.Config) -> None:
    """Does for the last files what the collection, which begins with the first, would have to do when it gets there."""
    places = [Path(argument.partition("::")[0]) for argument in config.args]
    files = {file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])}
    for file in sorted(files, reverse=True):
        kept = rewrite.get_cache_dir(file.absolute()) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, kept) is None:
            rewrite.try_makedirs(kept.parent)
            source, code = rewrite._rewrite_test(file.absolute(), config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


def write_to(log: IO[bytes], config: pytest.Config) -> None:
    """Redirects pytest's outputs: it keeps them, as they were before it captures them, in three places."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    for number in (1, 2, config.stash[fault_handler_stderr_fd_key]):
        os.dup2(log.fileno(), number)
    capture.start_global_capturing()
    capture.suspend_global_capture()


class PytestEnd(NamedTuple):
    """What a process of pytest uses: its end of the connection, and the file for its outputs."""

    connection: socket.socket
    log: IO[bytes]

    def stream(self) -> IO[str]:
        return self.connection.makefile("rw", encoding="utf-8")


def run_pytest(first: PytestEnd, others: list[PytestEnd], arguments: list[str]) -> int:
    """Runs pytest in this process, which is the first one, and in those that it forks."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(first.log.fileno(), number)
    sys.path[0] = os.getcwd()  # As with ``python -m pytest``.
    # Else every run rewrites the assertions of all files, which is half of what it takes to collect them.
    sys.dont_write_bytecode = False
    requests = FileRequests(first, others)
    status = int(pytest.main(["--quiet", *arguments], plugins=[requests]))
    requests.send(status=status, at="the end of the process")
    return status


class Lost(Exception):
    """A process of pytest died or is stuck, with the place where; or the run has reached its limit."""


class Process:
    """A process of pytest.

    Attributes:
        pid: Its process id; None before it is forked.
        asks: Whether it waits for a file.
        is_last: Whether it knows that there is no other file.
        status: Exit status of pytest; None until it has ended.
    """

    def __init__(self, outside_tests_s: float) -> None:
        self._outside_tests_s = outside_tests_s
        self.connection, other_end = socket.socketpair()
        self.connection.setblocking(False)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the process runs
        self.pytest_end = PytestEnd(other_end, self._log)
        self._unread = b""
        self.pid: int | None = None
        self.asks = self.is_last = False
        self.status: int | None = None
        self._is_at("before its start", None)

    def has_begun(self, pid: int) -> None:
        self.pid = pid
        self._is_at("its start", self._outside_tests_s)

    def _is_at(self, place: str, limit_s: float | None) -> None:
        self.place = place
        self._until = float("inf") if limit_s is None else time.monotonic() + limit_s

    def messages(self) -> list[dict[str, Any]]:
        """What it has sent since the last call."""
        with suppress(BlockingIOError, ConnectionResetError):
            while part := self.connection.recv(1 << 16):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for message in messages:
            if "pid" in message:
                self.has_begun(message["pid"])
            if "at" in message:
                self._is_at(message["at"], message.get("limit_s", self._outside_tests_s))
            if "done" in message:
                self._is_at(f"after {message['done']}", self._outside_tests_s)
            self.asks = self.asks or "asks" in message
            self.status = message.get("status", self.status)
        return messages

    def give(self, file: str) -> None:
        """Has it run a file; "" means that there is no other."""
        self.asks, self.is_last = False, not file
        self._is_at(self.place, self._outside_tests_s)
        with suppress(OSError):  # It has ended; check() notices.
            self.connection.sendall(f"{file}\n".encode())

    def check(self, code: int | None) -> None:
        """Raises if it is stuck, or has exited with this code before pytest ended.

        If it is stuck, faulthandler adds the stacks of all its threads to its output.
        """
        if code is not None and self.status is None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            raise Lost(f"{self.place}: the process {how}")
        if code is None and not self.asks and time.monotonic() > self._until and self.pid is not None:
            for number in (signal.SIGABRT, signal.SIGCONT):
                os.kill(self.pid, number)
            until = time.monotonic() + STACKS_S
            while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
            raise Lost(f"{self.place}: stuck beyond its limit")

    def text(self) -> str:
        """Its output; if pytest has ended, what follows the dots."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        if self.status is not None:
            text = "".join(text.partition("\n=")[1:])
        return text.strip()


class Suite:
    """A run of the suite: hands out files, and counts the outcomes of their tests."""

    def __init__(self, processes: list[Process]) -> None:
        self.counts: Counter[str] = Counter()
        self.statuses: list[int] = []
        self._running = processes
        self._first = processes[0]
        self._all_there = False
        self._codes: dict[int, int] = {}  # Exit codes by process id.
        self._tests: dict[str, int] = {}  # Number of tests by file.
        self._files: list[str] = []
        self._counts_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since: dict[str, float] = {}

    def run(self, until: float) -> None:
        """Runs until all processes have ended; raises if one never will."""
        while self._running:
            select.select([process.connection for process in self._running], [], [], POLL_S)
            self._codes |= reaped()  # Before their messages are read, so that none is missed.
            for process in tuple(self._running):
                self._read_messages(process)
            if self._first not in self._running:  # With errors of the collection it has forked no others.
                self._running = [process for process in self._running if process.pid is not None]
            for process in self._running:
                if process.asks and self._all_there:
                    self._answer(process)
            if time.monotonic() > until:
                places = ", ".join(process.place for process in self._running)
                raise Lost(f"{places}: the limit of the whole run is over")
        if not any(self.statuses) and self.counts.total() != sum(self._tests.values()):
            raise Lost("not all tests have run")

    def _read_messages(self, process: Process) -> None:
        code = None if process.pid is None else self._codes.get(process.pid)
        for message in process.messages():
            if "all_there" in message:
                self._all_there = True
                adopt_orphans(False)
            if "files" in message and not self._tests:
                self._tests = message["files"]
                self._files = sorted(message["files"], key=place_of)
            if "done" in message:
                self._count(message["done"], message["outcome"], message["how"])
        try:
            process.check(code)
        except Lost:
            say(process.text())
            raise
        if code is not None:
            self._running.remove(process)
            self.statuses.append(code)
            if not process.is_last:  # It stops at a failure, as asked, or could not begin.
                self._files.clear()
            say(process.text())

    def _answer(self, process: Process) -> None:
        if not self._files or self._files[0] in ALONE:
            others = [other for other in self._running if other is not process]
            if not self._files or not all(other.is_last for other in others):
                return process.give("")
            if others:
                return  # It waits until they have ended.
        self._since[self._files[0]] = time.monotonic()
        process.give(self._files.pop(0))

    def _count(self, test: str, outcome: str, how: str) -> None:
        self.counts[outcome] += 1
        if outcome == "failed":
            say(f"failed: {test}{how}")
        file = test.partition("::")[0]
        counts = self._counts_of[file]
        counts[outcome] += 1
        if counts.total() == self._tests[file]:
            say(f"{time.monotonic() - self._since[file]:6.1f} s  {file}: {in_words(counts)}")


def place_of(file: str) -> int:
    """Files of one place are begun in the order of their names."""
    return len(FIRST) + 1 if file in ALONE else [*FIRST, file].index(file)


def say(text: str) -> None:
    if text:
        print(text, flush=True)


def in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "lightning", "pytorch-lightning"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def run(options: argparse.Namespace) -> int:
    """The exit status of the suite."""
    until = time.monotonic() + options.limit_s
    about = versions()
    say(", ".join(f"{name} {version}" for name, version in about.items()))
    processes = [Process(options.outside_tests_s) for _ in range(options.processes)]
    first, *others = (process.pytest_end for process in processes)
    # Until all processes that the first one forks are there.
    adopt_orphans(True)
    if (pid := os.fork()) == 0:
        for process in processes:
            process.connection.close()
        return run_pytest(first, others, options.arguments)
    for end in (first, *others):
        end.connection.close()
    processes[0].has_begun(pid)
    suite = Suite(processes)
    lost = None
    try:
        suite.run(until)
    except Lost as error:
        lost = str(error)
    status = 1 if lost else max(suite.statuses)
    if lost:
        say(f"The run is ended: {lost}.")
    say(f"{'incomplete: ' if lost else ''}{in_words(suite.counts)}")
    if options.json:
        results = {"versions": about, "status": status, "lost": lost, "counts": suite.counts}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return status


def forked(options: argparse.Namespace) -> int:
    """Forks a process that runs the suite; returns its process id."""
    if (runner := os.fork()) != 0:
        return runner
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    sys.exit(run(options))


def adopt_orphans(do: bool) -> None:
    """Whether orphans among the descendants of this process become its children."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(do), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def supervise(options: argparse.Namespace) -> int:
    """Runs the suite in a fork, and kills the processes that it leaves: all orphans become children of this one."""
    adopt_orphans(True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    until = time.monotonic() + options.limit_s + LAST_WORDS_S
    runner = forked(options)
    try:
        while (left_s := until - time.monotonic()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], left_s)
            if (code := reaped().get(runner)) is not None:
                if code < 0:
                    say(f"The run is ended: what hands out the files was ended by {signal.Signals(-code).name}.")
                return abs(code)
        say(f"The run is ended: it did not end itself {LAST_WORDS_S:.0f} s after its limit.")
        return 1
    finally:
        sweep()


def stop(number: int, frame: object) -> None:
    """Ends this process once: a second signal, which timeout(1) sends, must not end the sweep."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def reaped() -> dict[int, int]:
    """The exit codes of the children that have ended."""
    codes = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def sweep() -> None:
    """Kills all descendants of this process."""
    until = time.monotonic() + SWEEP_S
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > until:
            print(f"Cannot be killed: {[process.pid for process in left]}", file=sys.stderr)
            return
        signal.sigtimedwait([signal.SIGCHLD], POLL_S)
        reaped()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for the whole run (%(default)s)")
    parser.add_argument("--outside-tests-s", type=float, default=180.0, help="to import a file, to start, and to end")
    # Two for each of CI's two cores: many tests wait for a limit, or for other processes. With more of them, ranks on a
    # slow machine get too little of a core to answer each other in time.
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts of outcomes and versions there")
    options, arguments = parser.parse_known_args()
    options.arguments = [argument for argument in arguments if argument != "--"]
    return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
