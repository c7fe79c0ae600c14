"""Code of ours says what it waits for, and the probes see it: threads as ranks wait in earnest, everywhere they may."""

import ast
import faulthandler
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parsed import nodes_of, parsed
from standing import FACTS, in_offload, in_preflight, meeting, seen, standing

import lightning_ncclsafe
from lightning_ncclsafe._torch import process_groups, stores
from lightning_ncclsafe.code import marks
from lightning_ncclsafe.code.marks import Mark, mark_at, marked
from lightning_ncclsafe.collectives.recording import PhaseHistory
from lightning_ncclsafe.collectives.timer import Timer
from lightning_ncclsafe.exchange import MemoryExchange, wait_for, wait_for_keys
from lightning_ncclsafe.exchange.meeting import Agreed
from lightning_ncclsafe.facts import Capacity, Frame, PreflightFacts, RankFacts, codec
from lightning_ncclsafe.guard.ending import wait_for_others
from lightning_ncclsafe.guard.leaving import stay_until_all_finished
from lightning_ncclsafe.guard.restarts import agree_on_start
from lightning_ncclsafe.loaders.tuning.budget import agree_on_budget
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.probes.process.stacks import exception_facts
from lightning_ncclsafe.probes.process.traceback_signal import parse_threads
from lightning_ncclsafe.rules.kit.activity import activity
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.settings import TimerSettings, TunerSettings
from lightning_ncclsafe.sigterm.agreement import StopAgreement

FOLDER = Path(lightning_ncclsafe.__file__).parent
OURS = tuple(path.relative_to(FOLDER.parent).as_posix() for path in FOLDER.rglob("*.py"))


@dataclass(frozen=True)
class Wait:
    """A function that waits for other ranks, and what makes a rank come to it and leave it."""

    at: Callable[..., object]
    call: Callable[[], object]
    release: Callable[[], object]


def quiet(text: str) -> None:
    pass


def presenting(rank: int) -> Wait:
    exchange = MemoryExchange()
    one = meeting(exchange, rank)
    return Wait(wait_for, lambda: one.meet(FACTS, lambda ranks: Agreed()), exchange.close)


def voting() -> Wait:
    class Work:
        def __init__(self) -> None:
            self.over = threading.Event()

        def wait(self) -> None:
            self.over.wait(60)

    work = Work()
    return Wait(
        process_groups.wait_for_vote, lambda: process_groups.wait_for_vote(work, torch.tensor((1,))), work.over.set
    )


def stopping() -> Wait:
    exchange = MemoryExchange()
    stop = StopAgreement(exchange, rank=1, world_size=2, deadline_s=60.0, say=quiet)
    exchange.set_if_absent("stop/asked", b"0")
    stop.poll()

    def decide() -> None:
        exchange.set_if_absent("stop/decision", b"0,0")
        stop.poll()

    return Wait(StopAgreement.may_pass, lambda: stop.may_pass((1, 0)), decide)


def starting(rank: int) -> Wait:
    exchange = MemoryExchange()

    def start() -> str:
        return agree_on_start(exchange, rank=rank, world_size=2, deadline_s=60.0, clear=lambda: None)

    return Wait(agree_on_start, start, exchange.close)


def finishing() -> Wait:
    may_leave = threading.Event()

    def stay() -> None:
        stay_until_all_finished(
            MemoryExchange(), rank=0, world_size=2, may_leave=may_leave.is_set, leave_behind=lambda: None
        )

    return Wait(stay_until_all_finished, stay, may_leave.set)


def leaving() -> Wait:
    exchange = MemoryExchange()
    return Wait(wait_for_others, lambda: wait_for_others(exchange, 0, 2), exchange.close)


def budgeting() -> Wait:
    over = threading.Event()

    def agree() -> object:
        return agree_on_budget(MemoryExchange(), Capacity(machine="here"), rank=1, world_size=2, over=over)

    return Wait(agree_on_budget, agree, over.set)


def tuner() -> Tuner:
    return Tuner(TunerSettings(), MemoryExchange(), rank=1, world_size=2, capacity=Capacity(machine="here"), say=quiet)


def taking_loaders() -> Wait:
    one = tuner()
    one.start()

    def release() -> None:
        one._has_budget.set()
        one.close()

    return Wait(Tuner.take, lambda: one._over.is_set() or one.take("train_dataloader", []), release)


def beginning_an_epoch() -> Wait:
    one = tuner()
    return Wait(
        Tuner._workers_of_epoch,
        lambda: one._workers_of_epoch("train_dataloader", SimpleNamespace(epochs=0, users=0)),  # type: ignore[arg-type]
        lambda: one._exchange.set("tuning/epoch/train_dataloader/1", b'{"settings":[]}'),
    )


def comparing_clocks() -> Wait:
    exchange = MemoryExchange()
    preflight = Preflight(
        look=PreflightFacts, on_problem="warn", identity=FACTS, world_size=2, report_dir=None, say=quiet
    )
    preflight.begin()
    return Wait(wait_for_keys, lambda: preflight.compare(exchange), exchange.close)


def ending_the_timer() -> Wait:
    exchange = MemoryExchange()
    timer = Timer(TimerSettings(), exchange, rank=0, world_size=2, phase_history=PhaseHistory(), boot_id="", say=quiet)
    timer.start()
    return Wait(Timer.end, timer.end, exchange.close)


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def connecting(at: Callable[..., object], call: Callable[[int], object]) -> Wait:
    """A rank that is there before the one that hosts the store."""
    there, hosts = port(), list[Any]()

    def host() -> None:
        hosts.append(torch.distributed.TCPStore("127.0.0.1", there, is_master=True, wait_for_workers=False))

    return Wait(at, lambda: call(there), host)


def launched() -> Wait:
    return connecting(stores.launched_store, lambda port: stores.launched_store("127.0.0.1", port, 1))


def under_an_agent() -> Wait:
    def connect(port: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        stores.agents_store()

    return connecting(stores.agents_store, connect)


WAITS: dict[str, Callable[[], Wait]] = {
    "the agreement, on rank 0": lambda: presenting(0),
    "the agreement, on another": lambda: presenting(1),
    "the vote on the next batch": voting,
    "the agreement on where to stop": stopping,
    "the agreement on a start, on rank 0": lambda: starting(0),
    "the agreement on a start, on another": lambda: starting(1),
    "all to finish": finishing,
    "the others to leave": leaving,
    "the budget, on the tuner's thread": budgeting,
    "the budget": taking_loaders,
    "an epoch's setting": beginning_an_epoch,
    "the preflight's clocks": comparing_clocks,
    "the timer's last words": ending_the_timer,
    "a store that is launched": launched,
    "the store of an agent": under_an_agent,
}


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


def facts_with(stack: tuple[Frame, ...]) -> RankFacts:
    return RankFacts(rank=1, progress=FACTS.progress, stack=stack)


@pytest.mark.parametrize("name", WAITS)
def test_own_code_that_waits_for_ranks_is_recognised(name: str) -> None:
    wait = WAITS[name]()
    doing = activity(facts_with(seen(wait.call, wait.at, wait.release)))
    assert doing.waits_for_peers, doing
    assert doing.kind is (Kind.COLLECTIVE if wait.at is process_groups.wait_for_vote else Kind.STORE)


def test_own_code_without_a_wait_for_ranks_is_not_a_wait() -> None:
    assert activity(facts_with(in_preflight())).kind is Kind.LIGHTNING
    assert activity(facts_with(in_offload())).kind is Kind.LOGGER
    assert {frame.mark for frame in in_preflight() if frame.mark} == {Mark.OWN}


# Functions of ours that wait, and for what else than for other ranks on a rank's main thread.
ITSELF = "a thread or a process of this rank"
ASIDE = "on a thread of ours, which no rank's facts show"
LOGGER = "below a logger's mark"
NOT_FOR_RANKS = {
    "_torch.loading._Workers._end_pinning": ITSELF,
    "_torch.loading._Workers._shutdown_workers": ITSELF,
    "_torch.loading._give_up_cut_messages.receive": ITSELF,
    "cli.preflight._compare_all": ITSELF,
    "code.side_thread._answer": ITSELF,
    "collectives.clocks.Follower._answer": ASIDE,
    "collectives.clocks.Reference._answer": ASIDE,
    "collectives.clocks.ClockSync.run": ASIDE,
    "collectives.timer.Timer._run": ASIDE,
    "exchange.fallback.CallThread.call": "the answer of a store or of storage to one question",
    "exchange.fallback.CallThread.close": ITSELF,
    "guard.ending.Ending.exit_after_main_thread.watch": ASIDE,
    "guard.ending._stay": "the thread of a run that has ended",
    "guard.leaving.Leaving._ask_who_stays": "below Leaving.finish",
    "guard.participation.Participation._gather": ASIDE,
    "guard.watchdog.Watchdog.pause": ASIDE,
    "guard.watchdog.Watchdog.stop": ITSELF,
    "guard.witness._attendances": "in a process that is no rank",
    "loaders.tuning.tuner.Tuner._run": ASIDE,
    "loaders.tuning.tuner.Tuner.close": ITSELF,
    "loggers.delivery.Delivery._run": ASIDE,
    "loggers.delivery.Delivery._wait_for_work": ASIDE,
    "loggers.delivery.Delivery.close": LOGGER,
    "loggers.delivery.Delivery.flush": LOGGER,
    "inspecting.looks._done": "in a process that is no rank",
    "inspecting.inspected_ranks.InspectedRanks.look": "in a process that is no rank",
    "inspecting.inspected_ranks.InspectedRanks.look_until_clear": "in a process that is no rank",
    "inspecting.layouts._layout": "in a process that is no rank",
    "inspecting.layouts._learned": "in a process that is no rank",
    "loggers.delivery.Delivery.wait_until": ASIDE,
    "loggers.intake.Intake.put": LOGGER,
    "loggers.intake.Intake.take_media": ASIDE,
    "loggers.intake.Intake.wait_for_entries": ASIDE,
    "loggers.intake.Intake.wait_until_empty": LOGGER,
    "loggers.media.MediaProcess.close": ASIDE,
    "loggers.stager.Stager._stage": ASIDE,
    "loggers.stager.Stager.join": LOGGER,
    "preflight.check.Preflight.compare": ITSELF,
    "preflight.check.Preflight.wait": ITSELF,
    "preflight.probe._watched_swap": ASIDE,
    "probes.process.stack_samples.StackSamples.outside_loop": ASIDE,
    "probes.process.caught.HandlerWatch.close": ITSELF,
    "guard.rank_hosts.try_connecting": ASIDE,
    "probes.process.ended_children.ChildWatch.close": ITSELF,
    "probes.process.main_thread.waits_for_gil": ASIDE,
    "probes.process.traceback_signal._wait_for_c": ASIDE,
    "probes.process.traceback_signal._wait_for_python": ASIDE,
    "probes.peers.Peers.witness": ASIDE,
    "probes.directories._end": ITSELF,
    "probes.directories._outputs": ITSELF,
    "strategies.guarded_save.GuardedSave._settle": ITSELF,
    "strategies.launchers._later": ASIDE,
}
WAITING_CALLS = {"sleep", "wait", "wait_for", "result", "select", "join"}
# Those of text and paths.
JOINED = {"os.path", "os.pathsep", "Markup('')"}


def waiting_functions() -> Iterator[tuple[str, ast.FunctionDef, Path]]:
    for path in sorted(FOLDER.rglob("*.py")):
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        for name, function in waiting_in(parsed(path.read_text()), module).items():
            yield name, function, path


def waiting_in(tree: ast.AST, module: str) -> dict[str, ast.FunctionDef]:
    """By name the functions that wait themselves, and not only one that is defined in them."""
    found: dict[str, ast.FunctionDef] = {}
    left: list[tuple[ast.AST, str, ast.FunctionDef | None]] = [(tree, module, None)]
    while left:
        node, name, function = left.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = f"{name}.{node.name}"
        if isinstance(node, ast.FunctionDef):
            function = node
        elif function is not None and waits(node):
            found[name] = function
        left.extend((child, name, function) for child in ast.iter_child_nodes(node))
    return found


def waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, node.func.value
    if name != "join":
        return name in WAITING_CALLS
    return not isinstance(owner, (ast.Constant, ast.JoinedStr, ast.IfExp)) and ast.unparse(owner) not in JOINED


def test_every_waiting_function_is_marked_or_listed() -> None:
    for module in (
        "strategies.guarded",
        "callbacks.declared",
        "callbacks.logger_offload",
        "callbacks.collective_timer",
    ):
        __import__(f"lightning_ncclsafe.{module}")
    found = {
        name: mark_at(str(path), function.lineno, function.name) not in (Mark.OWN, "")
        for name, function, path in waiting_functions()
    }
    assert {name for name, is_marked in found.items() if not is_marked} == NOT_FOR_RANKS.keys()


def own_name_in(text: str) -> str:
    """A path of one of our files, or a piece of it, in a text that may be a regular expression."""
    plain = text.replace("\\", "")
    if f"{FOLDER.name}/" in plain:
        return f"{FOLDER.name}/"
    named = [word.strip("/^$()") for word in plain.replace("|", " ").split() if word.rstrip("$)").endswith(".py")]
    return next((name for name in named if any(f"/{own}".endswith(f"/{name}") for own in OURS)), "")


def texts(source: str) -> Iterator[str]:
    """All texts but docstrings, those of attributes included."""
    nodes = nodes_of(source)
    documented = [node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docs = {id(inner.value) for node in documented for inner in node.body if isinstance(inner, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_own_code_is_matched_by_its_path() -> None:
    found = {
        (path.relative_to(FOLDER).as_posix(), name)
        for path in FOLDER.rglob("*.py")
        for text in texts(path.read_text())
        if (name := own_name_in(text))
    }
    # A program of its own, which is started by that path; and Python's and torch's files that are called like ours.
    assert found == {("probes/directories.py", "directory_trial.py")}


@pytest.mark.parametrize(
    "text",
    [r"/lightning_ncclsafe/loaders/agreement\.py$", "/lightning_ncclsafe/", "exchange/meeting.py", "watchdog.py"],
)
def test_a_match_by_path_is_found(text: str) -> None:
    assert own_name_in(text)


def compared_functions(source: str) -> list[str]:
    """Comparisons of the function of a frame with a name."""
    return [
        ast.unparse(node)
        for node in nodes_of(source)
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Attribute) and side.attr in ("function", "co_name") for side in operands(node))
        and any(isinstance(side, (ast.Constant, ast.Tuple, ast.Set, ast.Name)) for side in operands(node))
    ]


def operands(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def test_no_frame_is_matched_by_function_name_outside_the_table() -> None:
    assert [text for path in FOLDER.rglob("*.py") for text in compared_functions(path.read_text())] == []
    assert compared_functions('any(frame.function == "wait_for_vote" for frame in stack)')


def test_a_stack_from_faulthandler_has_the_same_marks() -> None:
    """Parsed from the text that faulthandler writes."""
    exchange = MemoryExchange()
    one = meeting(exchange, rank=1)
    call = lambda: one.meet(FACTS, lambda ranks: Agreed())  # noqa: E731
    with standing(call, wait_for, exchange.close), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = parse_threads(file.read().decode())
    (stack,) = (stack for stack in threads if any(frame.mark == Mark.STORE for frame in stack))
    assert activity(facts_with(stack)).kind is Kind.STORE


def test_marks_of_an_exception_survive_a_round_trip() -> None:
    exchange = MemoryExchange()
    exchange.close()
    with pytest.raises(Exception) as raised:
        meeting(exchange, rank=1).meet(FACTS, lambda ranks: Agreed())
    stack = exception_facts(raised.value, is_consequence=False).stack
    assert Mark.STORE in {frame.mark for frame in stack}
    assert codec.decode(RankFacts, codec.encode(facts_with(stack))).stack == stack


def test_frames_without_marks_are_read() -> None:
    old = b'{"file":"/a.py","line":1,"function":"f","code":"","user":false,"rank_condition":""}'
    assert codec.decode(Frame, old).mark == ""
    assert codec.decode(Frame, old[:-1] + b',"mark":"of a newer version"}').mark == "of a newer version"


def load(file: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module of ours in another folder."""
    monkeypatch.setattr(marks, "_FOLDER", marks._as_written(str(file.parent)))
    file.parent.mkdir()
    file.write_text(source)
    names: dict[str, Any] = {"marked": marked, "Mark": Mark}
    exec(compile(source, str(file), "exec"), names)
    return names


MODULE = """
@marked(Mark.STORE)
def wait():
    pass

class Other:
    def wait(self):
        pass

@marked(Mark.LOGGER)
class Logger:
    @property
    def one(self):
        return [inner for inner in ()]

    @classmethod
    def two(cls):
        def inner():
            pass

    @marked(Mark.STORE)
    def three(self):
        pass
"""


def test_functions_of_one_name_are_distinguished_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "häuser 家" / "module.py"
    load(file, MODULE, monkeypatch)
    for name in (str(file), str(file).encode("ascii", "backslashreplace").decode()):
        assert mark_at(name, 4, "wait") == Mark.STORE
        assert mark_at(name, 8, "wait") == Mark.OWN
        assert mark_at(name, 14, "one") == Mark.LOGGER
        assert mark_at(name, 19, "inner") == Mark.LOGGER
        assert mark_at(name, 23, "three") == Mark.STORE
    assert mark_at("/home/me/module.py", 4, "wait") == ""


def test_a_folder_with_our_name_as_prefix_is_not_ours() -> None:
    assert mark_at(f"{FOLDER}_and_more/guard.py", 1, "f") == ""
    assert mark_at(f"{FOLDER}{os.sep}guard.py", 1, "f") == Mark.OWN


def test_a_marked_function_is_unchanged() -> None:
    def wait() -> None:
        pass

    assert marked(Mark.STORE)(wait) is wait
