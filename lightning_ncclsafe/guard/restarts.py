"""The starts of one job: a name for each on a store that outlives them all, and what the previous start has left.

torchrun's agent keeps one store for all its starts of the ranks, with all keys of earlier starts (torch 2.13), and its
count of restarts may differ between hosts. So the ranks of each start agree on a name for it.
"""

import itertools
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.side_thread import NoThreadError, SideThread, UnansweredError
from lightning_ncclsafe.errors import PlannedStopError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for, wait_for_keys
from lightning_ncclsafe.facts.findings import NextStart, Plan
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.guard.ending import say_goodbye, wait_for_others
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.process.environment import JOB, launch_words
from lightning_ncclsafe.report.json import PLAN_FILE, plan_words, read_plan
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.rules.planning import SAME_MOST, is_same

# Folders of incidents, a few for each start.
_MOST_LOOKED_AT = 100
# The key of what rank 0 has read about earlier starts, and how long the others wait for it: reading a folder is quick.
_PLAN, _PLAN_S = "plan", 10.0
# How long rank 0 itself waits for the storage of reports.
_READ_S = 5.0
_storage = SideThread("ncclsafe-starts")
# Checked once in a process: a start that trains is not ended by earlier starts, whatever it calls.
_has_followed = False


@marked(Mark.STORE)
def agree_on_start(
    exchange: Exchange, *, rank: int, world_size: int, deadline_s: float, clear: Callable[[], None]
) -> str:
    """Returns a name that all ranks of this start share and no earlier start had. All ranks call it; rank 0 waits.

    Args:
        exchange: What the ranks share, which may hold keys of earlier starts.
        clear: Called on rank 0 while all others wait: removes what earlier starts have left.

    Raises:
        ExchangeError: The others have not come, or the exchange is lost.
    """
    poll_s = poll_interval_s(world_size)
    if rank == 0:
        return _lead(exchange, world_size, deadline_s, poll_s, clear)
    mine = uuid.uuid4().hex

    def welcome() -> str:
        found = exchange.get_many([f"hello/{rank}", f"welcome/{rank}"])
        welcomed, _, name = found.get(f"welcome/{rank}", b"").decode().partition(" ")
        if welcomed == mine:
            return name
        # Set again if rank 0 has removed it since.
        if found.get(f"hello/{rank}", b"").decode() != mine:
            exchange.set(f"hello/{rank}", mine.encode())
        return ""

    with suppress(ExchangeError):
        if name := wait_for(welcome, deadline_s=deadline_s, poll_s=poll_s, forgive=exchange):
            return name
    raise _never_came(exchange, "rank 0")


def _lead(exchange: Exchange, world_size: int, deadline_s: float, poll_s: float, clear: Callable[[], None]) -> str:
    name, waiting = uuid.uuid4().hex[:12], list(range(1, world_size))
    for rank in waiting:
        # Overwrites what an earlier start has left; whatever comes after this belongs to this start.
        exchange.set(f"hello/{rank}", b"")
    clear()

    def all_are_welcome() -> bool:
        hellos = exchange.get_many([f"hello/{rank}" for rank in waiting])
        for rank in [*waiting]:
            if hello := hellos.get(f"hello/{rank}"):
                exchange.set(f"welcome/{rank}", hello + b" " + name.encode())
                waiting.remove(rank)
        return not waiting

    with suppress(ExchangeError):
        wait_for(all_are_welcome, deadline_s=deadline_s, poll_s=poll_s, forgive=exchange)
    if waiting:
        raise _never_came(exchange, ranks_words(waiting))
    return name


def _never_came(exchange: Exchange, whom: str) -> ExchangeError:
    return ExchangeError(f"{whom} did not announce a start within the limit: {exchange.lost or 'no answer'}.")


def incident_before(report_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """How the previous start of this job ended, in words; empty if this is the first one, or it left nothing."""
    # Nothing is printed if storage does not answer.
    with suppress(UnansweredError, NoThreadError):
        return _storage.call(lambda: _incident_before(report_dir, environ), _READ_S)
    return ""


def _incident_before(report_dir: Path, environ: Mapping[str, str]) -> str:
    not_before_s = _earlier_starts_since_s(environ)
    if not_before_s is None:
        return ""
    with suppress(OSError, ValueError, LookupError, TypeError):
        folder = max(path.parent for path in report_dir.glob("*/report.json"))
        if folder.stat().st_mtime < not_before_s:
            return ""
        job = json.loads((folder / "report.json").read_bytes())["job"]
        with (folder / "report.txt").open(encoding="utf-8") as report:
            answer = report.readline().strip()
        if job["launch"] == launch_words(environ):
            return f"the previous start ended with incident {job['incident']['number']}: {folder}: {answer}"
    return ""


@marked(Mark.STORE)
def follow_plan(exchange: Exchange, place: Place, report_dir: Path, say: Callable[[str], None] = say_on_stderr) -> None:
    """Ends this start if the plan of earlier starts says so. All ranks call it; rank 0 reads, and the others follow.

    Raises:
        PlannedStopError: On all ranks.
    """
    global _has_followed
    if _has_followed or not launch_words():
        return
    _has_followed, reason = True, ""
    with suppress(ExchangeError):
        if place.rank == 0:
            reason = _reason_in_time(report_dir, say)
            exchange.set(_PLAN, reason.encode())
        else:
            reason = wait_for_keys(exchange, [_PLAN], deadline_s=_PLAN_S).get(_PLAN, b"").decode()
    if not reason:
        return
    if place.local_rank == 0:
        say(reason)
    say_goodbye(exchange, place.rank)
    if place.rank == 0:
        wait_for_others(exchange, place.rank, place.world_size)
    raise PlannedStopError(reason)


def _reason_in_time(report_dir: Path, say: Callable[[str], None]) -> str:
    try:
        return _storage.call(lambda: reason_to_stop(report_dir), _READ_S)
    except (UnansweredError, NoThreadError) as error:
        say(f"what earlier starts of this job have left in {report_dir} is not known, so training starts: it {error}")
        return ""


def reason_to_stop(report_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Why this start must end before it trains, according to earlier starts, in words; empty if it may train."""
    ended = _starts_that_ended(report_dir, environ)
    if not ended:
        return ""
    folder, last = ended[0]
    same = _starts([*itertools.takewhile(lambda start: is_same(start, last), (start for _, start in ended))])
    if last.plan is Plan.STOP:
        why = f"the previous start ended with {last.rule}, and its plan is {plan_words(last)}"
    elif same >= SAME_MOST:
        why = f"the last {same} starts ended with {last.rule}, each at step {last.step}, and the next one would, too"
    else:
        return ""
    return (
        f"this start ends before training: {why}\n  the cause was: {last.answer}\n  report: {folder}\n"
        f"  to start anyway, remove {folder / PLAN_FILE}"
    )


def _starts_that_ended(report_dir: Path, environ: Mapping[str, str]) -> list[tuple[Path, NextStart]]:
    """The plans of the incidents that ended earlier starts, the last one first; none if the last one ended no start."""
    not_before_s = _earlier_starts_since_s(environ)
    if not_before_s is None:
        return []
    found: list[tuple[Path, NextStart]] = []
    with suppress(OSError):
        # Names sort by time; more starts in a row would change nothing.
        for folder in sorted((path.parent for path in report_dir.glob("*/report.json")), reverse=True)[
            :_MOST_LOOKED_AT
        ]:
            start = read_plan(folder / PLAN_FILE)
            if start is None or start.launch != launch_words(environ) or start.opened_ns < not_before_s * 1e9:
                break
            found.append((folder, start))
    return found


def _starts(ended: list[NextStart]) -> int:
    """How many starts these incidents have ended, the last one first: within one start, their numbers rise."""
    return sum(older.incident >= newer.incident for newer, older in itertools.pairwise(ended)) + bool(ended)


def _earlier_starts_since_s(environ: Mapping[str, str]) -> float | None:
    """Since when, in seconds since the epoch, there may have been other starts of this job; None if there were none."""
    if environ.get(JOB):
        return 0.0
    if "TORCHELASTIC_RUN_ID" in environ:
        # Names of runs are often reused; all starts of this one are children of one agent.
        with suppress(psutil.Error):
            return psutil.Process(os.getppid()).create_time()
        return None
    return 0.0 if environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0") else None
