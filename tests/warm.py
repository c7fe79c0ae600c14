"""Programs that start at once: forks of one that has imported torch and Lightning already, which takes seconds.

Of the scripts that such a program starts itself, as launchers do, and of the processes that multiprocessing spawns for
it, as many as it is given children for are forks, too; the rest start as ever. It has its own session, directory,
environment and arguments, is ``__main__``, and ends as a program of its own would: with its threads, what it has
registered with ``atexit``, the interpreter's own end, and its exit code. That end leaves alone what was imported for
the program.

Run as a program itself, with the number of a listening socket and the modules to import: each connection to it asks for
one program.
"""

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import huge_pages

# What the programs import, or what is imported for them while they train.
PRELOADED = (
    "lightning_ncclsafe.lightning",
    "lightning_ncclsafe.report.html.page",
    "lightning.pytorch.loggers",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "rich.console",
    "rich.text",
)
# Of what was imported for programs: what the end of each takes apart, as it may hold what the program has made. All
# else is left as it is, as to free memory is to copy it first, which takes longer than many a small training.
TAKEN_APART = (
    "builtins",
    "sys",
    "threading",
    "concurrent",
    "multiprocessing",
    "torch.distributed",
    "lightning_ncclsafe",
)
# Until a program is there: includes all imports, on a machine that is busy.
START_S = 50
# With this option multiprocessing starts an interpreter for what it spawns.
SPAWNS = "--multiprocessing-fork"
# Open files that such a child is given: more than any of the tests' programs passes on.
MOST_PASSED = 50

# torch looks up the name of each address that it connects to (pytorch#159007), that of 127.0.0.1 included, which
# /etc/hosts does not have in the form ::ffff:127.0.0.1. Where a name server loses the question, a rank would wait for
# 5 s in the constructor of its store. Also for what is forked from whatever imports this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Lightning asks for them with each Trainer, and what every installed package says would be read each time: 30 ms.
importlib.metadata.entry_points = importlib.metadata.entry_points().select


class Running:
    """A program that was started.

    Attributes:
        pid: Of the program, and of its session.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(100))

    def wait(self, timeout_s: float) -> int:
        """Its exit code, negative for a signal, once; TimeoutError if it has not ended by then."""
        self._connection.settimeout(max(timeout_s, 0.001))
        code = int(self._connection.recv(100))
        self._connection.close()
        return code

    def end_session(self) -> None:
        """Nothing is left of it, nor of what it has started in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Warm:
    """The program that is forked from; programs may be asked for from any thread, and before it is ready."""

    def __init__(
        self, python: str | Path = sys.executable, preloaded: Sequence[str] = PRELOADED, *, start_s: float = START_S
    ) -> None:
        """Starts it.

        Args:
            python: The interpreter, that of another environment for instance.
            preloaded: What it imports before it forks, in this order.
            start_s: How long a program that is asked for may take to be there, the imports included.
        """
        self._start_s = start_s
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A name that is no file: it goes with the socket.
        self._listener.bind(f"\0warm-{os.getpid()}-{time.monotonic_ns()}")
        self._listener.listen(100)
        number = self._listener.fileno()
        self._process = subprocess.Popen(
            [str(python), __file__, str(number), *preloaded],
            pass_fds=[number],
            stdin=subprocess.PIPE,
            env=environment(),
        )

    def start(
        self,
        argv: Sequence[str],
        *,
        output: int,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        children: int = 0,
    ) -> Running:
        """Starts ``python *argv``: a script or ``-m`` and a module, with its arguments.

        Args:
            argv: The arguments of Python.
            output: The descriptor that both of its outputs go to.
            cwd: Where it works.
            env: Its environment; by default that of the tests, without what pytest puts there.
            children: How many of the scripts that it starts with its own interpreter, or has spawned, are forks, too,
                and its children all the same. Later ones import everything themselves.
        """
        env = environment() if env is None else dict(env)
        order = {"argv": [*argv], "cwd": str(cwd), "env": env, "children": children}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._start_s)
        connection.connect(self._listener.getsockname())
        socket.send_fds(connection, [json.dumps(order).encode()], [output])
        return Running(connection)

    def run(
        self,
        argv: Sequence[str],
        cwd: Path,
        *,
        timeout_s: float,
        envs: Sequence[Mapping[str, str]] = ({},),
        children: int = 0,
    ) -> tuple[list[int], str]:
        """The exit codes of programs, and what they and all that they have started have said until they ended.

        Args:
            argv: See `start`.
            cwd: See `start`.
            timeout_s: How long they have in all.
            envs: What is added to the environment of each program.
            children: Of each program; see `start`.

        Raises:
            TimeoutError: The last of them has not closed its output by then.
        """
        deadline, running = time.monotonic() + timeout_s, []
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as pipe:
            try:
                try:
                    for env in envs:
                        env = environment() | env
                        running.append(self.start(argv, output=writer, cwd=cwd, env=env, children=children))
                finally:
                    os.close(writer)
                output = _read(pipe, deadline)
            finally:
                for program in running:
                    program.end_session()
        return [program.wait(10) for program in running], output

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._listener.close()


def environment() -> dict[str, str]:
    """Of a program that is not a part of this one's tests."""
    # Asked on threads: pytest's main thread changes its own variable meanwhile.
    return {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST")}


def free_port() -> int:
    """A port that nobody else has until this process ends.

    It lies below those that Linux gives to whoever asks for any: ranks listen on it seconds later, and meanwhile one of
    theirs could have become a connection's.
    """
    for port in random.sample(range(20_000, 32_768), 1_000):
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as probe:
            claim.bind(f"\0a port of the tests: {port}")  # known to all processes of this machine
            probe.bind(("", port))
            # This process has it until it ends.
            atexit.register(claim.close)
            return port
        claim.close()
    raise OSError("no port is free")


def ranks_of(world_size: int) -> list[dict[str, str]]:
    """The environments of ranks that are started by a cluster: all at once, and not by one another."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return [job | {"LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _read(pipe: FileIO, deadline: float) -> str:
    output = b""
    while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
        more = pipe.read(1 << 16)
        if not more:
            return output.decode(errors="replace")
        output += more
    raise TimeoutError(f"programs still run, and have said:\n{output.decode(errors='replace')}")


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Forks for each order; returns it in the fork, and None here once nobody can send another."""
    # Those that wait for the programs are not waited for themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return watched(connection)
        connection.close()
    return None


def watched(connection: socket.socket) -> dict[str, Any]:
    """Returns in a fork that has the program's session and output; here its end is waited for and told."""
    text, (output,), _, _ = socket.recv_fds(connection, 1 << 20, 1)
    pid = os.fork()
    if pid:
        os.close(output)
        connection.sendall(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        # Whoever asked may have gone.
        with suppress(OSError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    for number in (nothing, output):
        os.close(number)
    order: dict[str, Any] = json.loads(text)
    return order


def with_children(order: dict[str, Any]) -> dict[str, Any]:
    """Returns in the program, and in each child of it that has something to run: with what that is."""
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(order["children"]):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            for end in (here, *(end for _, end in waiting)):
                end.close()
            if (given := waited_for(there)) is None:
                os._exit(0)
            return given
        there.close()
        waiting.append((pid, here))
    if waiting:
        hand_out(waiting)
    return order


def waited_for(connection: socket.socket) -> dict[str, Any] | None:
    """What a child is to run; None once its program has ended and has nothing for it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)  # it is not waited for as long as it says nothing
    os.close(nothing)
    text, received, _, _ = socket.recv_fds(connection, 1 << 20, MOST_PASSED)
    connection.close()
    if not text:
        return None
    order: dict[str, Any] = json.loads(text)
    # Out of one another's way first: some may have come with the numbers that others are to have.
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, max(order["numbers"]) + 1) for number in received]
    for number in received:
        os.close(number)
    for number, target in zip(above, order["numbers"], strict=True):
        os.dup2(number, target)
        os.close(number)
    if order["has_session"]:
        os.setsid()
    # As in an interpreter that has just started, and unlike in the program.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    return order


def hand_out(waiting: list[tuple[int, socket.socket]]) -> None:
    """Has the next scripts that this process starts, or what it spawns, run in children which wait for that."""
    fork_exec = _posixsubprocess.fork_exec

    def fork_or_exec(*arguments: Any) -> int:
        command = [os.fsdecode(word) for word in arguments[0]]
        kept, cwd, env, read_in, _, _, write_out, _, write_errors, _, error_pipe = arguments[3:14]
        is_unbuffered = command[1:2] == ["-u"]
        argv = command[1 + is_unbuffered :]
        is_script = command[0] == sys.executable and argv != [] and not argv[0].startswith("-")
        if not waiting or not (is_script or SPAWNS in argv):
            return int(fork_exec(*arguments))
        if SPAWNS in argv:
            # What comes before are options of the interpreter, which are those of this one.
            argv = argv[argv.index("-c") :]
        pid, connection = waiting.pop(0)
        # Whoever starts a script waits for the end of this one: another program would close it.
        passed = [number for number in kept if number != error_pipe]
        pairs = (os.fsdecode(pair).partition("=") for pair in env or ())
        order = {
            "argv": argv,
            "cwd": os.getcwd() if cwd is None else os.fsdecode(cwd),
            "env": dict(os.environ) if env is None else {name: value for name, _, value in pairs},
            "is_unbuffered": is_unbuffered,
            "has_session": bool(arguments[15]),
            "numbers": [0, 1, 2, *passed],
        }
        outputs = [own if number == -1 else number for own, number in enumerate((read_in, write_out, write_errors))]
        socket.send_fds(connection, [json.dumps(order).encode()], [*outputs, *passed])
        connection.close()
        return pid

    _posixsubprocess.fork_exec = fork_or_exec
    # subprocess has a name of its own for it since Python 3.11.
    if hasattr(subprocess, "_fork_exec"):
        subprocess._fork_exec = fork_or_exec


def leave(names: Iterable[str]) -> None:
    """Keeps modules from the end of the interpreter: what is no longer in the list is not taken apart."""
    modules = {name: sys.modules.pop(name, None) for name in names}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def become(order: dict[str, Any]) -> None:
    """Runs a program as Python does."""
    # After the end of the interpreter, that of torch's libraries is left out: to free memory is to copy it first.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    atexit.register(libc.fflush, None)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    first, *arguments = order["argv"]
    from lightning_ncclsafe import running

    # As an installed Python does when it starts.
    exec((Path(running.__path__[0]) / "lightning_ncclsafe.pth").read_text())
    if order.get("is_unbuffered"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if rank := os.environ.get("RANK") or os.environ.get("LOCAL_RANK"):
        from lightning_utilities.core.rank_zero import rank_zero_only

        # Lightning looks for it when it is imported.
        rank_zero_only.rank = int(rank)
    if first == "-m":
        sys.argv = arguments
        sys.path[0] = order["cwd"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *arguments[1:]]
        sys.path[0] = ""
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [first, *arguments]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    left: list[str] = []
    # Registered before all others, it is called after them.
    atexit.register(leave, left)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if (page := sys.modules.get("lightning_ncclsafe.report.html.page")) is not None:
        page._template()  # What every report would compile.
    for each in [*weakref.finalize._registry]:
        each.atexit = False
    # So that the end of each program does not look at everything that was imported.
    gc.freeze()
    huge_pages.use()
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        order = with_children(order)
        left += [name for name in sys.modules if not name.startswith(("__main__", *TAKEN_APART))]
        become(order)


if __name__ == "__main__":
    main()
