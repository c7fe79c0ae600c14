"""Whether a standstill is to be expected, from constructed facts of all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import scenes
from builders import (
    BARRIER,
    CHECKPOINT_IO,
    EPOCH_END,
    GLOO,
    NCCL,
    NEXT,
    NEXT_DATA,
    SITE,
    TORCH_SAVE,
    TRAINING_STEP,
    Backend,
    job,
    raised,
    user,
)

from lightning_ncclsafe.facts import (
    Action,
    EndedProcess,
    Frame,
    IncidentKind,
    JobFacts,
    MachineFacts,
    Phase,
    ProcessFacts,
    RankFacts,
    StepFacts,
)
from lightning_ncclsafe.rules.expected_waits import announced_for_s, busy_for_s, expected_for_s
from lightning_ncclsafe.rules.kit.frames import is_compiling

STEP = user("training_step", 12)
CONVERT = Frame(file=f"{SITE}/torch/_dynamo/convert_frame.py", line=1300, function="compile_inner")
LOWER = Frame(file=f"{SITE}/torch/_inductor/scheduler.py", line=2000, function="codegen")
TRITON = Frame(file=f"{SITE}/triton/compiler/compiler.py", line=300, function="compile")
TUNE = Frame(file=f"{SITE}/torch/_inductor/runtime/triton_heuristics.py", line=800, function="benchmark_all_configs")
# What is on the stack while compiled code runs.
EVAL_FRAME = Frame(file=f"{SITE}/torch/_dynamo/eval_frame.py", line=900, function="compile_wrapper")
OUTPUT_CODE = Frame(file=f"{SITE}/torch/_inductor/output_code.py", line=600, function="__call__")
LAUNCH = Frame(file=f"{SITE}/torch/_inductor/runtime/triton_heuristics.py", line=1100, function="run")


def no_own_limits(phase: str) -> float:
    return 1800.0


def scene(straggler: RankFacts, net: Backend = GLOO, *, waited_s: float = 23.0, **more: object) -> JobFacts:
    """Rank 0 is what the others wait for, in the middle of an epoch."""
    facts = job(straggler, *(net.waiting(rank, seq=40, idle=waited_s) for rank in (1, 2, 3)), **more)  # type: ignore[arg-type]
    return replace(facts, incident=replace(facts.incident, idle_s=waited_s))


def working(*stack: Frame, net: Backend = GLOO, **more: object) -> RankFacts:
    return net.working(0, *stack, seq=39, **{"action": TRAINING_STEP, **more})


@pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])
@pytest.mark.parametrize("frame", [CONVERT, LOWER, TRITON, TUNE], ids=lambda frame: str(frame.function))
def test_a_rank_that_compiles_is_given_five_minutes(net: Backend, frame: Frame) -> None:
    assert expected_for_s(scene(working(STEP, frame, net=net), net), no_own_limits) == 277
    assert expected_for_s(scene(working(STEP, frame, net=net, idle=280.0), net), no_own_limits) == 20
    assert expected_for_s(scene(working(STEP, frame, net=net, idle=301.0), net), no_own_limits) == 0


@pytest.mark.parametrize("frame", [EVAL_FRAME, OUTPUT_CODE, LAUNCH], ids=lambda frame: str(frame.function))
def test_a_rank_in_what_is_compiled_is_not(frame: Frame) -> None:
    assert expected_for_s(scene(working(STEP, frame)), no_own_limits) == 0
    assert not is_compiling((frame,))


def test_a_windows_path_is_a_path() -> None:
    assert is_compiling((replace(CONVERT, file=CONVERT.file.replace("/", "\\")),))


@pytest.mark.parametrize("stack", [(CHECKPOINT_IO, TORCH_SAVE), (TORCH_SAVE,)])
def test_a_checkpoint_is_given_five_minutes_from_when_it_began(stack: tuple[Frame, ...]) -> None:
    saving = working(*stack, action="[Callback]ModelCheckpoint.on_train_epoch_end", phase=Phase.TRAIN)
    assert expected_for_s(scene(saving), no_own_limits) == 277
    actions = (Action(name="save_checkpoint", for_s=120.0),)
    saving = replace(saving, progress=replace(saving.progress, phase=Phase.CHECKPOINT, actions=actions, idle_s=1.0))
    assert expected_for_s(scene(saving), no_own_limits) == 180


@pytest.mark.parametrize(
    ("phase", "batch"),
    [(Phase.TRAIN, 0), (Phase.TRAIN, -1), (Phase.VALIDATE, 0), (Phase.TEST, 0), (Phase.SANITY_CHECK, 1)],
)
def test_the_first_batch_of_a_loop_is_given_five_minutes(phase: Phase, batch: int) -> None:
    first = working(STEP, phase=phase, batch=batch)
    assert expected_for_s(scene(first), no_own_limits) == 277


@pytest.mark.parametrize(("batch", "validated", "quiet_s"), [(3, 4, 277), (4, 5, 277), (5, 6, 0), (3, 9, 0)])
def test_so_are_the_first_five_batches_of_an_evaluation(batch: int, validated: int, quiet_s: float) -> None:
    """How long they take is not known yet; in the next validation it is."""
    evaluates = working(STEP, phase=Phase.VALIDATE, batch=batch)
    assert expected_for_s(scene(replace(evaluates, steps=StepFacts(validated=validated))), no_own_limits) == quiet_s


def test_a_rank_that_waits_for_a_process_that_was_killed_is_given_no_time() -> None:
    get = Frame(file="/usr/lib/python3.12/multiprocessing/queues.py", line=103, function="get")
    waits = working(STEP, get, phase=Phase.VALIDATE, batch=0)
    assert expected_for_s(scene(waits), no_own_limits) == 277
    lost = replace(waits, machine=replace(waits.machine, ended=(EndedProcess(pid=7, signal="SIGXCPU"),)))
    assert expected_for_s(scene(lost), no_own_limits) == 0


def asleep(seconds: float | None, **more: object) -> RankFacts:
    """A rank whose first batch does not come, and for how long nothing in its process has run."""
    get = Frame(file="/usr/lib/python3.12/concurrent/futures/_base.py", line=451, function="result")
    waits = working(user("__getitem__", 12), get, batch=0, **more)
    return replace(waits, machine=replace(waits.machine, asleep_s=seconds))


@pytest.mark.parametrize(("asleep_s", "quiet_s"), [(None, 277), (0.0, 10), (6.5, 3.5), (10.0, 0), (40.0, 0)])
def test_threads_that_wait_for_one_another_are_given_ten_seconds(asleep_s: float | None, quiet_s: float) -> None:
    assert expected_for_s(early(asleep(asleep_s), waited_s=23.0), no_own_limits) == quiet_s


@pytest.mark.parametrize(("slept_s", "quiet_s"), [((20.0, 30.0), 0), ((20.0, None), 277), ((20.0, 4.0), 6)])
def test_so_are_workers_of_which_none_can_go_on(slept_s: tuple[float | None, ...], quiet_s: float) -> None:
    waits = working(NEXT_DATA, action=NEXT, batch=0)
    workers = tuple(ProcessFacts(pid=pid, asleep_s=one) for pid, one in enumerate(slept_s))
    assert expected_for_s(early(replace(waits, workers=workers), waited_s=23.0), no_own_limits) == quiet_s


def test_a_rank_that_waits_for_peers_sleeps_as_it_should() -> None:
    waiting = (replace(GLOO.waiting(rank, seq=40, batch=0), machine=MachineFacts(asleep_s=30.0)) for rank in range(4))
    assert expected_for_s(job(*waiting), no_own_limits) == 277


def test_one_that_sleeps_may_wait_for_another_that_goes_on() -> None:
    facts = early(asleep(30.0))
    at_work = GLOO.working(2, user("evaluate", 40), seq=39, action=EPOCH_END, batch=0)
    assert expected_for_s(facts, no_own_limits) == 0
    assert expected_for_s(replace(facts, ranks=(*facts.ranks[:2], at_work, facts.ranks[3])), no_own_limits) == 40


def early(straggler: RankFacts, *, waited_s: float = 20.0) -> JobFacts:
    """Ranks that wait in the first batch ask early, before it is unusual that they wait."""
    facts = job(straggler, *(GLOO.waiting(rank, seq=40, idle=waited_s, batch=0) for rank in (1, 2, 3)))
    return replace(facts, incident=replace(facts.incident, opened_by=1, idle_s=waited_s, suspect_after_s=20.0))


def test_whoever_asks_early_reports_only_what_cannot_go_on() -> None:
    in_a_hook = working(user("evaluate", 40), action=EPOCH_END, batch=0)
    assert expected_for_s(early(in_a_hook), no_own_limits) == 40
    assert expected_for_s(early(in_a_hook, waited_s=61.0), no_own_limits) == 0
    assert expected_for_s(early(replace(asleep(10.0), progress=in_a_hook.progress)), no_own_limits) == 0


@pytest.mark.parametrize(
    ("seen", "quiet_s"),
    [
        ({"state": "running"}, 40),
        ({"state": "zombie"}, 0),
        ({"state": "stopped"}, 0),
        ({"state": "", "exit_code": 3}, 0),
        ({"state": "", "ended_by": "SIGKILL"}, 0),
    ],
)
def test_a_silent_rank_may_be_busy_unless_it_is_seen_to_be_lost(seen: dict[str, Any], quiet_s: float) -> None:
    facts = early(working(STEP, batch=0))
    witnessed = (ProcessFacts(pid=7, rank=0, **seen),)
    assert expected_for_s(replace(facts, ranks=facts.ranks[1:], witnessed=witnessed), no_own_limits) == quiet_s


@pytest.mark.parametrize("kind", [IncidentKind.TIMEOUT, IncidentKind.EXCEPTION])
def test_nothing_waits_for_a_silent_rank_once_there_is_more_to_report(kind: IncidentKind) -> None:
    facts = early(working(STEP, batch=0))
    silent = replace(facts, ranks=facts.ranks[1:])
    assert expected_for_s(silent, no_own_limits) == 40
    assert expected_for_s(replace(silent, incident=replace(silent.incident, kind=kind)), no_own_limits) == 0
    failed = (raised(silent.ranks[0], "ValueError", "", STEP), *silent.ranks[1:])
    assert expected_for_s(replace(silent, ranks=failed), no_own_limits) == 0


def test_ranks_that_are_asked_because_one_leaves_or_is_lost_have_not_asked_early() -> None:
    leaves = early(working(user("evaluate", 40), action=EPOCH_END, batch=0), waited_s=1.0)
    assert expected_for_s(leaves, no_own_limits) == 0
    assert expected_for_s(replace(leaves, ranks=leaves.ranks[1:]), no_own_limits) == 0


def test_what_is_usual_work_is_not_expected_to_be_long() -> None:
    assert expected_for_s(scene(working(STEP)), no_own_limits) == 0
    assert expected_for_s(scene(working(user("evaluate", 40), action=EPOCH_END, batch=0)), no_own_limits) == 0
    assert expected_for_s(scene(working(user("setup", 40), phase=Phase.INIT, batch=-1)), no_own_limits) == 0


def test_one_rank_that_compiles_does_not_excuse_another() -> None:
    others = (GLOO.working(1, STEP, seq=39, action=TRAINING_STEP), GLOO.waiting(2, seq=40), GLOO.waiting(3, seq=40))
    assert expected_for_s(job(working(STEP, CONVERT), *others), no_own_limits) == 0


def test_a_slow_first_batch_of_data_is_expected_and_a_later_one_is_not() -> None:
    def loading(batch: int) -> JobFacts:
        return job(*(GLOO.working(rank, NEXT_DATA, seq=39, action=NEXT, batch=batch) for rank in range(4)))

    assert expected_for_s(loading(-1), no_own_limits) == 277
    assert expected_for_s(loading(7), no_own_limits) == 0


def test_if_all_have_joined_the_first_collective_the_connection_is_slow() -> None:
    assert expected_for_s(job(*(NCCL.waiting(rank, seq=1, batch=0) for rank in range(4))), no_own_limits) == 277
    assert expected_for_s(job(*(NCCL.waiting(rank, seq=40) for rank in range(4))), no_own_limits) == 0


@pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_ranks_that_wait_for_one_another_in_a_first_batch_are_not_given_five_minutes(net: Backend) -> None:
    """Rank 0 waits in a call that the others do not make, so none of them works."""

    def deadlock(idle_s: float) -> JobFacts:
        alone = net.rank(0, BARRIER, seq=40, outstanding=1, op="barrier", sizes=(), idle=idle_s, batch=0)
        facts = job(alone, *(net.waiting(rank, seq=40, idle=60.0, batch=0) for rank in (1, 2, 3)))
        return replace(facts, incident=replace(facts.incident, idle_s=60.0, suspect_after_s=60.0))

    assert expected_for_s(deadlock(60.0), no_own_limits) == 0
    # It has come there just now, and may be on its way.
    assert expected_for_s(deadlock(58.0), no_own_limits) == 2


def test_half_of_the_limit_is_the_most_that_of_either_rank() -> None:
    first = scene(working(STEP, batch=0))
    assert expected_for_s(first, lambda phase: 100.0 if phase == "first_batch" else 1800.0) == 27
    short = replace(first, incident=replace(first.incident, timeout_s=90.0))
    assert expected_for_s(short, no_own_limits) == 22


def test_nobody_waits_for_more_than_five_minutes_without_a_word() -> None:
    assert expected_for_s(scene(working(STEP, CONVERT, idle=1.0), waited_s=301.0), no_own_limits) == 0


@pytest.mark.parametrize("kind", [IncidentKind.TIMEOUT, IncidentKind.EXCEPTION])
def test_the_limit_and_an_exception_are_never_expected(kind: IncidentKind) -> None:
    assert expected_for_s(scene(working(STEP, CONVERT), kind=kind), no_own_limits) == 0


def test_nor_is_a_rank_that_raised_or_does_not_answer() -> None:
    assert expected_for_s(scene(raised(working(STEP, CONVERT), "ValueError", "x", STEP)), no_own_limits) == 0
    assert expected_for_s(scene(working(STEP, CONVERT), world=5), no_own_limits) == 0


def paused(rank: int = 0) -> RankFacts:
    facts = GLOO.working(rank, STEP, seq=39, action=TRAINING_STEP)
    actions = (*facts.progress.actions, Action(name="pause:a debugger", for_s=20.0))
    return replace(facts, progress=replace(facts.progress, actions=actions))


def test_an_announced_pause_is_asked_about_a_minute_later() -> None:
    assert announced_for_s(scene(paused())) == 60.0


def test_all_ranks_may_have_paused() -> None:
    assert announced_for_s(job(paused(), paused(1), world=2)) == 60.0
    assert announced_for_s(job(paused(), GLOO.working(1, user("read", 3), seq=40), world=2)) == 0.0
    assert announced_for_s(scene(working(STEP))) == 0.0


def test_a_pause_lasts_no_longer_than_the_hard_limit() -> None:
    facts = scene(paused())
    assert announced_for_s(replace(facts, incident=replace(facts.incident, timeout_s=30.0, idle_s=23.0))) == 7.0
    assert announced_for_s(replace(facts, incident=replace(facts.incident, kind=IncidentKind.TIMEOUT))) == 0.0


def test_the_pause_of_one_rank_does_not_excuse_another() -> None:
    other = GLOO.working(1, STEP, seq=39, action=TRAINING_STEP)
    assert announced_for_s(job(paused(), other, *(GLOO.waiting(rank, seq=40) for rank in (2, 3)))) == 0.0
    assert announced_for_s(job(paused(), *(GLOO.waiting(rank, seq=40) for rank in (1, 2)), world=4)) == 0.0, "silent"


def test_ranks_that_wait_for_nobody_in_particular_are_in_no_pause() -> None:
    assert announced_for_s(job(*(GLOO.waiting(rank, seq=40) for rank in range(4)))) == 0.0


def test_a_rank_that_waits_by_itself_is_not_asked_before_the_job_makes_no_progress() -> None:
    """The rank that asks is 1, and is told when to ask again."""
    alone = scenes.each_waits_by_itself(GLOO)
    assert busy_for_s(alone) == 0
    works = GLOO.working(2, STEP, seq=60, action=TRAINING_STEP)
    assert busy_for_s(replace(alone, ranks=(*alone.ranks[:2], works, alone.ranks[3]))) == 20, "one computes"
    waits = GLOO.waiting(2, seq=61)
    assert busy_for_s(replace(alone, ranks=(*alone.ranks[:2], waits, alone.ranks[3]))) == 0
    soon = GLOO.waiting(2, seq=61, idle=15.0)
    assert busy_for_s(replace(alone, ranks=(*alone.ranks[:2], soon, alone.ranks[3]))) == 5, "it has only just come"
    child = ProcessFacts(pid=77, state="running")
    busy = replace(alone.ranks[0], workers=(child,))
    assert busy_for_s(replace(alone, ranks=(busy, *alone.ranks[1:]))) == 20, "a program works for it"
    assert busy_for_s(replace(alone, ranks=alone.ranks[:3])) == 0, "one does not answer"
    assert busy_for_s(replace(alone, incident=replace(alone.incident, kind=IncidentKind.TIMEOUT))) == 0


def asked_after_ten(facts: JobFacts, waited_s: float, timeout_s: float = 1800.0) -> JobFacts:
    incident = replace(facts.incident, idle_s=waited_s, suspect_after_s=10.0, timeout_s=timeout_s)
    return replace(facts, incident=incident)


@pytest.mark.parametrize(
    ("waited_s", "timeout_s", "quiet_s"),
    [(11.0, 1800.0, 9.0), (20.0, 1800.0, 0.0), (11.0, 30.0, 4.0), (9.0, 1800.0, 0.0)],
    ids=["asked early", "long enough", "half of the limit", "as a rank leaves"],
)
def test_a_rank_that_may_yet_go_on_is_given_twenty_seconds(waited_s: float, timeout_s: float, quiet_s: float) -> None:
    """It tries a download again, say."""
    facts = scene(working(STEP), waited_s=waited_s)
    assert expected_for_s(asked_after_ten(facts, waited_s, timeout_s), no_own_limits) == quiet_s


def test_what_cannot_go_on_by_itself_is_given_no_time() -> None:
    get = Frame(file="/usr/lib/python3.12/multiprocessing/queues.py", line=103, function="get")
    waits = working(STEP, get)
    assert expected_for_s(asked_after_ten(scene(waits, waited_s=11.0), 11.0), no_own_limits) == 9
    lost = replace(waits, machine=replace(waits.machine, ended=(EndedProcess(pid=7, signal="SIGXCPU"),)))
    assert expected_for_s(asked_after_ten(scene(lost, waited_s=11.0), 11.0), no_own_limits) == 0
    together = job(*(GLOO.waiting(rank, seq=40, idle=11.0) for rank in range(4)))
    assert expected_for_s(asked_after_ten(together, 11.0), no_own_limits) == 0
