"""What ranks have caught is said beside what they are found to do, and tells the one that went on from the innocent."""

from dataclasses import replace

import call_scenes as scenes
import pytest
from builders import (
    ALL_REDUCE,
    FETCH,
    GLOO,
    NCCL,
    NEXT,
    NEXT_DATA,
    TORCH_SAVE,
    TRAINING_STEP,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    transport_error,
    user,
)
from judged import first

from lightning_ncclsafe.facts import (
    AwaitedThread,
    Branch,
    CaughtException,
    Decides,
    EndedProcess,
    Frame,
    IncidentKind,
    JobFacts,
    MachineFacts,
    RankFacts,
    ThreadLockFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.judging import judge

NO_FACES = CaughtException(
    type="ValueError",
    message="no faces in this image",
    stack=(user("detect", 31),),
    ago_s=24.0,
)
FED = CaughtException(type="KeyError", message="'label'", stack=(user("feed", 12),), thread="feeder", ago_s=30.0)
HANDLED = replace(user("average", 44), handler="except ValueError:  (line 45)")
QUEUE_GET = Frame(file="/usr/lib/python3.12/queue.py", line=171, function="get")
CONDITION = Frame(file="/usr/lib/python3.12/threading.py", line=355, function="wait")
POOL = Frame(file="/usr/lib/python3.12/multiprocessing/pool.py", line=768, function="wait")


def rank_that_skipped(net: Backend, *, handled: bool = False, caught: tuple[CaughtException, ...] = ()) -> JobFacts:
    """Rank 1 has left out an all_reduce and waits in DDP's; rank 0 waits in the one that it has left out."""
    line = HANDLED if handled else user("average", 44)
    inside = net.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((5,),), action=TRAINING_STEP, world=2)
    return job(inside, replace(net.waiting(1, seq=61, world=2), caught=caught), world=2)


OUT_OF_MEMORY = CaughtException(
    type="OutOfMemoryError",
    message="CUDA out of memory. Tried to allocate 3.81 GiB.",
    stack=(replace(user("training_step", 50), handler="except RuntimeError:  (line 52)"), user("similarity", 31)),
    ago_s=24.0,
)


def test_a_rank_that_continues_without_memory() -> None:
    finding = first(rank_that_skipped(GLOO, caught=(OUT_OF_MEMORY,)))
    assert (finding.rule, finding.ranks, finding.confidence) == ("gpu-memory-exhausted", (1,), Confidence.LIKELY)
    assert finding.location.endswith("train.py:31 in similarity")
    assert finding.summary.startswith(
        "Rank 1 has run out of memory on its GPU: it caught OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "3.81 GiB at train.py:31 in similarity, in `except RuntimeError:` (line 52), and continued. Since then, its "
        "calls differ from the others': rank 0 called all_reduce"
    )
    assert finding.summary.count("OutOfMemoryError") == 1
    within = Branch(line=50, test="except RuntimeError:  (line 52)", on="exception", handled_at="b.py:9 in retried")
    outer, inner = OUT_OF_MEMORY.stack
    known = replace(OUT_OF_MEMORY, stack=(replace(outer, branches=(within,)), inner))
    assert first(rank_that_skipped(GLOO, caught=(known,))).location == "b.py:9 in retried"


def test_a_line_that_raised_instead_of_logging_a_key() -> None:
    """All ranks have logged the key before, and one has gone on without it."""
    scene = scenes.key_that_one_rank_lacks(GLOO)
    line = replace(user("validation_step", 104), handler="except ValueError:  (line 105)")
    raised_there = CaughtException(
        type="ValueError", message="only one class", stack=(line, user("roc_auc", 9)), ago_s=24.0
    )
    elsewhere = replace(raised_there, stack=(replace(line, line=102), user("roc_auc", 9)))

    def judged(caught: CaughtException) -> Finding:
        steps = replace(scene.ranks[2].steps, logged=scene.ranks[0].steps.logged)
        lacking = replace(scene.ranks[2], steps=steps, caught=(caught,))
        return first(replace(scene, ranks=(*scene.ranks[:2], lacking, scene.ranks[3])))

    finding = judged(raised_there)
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-log-keys", (2,), Confidence.LIKELY)
    assert finding.location == f"{USER_FILE}:104 in validation_step"
    assert finding.summary.startswith(
        "Rank 2 has not logged 'val_extra' in this step: the line that logs it raised ValueError: only one class at "
        "train.py:9 in roc_auc, which was caught by `except ValueError:` (line 105): ranks 0-1, 3 wait in "
    )
    assert judged(elsewhere).rule == "diverged-collectives"
    assert judged(replace(raised_there, ago_s=600.0)).rule == "diverged-collectives", "long ago"


@pytest.mark.parametrize(
    "caught", [replace(OUT_OF_MEMORY, ago_s=50.0), replace(OUT_OF_MEMORY, count=9), NO_FACES], ids=str
)
def test_a_lack_of_memory_that_is_over_explains_nothing(caught: CaughtException) -> None:
    assert first(rank_that_skipped(GLOO, caught=(caught,))).rule == "diverged-collectives"


def test_a_breakpoint_for_all_ranks_that_one_rank_calls() -> None:
    loss = Branch(line=43, test="if loss > 100:  (line 43)", on=Decides.VALUE, until=44)
    line = replace(user("watched", 44, code="dist.breakpoint()"), branches=(loss,))
    inside = GLOO.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((5,),), action=TRAINING_STEP, world=3)
    finding = first(job(inside, *(GLOO.waiting(n, seq=61, world=3) for n in (1, 2)), world=3))
    assert finding.remedy.startswith("torch.distributed.breakpoint() is for all ranks")


def test_a_clause_that_may_have_led_around_a_call_is_no_condition_to_decide_alike() -> None:
    clause = Branch(line=45, test="except ValueError:  (line 45)", on=Decides.EXCEPTION, until=44)
    line = replace(user("average", 44), branches=(clause,))
    inside = GLOO.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((5,),), action=TRAINING_STEP, world=3)
    same = replace(inside, rank=1, local_rank=1, pid=1001)
    finding = first(job(inside, same, GLOO.waiting(2, seq=61, world=3), world=3))
    assert (finding.rule, finding.decided_at) == ("diverged-collectives", f"{USER_FILE}:45 in average")
    assert "as the clause at train.py:45 in average may have done" in finding.remedy


@pytest.mark.parametrize("net", [GLOO, NCCL])
def test_of_two_ranks_the_one_that_caught_an_exception_has_skipped_the_call(net: Backend) -> None:
    finding = first(rank_that_skipped(net, caught=(NO_FACES,)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (1,))
    assert finding.location == f"{USER_FILE}:31 in detect"
    assert finding.confidence is Confidence.LIKELY
    assert "what skips a call that needs all ranks, as rank 1 may have done" in finding.remedy
    assert "the reason of the ValueError" in finding.remedy
    told = "Rank 1 caught ValueError: no faces in this image, raised at train.py:31 in detect, 24 s before this report"
    assert told in finding.summary
    assert any(item.rank == 1 and "no faces" in item.text for item in finding.evidence)


@pytest.mark.parametrize(
    ("clause", "passed", "line"),
    [
        ("except ValueError:  (line 45)", "", "45 in average"),
        ("except ValueError:  (line 45)", "all_reduce", "31 in detect"),
        ("with suppress(ValueError):  (line 45)", "", "31 in detect"),
    ],
    ids=["by a clause", "out of a collective", "by a context manager"],
)
def test_the_clause_that_caught_an_exception_is_the_line_to_look_at(clause: str, passed: str, line: str) -> None:
    within = Branch(line=45, test=clause, on=Decides.EXCEPTION, until=46)
    caught_at = replace(user("average", 46), branches=(within,))
    finding = first(rank_that_skipped(GLOO, caught=(replace(NO_FACES, caught_at=caught_at, passed=passed),)))
    assert (finding.rule, finding.location) == ("diverged-collectives", f"{USER_FILE}:{line}")


def test_a_clause_of_what_is_tried_in_the_block_has_not_caught_it() -> None:
    within = Branch(line=45, test="except ValueError:  (line 45)", on=Decides.EXCEPTION, until=49)
    tried = Branch(line=48, test="except OSError:  (line 48)", on=Decides.EXCEPTION, until=47)
    caught_at = replace(user("average", 47), branches=(within, tried))
    finding = first(rank_that_skipped(GLOO, caught=(replace(NO_FACES, caught_at=caught_at),)))
    assert finding.location == f"{USER_FILE}:45 in average"


def test_of_two_ranks_the_one_beyond_a_try_may_have_skipped_its_body() -> None:
    finding = first(rank_that_skipped(GLOO, handled=True))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (1,))
    assert finding.confidence is Confidence.LIKELY
    assert finding.location == f"{USER_FILE}:44 in average"
    assert "is caught by `except ValueError:` (line 45)" in finding.summary


def test_without_either_what_is_called_on_all_ranks_decides() -> None:
    """Rank 1 is in DDP's reduction, rank 0 in a call of the user's own; see `test_out_of_step`."""
    finding = first(rank_that_skipped(GLOO))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert "caught" not in finding.summary


@pytest.mark.parametrize(
    "caught",
    [replace(NO_FACES, ago_s=900.0), replace(NO_FACES, count=8)],
    ids=["long ago", "usual"],
)
def test_exceptions_that_ranks_catch_all_the_time_explain_nothing(caught: CaughtException) -> None:
    finding = first(rank_that_skipped(GLOO, caught=(caught,)))
    assert finding.ranks == (0,) and "caught" not in finding.summary


def test_a_usual_exception_is_reported_and_explains_nothing() -> None:
    often = replace(NO_FACES, count=300)
    finding = first(behind(replace(GLOO.working(0, user("step", 80), seq=60), caught=(often,))))
    assert "caught" not in finding.summary
    told = "no faces in this image, raised at train.py:31 in detect, 300 times"
    assert any(told in item.text for item in finding.evidence)


def test_an_exception_that_all_ranks_catch_explains_nothing() -> None:
    facts = rank_that_skipped(GLOO, caught=(NO_FACES,))
    facts = replace(facts, ranks=tuple(replace(one, caught=(NO_FACES,)) for one in facts.ranks))
    finding = first(facts)
    assert finding.ranks == (0,) and "caught" not in finding.summary


def test_a_condition_on_the_rank_says_more() -> None:
    facts = rank_that_skipped(GLOO, caught=(NO_FACES,))
    line = user("average", 44, condition="if self.global_rank == 0:  (line 43)")
    inside = GLOO.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((5,),), action=TRAINING_STEP, world=2)
    finding = first(replace(facts, ranks=(inside, facts.ranks[1])))
    assert finding.ranks == (0,)
    # As their calls are compared, the one that is not named may have diverged all the same.
    assert any(item.rank == 1 and "no faces" in item.text for item in finding.evidence)


def behind(culprit: RankFacts) -> JobFacts:
    return job(culprit, *(GLOO.waiting(n, seq=61) for n in (1, 2, 3)))


def test_a_rank_in_an_except_block() -> None:
    upload = user("upload", 71, code="time.sleep(delay)")
    held = CaughtException(
        type="OSError", message="timed out", stack=(user("put", 9),), caught_at=upload, is_held=True, count=40
    )
    finding = first(behind(replace(GLOO.working(0, upload, seq=60), caught=(held,))))
    assert finding.ranks == (0,)
    told = "Rank 0 is in the `except` block (line 71) that caught OSError: timed out, raised at train.py:9 in put."
    assert finding.summary.endswith(told)
    assert finding.remedy.startswith("Begin with the OSError at train.py:9 in put: remove its reason,")
    assert finding.remedy.count("Begin with") == 1
    stalled = replace(GLOO.working(0, user("__iter__", 30), NEXT_DATA, upload, seq=60, action=NEXT), caught=(held,))
    remedy = first(behind(stalled)).remedy
    assert (
        remedy.startswith("Begin with the OSError at train.py:9 in put: ") and "the sample that is being read" in remedy
    )


def test_an_exception_that_left_a_collective_or_a_hook_names_it() -> None:
    left = replace(NO_FACES, passed="all_reduce", count=2)
    finding = first(behind(replace(GLOO.working(0, user("step", 80), seq=60), caught=(left,))))
    told = "out of all_reduce, raised at train.py:31 in detect, 2 times, 24 s before this report, and continued."
    assert told in finding.summary


def test_ranks_that_are_not_blamed_are_not_accused() -> None:
    facts = behind(GLOO.working(0, user("step", 80), seq=60))
    ranks = (facts.ranks[0], replace(facts.ranks[1], caught=(NO_FACES,)), *facts.ranks[2:])
    assert "caught" not in first(replace(facts, ranks=ranks)).summary


@pytest.mark.parametrize("wait", [(QUEUE_GET, CONDITION), (CONDITION, CONDITION)])
def test_a_thread_that_has_ended_and_whose_queue_is_waited_for(wait: tuple[Frame, ...]) -> None:
    finding = first(behind(replace(GLOO.working(0, user("next_batch", 20), *wait, seq=60), caught=(FED,))))
    assert (finding.rule, finding.ranks) == ("rank-behind", (0,))
    assert finding.location == f"{USER_FILE}:20 in next_batch"
    assert finding.decided_at == f"{USER_FILE}:12 in feed"
    assert "Rank 0's thread 'feeder' ended with KeyError: 'label', raised at train.py:12 in feed" in finding.summary
    assert finding.remedy.startswith("Correct the KeyError, and pass such errors on: catch them in the thread")


def test_under_a_condition_on_the_rank_the_remedy_is_that_of_the_thread_as_well() -> None:
    line = user("on_train_epoch_end", 20, condition="if trainer.is_global_zero:  (line 19)")
    culprit = GLOO.working(0, line, QUEUE_GET, CONDITION, seq=60, action="[LightningModule]Net.on_train_epoch_end")
    assert first(behind(culprit)).remedy.startswith("Share this work")
    finding = first(behind(replace(culprit, caught=(FED,))))
    assert finding.rule == "rank-zero-only-work" and finding.remedy.startswith("Correct the KeyError")
    assert finding.decided_at == f"{USER_FILE}:19 in on_train_epoch_end", "the condition is not hidden"


def test_a_rank_that_waits_for_an_ended_thread_is_not_working_alone() -> None:
    waits = (user("on_train_epoch_end", 20), QUEUE_GET, CONDITION)
    culprit = GLOO.working(0, *waits, seq=60, action="[LightningModule]Net.on_train_epoch_end")
    assert first(behind(culprit)).rule == "rank-zero-only-work"
    assert first(behind(replace(culprit, caught=(FED,)))).rule == "rank-behind"


def _loading(caught: CaughtException) -> JobFacts:
    stack = (NEXT_DATA, FETCH, user("__iter__", 20), QUEUE_GET, CONDITION)
    return behind(replace(GLOO.working(0, *stack, seq=60, action=NEXT), caught=(caught,)))


def test_the_same_within_a_loader_is_no_matter_of_storage() -> None:
    finding = first(_loading(FED))
    assert (finding.rule, finding.ranks) == ("data-stall", (0,))
    assert "Rank 0's thread 'feeder' ended with KeyError: 'label', raised at train.py:12 in feed" in finding.summary
    assert finding.remedy.startswith("Correct the KeyError, and pass such errors on: catch them in the thread")


def test_a_thread_that_ended_long_ago_is_not_waited_for() -> None:
    finding = first(_loading(replace(FED, ago_s=4000.0)))
    assert "KeyError" not in finding.remedy and "'label'" not in finding.summary


def test_a_thread_for_which_nobody_waits_is_reported() -> None:
    finding = first(behind(replace(GLOO.working(0, user("step", 80), seq=60), caught=(FED,))))
    assert "Rank 0's thread 'feeder' ended with KeyError: 'label'" in finding.summary
    assert finding.decided_at == ""


@pytest.mark.parametrize("condition", ["", "if rank == 0:  (line 19)"])
def test_a_pool_that_has_replaced_its_worker(condition: str) -> None:
    """Who waits for a dead process does not work, under whatever condition on the rank."""
    ended = (EndedProcess(pid=4711, signal="SIGKILL", ago_s=25.0, is_replaced=True),)
    culprit = GLOO.working(0, user("score", 20, condition=condition), POOL, CONDITION, CONDITION, seq=60)
    finding = first(behind(replace(culprit, machine=MachineFacts(ended=ended))))
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.LIKELY)
    assert any(
        "25 s ago; its parent has collected it, and may have replaced it" in item.text for item in finding.evidence
    )


POOL_GET, POOL_WORKER = replace(POOL, line=774, function="get"), replace(POOL, line=114, function="worker")
TASK = Frame(file="/usr/lib/python3.12/multiprocessing/queues.py", line=386, function="get")
RESULT = replace(TASK, line=394, function="put")
MAPSTAR = replace(POOL, line=48, function="mapstar")


def pool_whose_processes(*stacks: tuple[Frame, ...]) -> list[Finding]:
    """Rank 0 waits for the result of a pool, whose processes are where the stacks say."""
    culprit = GLOO.working(0, user("score", 20), POOL_GET, POOL, CONDITION, CONDITION, seq=60)
    workers = tuple(replace(process(-1, "sleeping"), pid=70 + index, stack=it) for index, it in enumerate(stacks))
    return [*judge(behind(replace(culprit, workers=workers))).findings]


def test_a_pool_that_has_lost_a_task() -> None:
    """It has replaced a process that lived too briefly to be seen, and nobody has its task."""
    finding = pool_whose_processes((POOL_WORKER, TASK), (user("<module>", 1), POOL_WORKER, TASK, CONDITION))[0]
    assert (finding.rule, finding.ranks, finding.confidence) == ("worker-died", (0,), Confidence.LIKELY)
    assert "Rank 0 waits for a result of its process pool, in which all 2 processes wait for a task" in finding.summary
    assert finding.location.endswith("train.py:20 in score")
    assert finding.remedy.endswith("where multiprocessing.Pool waits forever.")


@pytest.mark.parametrize(
    "stack",
    [
        (POOL_WORKER, MAPSTAR, user("reward", 9)),
        (POOL_WORKER, MAPSTAR),
        (POOL_WORKER, RESULT),
        # Unknown.
        (),
    ],
)
def test_a_pool_that_works_has_lost_nothing(stack: tuple[Frame, ...]) -> None:
    assert "worker-died" not in {finding.rule for finding in pool_whose_processes((POOL_WORKER, TASK), stack)}


def test_other_children_are_no_pool() -> None:
    assert "worker-died" not in {finding.rule for finding in pool_whose_processes((user("serve", 3), TASK))}


def test_an_exception_that_has_ended_a_rank_is_reported_first() -> None:
    failed = raised(GLOO.working(0, seq=60), "IndexError", "out of range", user("step", 80))
    finding = first(behind(replace(failed, caught=(NO_FACES,))))
    assert finding.rule == "failed-rank"
    assert finding.summary.index("IndexError") < finding.summary.index("ValueError")


def test_a_rank_that_survived_the_exception_that_ended_the_others_is_named() -> None:
    """A first call of the Trainer has failed on rank 0, which caught that; the other was ended, and is missed now."""
    survived = replace(NO_FACES, passed="Trainer.fit", ago_s=400.0)
    culprit = replace(GLOO.in_barrier(0, "post_setup", seq=2, world=2, idle=20.0), caught=(survived,))
    finding = first(job(culprit, world=2, witnessed=(process(1, "zombie"),)))
    assert (finding.rule, finding.ranks) == ("dead-rank", (1,))
    assert (
        "Rank 0 caught ValueError: no faces in this image out of Trainer.fit, raised at train.py:31" in finding.summary
    )
    assert finding.summary.endswith("and continued, although the guard ends the others when one rank raises.")
    other = replace(survived, passed="", ago_s=5.0)
    facts = job(replace(culprit, caught=(other,)), world=2, witnessed=(process(1, "zombie"),))
    assert "caught" not in first(facts).summary


def ended_by_gloo(caught: tuple[CaughtException, ...], stack: tuple[Frame, ...]) -> JobFacts:
    """Rank 1 was in an all_reduce that rank 0 has left out, and was sent what rank 0 called next."""
    told = transport_error(GLOO.waiting(0, seq=61, world=2, idle=0.5))
    gone = replace(process(1, "zombie", ended_by="SIGABRT"), stack=stack)
    return job(replace(told, caught=caught), world=2, witnessed=(gone,), kind=IncidentKind.EXCEPTION)


def test_a_rank_that_gloo_has_ended_in_a_call_that_another_has_left_out() -> None:
    caught = (replace(NO_FACES, ago_s=0.6),)
    findings = judge(ended_by_gloo(caught, (user("average", 44), ALL_REDUCE))).findings
    assert [one.rule for one in findings] == ["diverged-collectives"]
    assert (findings[0].ranks, findings[0].confidence) == ((0,), Confidence.LIKELY)
    assert findings[0].location == f"{USER_FILE}:31 in detect"
    assert "skipped a collective that rank 1 was in at train.py:44 in average" in findings[0].summary
    assert "Rank 0 caught ValueError: no faces in this image" in findings[0].summary


def test_a_connection_that_broke_has_left_nothing_out() -> None:
    broke = replace(NO_FACES, passed="all_reduce", ago_s=0.1, is_consequence=True)
    assert first(ended_by_gloo((broke,), (user("average", 44), ALL_REDUCE))).rule == "mismatched-collective"


def test_where_nothing_was_seen_the_sizes_may_differ_as_well() -> None:
    finding = first(ended_by_gloo((replace(NO_FACES, ago_s=40.0),), (HANDLED, ALL_REDUCE)))
    assert finding.rule == "mismatched-collective"
    assert "where rank 1 was, is in a `try`" in finding.summary


def _locked(**more: object) -> JobFacts:
    lock = ThreadLockFacts(
        lock="self.lock",
        thread="writer",
        taken_at=user("consume", 19),
        stack=(user("consume", 20), QUEUE_GET, CONDITION),
    )
    culprit = replace(GLOO.working(0, user("step", 80), seq=60), thread_lock=replace(lock, **more))  # type: ignore[arg-type]
    return behind(culprit)


def test_the_thread_that_holds_a_lock_is_reported_beside_the_cause() -> None:
    finding = first(_locked())
    assert (finding.rule, finding.location) == ("rank-behind", f"{USER_FILE}:80 in step")
    told = "Rank 0 waits there for `self.lock`, which its thread 'writer' has taken at train.py:19 in consume"
    assert f"{told}; it is at train.py:20 in consume." in finding.summary
    assert finding.remedy.startswith("Let no thread wait for anything else while it holds a lock")
    assert any("Its thread 'writer' is in threading.py" in item.text for item in finding.evidence)


def test_a_lock_that_is_taken_again_is_reported_as_that() -> None:
    finding = first(_locked(is_own=True, thread="MainThread"))
    assert "which the same thread has already taken at train.py:19 in consume." in finding.summary
    assert finding.remedy.startswith("Take the lock once")


JOIN = Frame(file="/usr/lib/python3.12/threading.py", line=1149, function="join")


def _awaited(*stack: Frame) -> RankFacts:
    thread = AwaitedThread(name="writer", stack=stack)
    return replace(GLOO.rank(0, user("step", 80), JOIN, seq=60, action=TRAINING_STEP), awaited_thread=thread)


def test_the_awaited_thread_is_reported_beside_the_cause() -> None:
    finding = first(behind(_awaited(JOIN, user("upload", 31, code="put(part)"), QUEUE_GET, CONDITION)))
    assert (finding.rule, finding.ranks, finding.location) == ("rank-behind", (0,), f"{USER_FILE}:80 in step")
    told = "Rank 0 waits there for its thread 'writer', which is at train.py:31 in upload."
    assert finding.summary.endswith(told)
    seen = f"Its thread 'writer' is at {USER_FILE}:31 in upload: put(part)"
    assert [item.text for item in finding.evidence if "Its thread" in item.text] == [seen]


def test_a_thread_in_no_code_of_the_user_is_told_with_its_deepest_frame() -> None:
    assert "which is at threading.py:355 in wait." in first(behind(_awaited(QUEUE_GET, CONDITION))).summary


def test_a_thread_without_a_name_or_a_stack() -> None:
    rank = _awaited(user("upload", 31))
    assert rank.awaited_thread is not None
    nameless = replace(rank, awaited_thread=replace(rank.awaited_thread, name=""))
    told = "Rank 0 waits there for another thread of its process, which is at train.py:31 in upload."
    assert told in first(behind(nameless)).summary
    assert "thread" not in first(behind(_awaited())).summary


def test_a_thread_that_saves_makes_it_a_checkpoint() -> None:
    finding = first(behind(_awaited(TORCH_SAVE)))
    assert (finding.rule, finding.ranks, finding.location) == ("slow-checkpoint", (0,), f"{USER_FILE}:80 in step")
    assert "Rank 0 waits there for its thread 'writer', which is at serialization.py:950 in save." in finding.summary


def test_a_thread_in_a_handler_of_python_makes_it_that_logger() -> None:
    handlers = Frame(file="/usr/lib/python3.12/logging/__init__.py", line=1700, function="callHandlers")
    finding = first(behind(_awaited(user("tell", 8), handlers)))
    assert finding.rule == "slow-logger" and "a handler of Python's logging" in finding.summary
    assert finding.remedy.startswith("Take the handler off")


def test_a_rank_that_failed_elsewhere_does_not_wait_there() -> None:
    finding = first(behind(raised(_awaited(user("upload", 31)), "KeyError", "'label'", user("feed", 12))))
    assert finding.rule == "failed-rank"
    assert "Rank 0 waits for its thread 'writer', which is at train.py:31 in upload." in finding.summary


def test_only_the_first_finding_and_its_first_rank_tell_a_thread() -> None:
    one = _awaited(user("upload", 31))
    two, three = (replace(one, rank=rank, stack=(user("step", line), JOIN)) for rank, line in ((1, 80), (2, 90)))
    findings = judge(job(one, two, three, GLOO.waiting(3, seq=61))).findings
    assert [finding.ranks for finding in findings] == [(0, 1), (2,)]
    assert [finding.summary.count("its thread 'writer'") for finding in findings] == [1, 0]
