"""Runs the whole suite, in processes of pytest beside one another, and ends whatever a test does to them.

The first process collects everything, as it takes many seconds to import all files and to rewrite what they assert, and
forks the others. Each asks for one file after the other; what stands in ``ALONE`` is given to the last one that still
runs. A process that ends before its time, or that is stuck beyond the limit of its test, ends the run: the test is
named, nothing more is waited for, and nothing that the tests have started is left.

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
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

# These start ranks and measure them: whatever else runs would be in their way.
ALONE = "tests/trainers/"
# Beyond what pytest-timeout allows a test. It ends the process itself, except where this is stopped, holds the
# interpreter's lock, or where the test has failed already: then nobody looks at its teardown any more.
SLACK = 1.25
# For the stacks of a process that is stuck.
STACKS_S = 2.0
# For what is left to say after the limit of the whole run.
LAST_WORDS_S = 10.0
SWEEP_S = 10.0
POLL_S = 0.2
PR_SET_CHILD_SUBREAPER = 36


class Hooks:
    @pytest.hookspec
    def pytest_before_forks(self, session: pytest.Session) -> None:
        """What is made now is there for all processes, once."""


class Asking:
    """The plugin of pytest: asks for files, and says where it is."""

    def __init__(self, theirs: "Theirs", others: list["Theirs"]) -> None:
        self._stream = theirs.stream()
        self._others = others
        # A file that works on a large tensor where it is imported would have OpenMP start threads, which it would wait
        # for in the forks, too. The programs of the tests have as many as ever.
        self._one_thread = "" if "OMP_NUM_THREADS" in os.environ else "OMP_NUM_THREADS"
        if self._one_thread:
            os.environ[self._one_thread] = "1"
        self._worst = "passed"
        self.say(at="pytest's start")

    def say(self, **what: Any) -> None:
        self._stream.write(json.dumps(what) + "\n")
        self._stream.flush()

    def _claimed(self, files: dict[str, list[pytest.Item]]) -> Iterator[pytest.Item]:
        while True:
            self.say(asks=True)
            if not (name := self._stream.readline().strip()):
                return
            yield from files[name]

    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.add_hookspecs(Hooks)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        self.say(at=f"the collection of {collector.nodeid or 'the tests'}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # Errors of the collection: pytest's own says so.
        files: dict[str, list[pytest.Item]] = {}
        for each in session.items:
            files.setdefault(each.nodeid.partition("::")[0], []).append(each)
        self.say(files={name: len(items) for name, items in files.items()})
        os.environ.pop(self._one_thread, "")
        session.config.hook.pytest_before_forks(session=session)
        # Of all that the collection has made nothing becomes garbage: neither here nor in a fork it is looked at again.
        gc.freeze()
        if self._is_first_after_forks(session.config):
            self.say(all_there=True)
        claimed = self._claimed(files)
        item = next(claimed, None)
        while item is not None:
            following = next(claimed, None)  # Before it runs: what is torn down after it depends on that.
            self._worst = "passed"
            self.say(at=item.nodeid, limit_s=None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.say(done=item.nodeid, outcome=self._worst)
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
            # Its child becomes one of the process that hands out the files, as the first one is.
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
        self.say(at=item.nodeid, limit_s=settings.timeout * SLACK)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._worst == "passed"):
            self._worst = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.say(at="pytest's end")


def write_to(log: IO[bytes], config: pytest.Config) -> None:
    """Pytest has its outputs, as they were before it captures them, in three places."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    for number in (1, 2, config.stash[fault_handler_stderr_fd_key]):
        os.dup2(log.fileno(), number)
    capture.start_global_capturing()
    capture.suspend_global_capture()


class Theirs(NamedTuple):
    """What a process of pytest has of its own: the other end of its connection, and the file that it writes to."""

    connection: socket.socket
    log: IO[bytes]

    def stream(self) -> IO[str]:
        return self.connection.makefile("rw", encoding="utf-8")


def ask(first: Theirs, others: list[Theirs], arguments: list[str]) -> int:
    """Is the first process of pytest, or one of those that it forks."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(first.log.fileno(), number)
    sys.path[0] = os.getcwd()  # As with ``python -m pytest``.
    asking = Asking(first, others)
    status = int(pytest.main(["--quiet", *arguments], plugins=[asking]))
    asking.say(status=status, at="the end of the process")
    return status


class Lost(Exception):
    """A process of pytest that ended before its time or is stuck, and where it was; or the limit of the run."""


class Process:
    """One of pytest.

    Attributes:
        pid: None before it was forked.
        asks: Whether it waits to be given a file.
        is_last: Whether it was told that there is no further one.
        status: Of pytest, once it came to its end.
    """

    def __init__(self, outside_tests_s: float) -> None:
        self._outside_tests_s = outside_tests_s
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the process runs
        self.theirs = Theirs(theirs, self._log)
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

    def heard(self) -> list[dict[str, Any]]:
        """What it has said since last asked."""
        with suppress(BlockingIOError, ConnectionResetError):
            while part := self.connection.recv(1 << 16):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        all_said: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for said in all_said:
            if "pid" in said:
                self.has_begun(said["pid"])
            if "at" in said:
                self._is_at(said["at"], said.get("limit_s", self._outside_tests_s))
            if "done" in said:
                self._is_at(f"after {said['done']}", self._outside_tests_s)
            self.asks = self.asks or "asks" in said
            self.status = said.get("status", self.status)
        return all_said

    def give(self, file: str) -> None:
        """Lets it run a file; "" says that there is none."""
        self.asks, self.is_last = False, not file
        self._is_at(self.place, self._outside_tests_s)
        with suppress(OSError):  # It has ended, which is_alive() tells.
            self.connection.sendall(f"{file}\n".encode())

    def check(self, code: int | None) -> None:
        """Lost if it is stuck, or has ended with this code before it came to its end.

        Of one that is stuck, faulthandler adds the stacks of all threads to what it has written.
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
        """What it has written: of a run that came to its end, what follows the dots."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        if self.status is not None:
            text = "".join(text.partition("\n=")[1:])
        return text.strip()


class Suite:
    """The run: hands out files, and counts what becomes of their tests."""

    def __init__(self, processes: list[Process]) -> None:
        self.counts: Counter[str] = Counter()
        self.statuses: list[int] = []
        self._running = processes
        self._first = processes[0]
        self._all_there = False
        self._codes: dict[int, int] = {}  # Of processes that have ended.
        self._tests: dict[str, int] = {}  # Of each file, how many.
        self._files: list[str] = []
        self._counts_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since: dict[str, float] = {}

    def run(self, until: float) -> None:
        """Until all processes have ended; Lost if one never will."""
        while self._running:
            select.select([process.connection for process in self._running], [], [], POLL_S)
            self._codes |= reaped()  # Before they are heard: then nothing that they have said is missed.
            for process in tuple(self._running):
                self._hear(process)
            if self._first not in self._running:  # Errors of the collection: it has forked nobody.
                self._running = [process for process in self._running if process.pid is not None]
            for process in self._running:
                if process.asks and self._all_there:
                    self._answer(process)
            if time.monotonic() > until:
                places = ", ".join(process.place for process in self._running)
                raise Lost(f"{places}: the limit of the whole run is over")
        if not any(self.statuses) and self.counts.total() != sum(self._tests.values()):
            raise Lost("not all tests have run")

    def _hear(self, process: Process) -> None:
        code = None if process.pid is None else self._codes.get(process.pid)
        for said in process.heard():
            if "all_there" in said:
                self._all_there = True
                adopt_orphans(False)
            if "files" in said and not self._tests:
                self._tests = said["files"]
                self._files = sorted(said["files"], key=lambda file: file.startswith(ALONE))
            if "done" in said:
                self._count(said["done"], said["outcome"])
        try:
            process.check(code)
        except Lost:
            say(process.text())
            raise
        if code is not None:
            self._running.remove(process)
            self.statuses.append(code)
            if not process.is_last:  # It was to stop at a failure, or could not begin.
                self._files.clear()
            say(process.text())

    def _answer(self, process: Process) -> None:
        if not self._files or self._files[0].startswith(ALONE):
            others = [other for other in self._running if other is not process]
            if not self._files or not all(other.is_last for other in others):
                return process.give("")
            if others:
                return  # They still end: it waits.
        self._since[self._files[0]] = time.monotonic()
        process.give(self._files.pop(0))

    def _count(self, test: str, outcome: str) -> None:
        self.counts[outcome] += 1
        if outcome == "failed":
            say(f"failed: {test}")
        file = test.partition("::")[0]
        counts = self._counts_of[file]
        counts[outcome] += 1
        if counts.total() == self._tests[file]:
            say(f"{time.monotonic() - self._since[file]:6.1f} s  {file}: {in_words(counts)}")


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
    first, *others = (process.theirs for process in processes)
    # Of those that the first one forks, until they are there.
    adopt_orphans(True)
    if (pid := os.fork()) == 0:
        for process in processes:
            process.connection.close()
        return ask(first, others, options.arguments)
    for theirs in (first, *others):
        theirs.connection.close()
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
    """The process that runs the suite."""
    if (runner := os.fork()) != 0:
        return runner
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    sys.exit(run(options))


def adopt_orphans(do: bool) -> None:
    """Whether what is left of processes below this one becomes its own."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(do), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def supervise(options: argparse.Namespace) -> int:
    """Runs the suite in a fork, and ends what is left of it: all orphans come to this process."""
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
    """Kills all that is left below this process."""
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
    parser.add_argument("--limit-s", type=float, default=900.0, help="for the whole run (%(default)s)")
    parser.add_argument("--outside-tests-s", type=float, default=60.0, help="to import a file, to start, and to end")
    # More than the two cores of CI: many tests wait for a limit, or for other processes.
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="what has become of the tests, and the versions")
    options, arguments = parser.parse_known_args()
    options.arguments = [argument for argument in arguments if argument != "--"]
    return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
