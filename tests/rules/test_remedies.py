"""What is said suits the case: what ranks are told to do, and how what they do is called."""

from dataclasses import replace

import call_scenes
import pytest
import scenes
from builders import GLOO, NEXT, NEXT_DATA, RUN, TRAINING_STEP, USER_FILE, job, process, raised, user
from call_scenes import ALL_GATHER, INDUCTOR, with_size
from judged import first

from lightning_ncclsafe.facts import (
    Branch,
    ChildProcess,
    Decides,
    ExceptionFacts,
    Frame,
    LoaderFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    StepFacts,
    StorageFacts,
)
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.report.ranks import rank_table
from lightning_ncclsafe.rules.kit import directory_words
from lightning_ncclsafe.rules.kit.sentences import batch_words

SEMAPHORE = replace(user("__enter__", 95, file="/usr/lib/python3.11/multiprocessing/synchronize.py"), user=False)
UPLOAD = user("after_save_checkpoint", 30, file="/home/me/registry.py")


def texts(finding: Finding, source: str, rank: int | None = None) -> list[str]:
    def is_wanted(item: Evidence) -> bool:
        return item.source == source and (rank is None or item.rank == rank)

    return [item.text for item in finding.evidence if is_wanted(item)]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.TRAIN, "after epoch 1"),
        (Phase.FINISHED, "after epoch 1"),
        (Phase.INIT, "before the first batch"),
        (Phase.TEST, "batch 5 of epoch 2, in test"),
    ],
)
def test_an_epoch_that_may_never_begin_has_no_batch(phase: Phase, words: str) -> None:
    assert batch_words(Progress(phase=phase, epoch=2, batch_idx=5, is_between_epochs=True)) == words


def test_a_rank_that_has_finished_is_not_in_anything() -> None:
    facts = scenes.short_rank_finished(GLOO)
    finished = next(line for line in rank_table(facts) if "phase finished" in line)
    assert finished.startswith("Rank 1: has finished;") and "batch" not in finished
    assert not any("is in finished" in line for line in rank_table(facts))


def test_a_rank_that_has_raised_is_not_said_to_be_in_the_guards_own_wait() -> None:
    finding = first(call_scenes.overrun_rank(GLOO))
    raised = "Raised RuntimeError at train.py:57 in training_step, batch 11 of epoch 0."
    assert not any("no progress for" in line for line in rank_table(call_scenes.overrun_rank(GLOO)) if "raised" in line)
    assert raised in texts(finding, "phase") and not any("rendezvous" in text for text in texts(finding, "stack"))
    lines = [line for line in rank_table(call_scenes.overrun_rank(GLOO)) if ": raised RuntimeError;" in line]
    assert lines and all(line.endswith("train.py:57 in training_step") for line in lines)


def skipped(count: int, *, by_others: int = 0) -> Finding:
    steps = StepFacts(with_backward=12, skipped=count, skipped_epoch=0, skipped_batch=11, returns_nothing=("/a.py:9",))
    others = StepFacts(with_backward=12 + count - by_others, skipped=by_others, skipped_epoch=0, skipped_batch=2)
    ahead = replace(GLOO.working(1, user("log", 80), seq=60, batch=12, action=TRAINING_STEP), steps=steps)
    return first(job(*(ahead if n == 1 else replace(GLOO.waiting(n, seq=61), steps=others) for n in range(4))))


def test_all_skipped_batches_are_counted() -> None:
    assert "Rank 1 has skipped batch 11 of epoch 0: " in skipped(1).summary
    assert "Rank 1 has skipped 9 batches, the last one batch 11 of epoch 0: " in skipped(9).summary


def sized(sizes: tuple[tuple[int, ...], ...]) -> Finding:
    line = user("gathered", 57)
    ranks = (GLOO.rank(n, line, ALL_GATHER, op="all_gather", seq=61, outstanding=1) for n in range(4))
    return first(job(*(with_size(facts, 61, sizes) if facts.rank == 1 else facts for facts in ranks)))


def test_an_empty_tensor_is_called_one() -> None:
    assert "rank 1 called all_gather (an empty tensor)" in sized(((0, 4),)).summary


def test_tensors_of_another_size_are_padded_and_those_of_another_type_converted() -> None:
    assert "pad them" in first(call_scenes.another_size(GLOO)).remedy
    other_type = first(call_scenes.another_type(GLOO)).remedy
    assert "dtype=torch.float32" in other_type and "pad" not in other_type


def test_a_call_that_broke_has_not_completed() -> None:
    """Gloo's recorder has a call that raised as completed."""
    facts = call_scenes.overrun_rank(GLOO)
    ranks = (
        replace(one, collectives=(*one.collectives[:-1], replace(one.collectives[-1], completed=True)))
        for one in facts.ranks
    )
    assert "completed all the same" not in first(replace(facts, ranks=tuple(ranks))).summary


def compiling(**more: object) -> Finding:
    late = GLOO.working(0, user("forward", 7), INDUCTOR, seq=60, action=TRAINING_STEP)
    return first(job(replace(late, **more), *(GLOO.waiting(rank, seq=61) for rank in (1, 2, 3))))  # type: ignore[arg-type]


def test_who_compiles_again_is_told_about_shapes_and_not_about_caches() -> None:
    assert "TORCHINDUCTOR_CACHE_DIR" in compiling().remedy
    assert compiling(steps=StepFacts(with_backward=5)).remedy.startswith("The first batches are over")


def logging(*frames: object) -> Finding:
    facts = scenes.logger_flushes(GLOO)
    culprit = facts.ranks[0]
    stack = (*culprit.stack[:2], *frames, *culprit.stack[2:])
    return first(replace(facts, ranks=(replace(culprit, stack=stack), *facts.ranks[1:])))


def test_an_upload_of_a_checkpoint_is_not_left_to_what_does_not_take_it() -> None:
    assert "LoggerOffload()" in logging().remedy
    assert logging(UPLOAD).remedy.startswith("Upload checkpoints less often")


def stalled(*workers: ProcessFacts) -> Finding:
    culprit = GLOO.working(2, NEXT_DATA, seq=60, action=NEXT)
    culprit = replace(culprit, workers=workers, loaders=(LoaderFacts(dataset="Archive", num_workers=len(workers)),))
    return first(job(*(culprit if rank == 2 else GLOO.waiting(rank, seq=61) for rank in range(4))))


def test_a_worker_that_waits_for_a_lock_of_multiprocessing_is_told_so() -> None:
    worker = process(2, "sleeping", stack=(user("unpacked", 516, code="with self.lock:"), SEMAPHORE))
    assert stalled(worker).remedy.startswith("This line waits for a lock that nobody releases")
    assert "(its only worker is sleeping at train.py:516 in unpacked)" in stalled(worker).summary


def test_workers_of_which_none_can_go_on_are_evidence() -> None:
    def said(slept_s: float | None) -> list[str]:
        workers = (process(2, "sleeping", asleep_s=slept_s), process(2, "sleeping", asleep_s=12.0))
        return [text for text in texts(stalled(*workers), "process", 2) if text.startswith("All threads")]

    assert said(30.0) == ["All threads of its workers have slept for 12 s, each waiting for another."]
    assert said(4.0) == said(None) == []


def test_a_loader_without_workers_may_never_come_to_a_sample() -> None:
    assert "whether it ever comes to the next sample" in stalled().remedy


def test_a_dataset_that_waits_for_something_is_not_given_workers() -> None:
    pause = user("__iter__", 41, code="time.sleep(0.5)")
    loop = Branch(line=40, test="while not self.ready():  (line 40)", on=Decides.PASSES, until=41)

    def told(frame: Frame) -> str:
        stack = (RUN, NEXT_DATA, frame)
        culprit = replace(GLOO.working(2, *stack, seq=60, action=NEXT), loaders=(LoaderFacts(dataset="Archive"),))
        return first(job(*(culprit if rank == 2 else GLOO.waiting(rank, seq=61) for rank in range(4)))).remedy

    polling = told(replace(pause, branches=(loop,)))
    assert polling.startswith("This line only pauses before `while not self.ready():` (line 40) is looked at again: ")
    assert "num_workers" not in polling and "num_workers" not in told(pause)
    assert told(user("__iter__", 41, code="read()")).endswith("give the loader workers (num_workers).")


def test_a_hook_that_waits_for_something_is_told_for_what() -> None:
    loop = Branch(line=40, test="while not done.exists():  (line 40)", on=Decides.PASSES, until=41)
    pause = replace(user("on_train_batch_end", 41, code="time.sleep(0.5)"), branches=(loop,))
    found = first(job(GLOO.working(0, RUN, pause, seq=60), *(GLOO.waiting(n, seq=61) for n in (1, 2, 3))))
    assert "`while not done.exists():` (line 40)" in found.remedy
    assert (found.location, found.decided_at) == (
        f"{USER_FILE}:41 in on_train_batch_end",
        f"{USER_FILE}:40 in on_train_batch_end",
    )


@pytest.mark.parametrize(
    ("jumps", "decided_at"),
    [
        ([("break", 38)], f"{USER_FILE}:37 in wait_for"),
        ([("break", 43)], f"{USER_FILE}:42 in wait_for"),
        ([("return", 43)], f"{USER_FILE}:42 in wait_for"),
        pytest.param([("return", 38)], "", id="a return that may be before the loop"),
        pytest.param([("break", 38), ("break", 43)], "", id="either may be what is awaited"),
    ],
)
def test_what_ends_a_loop_with_pauses_is_told_as_its_condition(jumps: list[tuple[str, int]], decided_at: str) -> None:
    tests = [(jump, line, f"if done.exists():  (line {line - 1})") for jump, line in jumps]
    branches = tuple(Branch(line=line, test=test, on=Decides.VALUE, jump=jump) for jump, line, test in tests)
    pause = replace(user("wait_for", 41, code="time.sleep(0.5)"), branches=branches)
    found = first(job(GLOO.working(0, RUN, pause, seq=60), *(GLOO.waiting(n, seq=61) for n in (1, 2, 3))))
    assert (found.location, found.decided_at) == (f"{USER_FILE}:41 in wait_for", decided_at)
    assert ("is looked at again" in found.remedy) is bool(decided_at)


@pytest.mark.parametrize(
    ("more", "start"),
    [
        (
            {"phase": Phase.INIT, "batch": -1, "action": "[LightningDataModule]Data.setup"},
            "Do this work once and ahead",
        ),
        ({"phase": Phase.INIT, "batch": -1, "action": "[LightningDataModule]Data.prepare_data"}, "Share this work"),
        ({}, "Share this work"),
    ],
)
def test_preparation_by_one_rank_alone_is_no_evaluation(more: dict[str, object], start: str) -> None:
    line = user("cache", 50, condition="if rank == 0:  (line 43)")
    same = {key: more[key] for key in ("phase", "batch") if key in more}
    waiting = (GLOO.in_barrier(n, "cache", seq=61, **same) for n in (1, 2, 3))
    finding = first(job(GLOO.working(0, line, seq=60, **more), *waiting))
    assert finding.rule == "rank-zero-only-work" and finding.remedy.startswith(start)


def test_a_worker_without_a_task_has_not_handed_over_what_it_made() -> None:
    torch_file, python_file = "/lib/site-packages/torch/utils/data/_utils/worker.py", "multiprocessing/queues.py"
    own = Frame(file=torch_file, line=308, function="_worker_loop")
    get = Frame(file=f"/usr/lib/python3.11/{python_file}", line=113, function="get")
    idle, busy = process(2, "sleeping", stack=(own, get)), process(2, "sleeping", stack=(own, user("read", 9)))
    lost = stalled(idle, idle)
    assert "(all its 2 workers wait for the next task: what was made of the last one has not arrived)" in lost.summary
    assert "(its only worker waits for the next task:" in stalled(idle).summary
    assert lost.remedy.startswith("Look for a traceback on this rank's stderr")
    assert not stalled(idle, busy).remedy.startswith("Look for a traceback")
    error = ExceptionFacts(type="NoSuchKey", message="clip-7", stack=(own, user("read", 9)))
    unsent = stalled(replace(idle, raised=error))
    assert "NoSuchKey: clip-7 at train.py:9 in read, which could not be pickled and sent" in unsent.summary
    assert unsent.location.endswith("train.py:9 in read") and unsent.remedy.startswith("Correct this error.")


def test_a_logger_that_waits_for_its_own_process_is_to_let_that_one_finish() -> None:
    ends = user("finalize", 33, file="/lib/site-packages/lightning/pytorch/loggers/logger.py")
    join = Frame(file="/usr/lib/python3.11/multiprocessing/process.py", line=149, function="join")
    rank = GLOO.working(0, RUN, replace(ends, user=False), join, seq=60)
    child = ChildProcess(pid=77, parent=1000, command="python", state="sleeping")

    def told(facts: RankFacts) -> Finding:
        return first(job(facts, GLOO.waiting(1, seq=61, world=2), world=2))

    finding = told(replace(rank, awaited_processes=(child,)))
    assert finding.rule == "slow-logger"
    assert finding.remedy.startswith("This logger waits for its process 77: ") and "LoggerOffload" not in finding.remedy
    assert "LoggerOffload" in told(rank).remedy


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if HOST.fullmatch(word):", "matching of regular expressions"),
        ("value = base**value", "arithmetic of whole numbers"),
        ("value = (base) ** exponents[0]", "arithmetic of whole numbers"),
        ("loss = extension.run(batch, **options)", ""),
        ("loss = extension.run(**options)", ""),
        ("scaled = torch.pow(weights, 2)", ""),
        ("extension.run()", ""),
    ],
)
def test_what_python_itself_computes_has_no_lock_to_release(code: str, words: str) -> None:
    seen = process(1, "running", gil_held=True, stack=(user("reward", 41, code=code),), ran_share=1.0, queued_share=0.0)
    finding = first(job(GLOO.waiting(0, seq=61, world=2), world=2, witnessed=(seen,)))
    assert finding.rule == "gil-held"
    assert (words in finding.remedy) and (("gil_scoped_release" in finding.remedy) != bool(words))
    sleeping = first(job(GLOO.waiting(0, seq=61, world=2), world=2, witnessed=(replace(seen, state="sleeping"),)))
    assert "gil_scoped_release" in sleeping.remedy


def test_who_waits_besides_a_rank_that_skipped_a_step_is_told() -> None:
    steps = StepFacts(with_backward=12, skipped=1, skipped_epoch=0, skipped_batch=11, returns_nothing=("/a.py:9",))
    line = user("log", 80)
    inside = GLOO.rank(1, line, ALL_GATHER, op="all_gather", seq=61, outstanding=1, action=TRAINING_STEP)
    others = StepFacts(with_backward=13, skipped=0)
    waiting = (replace(GLOO.waiting(n, seq=61), steps=others) for n in (0, 2, 3))
    summary = first(job(replace(inside, steps=steps), *waiting)).summary
    assert "(its only `return` without a value is a.py:9); it now waits in all_gather (sequence number 61, " in summary
    assert "; it is now in training_step" in skipped(1).summary


def test_a_rank_that_has_only_called_what_others_wait_in_is_not_said_to_wait_in_it() -> None:
    """Its call is asynchronous, and it computes."""
    called = GLOO.working(1, user("log", 80), seq=61, outstanding=1)
    behind = GLOO.working(2, user("log", 80), seq=60)
    waiting = (GLOO.waiting(rank, seq=61) for rank in (0, 3))
    told = texts(first(job(*waiting, called, behind)), "flight recorder")
    assert told[0].endswith("; ranks 0, 3 wait in, rank 1 has called sequence number 61.")


def test_a_url_has_no_file_system_of_this_host() -> None:
    assert directory_words(StorageFacts(path="s3://logs/run", owner="L", filesystem="ext4")) == "s3://logs/run"
    assert directory_words(StorageFacts(path="/logs/run", owner="L", filesystem="ext4")) == "/logs/run (ext4)"


def exit_of(rank: RankFacts) -> Finding:
    return first(job(raised(rank, "SystemExit", "", RUN, user("loaded", 229)), GLOO.waiting(1, seq=61), world=2))


def test_an_exit_from_an_error_is_told_with_that_error() -> None:
    rank = raised(GLOO.working(0, seq=60), "SystemExit", "", RUN, user("loaded", 229))
    assert rank.exception is not None
    rank = replace(rank, exception=replace(rank.exception, handled="EOFError: Ran out of input"))
    summary = first(job(rank, GLOO.waiting(1, seq=61), world=2)).summary
    assert summary.endswith(". It exited while it handled EOFError: Ran out of input.")
    assert "handled" not in exit_of(GLOO.working(0, seq=60)).summary


def test_the_traceback_of_a_worker_is_no_part_of_what_was_raised() -> None:
    told = "Caught KeyError in DataLoader worker process 0."
    message = f"{told}\nOriginal Traceback (most recent call last):\n  File \"/a.py\", line 3, in f\n\nKeyError: 'x'\n"
    finding = first(job(raised(GLOO.working(0, seq=60), "KeyError", message, RUN), GLOO.waiting(1, seq=61), world=2))
    assert texts(finding, "exception") == [f"KeyError: {told} KeyError: 'x'"]


def test_an_exception_without_a_message_has_no_colon() -> None:
    assert texts(exit_of(GLOO.working(0, seq=60)), "exception") == ["SystemExit"]


def frame(file: str, function: str) -> Frame:
    return Frame(file=f"/usr/lib/python3.11/{file}", line=9, function=function)


@pytest.mark.parametrize(
    ("below", "is_request"),
    [
        ((frame("urllib/request.py", "urlopen"), frame("socket.py", "readinto")), True),
        ((frame("site-packages/requests/api.py", "post"), frame("ssl.py", "read")), True),
        ((frame("site-packages/wandb/sdk/wandb_run.py", "log"), frame("socket.py", "readinto")), False),
        ((), False),
    ],
)
def test_a_logger_of_the_users_own_that_asks_a_server_needs_a_timeout(
    below: tuple[Frame, ...], is_request: bool
) -> None:
    hook = frame("site-packages/lightning/pytorch/loggers/logger.py", "log_metrics")
    rank = GLOO.working(0, RUN, hook, user("_post", 26), *below, seq=60)
    finding = first(job(rank, GLOO.waiting(1, seq=61, world=2), world=2))
    assert finding.rule == "slow-logger"
    assert ("urlopen(request, timeout=5), requests.post(…, timeout=5)" in finding.remedy) is is_request
    assert ("on a local disk" in finding.remedy) is not is_request
    assert "from lightning_ncclsafe import LoggerOffload" in finding.remedy


def alone(*stack: Frame, **more: object) -> str:
    line = user("on_train_epoch_end", 50, condition="if rank == 0:  (line 43)")
    culprit = GLOO.working(0, line, *stack, seq=60, action="[LightningModule]Net.on_train_epoch_end")
    finding = first(job(replace(culprit, **more), *(GLOO.in_barrier(n, "epoch", seq=61) for n in (1, 2, 3))))
    assert finding.rule == "rank-zero-only-work"
    return finding.remedy


def test_who_works_alone_is_told_whether_the_others_will_go_on() -> None:
    go_on = "The others continue when it is done."
    assert alone().endswith(go_on)
    get = frame("multiprocessing/queues.py", "get")
    assert go_on not in alone(get), "nobody knows whether anything is put there"
    run = frame("subprocess.py", "run")
    program = ChildProcess(pid=77, parent=1000, command="python score.py", state="sleeping")
    remedy = alone(run, awaited_processes=(program,))
    assert remedy.startswith("Start the program without waiting for it (subprocess.Popen)") and remedy.endswith(go_on)
    ended = alone(run, awaited_processes=(replace(program, state="zombie"),))
    assert ended.startswith("Share this work") and go_on not in ended
