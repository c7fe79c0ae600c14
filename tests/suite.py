"""Runs the whole suite, in processes of pytest beside one another, and ends whatever a test does to them.

Each process collects everything, and asks for one file after the other; what stands in ``ALONE`` is given to the
last one that still runs. A process that ends before its time, or that is stuck beyond the limit of its test, ends
the run: the test is named, nothing more is waited for, and nothing that the tests have started is left.

    python tests/suite.py [OPTION...] [ARGUMENT OF PYTEST...]
"""

import argparse
import ctypes
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

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


class Asking:
    """The plugin of pytest: asks for files, and says where it is."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rw", encoding="utf-8")
        self._worst = "passed"
        self.say(at="pytest's start")

    def say(self, **what: Any) -> None:
        self._stream.write(json.dumps(what) + "\n")
        self._stream.flush()

    def _claimed(self, files: dict[str, list[pytest.Item]]) -> Iterator[pytest.Item]:
        self.say(files={name: len(items) for name, items in files.items()})
        while True:
            self.say(asks=True)
            if not (name := self._stream.readline().strip()):
                return
            yield from files[name]

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        self.say(at=f"the collection of {collector.nodeid or 'the tests'}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # Errors of the collection: pytest's own says so.
        files: dict[str, list[pytest.Item]] = {}
        for each in session.items:
            files.setdefault(each.nodeid.partition("::")[0], []).append(each)
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

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        self.say(at=item.nodeid, limit_s=settings.timeout * SLACK)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._worst == "passed"):
            self._worst = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.say(at="pytest's end")


def ask(number: int, arguments: list[str]) -> int:
    """Is a process of pytest."""
    asking = Asking(socket.socket(fileno=number))
    sys.path[0] = os.getcwd()  # As with ``python -m pytest``.
    status = int(pytest.main(["--quiet", *arguments], plugins=[asking]))
    asking.say(status=status, at="the end of the process")
    return status


class Lost(Exception):
    """A process of pytest that ended before its time or is stuck, and where it was; or the limit of the run."""


class Process:
    """One of pytest.

    Attributes:
        asks: Whether it waits to be given a file.
        is_last: Whether it was told that there is no further one.
        status: Of pytest, once it came to its end.
    """

    def __init__(self, outside_tests_s: float, arguments: list[str]) -> None:
        self._outside_tests_s = outside_tests_s
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the process runs
        self._running = subprocess.Popen(
            [sys.executable, __file__, "--ask", str(theirs.fileno()), "--", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._unread = b""
        self.asks = self.is_last = False
        self.status: int | None = None
        self._is_at("the start of Python", outside_tests_s)

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

    def exit_code(self) -> int | None:
        return self._running.poll()

    def check(self, code: int | None) -> None:
        """Lost if it is stuck, or has ended with this code before it came to its end.

        Of one that is stuck, faulthandler adds the stacks of all threads to what it has written.
        """
        if code is not None and self.status is None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            raise Lost(f"{self.place}: the process {how}")
        if code is None and not self.asks and time.monotonic() > self._until:
            for number in (signal.SIGABRT, signal.SIGCONT):
                self._running.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._running.wait(STACKS_S)
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
        self._tests: dict[str, int] = {}  # Of each file, how many.
        self._files: list[str] = []
        self._counts_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since: dict[str, float] = {}

    def run(self, until: float) -> None:
        """Until all processes have ended; Lost if one never will."""
        while self._running:
            select.select([process.connection for process in self._running], [], [], POLL_S)
            for process in tuple(self._running):
                self._hear(process)
            for process in self._running:
                if process.asks:
                    self._answer(process)
            if time.monotonic() > until:
                places = ", ".join(process.place for process in self._running)
                raise Lost(f"{places}: the limit of the whole run is over")
        if not any(self.statuses) and self.counts.total() != sum(self._tests.values()):
            raise Lost("not all tests have run")

    def _hear(self, process: Process) -> None:
        code = process.exit_code()  # Before it is heard: then nothing that it has said is missed.
        for said in process.heard():
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
    suite = Suite([Process(options.outside_tests_s, options.arguments) for _ in range(options.processes)])
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
    try:
        os._exit(run(options))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def supervise(options: argparse.Namespace) -> int:
    """Runs the suite in a fork, and ends what is left of it: all orphans come to this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
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
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="what has become of the tests, and the versions")
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    options.arguments = [argument for argument in arguments if argument != "--"]
    return supervise(options) if options.ask is None else ask(options.ask, options.arguments)


if __name__ == "__main__":
    sys.exit(main())
