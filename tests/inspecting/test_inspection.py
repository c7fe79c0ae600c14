"""What looks at ranks come to: recorded ones, and ones that are made up."""

import json
import linecache
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import Phase, ProcessFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.inspecting import facts_of_looks, inspected_ranks, sources
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S, diagnosis_of, joined, wait_in_vain
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts, shows_enough
from lightning_ncclsafe.inspecting.inspected_ranks import seen_rank
from lightning_ncclsafe.inspecting.looks import Look, SeenFrame, SeenThread, StackReader, denied_words, threads_in
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.sources import remember_sources
from lightning_ncclsafe.probes.process.main_thread import ThreadLook
from lightning_ncclsafe.report.text import render_text

SITE = "/venv/lib/python3.12/site-packages"
USERS = "/home/ada/train.py"
BARRIER = SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 5, "barrier")


def user(line: int, function: str = "main", digest: str = "a") -> SeenFrame:
    return SeenFrame(USERS, line, function, {}, digest)


def look(at_s: float, *frames: SeenFrame, state: str = "sleeping", gil: bool = False, ran_s: float = 0.0) -> Look:
    return Look(
        at_s=at_s,
        threads=(SeenThread(name="MainThread", is_main=True, holds_gil=gil, frames=frames),) if frames else (),
        problem="" if frames or state in ("gone", "zombie") else "it may not be read",
        main_thread=ThreadLook(state=state, ran_s=ran_s, queued_s=0.0),
        process=ProcessFacts(pid=7, state=state),
    )


def rank(number: int, *looks: Look, of: int = 2, **more: object) -> SeenRank:
    given = {"local_rank": number, "local_world_size": of, "world_size": of, "job": "node1:29500", "parent": 1}
    return SeenRank(process=RankProcess(pid=100 + number, rank=number, **(given | more)), looks=looks)  # type: ignore[arg-type]


def waiting(number: int, of: int = 2, **more: object) -> SeenRank:
    return rank(number, *(look(at, user(20), BARRIER) for at in (0.0, 1.0, 2.0)), of=of, **more)


def judged(*ranks: SeenRank) -> Diagnosis:
    return diagnosis_of(job_facts(ranks, taken_ns=1))


def test_an_awaited_rank_is_named_with_a_minimum_time() -> None:
    diagnosis = judged(waiting(0), rank(1, *(look(at, user(30, "evaluate")) for at in (0.0, 2.0))))
    first = diagnosis.findings[0]
    assert (first.ranks, first.location) == ((1,), f"{USERS}:30 in evaluate")
    assert "for at least 2.0 s" in first.summary and "epoch" not in first.summary and "batch" not in first.summary
    assert first.confidence is not Confidence.CERTAIN
    assert any("Flight Recorder cannot be read" in text for text in diagnosis.unanswered)


@pytest.mark.parametrize("others", [{"line": 21}, {"digest": "b"}])
def test_a_job_whose_ranks_all_change_between_looks_moves(others: dict[str, object]) -> None:
    changed = replace(user(20), **others)  # type: ignore[arg-type]
    ranks = [rank(number, look(0, user(20), BARRIER), look(1, changed, BARRIER)) for number in (0, 1)]
    diagnosis = judged(*ranks)
    assert diagnosis.findings == ()
    text = render_text(diagnosis)
    assert text.startswith("Nothing found: the job makes progress.")
    assert "of 2 in a collective" in text


def test_library_frames_below_the_users_line_are_not_movement() -> None:
    """A wait in a retry loop."""
    poll = [SeenFrame(f"{SITE}/torch/utils/data/dataloader.py", line, "_try_get_data") for line in (1, 2)]
    ranks = [rank(number, *(look(at, user(20), poll[at]) for at in (0, 1))) for number in (0, 1)]
    assert [facts.inspection.moved for facts in job_facts(ranks).ranks if facts.inspection] == [False, False]


def test_a_working_rank_is_named_although_it_moves() -> None:
    works = rank(0, look(0, user(30, "evaluate")), look(1, user(31, "evaluate")))
    first = judged(works, waiting(1)).findings[0]
    assert first.ranks == (0,) and first.summary.count("and moves") == 1


def test_a_moving_rank_is_shown_where_it_works() -> None:
    works = rank(0, look(0, user(30, "evaluate")), look(1, user(31, "reduce"), BARRIER))
    assert judged(works, waiting(1)).findings[0].location == f"{USERS}:30 in evaluate"


SIGTERM = (
    SeenFrame(f"{SITE}/lightning/pytorch/trainer/trainer.py", 1, "_run"),
    SeenFrame(f"{SITE}/lightning/pytorch/loops/training_epoch_loop.py", 9, "advance"),
    SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 7, "broadcast"),
)


def in_library(number: int, of: int = 3, **more: object) -> SeenRank:
    return rank(number, *(look(at, user(10), *SIGTERM) for at in (0.0, 1.0, 2.0)), of=of, **more)


def in_own_call(number: int, line: int = 30, of: int = 3) -> SeenRank:
    stack = (user(10), SIGTERM[0], user(line, "on_train_epoch_end"), BARRIER)
    return rank(number, *(look(at, *stack) for at in (0.0, 1.0, 2.0)), of=of)


def test_ranks_in_different_calls_have_diverged_at_the_users_line() -> None:
    first = judged(in_own_call(0), in_library(1), in_library(2)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (0,), Confidence.POSSIBLE)
    assert first.location == f"{USERS}:30 in on_train_epoch_end"
    assert "rank 0 waits in barrier at train.py:30" in first.summary and "ranks 1-2 wait in" in first.summary
    # Where most are in the user's call, the one that is not has left it out.
    first = judged(in_own_call(0), in_own_call(1), in_library(2)).findings[0]
    assert (first.ranks, first.location) == ((2,), f"{USERS}:30 in on_train_epoch_end")


def test_a_rank_condition_around_a_call_makes_divergence_likely(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "train.py"
    program.write_text("def meet(rank):\n    if rank == 0:\n        barrier()\n")
    own = (SIGTERM[0], SeenFrame(str(program), 3, "meet"), BARRIER)
    first = judged(rank(0, *(look(at, *own) for at in (0, 2)), of=3), in_library(1), in_library(2)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (0,), Confidence.LIKELY)
    assert "`if rank == 0:` (line 2)" in first.summary


def test_rank_conditions_around_a_send_blame_nobody(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "train.py"
    program.write_text("def pass_on(rank):\n    if rank == 0:\n        send()\n    else:\n        recv()\n")
    receives = (
        SIGTERM[0],
        SeenFrame(str(program), 5, "pass_on"),
        SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 6, "recv"),
    )
    for of, blamed in ((2, (0, 1)), (3, (1,))):
        ranks = [rank(1, *(look(at, *receives) for at in (0, 2)), of=of), in_library(0, of=of), in_library(2)][:of]
        first = judged(*ranks).findings[0]
        assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", blamed, Confidence.POSSIBLE)
        assert first.location == f"{program}:5 in pass_on"


def test_a_rank_waiting_for_its_own_thread_is_behind() -> None:
    hook = SeenFrame(f"{SITE}/lightning/pytorch/trainer/call.py", 1, "_call_lightning_module_hook")
    own = (user(10), *SIGTERM[:2], hook, user(66, "on_train_epoch_end"))
    queue = (
        SeenFrame("/usr/lib/python3.12/queue.py", 1, "get"),
        SeenFrame("/usr/lib/python3.12/threading.py", 1, "wait"),
    )

    def named(*below: SeenFrame) -> tuple[str, Confidence]:
        ranks = [rank(0, *(look(at, *own, *below) for at in (0, LONG_STEP_S)), of=3), in_library(1), in_library(2)]
        first = judged(*ranks).findings[0]
        assert (first.ranks, first.location) == ((0,), f"{USERS}:66 in on_train_epoch_end")
        return first.rule, first.confidence

    assert named() == ("rank-zero-only-work", Confidence.LIKELY)
    assert named(*queue) == ("rank-behind", Confidence.POSSIBLE)


def test_importing_torch_distributed_is_not_a_collective() -> None:
    imports = (user(3, "<module>"), SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "<module>"))
    late = rank(1, *(look(at, *imports) for at in (0, 1, 2)))
    assert [finding.ranks for finding in judged(waiting(0), late).findings] == [(1,)]


def test_a_rank_voting_on_early_stopping_may_have_diverged() -> None:
    """Ranks that are past their last batch in any other way have probably run out of batches."""

    def named(file: str, function: str) -> tuple[str, tuple[int, ...]]:
        votes = (user(10), SIGTERM[0], SeenFrame(f"{SITE}/lightning/pytorch/loops/fit_loop.py", 9, "on_advance_end"))
        hook = SeenFrame(
            f"{SITE}/lightning/pytorch/trainer/call.py",
            1,
            "_call_callback_hooks",
            {"hook_name": "'on_train_epoch_end'"},
        )
        own = (*votes, hook, SeenFrame(f"{SITE}/lightning/pytorch/callbacks/{file}", 3, function), BARRIER)
        ranks = [rank(0, *(look(at, *own) for at in (0, LONG_STEP_S)), of=3), in_library(1), in_library(2)]
        first = judged(*ranks).findings[0]
        return first.rule, first.ranks

    assert named("early_stopping.py", "_run_early_stopping_check") == ("diverged-collectives", (0,))
    assert named("model_checkpoint.py", "_save_topk_checkpoint") == ("uneven-batches", (0,))


def test_ranks_in_one_call_or_beside_a_working_rank_have_not_diverged() -> None:
    together = judged(in_library(0, of=2), in_library(1, of=2))
    works = rank(2, *(look(at, user(10), SIGTERM[0], user(40, "evaluate")) for at in (0, 1, 2)), of=3)
    for diagnosis in (together, judged(in_own_call(0), in_library(1), works)):
        assert "diverged-collectives" not in [finding.rule for finding in diagnosis.findings]


def test_a_moving_rank_that_is_not_awaited_gives_no_finding() -> None:
    other = replace(user(10), digest="b")
    moves = rank(0, look(0, user(10), *SIGTERM), look(1, other, *SIGTERM), look(2, other, *SIGTERM))
    diagnosis = judged(moves, in_library(1, of=2))
    assert diagnosis.findings == ()
    assert "rank 0 moves, and rank 1 made no progress meanwhile" in render_text(diagnosis)


def test_a_moving_rank_zero_is_only_possibly_at_fault(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "train.py"
    program.write_text("def work(rank):\n    if rank == 0:\n        one()\n        two()\n")
    lines = [SeenFrame(str(program), line, "work") for line in (3, 4)]
    stands = judged(rank(0, *(look(at, lines[0]) for at in (0, 10, LONG_STEP_S))), waiting(1)).findings[0]
    assert (stands.rule, stands.confidence) == ("rank-zero-only-work", Confidence.LIKELY)
    moves = judged(rank(0, look(0, lines[0]), look(1, lines[1])), waiting(1)).findings[0]
    assert (moves.rule, moves.confidence) == ("rank-zero-only-work", Confidence.POSSIBLE)
    assert moves.summary.endswith("Rank 0 moves: it may still reach the others, so inspect again.")


@pytest.mark.parametrize("gil", [False, True])
def test_a_short_standstill_lowers_the_confidence(tmp_path, gil: bool) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "train.py"
    program.write_text("def work(rank):\n    if rank == 0:\n        evaluate()\n")

    def named(last_s: float, slept_s: float | None = None) -> Finding:
        state = "running" if gil else "sleeping"
        frame = SeenFrame(str(program), 3, "work")
        looks = [look(at, frame, state=state, gil=gil) for at in (0.0, 1.0, last_s)]
        works = rank(0, *looks[:-1], replace(looks[-1], slept_s=slept_s))
        return judged(works, waiting(1)).findings[0]

    short, long = named(2.5), named(LONG_STEP_S)
    assert (short.ranks, short.confidence) == ((0,), Confidence.POSSIBLE)
    assert (long.rule, long.ranks) == (short.rule, (0,))
    order = [*Confidence]
    assert order.index(long.confidence) < order.index(short.confidence)
    # What has not run has not left its line, whoever looked.
    before = named(2.5, slept_s=614.2)
    assert before.confidence is long.confidence
    assert gil or "for at least 10 min 14 s" in before.summary


def test_the_report_shows_how_long_a_rank_has_slept() -> None:
    slept = rank(0, look(0, user(30, "evaluate")), replace(look(2, user(30, "evaluate")), slept_s=614.2))
    text = render_text(judged(slept, waiting(1)))
    assert "Rank 0 has not run for 10 min 14 s, according to the kernel." in " ".join(text.split())


def test_ranks_that_end_during_the_inspection_keep_their_finding() -> None:
    works = rank(0, *(look(at, user(30, "evaluate")) for at in (0, 2)))
    diagnosis = judged(replace(works, ended_after=True), waiting(1))
    assert diagnosis.findings[0].ranks == (0,)
    assert "Rank 0 ended after that: this answer is about what they did before." in diagnosis.unanswered
    # A job in which somebody moved may have come to its end.
    moves = rank(0, look(0, user(30)), look(2, user(31)))
    diagnosis = judged(replace(moves, ended_after=True), replace(waiting(1), ended_after=True))
    assert diagnosis.findings == () and "Ranks 0-1 ended meanwhile: inspect again." in diagnosis.unanswered


def test_nothing_is_found_if_all_ranks_end_during_the_inspection() -> None:
    works = rank(0, *(look(at, user(30, "evaluate")) for at in (0, 8)))
    diagnosis = judged(*(replace(one, ended_after=True) for one in (works, waiting(1))))
    assert diagnosis.findings == ()
    text = " ".join(render_text(diagnosis).split())
    assert text.startswith("Nothing found: ranks 0-1 made no progress, and ended during the inspection")
    assert "Ranks 0-1 ended after that: these are all of them." in text and "train.py:30 in evaluate" in text


def test_a_stack_read_once_shows_no_standstill() -> None:
    ranks = [rank(0, look(0, user(30, "evaluate")), look(2)), waiting(1)]
    assert [facts.inspection.idle_s for facts in job_facts(ranks).ranks if facts.inspection] == [0.0, 2.0]
    assert judged(ranks[0], rank(1, look(0, user(20), BARRIER), look(2))).findings == ()


def test_a_program_without_a_trainer_is_not_blamed_for_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "train.py"
    program.write_text("def export():\n    work()\n\nif rank == 0:\n    export()\nbarrier()\n")
    works = (SeenFrame(str(program), 5, "<module>"), SeenFrame(str(program), 2, "export"))
    waits = (SeenFrame(str(program), 6, "<module>"), BARRIER)
    ranks = [rank(number, *(look(at, *(waits if number else works)) for at in (0, LONG_STEP_S))) for number in (0, 1)]
    diagnosis = judged(*ranks)
    assert [finding.rule for finding in diagnosis.findings] == ["rank-zero-only-work"]
    assert "Trainer alone" not in render_text(diagnosis)


def test_ranks_on_other_hosts_are_not_called_silent() -> None:
    job = job_facts(
        [waiting(2, of=4, local_rank=0, local_world_size=2), waiting(3, of=4, local_rank=1, local_world_size=2)]
    )
    assert (job.silent, job.elsewhere, job.witnessed) == ((), (0, 1), ())
    diagnosis = diagnosis_of(job)
    assert any(text.startswith("Ranks 0-1 were not inspected") for text in diagnosis.unanswered)
    assert {finding.confidence for finding in diagnosis.findings} <= {Confidence.POSSIBLE}


def test_hosts_are_joined_by_their_latest_inspection() -> None:
    here = [waiting(0, local_world_size=1), waiting(1, local_rank=0, local_world_size=1)]
    works = rank(1, *(look(at, user(30, "evaluate")) for at in (0.0, 2.0)), local_rank=0, local_world_size=1)
    jobs = [job_facts([one], taken_ns=number) for number, one in enumerate((here[0], here[1], works), 1)]
    (job,) = joined(jobs)
    assert (job.elsewhere, job.silent, [facts.taken_ns for facts in job.ranks]) == ((), (), [1, 3])
    assert diagnosis_of(job).findings[0].ranks == (1,)
    other = replace(jobs[0], launch="node9:1")
    assert len(joined([jobs[0], other])) == 2


@pytest.mark.parametrize(("ran_s", "is_shown"), [(0.0, True), (2.0, False)])
def test_threads_are_shown_if_the_main_thread_may_wait_for_one(tmp_path: Path, ran_s: float, is_shown: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text("with lock:\n    pass\nanswer = server.recv(1)\n")
    holds = SeenThread(name="Thread-1 (upload)", frames=(SeenFrame(str(script), 3, "upload"), BARRIER))
    idle = SeenThread(name="pool", frames=(SeenFrame("/usr/lib/python3.12/threading.py", 3, "wait"),))

    def at(at_s: float) -> Look:
        main = look(at_s, SeenFrame(str(script), 1, "step"), ran_s=ran_s * at_s)
        return replace(main, threads=(*main.threads, holds, idle))

    first = judged(waiting(0), rank(1, at(0.0), at(2.0))).findings[0]
    assert (first.rule, first.ranks) == ("rank-behind", (1,))
    texts = [one.text for one in first.evidence if "Its thread" in one.text]
    assert texts == [f"Its thread Thread-1 (upload) is at {script}:3 in upload: answer = server.recv(1)"] * is_shown
    assert ("should answer is still alive" in first.remedy) is is_shown


def test_a_stopped_rank_is_found() -> None:
    stopped = rank(0, *(look(at, user(30), state="stopped") for at in (0, 1)))
    assert judged(stopped, waiting(1)).findings[0].rule == "stopped-process"


def test_a_missing_rank_of_a_launcher_is_gone() -> None:
    job = job_facts([waiting(1, of=2)])
    assert [(one.rank, one.state) for one in job.witnessed] == [(0, "gone")]
    assert job_facts([waiting(1, of=2)], are_all=False).witnessed == ()


def test_a_zombie_shows_how_its_rank_ended() -> None:
    killed = ProcessFacts(pid=9, state="zombie", ended_by="SIGKILL")
    job = job_facts([waiting(1, of=2)], beside=[killed])
    assert job.witnessed == (replace(killed, rank=0),)
    first = diagnosis_of(job).findings[0]
    assert (first.rule, first.ranks) == ("dead-rank", (0,)) and "SIGKILL" in first.summary
    assert wait_in_vain(job) and not wait_in_vain(job_facts([waiting(1, of=2)]))
    at_work = rank(2, *(look(at, user(30)) for at in (0.0, 1.0)), of=3)
    assert not wait_in_vain(job_facts([waiting(1, of=3), at_work], beside=[killed]))
    # Of two that ended in different ways, nobody knows which is which; nor if one has gone unnoticed.
    other = replace(killed, pid=10, ended_by="", exit_code=1)
    assert {one.state for one in job_facts([waiting(2, of=3)], beside=[killed, other]).witnessed} == {"gone"}
    assert {one.state for one in job_facts([waiting(2, of=3)], beside=[killed]).witnessed} == {"gone"}
    assert [one.rank for one in job_facts([waiting(2, of=3)], beside=[killed, killed]).witnessed] == [0, 1]


def test_ended_ranks_are_not_called_dead() -> None:
    """A job that finishes looks the same."""
    ended = [rank(number, *(look(at, state="gone") for at in (0, 1))) for number in (0, 1)]
    assert judged(*ended).findings == ()
    assert "have ended" in render_text(judged(*ended)).splitlines()[0]
    ends = rank(0, look(0, user(40)), look(1, state="gone"))
    diagnosis = judged(ends, waiting(1))
    assert diagnosis.findings == () and "Rank 0 ended meanwhile: inspect again." in diagnosis.unanswered
    # One that was gone before is what the other waits for.
    gone = rank(0, *(look(at, state="gone") for at in (0, 1)))
    first = judged(gone, waiting(1)).findings[0]
    assert (first.rule, first.confidence) == ("dead-rank", Confidence.POSSIBLE)


def test_a_rank_in_teardown_after_the_others_ended_is_unfinished() -> None:
    hook = SeenFrame(f"{SITE}/lightning/pytorch/trainer/call.py", 1, "_call_callback_hooks")
    gone = rank(1, *(look(at, state="gone") for at in (0, 1)))

    def named(hook_name: str) -> tuple[str, tuple[int, ...], Confidence]:
        stack = (user(10), SIGTERM[0], hook, user(84, hook_name))
        first = judged(rank(0, *(look(at, *stack) for at in (0, LONG_STEP_S))), gone).findings[0]
        return first.rule, first.ranks, first.confidence

    assert named("on_fit_end") == ("unfinished-rank", (0,), Confidence.LIKELY)
    for function, cause in (("stop", "unfinished-rank"), ("finalize", "slow-logger")):
        stack = (user(10), SIGTERM[0], replace(hook, function="_call_teardown_hook"), user(86, function))
        first = judged(rank(0, *(look(at, *stack) for at in (0, LONG_STEP_S))), gone).findings[0]
        assert (first.rule, first.ranks) == (cause, (0,)) and "in teardown at" in first.summary
    assert named("on_train_batch_end") == ("dead-rank", (1,), Confidence.POSSIBLE)
    # What one rank does once the others have left the program holds up nobody.
    after = judged(rank(0, *(look(at, user(90, "export")) for at in (0, LONG_STEP_S))), gone)
    assert after.findings == () and "gone" in render_text(after)


def test_a_dead_process_explains_a_hang_only_if_others_wait() -> None:
    gone = rank(1, *(look(at, state="gone") for at in (0, 1)))
    works = rank(0, *(look(at, user(30, "evaluate")) for at in (0.0, 2.0)))
    assert shows_enough([waiting(0), gone]) and not shows_enough([works, gone])
    stopped = rank(1, *(look(at, user(30), state="stopped") for at in (0, 1)))
    assert shows_enough([works, stopped])


def test_a_rank_that_holds_the_gil_is_found(tmp_path) -> None:  # type: ignore[no-untyped-def]
    held = rank(0, *(look(at, user(30), state="running", gil=True, ran_s=float(at)) for at in (0, 1, 2)))
    first = judged(held, waiting(1)).findings[0]
    assert (first.rule, first.ranks) == ("gil-held", (0,))
    # What calls the garbage collector is in it.
    program = tmp_path / "train.py"
    program.write_text("import gc\n\ndef collect():\n    gc.collect()\n")
    frame = SeenFrame(str(program), 4, "collect")
    collects = rank(0, *(look(at, frame, state="running", gil=True, ran_s=float(at)) for at in (0, 1, 2)))
    first = judged(collects, waiting(1)).findings[0]
    assert (first.rule, first.ranks, first.location) == ("gc-pause", (0,), f"{program}:4 in collect")
    # One that imports, or calls others' code, runs other lines and does not keep it.
    below = [SeenFrame(f"{SITE}/torch/__init__.py", line, "<module>") for line in (1, 2, 3)]
    imports = rank(0, *(look(at, user(30), below[at], state="running", gil=True) for at in (0, 1, 2)))
    assert judged(imports, waiting(1)).findings[0].rule != "gil-held"
    # Nor does one that moves.
    moving = rank(0, *(look(at, user(30 + at), state="running", gil=True) for at in (0, 1, 2)))
    assert judged(moving, waiting(1)).findings[0].rule != "gil-held"


def test_a_rank_nobody_waits_for_is_not_behind() -> None:
    diagnosis = judged(rank(0, *(look(at, user(30)) for at in (0, 1, 2)), of=1))
    assert diagnosis.findings == ()
    assert "no rank is seen waiting" in render_text(diagnosis)


def test_unreadable_stacks_give_a_reason_and_no_finding() -> None:
    diagnosis = judged(*(rank(number, look(0), look(1)) for number in (0, 1)))
    assert diagnosis.findings == ()
    assert "could not be read: it may not be read" in render_text(diagnosis)


def test_ranks_after_and_before_the_trainer_call_are_recognised() -> None:
    trainer = SeenFrame(f"{SITE}/lightning/pytorch/trainer/trainer.py", 5, "_run")
    inside = rank(0, *(look(at, user(40), trainer, BARRIER) for at in (0, 1)), of=3)
    after = rank(1, *(look(at, user(45)) for at in (0, 1)), of=3)
    before = rank(2, *(look(at, user(35)) for at in (0, 1)), of=3)
    phases = [facts.progress.phase for facts in job_facts([inside, after, before]).ranks]
    assert phases == [Phase.INIT, Phase.FINISHED, Phase.INIT]


def test_py_spy_output_is_read_without_user_data() -> None:
    variables = [{"name": "batch_idx", "addr": 1, "repr": "7"}, {"name": "password", "addr": 2, "repr": "'secret'"}]
    frames = [
        {"name": "Trainer._run", "filename": "trainer.py", "line": 9, "locals": variables},
        {"name": "<module>", "filename": "train.py", "line": 3, "locals": None},
    ]
    plain = {"os_thread_id": 7, "thread_name": None, "owns_gil": True, "frames": frames}
    (thread,) = threads_in(json.dumps([plain]).encode(), 7)
    assert thread.is_main and thread.holds_gil
    assert [(one.function, one.line) for one in thread.frames] == [("<module>", 3), ("_run", 9)]
    assert thread.frames[1].values == {"batch_idx": "7"} and "secret" not in repr(thread)
    nameless = plain | {"os_thread_id": None}
    (alone,) = threads_in(json.dumps([nameless]).encode(), 7)
    assert alone.is_main
    assert not any(thread.is_main for thread in threads_in(json.dumps([nameless] * 2).encode(), 7))
    variables[1]["repr"] = "'other'"
    (again,) = threads_in(json.dumps([plain]).encode(), 7)
    assert again.frames[1].digest != thread.frames[1].digest


@pytest.mark.parametrize(
    ("scope", "own_id", "said"),
    [("1", 1000, "ptrace_scope is 1: run with sudo"), ("2", 1000, "is 2: root alone"), ("0", 0, "CAP_SYS_PTRACE")],
)
def test_missing_permission_is_explained_with_a_remedy(tmp_path, scope: str, own_id: int, said: str) -> None:  # type: ignore[no-untyped-def]
    yama = tmp_path / "ptrace_scope"
    yama.write_text(scope)
    # No process has this number, so that nobody owns it.
    words = denied_words(0, yama=yama, own_id=own_id)
    assert said in words and "\n" not in words


def test_a_process_of_another_user_is_reported() -> None:
    assert "another user (uid 0)" in denied_words(1, own_id=1000)


def test_a_rank_in_a_container_uses_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})
    for folder, text in ((tmp_path, "of the host"), (tmp_path / "7" / "root" / str(tmp_path)[1:], "of the rank")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(f"# {text}\n")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "root").symlink_to("/")
    file, elsewhere = str(tmp_path / "train.py"), str(tmp_path / "elsewhere.py")
    os.rename(tmp_path / "7" / "root" / file[1:], inside := tmp_path / "7" / "root" / elsewhere[1:])
    # Only there, nowhere, only here, of the same root, of a process that has ended.
    remember_sources(7, [elsewhere, "/nowhere/at/all.py", "<string>", file], processes=tmp_path)
    assert {*linecache.cache} == {elsewhere}
    inside.rename(inside.with_name("train.py"))
    for pid in (8, 9):
        remember_sources(pid, [file], processes=tmp_path)
        assert linecache.getline(file, 1) == "# of the host\n"
        linecache.clearcache()
    # Of the same name, in both.
    remember_sources(7, [file], processes=tmp_path)
    assert linecache.getline(file, 1) == "# of the rank\n"


def test_impossible_file_names_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory read while it changes may hold anything, and a program may name its code anything."""
    monkeypatch.setattr(linecache, "cache", {})
    names = ["/a\0b", "/a\ud800b", "", "/" + "a" * 5000, "/tmp"]
    remember_sources(os.getpid(), names)
    assert [linecache.getlines(name) for name in names] == [[]] * 5


def test_unresponsive_storage_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(sources, "_STORAGE_S", 0.05)
    for name in ("remember_sources", "_open_files", "_versions"):
        monkeypatch.setattr(inspected_ranks, name, lambda *_: answers.wait(60) and ())
    own = RankProcess(pid=os.getpid(), rank=0, local_rank=0, world_size=1, local_world_size=1, job="j", parent=1)
    try:
        seen = seen_rank(own, (), StackReader("py-spy"), [own])
    finally:
        answers.set()
    assert (seen.storage, seen.versions, seen.process) == ((), {}, own)


@pytest.mark.parametrize("is_rank", [False, True])
def test_an_ended_rank_is_not_a_worker_of_its_launcher(is_rank: bool) -> None:
    with subprocess.Popen(["false"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        of_job = {"world_size": 2, "local_world_size": 2, "job": "j"}
        own = RankProcess(pid=os.getpid(), rank=0, local_rank=0, parent=1, **of_job)  # type: ignore[arg-type]
        other = RankProcess(pid=child.pid, rank=1, local_rank=1, parent=own.pid, **of_job)  # type: ignore[arg-type]
        seen = seen_rank(own, (), StackReader("py-spy"), [own, other] if is_rank else [own])
    assert (child.pid in [ended.pid for ended in seen.ended]) is not is_rank


def test_unresponsive_source_storage_does_not_block_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(facts_of_looks, "_SOURCES_S", 0.05)
    monkeypatch.setattr(facts_of_looks, "_with_source", lambda facts, _: answers.wait(60) and facts)
    try:
        ranks = job_facts([waiting(0), waiting(1)], taken_ns=1).ranks
    finally:
        answers.set()
    assert [facts.rank for facts in ranks] == [0, 1]
    assert all("the source of its lines could not be read within 0.05 s" in facts.missing for facts in ranks)
