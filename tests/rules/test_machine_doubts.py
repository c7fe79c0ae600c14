"""What looks like a cause in host, process or device and may be another one: how sure a report may be then."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import machine_scenes as scenes
import pytest
from builders import (
    EMPTY_CACHE,
    ENGINE,
    GLOO,
    INIT_GROUP,
    MAIN,
    NCCL,
    NEXT,
    NEXT_DATA,
    RUN,
    SITE,
    STORAGE_COPY,
    TORCH_SAVE,
    TRAINING_STEP,
    TRY_GET,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    unread,
    user,
)
from builders import transport_error as lost
from judged import found

from lightning_ncclsafe.facts import (
    Action,
    Collective,
    EndedProcess,
    Frame,
    HostFacts,
    JobFacts,
    LoaderFacts,
    MainThreadFacts,
    Phase,
    PressureFacts,
    ProcessFacts,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding, Plan
from lightning_ncclsafe.rules.judging import judge

GB = 1_000_000_000
CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE
ZERO = "if self.trainer.is_global_zero:  (line 49)"


def silent(**seen: object) -> dict[str, Confidence]:
    """Rank 2 does not answer and is seen so."""
    return found(scenes.without_answer(GLOO, process(2, **seen)))  # type: ignore[arg-type]


def only(facts: JobFacts) -> Finding:
    (finding,) = judge(facts).findings
    return finding


def test_the_lock_is_surely_held_only_by_who_has_a_core() -> None:
    """Where nobody knows how many turns it got, or it got few, its guard may have had none."""
    seen = {"state": "running", "gil_held": True, "stack": (user("f", 1),)}
    assert silent(**seen, ran_share=0.98) == {"gil-held": CERTAIN}
    assert silent(**seen, ran_share=0.3, queued_share=0.7) == {"gil-held": LIKELY}
    assert silent(**seen) == {"gil-held": LIKELY}


def copying(condition: str = "", *below: Frame) -> tuple[Frame, ...]:
    """Saves what is on its GPU."""
    save = user("on_train_epoch_end", 50, condition=condition)
    return (MAIN, RUN, save, *(below or (TORCH_SAVE, STORAGE_COPY)))


def test_a_rank_that_copies_from_its_gpu_waits_for_it_with_the_lock() -> None:
    seen = {"state": "running", "gil_held": True, "ran_share": 0.98}
    assert silent(**seen, stack=copying(ZERO)) == {"rank-zero-only-work": LIKELY}
    assert silent(**seen, stack=copying()) == {"gpu-stuck": POSSIBLE}
    # No such wait: a regular expression, a library's function that keeps the lock, a thread that lets go of it.
    search = Frame(file="/usr/lib/python3.12/re/__init__.py", line=177, function="search")
    assert silent(**seen, stack=copying(ZERO, search)) == {"gil-held": CERTAIN}
    assert silent(**seen, stack=copying(ZERO, TORCH_SAVE, STORAGE_COPY, user("pickled", 9))) == {"gil-held": CERTAIN}
    assert silent(**seen, stack=()) == {"gil-held": CERTAIN}
    assert silent(**seen | {"gil_held": False}, stack=copying(ZERO)) == {"frozen-rank": LIKELY}
    assert silent(**seen | {"ran_share": 0.02}, stack=copying(ZERO)) == {"host-starved": LIKELY}


def test_a_rank_that_copies_from_its_gpu_is_told_with_its_line() -> None:
    seen = process(2, "running", gil_held=True, stack=copying(ZERO))
    place = f"{USER_FILE}:50 in on_train_epoch_end"
    alone = only(scenes.without_answer(NCCL, seen))
    assert (alone.ranks, alone.location, alone.plan) == ((2,), place, Plan.STOP)
    assert alone.summary.startswith("Rank 2 is copying a tensor from its GPU at train.py:50 in on_train_epoch_end")
    assert (
        "which has not ended, probably a collective that it alone has called under `if self.trainer.is_global_zero:`"
        in alone.summary
    )
    stuck = only(scenes.without_answer(NCCL, replace(seen, stack=copying())))
    assert (stuck.ranks, stuck.location, stuck.plan) == ((2,), place, Plan.UNKNOWN)
    assert "alone" not in stuck.summary


def test_a_rank_that_copies_from_its_gpu_while_nobody_waits_is_told() -> None:
    seen = process(2, "running", gil_held=True, stack=copying(ZERO))
    others = (NCCL.finished(rank, seq=60, batch=19) for rank in (0, 1, 3))
    assert found(job(*others, witnessed=(seen,))) == {"gpu-stuck": POSSIBLE}


def test_a_rank_that_was_late_to_answer_is_not_why_ranks_wait_in_different_calls() -> None:
    """On a starved host, a rank that waits in a collective may not get a core in time to answer."""
    seen = process(2, "sleeping", gil_held=True, stack=(user("training_step", 40),), ran_share=0.0, queued_share=0.0)
    elsewhere = GLOO.in_barrier(0, "Trainer.save_checkpoint", seq=61)
    waits = found(job(elsewhere, *(GLOO.waiting(rank, seq=61) for rank in (1, 2, 3)), witnessed=(seen,)))
    assert "gil-held" not in waits and "diverged-collectives" in waits


def test_a_thread_that_sleeps_may_itself_wait_for_the_lock() -> None:
    finding = only(scenes.native_code_waits_with_the_gil(GLOO))
    assert "called at train.py:15 in gilsleep, or by another thread" in finding.summary
    assert "this line, or another thread, calls" in finding.remedy


def test_collecting_garbage_takes_long_for_want_of_cores_or_memory_too() -> None:
    seen = {"gil_held": True, "stack": (user("step", 1), scenes.COLLECTS)}
    assert silent(**seen, state="running", ran_share=0.98) == {"gc-pause": CERTAIN}
    both = {"gc-pause": LIKELY, "host-starved": LIKELY}
    assert silent(**seen, state="running", ran_share=0.03, queued_share=0.9) == both
    assert silent(**seen, state="disk-sleep", wait_channel="folio_wait_bit_common", swap_bytes=4 * GB) == both


def test_a_swapped_process_that_waits_for_a_network_mount_waits_for_storage() -> None:
    assert silent(state="disk-sleep", wait_channel="rpc_wait_bit_killable", swap_bytes=GB) == {
        "blocked-on-disk": LIKELY
    }
    assert silent(state="disk-sleep", wait_channel="folio_wait_bit_common", swap_bytes=GB) == {"host-starved": LIKELY}


def blocked(channel: str, *, faults: int | None = 0, stalled: float | None = None, swap: int = 0) -> JobFacts:
    """Rank 2 is in uninterruptible sleep whenever it is looked at."""
    main_thread = MainThreadFacts(
        over_s=20.0, state="disk-sleep", wait_channel=channel, looks=11, blocked_looks=11, major_faults=faults
    )
    facts = scenes.at_work(GLOO, main_thread=main_thread, pressure=PressureFacts(over_s=20.0, memory_stalled=stalled))
    memory = HostFacts(process_swap_bytes=swap)
    return replace(facts, ranks=tuple(replace(one, host_facts=memory) for one in facts.ranks))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (blocked("folio_wait_bit_common"), {"blocked-on-disk": CERTAIN}),
        # No swap, and the host throws away pages of files that it needs again at once.
        (blocked("folio_wait_bit_common", faults=90_000, stalled=0.8), {"host-starved": LIKELY}),
        # Once swapped out in part, long ago: it waits for no page now.
        (blocked("folio_wait_bit_common", swap=GB), {"blocked-on-disk": CERTAIN}),
        (blocked("folio_wait_bit_common", swap=GB, faults=300), {"blocked-on-disk": POSSIBLE}),
        (blocked("nfs_wait_bit_killable", swap=GB, faults=300), {"blocked-on-disk": CERTAIN}),
    ],
    ids=["disk", "thrashing", "swapped once", "perhaps swapping", "network"],
)
def test_storage_and_lack_of_memory_are_told_apart_or_not_claimed(
    facts: JobFacts, expected: dict[str, Confidence]
) -> None:
    assert found(facts) == expected


def test_a_dead_child_beside_torchs_loader_is_none_of_its_workers() -> None:
    """It looks after them every five seconds, and raises: this one is something else."""
    culprit = GLOO.working(2, NEXT_DATA, TRY_GET, scenes.QUEUE_GET, seq=60, action=NEXT)
    facts = scenes.late(GLOO, scenes.with_machine(culprit, ended=(EndedProcess(pid=4711, signal="SIGKILL"),)))
    assert found(facts) == {"data-stall": CERTAIN, "worker-died": POSSIBLE}


@pytest.mark.parametrize("end", [{"signal": "SIGKILL"}, {"exit_code": 1}])
def test_a_loader_that_has_fewer_workers_left_than_it_has_started_has_lost_one(end: dict[str, Any]) -> None:
    """A library has taken SIGCHLD for itself, and the loader has not looked yet."""
    culprit = GLOO.working(2, NEXT_DATA, TRY_GET, scenes.QUEUE_GET, seq=60, action=NEXT)
    culprit = scenes.with_machine(culprit, ended=(EndedProcess(pid=4711, **end),))
    left = (ProcessFacts(pid=4710, state="sleeping"), ProcessFacts(pid=4711, state="zombie"))
    culprit = replace(culprit, loaders=(LoaderFacts(num_workers=2),), workers=left)
    facts = scenes.late(GLOO, culprit)
    assert next(iter(found(facts).items())) == ("worker-died", CERTAIN)


def test_another_child_that_has_failed_need_not_be_the_worker_that_is_missing() -> None:
    """A loader of iterable data lets workers go that have come to their end."""
    culprit = GLOO.working(2, NEXT_DATA, TRY_GET, scenes.QUEUE_GET, seq=60, action=NEXT)
    culprit = scenes.with_machine(culprit, ended=(EndedProcess(pid=99, exit_code=1),))
    left = (ProcessFacts(pid=4710, state="sleeping"),)
    culprit = replace(culprit, loaders=(LoaderFacts(num_workers=2),), workers=left)
    assert found(scenes.late(GLOO, culprit))["worker-died"] is not CERTAIN
    blind = replace(culprit, workers=(), missing=("workers: no answer within 0.5 s",))
    assert found(scenes.late(GLOO, blind)) == {"data-stall": CERTAIN, "worker-died": POSSIBLE}


def test_an_idle_worker_is_not_at_the_line_of_the_rank_that_forked_it() -> None:
    begins = Frame(file="/usr/lib/python3.11/multiprocessing/process.py", line=314, function="_bootstrap")
    loop = Frame(file=f"{SITE}/torch/utils/data/_utils/worker.py", line=330, function="_worker_loop")
    idle = ProcessFacts(pid=76, state="sleeping", stack=(MAIN, RUN, begins, loop, scenes.QUEUE_GET))
    reads = ProcessFacts(pid=77, state="sleeping", stack=(MAIN, RUN, begins, loop, user("read", 8)))
    culprit = GLOO.working(2, NEXT_DATA, TRY_GET, seq=60, action=NEXT)
    culprit = replace(culprit, workers=(idle, reads), loaders=(LoaderFacts(num_workers=2),))
    finding = judge(scenes.late(GLOO, culprit)).findings[0]
    assert (finding.rule, finding.confidence) == ("data-stall", CERTAIN)
    assert finding.location.endswith("train.py:8 in read")
    assert "train.py:200" not in finding.summary


def test_a_rank_that_reads_by_itself_is_at_its_own_line_whatever_pool_it_has() -> None:
    begins = Frame(file="/usr/lib/python3.11/multiprocessing/process.py", line=314, function="_bootstrap")
    works = Frame(file="/usr/lib/python3.11/multiprocessing/pool.py", line=114, function="worker")
    idle = ProcessFacts(pid=76, state="sleeping", stack=(MAIN, RUN, begins, works, scenes.QUEUE_GET))
    culprit = GLOO.working(2, NEXT_DATA, user("read", 8), scenes.QUEUE_GET, seq=60, action=NEXT)
    finding = judge(scenes.late(GLOO, replace(culprit, workers=(idle,)))).findings[0]
    assert finding.rule == "data-stall"
    assert finding.location.endswith("train.py:8 in read")


def test_a_shell_in_a_program_is_a_debugger_and_one_around_it_is_not() -> None:
    shell = Frame(file="/usr/lib/python3.11/code.py", line=250, function="raw_input")
    culprit = GLOO.working(2, user("training_step", 40), shell, seq=60, action=TRAINING_STEP)
    assert judge(scenes.late(GLOO, culprit)).findings[0].rule == "at-breakpoint"
    around = Frame(file=f"{SITE}/IPython/terminal/interactiveshell.py", line=900, function="mainloop")
    works = GLOO.working(2, around, user("training_step", 40), seq=60, action=TRAINING_STEP)
    assert "at-breakpoint" not in found(scenes.late(GLOO, works))


def test_what_has_to_go_is_the_call_of_a_debugger() -> None:
    prompt = Frame(file="/usr/lib/python3.12/pdb.py", line=432, function="_cmdloop")
    paused = GLOO.working(2, user("training_step", 40), prompt, seq=60, action=TRAINING_STEP)
    before = judge(scenes.late(GLOO, replace(paused, breakpoint_at=user("training_step", 39)))).findings[0]
    assert before.location.endswith("train.py:39 in training_step")
    assert "is paused in a debugger, called in line 39, " in before.summary
    assert "train.py:40 in training_step" in before.summary
    for call in (user("training_step", 40), None):
        at_it = judge(scenes.late(GLOO, replace(paused, breakpoint_at=call))).findings[0]
        assert at_it.location.endswith("train.py:40 in training_step")
        assert "called in line" not in at_it.summary


def test_a_debugger_that_waits_for_a_connection_is_one() -> None:
    listens = Frame(file=f"{SITE}/remote_pdb.py", line=60, function="__init__")
    culprit = GLOO.working(2, user("training_step", 40), listens, seq=60, action=TRAINING_STEP)
    finding = judge(scenes.late(GLOO, culprit)).findings[0]
    assert (finding.rule, finding.confidence, finding.ranks) == ("at-breakpoint", CERTAIN, (2,))


def test_which_process_a_rank_waits_for_is_not_known() -> None:
    assert found(scenes.queue_that_nobody_fills(GLOO)) == {"worker-died": LIKELY}
    assert found(scenes.pool_that_a_dataset_asks(GLOO)) == {"worker-died": LIKELY}


def everywhere(net: Backend, type_: str, message: str, **machine: object) -> JobFacts:
    """All four ranks raise the same, at the same line."""
    ranks = (raised(net.working(rank, seq=60), type_, message, RUN, user("training_step", 42)) for rank in range(4))
    return job(*(scenes.with_machine(one, **machine) for one in ranks))


@pytest.mark.parametrize(
    ("type_", "message", "rule", "words"),
    [
        ("RuntimeError", scenes.KILLED, "worker-died", "Workers of ranks 0-3 were killed by a signal (Killed), batch"),
        (
            "OutOfMemoryError",
            scenes.CUDA_OOM,
            "gpu-memory-exhausted",
            "Ranks 0-3 have run out of memory on their GPUs (rank 0 needed 2.00 GiB, with 1.20 GiB free) at train",
        ),
        ("RuntimeError", scenes.NO_SPACE, "shm-exhausted", "Shared memory (/dev/shm) is used up on ranks 0-3, batch"),
    ],
    ids=["workers", "GPU memory", "shared memory"],
)
def test_what_happens_on_all_ranks_is_one_finding(type_: str, message: str, rule: str, words: str) -> None:
    finding = only(everywhere(NCCL, type_, message))
    assert (finding.rule, finding.ranks) == (rule, (0, 1, 2, 3))
    assert finding.summary.startswith(words)


def test_workers_that_were_asked_to_end_are_not_blamed() -> None:
    message = "DataLoader worker (pid 4711) is killed by signal: Terminated. "
    assert only(everywhere(GLOO, "RuntimeError", message)).remedy.startswith("Something asked it to exit")


@pytest.mark.parametrize(
    "errno",
    ["Too many open files (24)", "Permission denied (13)", "Cannot allocate memory (12)"],
    ids=["files", "rights", "memory"],
)
def test_shared_memory_that_cannot_be_opened_for_another_reason_is_not_full(errno: str) -> None:
    message = f"unable to open shared memory object </torch_93_21> in read-write mode: {errno}"
    assert found(scenes.failed(GLOO, "RuntimeError", message)) == {"failed-rank": CERTAIN}


def test_a_bus_error_is_not_certain_to_be_shared_memory() -> None:
    """torch only says that it is possible: a mapped file that was cut short ends a worker as well."""
    assert found(scenes.failed(GLOO, "RuntimeError", scenes.BUS_ERROR)) == {"shm-exhausted": LIKELY}
    full = {"shm_total_bytes": 64_000_000, "shm_free_bytes": 0}
    assert found(scenes.failed(GLOO, "RuntimeError", scenes.BUS_ERROR, **full)) == {"shm-exhausted": CERTAIN}


def test_a_full_shared_memory_may_be_meant() -> None:
    culprit = GLOO.working(2, NEXT_DATA, TRY_GET, seq=60, action=NEXT)
    full = scenes.with_machine(culprit, shm_total_bytes=64 * GB, shm_free_bytes=GB // 2)
    assert found(scenes.late(GLOO, full)) == {"data-stall": CERTAIN, "shm-exhausted": POSSIBLE}


def test_the_handle_of_a_library_is_not_certain_to_lack_memory() -> None:
    message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    finding = only(scenes.failed(NCCL, "RuntimeError", message))
    assert (finding.rule, finding.confidence) == ("gpu-memory-exhausted", LIKELY)
    assert finding.summary.startswith("Rank 2 has probably run out of memory on its GPU at train.py:42")


def ended(facts: RankFacts) -> RankFacts:
    """The same rank, for which the back end has completed all that it called."""
    calls = tuple(replace(call, completed=True) for call in facts.collectives)
    groups = tuple(replace(group, last_completed=group.last_enqueued) for group in facts.groups)
    return replace(facts, collectives=calls, groups=groups)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 4261412864.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4575657222473777152 bytes. Error code 12",
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
    ],
    ids=["GPU", "CPU", "exabyte"],
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_size_that_nobody_has_is_another_collectives_data(has_ended: bool, message: str) -> None:
    """Rank 2 gathers objects while the others reduce gradients: it takes their numbers for a length.

    NCCL may have completed its call.
    """
    line = user("gather_metrics", 77)
    called = NCCL.rank(2, line, seq=61, outstanding=1, op="all_gather", sizes=((1,),))
    called = ended(called) if has_ended else called
    garbled = raised(called, "OutOfMemoryError", message, RUN, line)
    facts = job(*(garbled if rank == 2 else NCCL.waiting(rank, seq=61) for rank in range(4)))
    assert found(facts) == {"diverged-collectives": CERTAIN}


@pytest.mark.parametrize(
    ("deepest", "rule"),
    [
        (Frame(file=f"{SITE}/torch/distributed/utils.py", line=286, function="_verify"), "diverged-collectives"),
        (user("step", 4), "failed-rank"),
    ],
)
def test_a_number_that_is_none_is_another_collectives_data_only_in_torchs_own_code(deepest: Frame, rule: str) -> None:
    called = ended(NCCL.rank(2, user("fit", 3), seq=61, outstanding=1, op="all_gather", sizes=((1,),)))
    message = "value cannot be converted to type int without overflow"
    garbled = raised(called, "RuntimeError", message, RUN, deepest)
    facts = job(*(garbled if rank == 2 else NCCL.waiting(rank, seq=61) for rank in range(4)))
    assert next(iter(found(facts))) == rule


GATHER = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=3433, function="gather_object")
SAVE_SHARDS = Frame(file=f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", line=195, function="save")


@pytest.mark.parametrize(
    ("inner", "rule"),
    [
        ((GATHER,), "diverged-collectives"),
        ((SAVE_SHARDS, GATHER), "diverged-collectives"),
        ((user("step", 4),), "failed-rank"),  # what the user's own line asks for may be the user's own mistake
    ],
)
def test_a_size_that_no_rank_has_sent_shows_different_calls_although_no_entry_does(
    inner: tuple[Frame, ...], rule: str
) -> None:
    """The recorders of the other ranks cannot be read."""
    called = ended(NCCL.rank(0, user("fit", 3), seq=49, outstanding=1, op="all_gather", sizes=((1,),)))
    message = "CUDA out of memory. Tried to allocate more than 1EB memory."
    raising = raised(called, "OutOfMemoryError", message, RUN, user("save", 168), *inner)
    others = [unread(NCCL.rank(rank, RUN, EMPTY_CACHE, seq=84)) for rank in range(1, 4)]
    finding = judge(job(raising, *others)).findings[0]
    assert (finding.rule, finding.ranks) == (rule, (0,))
    if rule == "diverged-collectives":
        assert (finding.confidence, finding.location) == (LIKELY, f"{USER_FILE}:168 in save")
        assert "no rank has sent this size" in finding.summary


def unread_at_the_end(calls: dict[int, int], **progress: Any) -> JobFacts:
    """All ranks give memory back after training, behind devices that tell nothing."""
    ranks = [unread(NCCL.rank(rank, RUN, EMPTY_CACHE, seq=61, world=len(calls))) for rank in calls]
    groups = [(replace(facts.unrecorded[0], calls=calls[facts.rank]),) for facts in ranks]
    every = [replace(facts, unrecorded=own) for facts, own in zip(ranks, groups, strict=True)]
    return job(*every[:-1], replace(every[-1], progress=replace(every[-1].progress, **progress)), world=len(calls))


def test_a_rank_that_has_called_fewer_collectives_at_the_same_place_is_out_of_step() -> None:
    (finding,) = judge(unread_at_the_end({0: 108, 1: 104, 2: 108})).findings
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (1,), LIKELY)
    assert "collectives of the default group (108 on ranks 0, 2 but 104 on rank 1)" in finding.summary
    two = judge(unread_at_the_end({0: 108, 1: 104})).findings[0]
    assert (two.rule, two.ranks) == ("diverged-collectives", (0, 1))


def test_numbers_of_calls_show_nothing_at_other_places_or_if_they_are_equal() -> None:
    apart = unread_at_the_end({0: 108, 1: 108, 2: 104})
    other_layer = replace(apart.ranks[2], stack=(RUN, user("forward", 39), EMPTY_CACHE))
    for facts in (
        unread_at_the_end({0: 108, 1: 108, 2: 108}),
        unread_at_the_end({0: 108, 1: 108, 2: 104}, batch_idx=3),
        unread_at_the_end({0: 108, 1: 108, 2: 104}, global_step=3),
        replace(apart, ranks=(*apart.ranks[:2], other_layer)),
        # In a backward pass, one bucket more may have been launched; votes are called ahead.
        replace(apart, ranks=tuple(replace(facts, stack=(RUN, ENGINE)) for facts in apart.ranks)),
        replace(apart, ranks=tuple(map(with_gloos_count, apart.ranks))),
    ):
        assert "diverged-collectives" not in found(facts)


def with_gloos_count(facts: RankFacts) -> RankFacts:
    """As many calls of NCCL on all ranks, but not of gloo."""
    (own,) = facts.unrecorded
    votes = replace(own, name="1", backend="gloo", calls=own.calls)
    return replace(facts, unrecorded=(replace(own, calls=108), votes))


def test_a_rank_that_has_not_called_what_others_wait_in_is_behind_though_its_device_tells_nothing() -> None:
    computes = unread(NCCL.working(1, user("training_step", 57), EMPTY_CACHE, seq=60, action=TRAINING_STEP))
    one_less = replace(computes, unrecorded=(replace(computes.unrecorded[0], calls=60),))
    facts = job(*(one_less if rank == 1 else NCCL.waiting(rank, seq=61) for rank in range(4)))
    (finding,) = judge(facts).findings
    assert (finding.rule, finding.ranks, finding.confidence) == ("rank-behind", (1,), POSSIBLE)
    # A rank that reads a value under a condition on the rank is in the same call as the others.
    reads = NCCL.rank(0, user("log", 33, condition=ZERO), EMPTY_CACHE, seq=61, outstanding=1)
    (finding,) = judge(replace(facts, ranks=(reads, *facts.ranks[1:]))).findings
    assert (finding.rule, finding.ranks) == ("rank-behind", (1,))


def test_a_gpu_that_sends_to_a_peer_before_is_not_stuck() -> None:
    """Its stream is in a send of the same group, for which the peer is to blame."""
    facts = scenes.not_started_on_one_gpu(NCCL)
    send = Collective(group="0", seq=3, op="send 2->3", backend="nccl", is_p2p=True, created_ns=1)
    stuck = replace(facts.ranks[2], collectives=(send, *facts.ranks[2].collectives))
    assert "gpu-stuck" not in found(replace(facts, ranks=(*facts.ranks[:2], stuck, facts.ranks[3])))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"NCCL_P2P_LEVEL": "LOC"}, {"all-joined": LIKELY}),
        ({"NCCL_P2P_DISABLE": ""}, {"p2p-blocked": LIKELY, "all-joined": LIKELY}),
    ],
    ids=["level", "empty"],
)
def test_where_peer_to_peer_is_off_it_is_not_blocked(settings: dict[str, str], expected: dict[str, Confidence]) -> None:
    facts = scenes.first_collective_of_all_gpus(NCCL)
    told = (scenes.with_machine(one, settings=settings) for one in facts.ranks)
    assert found(replace(facts, ranks=tuple(told))) == expected


@pytest.mark.parametrize(
    "message",
    [
        "[1] is setting up NCCL communicator, but store->get('0') got error: wait timeout after 60000ms",
        "Rank 0 timed out: Ranks 1 failed to pass monitoredBarrier in 30000 ms",
    ],
    ids=["store", "monitored barrier"],
)
def test_a_rank_that_gave_up_waiting_has_closed_the_connections(message: str) -> None:
    ranks = [*scenes.on_two_hosts(*(lost(GLOO.waiting(rank, seq=61)) for rank in range(4)))]
    assert "network-cut" in found(job(*ranks))
    ranks[0] = raised(ranks[0], "RuntimeError", message, RUN, consequence=True)
    assert "network-cut" not in found(job(*ranks))


def test_connections_that_broke_after_ranks_diverged_are_no_cut() -> None:
    ranks: list[RankFacts] = [lost(GLOO.waiting(rank, seq=61)) for rank in range(4)]
    last = ranks[2].collectives[-1]
    other = replace(ranks[2], collectives=(*ranks[2].collectives[:-1], replace(last, op="barrier", input_sizes=())))
    assert "network-cut" not in found(job(*ranks[:2], other, ranks[3]))


def in_init(rank: int, world: int) -> RankFacts:
    progress = Progress(phase=Phase.INIT, actions=(Action(name="init_process_group", for_s=30),), idle_s=30)
    facts = RankFacts(rank=rank, local_rank=rank, host="node-1", progress=progress, stack=(INIT_GROUP,))
    taken = scenes.interface(rank, "lo", "127.0.1.1", is_loopback=True, chosen_by="address of the host's name")
    return scenes.with_machine(facts, interface=taken)


def test_an_interface_is_not_blamed_for_a_rank_that_may_not_have_been_started() -> None:
    """One host, on which loopback does, and processes that nobody may look at: both are possible."""
    facts = job(in_init(0, 2), world=2)
    assert found(facts) == {"wrong-interface": POSSIBLE, "late-at-init": POSSIBLE}
    summary = judge(facts).findings[0].summary
    condition = "this is the cause if rank 1, of which nothing is known, runs on another host."
    assert f"rank 0 waits at the start; {condition}" in summary


def test_on_one_host_any_interface_works_and_a_missing_rank_is_late() -> None:
    ranks = (replace(in_init(rank, 2), local_world_size=2) for rank in range(1))
    assert found(job(*ranks, world=2)) == {"late-at-init": POSSIBLE}


def confidences(build: Callable[[Backend], JobFacts]) -> set[Confidence]:
    return {finding.confidence for net in (GLOO, NCCL) for finding in judge(build(net)).findings}


def test_two_hosts_that_are_known_make_a_wrong_interface_likely() -> None:
    assert LIKELY in confidences(scenes.bridges_of_docker)


def test_a_question_to_a_name_server_counts_where_names_are_looked_up() -> None:
    """Libraries with resolvers of their own keep such sockets open."""
    facts = scenes.name_server_without_an_answer(GLOO)
    at_work = (replace(one, stack=(scenes.user("training_step", 40),)) for one in facts.ranks)
    assert "slow-name-server" not in found(replace(facts, ranks=tuple(at_work)))
    by_hand = scenes.user("prepare", 40, code="socket.gethostbyname(host)")
    assert (
        found(replace(facts, ranks=tuple(replace(one, stack=(by_hand,)) for one in facts.ranks)))["slow-name-server"]
        is LIKELY
    )
