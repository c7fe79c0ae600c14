"""Causes in host, process, device and network: what looks like one and is another, and what is said of each."""

from dataclasses import replace

import machine_scenes as scenes
import pytest
from builders import ENGINE, EPOCH_END, GLOO, NCCL, TRAINING_STEP, Backend, job, process, raised, transport_error, user
from judged import first, rules_found
from scenes import _in_init as scenes_in_init

from lightning_ncclsafe.facts import (
    ChildProcess,
    Collective,
    EndedProcess,
    ExitCall,
    Frame,
    GarbageFacts,
    GpuFacts,
    GpuStateFacts,
    Group,
    IncidentKind,
    InterfaceFacts,
    JobFacts,
    LoaderFacts,
    MainThreadFacts,
    Phase,
    PressureFacts,
    ProcessFacts,
    Progress,
    RankFacts,
    TriedAddress,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.machine import Wait, wait_of

GB = 1_000_000_000


def silent(**seen: object) -> Finding:
    """Rank 2 does not answer and is seen so."""
    return first(scenes.without_answer(GLOO, process(2, **seen)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scene", "parts"),
    [
        (scenes.paused_container, ("Rank 2 is frozen with its control group, as by a paused container, while ranks",)),
        (scenes.native_code_waits_with_the_gil, ("held by native code called at train.py:15 in gilsleep",)),
        (scenes.collects_garbage, ("Rank 2 is in Python's garbage collector, at train.py:40 in training_step",)),
        (scenes.collected_garbage, ("was in Python's garbage collector for 19 s, until 0.4 s ago",)),
        (scenes.page_fault_on_a_dead_mount, ("in rpc_wait_bit_killable, waiting for storage on a network",)),
        (scenes.fsync_hangs, ("Rank 2 waits for storage in percpu_rwsem_wait", "at train.py:21 in dump")),
        (scenes.starved_of_cores, ("waiting for a core most of the time (18 s of the last 20 s), in training_step",)),
        (scenes.throttled_by_a_quota, ("the CPU quota of its control group (in 199 of the last 201 periods)",)),
        (scenes.too_starved_to_answer, ("Rank 2 is starved of CPU time: it got 4% of a core, while",)),
        (scenes.swapped_out, ("waiting for memory that is swapped out",)),
        (scenes.worker_is_killed, ("worker 4711 of rank 2 was killed by a signal (Killed), and the kernel's out-of-",)),
        (
            scenes.queue_that_nobody_fills,
            ("Rank 2 waits for another process, and its child process 4711 was killed by SIGKILL: in training",),
        ),
        (
            scenes.worker_dies_of_a_bus_error,
            ("(/dev/shm) is probably used up on rank 2 (30.0 MB of its 64.0 MB are free now)",),
        ),
        (scenes.out_of_gpu_memory, ("(it needed 2.00 GiB, with 1.20 GiB free) at train.py:42 in training_step",)),
        (scenes.not_started_on_one_gpu, ("on the GPU of rank 2 it has not started, on those of ranks 0-1, 3 it has",)),
        (
            scenes.not_ended_on_one_gpu,
            ("on the GPU of rank 2 it has not ended, on those of ranks 0-1, 3 it has ended",),
        ),
        (scenes.sync_with_a_broken_gpu, ("Rank 2 waits for its own GPU, in training_step at train.py:44",)),
        (scenes.first_collective_of_all_gpus, ("The first collective, all_reduce (sequence number 1", "peer-to-peer")),
        (scenes.link_fails_for_a_moment, ("Connections to node-2 (ranks 2-3) were lost", "all 4 ranks are alive")),
        (scenes.bridges_of_docker, ("use the same address 172.17.0.1 (docker0), a bridge's",)),
        (scenes.loopback_between_hosts, ("Ranks 0-1 use the loopback interface",)),
    ],
)
def test_summaries(scene: object, parts: tuple[str, ...]) -> None:
    summary = first(scene(GLOO)).summary  # type: ignore[operator]
    for part in parts:
        assert part in summary


@pytest.mark.parametrize(
    ("channel", "wait"),
    [
        ("", Wait.UNKNOWN),
        ("futex_wait_queue", Wait.UNKNOWN),
        ("do_sys_poll", Wait.UNKNOWN),
        ("kernel_clone", Wait.UNKNOWN),
        ("nfs_wait_bit_killable", Wait.NETWORK_STORAGE),
        ("request_wait_answer", Wait.NETWORK_STORAGE),
        ("nvme_submit_sync_cmd", Wait.STORAGE),
        ("io_schedule", Wait.STORAGE),
        ("folio_wait_bit_common", Wait.STORAGE),
        ("jbd2_log_wait_commit", Wait.STORAGE),
        ("nv_wait_for_lock", Wait.DRIVER),
        ("uvm_va_block_wait", Wait.DRIVER),
        ("anon_pipe_read", Wait.PIPE),
        ("__refrigerator", Wait.FREEZER),
        ("do_freezer_trap", Wait.FREEZER),
        ("hrtimer_nanosleep", Wait.CLOCK),
        ("do_nanosleep", Wait.CLOCK),
    ],
)
def test_what_a_kernel_function_waits_for(channel: str, wait: Wait) -> None:
    assert wait_of(channel) is wait


def test_uninterruptible_sleep_for_no_known_reason_is_not_certain_to_be_storage() -> None:
    finding = silent(state="disk-sleep", wait_channel="kernel_clone")
    assert (finding.rule, finding.confidence) == ("blocked-on-disk", Confidence.LIKELY)
    assert silent(state="disk-sleep", wait_channel="nfs_wait_bit_killable").confidence is Confidence.CERTAIN
    # As for a page of a program or a mapped file that the host had no memory for.
    assert silent(state="disk-sleep", wait_channel="folio_wait_bit_common").confidence is Confidence.LIKELY


def test_uninterruptible_sleep_of_a_swapped_process_is_lack_of_memory() -> None:
    assert silent(state="disk-sleep", wait_channel="io_schedule", swap_bytes=4 * GB).rule == "host-starved"


def test_a_busy_process_that_gets_no_core_does_not_keep_the_gil() -> None:
    """On an overloaded host all the same, one that gets a third of a core could have answered."""
    seen = {"state": "running", "gil_held": True, "stack": (user("f", 1),)}
    assert silent(**seen, ran_share=0.05, queued_share=0.9).rule == "host-starved"
    assert silent(**seen, ran_share=0.3, queued_share=0.7).rule == "gil-held"
    assert silent(**seen).rule == "gil-held"


def test_a_process_that_sleeps_and_nobody_knows_why_is_frozen() -> None:
    assert silent(state="sleeping").rule == "frozen-rank"
    assert silent(state="sleeping", ran_share=0.0, queued_share=0.0).rule == "frozen-rank"


def not_joined(**seen: object) -> list[str]:
    facts = (scenes_in_init(rank) for rank in range(3))
    return rules_found(job(*facts, witnessed=(process(3, **seen),)))  # type: ignore[arg-type]


def test_a_rank_that_has_not_joined_is_late_unless_it_is_stopped_or_its_storage_is_dead() -> None:
    assert not_joined(state="disk-sleep", wait_channel="folio_wait_bit_common") == ["late-at-init"]
    assert not_joined(state="disk-sleep", wait_channel="nfs_wait_bit", swap_bytes=GB) == ["late-at-init"]
    assert not_joined(state="disk-sleep", wait_channel="nfs_wait_bit") == ["blocked-on-disk"]
    assert not_joined(state="disk-sleep", wait_channel="__refrigerator") == ["stopped-process"]
    assert not_joined(state="stopped") == ["stopped-process"]


def thread(**more: object) -> MainThreadFacts:
    return MainThreadFacts(**({"over_s": 20.0, "looks": 11, "state": "sleeping"} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "main_thread",
    [
        # Now and then, as one that reads many files.
        thread(state="disk-sleep", wait_channel="io_schedule", blocked_looks=3),
        thread(state="disk-sleep", wait_channel="nv_lock", blocked_looks=11),
        thread(wait_channel="futex_wait_queue"),
        thread(state="running", ran_s=19.0, queued_s=1.0),
    ],
)
def test_slow_work_is_neither_blocked_nor_starved(main_thread: MainThreadFacts) -> None:
    line = user("training_step", 40, code="np.save(path, everything)")
    assert rules_found(scenes.at_work(GLOO, line, main_thread=main_thread)) == ["rank-behind"]


@pytest.mark.parametrize(("looks", "confidence"), [(2, Confidence.LIKELY), (3, Confidence.CERTAIN)])
def test_storage_that_never_answers_is_certain_after_some_looks(looks: int, confidence: Confidence) -> None:
    blocked = thread(state="disk-sleep", wait_channel="io_schedule", looks=looks, blocked_looks=looks)
    finding = first(scenes.at_work(GLOO, main_thread=blocked))
    assert (finding.rule, finding.confidence) == ("blocked-on-disk", confidence)


def test_the_pipe_below_a_queue_is_no_file() -> None:
    waits = thread(wait_channel="anon_pipe_read")
    read = replace(scenes.QUEUE_GET, file="/usr/lib/python3.12/multiprocessing/connection.py", code="read(handle, n)")
    assert rules_found(scenes.at_work(GLOO, user("training_step", 40), read, main_thread=waits)) == ["rank-behind"]
    path = replace(read, file="/usr/lib/python3.12/pathlib.py", code="return f.read()")
    assert rules_found(scenes.at_work(GLOO, user("training_step", 40), path, main_thread=waits)) == ["blocked-on-disk"]


def test_a_wait_in_a_fifo_is_blamed_on_its_other_end_not_on_storage() -> None:
    line = user("training_step", 40, code="pipe = open(path, 'w')")
    finding = first(scenes.at_work(GLOO, line, main_thread=thread(wait_channel="wait_for_partner")))
    assert "waits for the other end of a pipe (kernel function wait_for_partner)" in finding.summary
    assert "lsof" in finding.remedy and "quotas" not in finding.remedy
    assert "storage" not in finding.summary


def in_pipe(file: str, *children: ChildProcess, channel: str = "anon_pipe_read") -> JobFacts:
    """Rank 2 reads a line from this file."""
    line = user("score", 40, code="answer = answers.readline()")
    scene = scenes.at_work(GLOO, line, main_thread=thread(wait_channel=channel))
    seen = {"awaited_file": file, "awaited_processes": children}
    return replace(scene, ranks=tuple(replace(one, **seen) if one.rank == 2 else one for one in scene.ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "channel", "confidence"),
    [
        ("/scratch/metrics.fifo", "anon_pipe_read", Confidence.LIKELY),
        ("", "wait_for_partner", Confidence.LIKELY),
        ("pipe:[4711]", "anon_pipe_read", Confidence.POSSIBLE),
        ("", "pipe_read", Confidence.POSSIBLE),
    ],
)
def test_only_a_pipe_with_a_name_is_likely_to_be_storage(file: str, channel: str, confidence: Confidence) -> None:
    finding = first(in_pipe(file, channel=channel))
    assert (finding.rule, finding.confidence) == ("blocked-on-disk", confidence)


@pytest.mark.parametrize(
    ("channel", "does"),
    [("anon_pipe_read", "reads from"), ("anon_pipe_write", "writes to"), ("pipe_wait", "waits for")],
)
def test_a_program_at_the_other_end_of_a_pipe_is_no_disk(channel: str, does: str) -> None:
    shell = ChildProcess(pid=123, parent=7, command="sh -c", state="sleeping")
    (finding,) = judge(in_pipe("pipe:[4711]", shell, channel=channel)).findings
    assert finding.rule == "rank-behind"
    assert finding.summary.endswith(f" Rank 2 {does} its child process 123 (sh -c), which is sleeping.")
    told = first(in_pipe("pipe:[4711]", ChildProcess(pid=123, parent=7, state="zombie"), channel=channel))
    assert told.summary.endswith(f" Rank 2 {does} its child process 123, which has ended.")
    start = "The pipe is full, and process 123," if "write" in channel else "Look at what process 123 is doing"
    assert finding.remedy.startswith(start)
    assert told.remedy.startswith("This rank does not wait in a collective")


def test_where_the_kernel_does_not_say_the_line_alone_is_not_much() -> None:
    line = user("training_step", 40, code="np.save(path, everything)")
    finding = first(scenes.at_work(GLOO, line, main_thread=thread()))
    assert (finding.rule, finding.confidence) == ("blocked-on-disk", Confidence.POSSIBLE)


@pytest.mark.parametrize(
    "pressure",
    [
        # A little, too short, and of a host that others use as well.
        PressureFacts(over_s=20.0, periods=200, throttled_periods=40, throttled_s=3.0),
        PressureFacts(over_s=0.6, periods=6, throttled_periods=6, throttled_s=0.5),
        PressureFacts(over_s=20.0, cpu_waited=0.99, memory_stalled=0.9, io_stalled=0.9),
        PressureFacts(over_s=20.0, periods=0, throttled_periods=0, throttled_s=0.0),
    ],
)
def test_pressure_on_a_host_alone_explains_no_rank(pressure: PressureFacts) -> None:
    main_thread = thread(state="running", ran_s=18.0, queued_s=2.0, major_faults=0)
    assert rules_found(scenes.at_work(GLOO, pressure=pressure, main_thread=main_thread)) == ["rank-behind"]


def test_a_wait_for_a_core_that_goes_on_counts_before_it_is_over() -> None:
    """The lowest priority, beside a busy process: it could run in every look, and has hardly run."""
    ready = thread(state="running", looks=11, running_looks=11, ran_s=0.3, queued_s=0.2)
    finding = first(scenes.at_work(GLOO, main_thread=ready))
    assert finding.rule == "host-starved" and "(20 s of the last 20 s)" in finding.summary
    slept = thread(state="running", looks=11, running_looks=5, ran_s=0.3, queued_s=0.2)
    assert rules_found(scenes.at_work(GLOO, main_thread=slept)) == ["rank-behind"]


def test_a_rank_that_shares_a_core_with_two_others_is_slower_but_not_stuck() -> None:
    """Three times slower is no hang: what it does takes long by itself."""
    sharing = thread(state="running", ran_s=7.0, queued_s=13.0)
    assert rules_found(scenes.at_work(GLOO, main_thread=sharing)) == ["rank-behind"]
    starved = thread(state="running", ran_s=4.0, queued_s=16.0)
    assert rules_found(scenes.at_work(GLOO, main_thread=starved)) == ["host-starved"]


def test_a_rank_that_is_too_slow_to_tell_is_judged_by_what_others_have_seen() -> None:
    facts = scenes.at_work(GLOO, main_thread=None)
    seen = process(2, "running", ran_share=0.01, queued_share=0.9)
    finding = first(replace(facts, witnessed=(seen,)))
    assert finding.rule == "host-starved" and "(it got 1% of one)" in finding.summary
    assert rules_found(replace(facts, witnessed=(replace(seen, ran_share=0.9),))) == ["rank-behind"]


def test_a_starved_rank_that_works_under_a_condition_is_both() -> None:
    line = user("on_train_epoch_end", 40, condition="if rank == 0:  (line 39)")
    starved = thread(state="running", ran_s=1.0, queued_s=18.0)
    assert rules_found(scenes.at_work(GLOO, line, main_thread=starved)) == ["rank-zero-only-work", "host-starved"]


@pytest.mark.parametrize(
    "garbage",
    [
        GarbageFacts(longest_s=0.8, ended_ago_s=0.1, total_s=0.8, count=1),
        # It is over for longer than the rank stands still, and short beside that time.
        GarbageFacts(longest_s=20.0, ended_ago_s=40.0, total_s=20.0, count=1),
        GarbageFacts(longest_s=4.0, ended_ago_s=2.0, total_s=4.0, count=1),
    ],
)
def test_a_collection_that_explains_nothing_is_not_blamed(garbage: GarbageFacts) -> None:
    assert rules_found(scenes.at_work(GLOO, garbage=garbage)) == ["rank-behind"]


def test_a_rank_that_answers_while_it_collects_is_in_a_finalizer() -> None:
    """The collector itself keeps the lock; a __del__ that waits lets it go. It is not the number of objects then."""
    finding = first(scenes.at_work(GLOO, garbage=GarbageFacts(running_s=21.0)))
    assert (finding.rule, finding.confidence) == ("gc-pause", Confidence.LIKELY)
    assert "has been in Python's garbage collector for 21 s, in a finalizer that it has called" in finding.summary
    assert "A collection began 21 s ago and is not over." in [item.text for item in finding.evidence]
    assert finding.remedy.startswith("Let no __del__")


def test_a_dead_child_of_a_rank_that_does_not_wait_for_it_is_no_cause() -> None:
    ended = (EndedProcess(pid=9, signal="SIGKILL"),)
    assert rules_found(scenes.at_work(GLOO, ended=ended)) == ["rank-behind"]


def test_a_batch_whose_maker_dies_while_it_hands_it_over() -> None:
    files = ("torch/utils/data/dataloader.py", "torch/multiprocessing/reductions.py", "multiprocessing/connection.py")
    stack = tuple(Frame(file=f"/usr/lib/python3.12/{file}", line=1, function="f") for file in files)
    broken = raised(GLOO.working(2, seq=60), "ConnectionResetError", "[Errno 104] Connection reset by peer", *stack)
    finding = first(scenes.late(GLOO, broken))
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.LIKELY)
    ended = (EndedProcess(pid=8, exit_code=1), EndedProcess(pid=9, signal="SIGKILL"))
    finding = first(scenes.late(GLOO, scenes.with_machine(broken, ended=ended)))
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.CERTAIN)
    assert "worker 9 of rank 2 was killed by a signal (SIGKILL)" in finding.summary
    elsewhere = raised(GLOO.working(2, seq=60), "ConnectionResetError", "[Errno 104]", *stack[1:])
    assert rules_found(scenes.late(GLOO, elsewhere)) == ["failed-rank"]


def test_a_worker_that_crashed_is_named_with_its_signal_and_line() -> None:
    """Torch may have been too late to learn the signal; of several workers, the one that its message names counts."""
    stack = (Frame(file="/usr/lib/torch/worker.py", line=9, function="_worker_loop"), user("decode", 52))
    ended = (EndedProcess(pid=10, signal="SIGKILL"), EndedProcess(pid=11, signal="SIGSEGV", stack=stack))
    failed = scenes.failed(GLOO, "RuntimeError", "DataLoader worker (pid(s) 11) exited unexpectedly")
    ranks = tuple(scenes.with_machine(one, ended=ended) if one.exception else one for one in failed.ranks)
    finding = first(replace(failed, ranks=ranks))
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.CERTAIN)
    assert finding.location == "/home/me/project/train.py:52 in decode"
    assert "was killed by a signal (SIGSEGV) at train.py:52 in decode" in finding.summary


def test_a_process_that_crashed_while_it_is_waited_for_is_told_with_its_line() -> None:
    facts = scenes.pool_that_a_dataset_asks(GLOO)
    ended = (EndedProcess(pid=4711, signal="SIGSEGV", stack=(user("decode", 52),)),)
    culprit = next(one for one in facts.ranks if one.machine.ended)
    ranks = tuple(scenes.with_machine(one, ended=ended) if one is culprit else one for one in facts.ranks)
    finding = first(replace(facts, ranks=ranks))
    assert (finding.rule, finding.location) == ("worker-died", "/home/me/project/train.py:52 in decode")
    assert "its child process 4711 was killed by SIGSEGV at train.py:52 in decode" in finding.summary
    assert first(facts).location == "/home/me/project/train.py:12 in __getitem__"


def test_a_child_that_has_exited_by_itself_is_less_sure() -> None:
    facts = scenes.queue_that_nobody_fills(GLOO)
    ended = (EndedProcess(pid=9, exit_code=1),)
    ranks = tuple(
        replace(one, machine=replace(one.machine, ended=ended if one.rank == 2 else ())) for one in facts.ranks
    )
    finding = first(replace(facts, ranks=ranks))
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.LIKELY)
    assert "exited with code 1" in finding.summary
    # Nor has it to do with loaders or memory.
    assert "num_workers" not in finding.remedy and {item.source for item in finding.evidence}.isdisjoint(
        ("loader", "host")
    )
    failed = replace(ended[0], raised="MemoryError: no room", stack=(user("resample", 17),))
    ranks = tuple(replace(one, machine=replace(one.machine, ended=(failed,) if one.rank == 2 else ())) for one in ranks)
    finding = first(replace(facts, ranks=ranks))
    assert "was ended by MemoryError: no room at train.py:17 in resample" in finding.summary
    assert finding.location.endswith("train.py:17 in resample")
    assert finding.remedy.startswith("Correct this exception.")


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("DataLoader worker (pid(s) 11, 12) exited unexpectedly", "worker-died"),
        ("DataLoader worker (pid 11) is killed by signal: Segmentation fault. ", "worker-died"),
        (
            "A process in the process pool was terminated abruptly while the future was running or pending.",
            "worker-died",
        ),
        (
            "unable to open shared memory object </torch_1_2> in read-write mode: No space left on device",
            "shm-exhausted",
        ),
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", "shm-exhausted"),
        ("[Errno 28] No space left on device: '/mnt/ckpt/last.ckpt'", "failed-rank"),
        ("bad label 11", "failed-rank"),
    ],
)
def test_what_an_exception_says(message: str, rule: str) -> None:
    assert rules_found(scenes.failed(GLOO, "RuntimeError", message)) == [rule]


def test_a_bus_error_beside_much_shared_memory_is_the_workers_death_first() -> None:
    much = {"shm_total_bytes": 25 * GB, "shm_free_bytes": 24 * GB}
    found = judge(scenes.failed(GLOO, "RuntimeError", scenes.BUS_ERROR, **much)).findings
    assert [(finding.rule, finding.confidence) for finding in found] == [
        ("worker-died", Confidence.CERTAIN),
        ("shm-exhausted", Confidence.POSSIBLE),
    ]


def test_no_space_left_is_shared_memorys_where_that_is_full() -> None:
    full = {"shm_total_bytes": 64_000_000, "shm_free_bytes": 4096}
    assert rules_found(scenes.failed(GLOO, "OSError", "[Errno 28] No space left on device", **full)) == [
        "shm-exhausted"
    ]


@pytest.mark.parametrize(
    ("type_", "message", "rule"),
    [
        ("OutOfMemoryError", "CUDA out of memory.", "gpu-memory-exhausted"),
        ("RuntimeError", "CUDA error: out of memory", "gpu-memory-exhausted"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "gpu-memory-exhausted"),
        # What follows from ranks that have called different collectives of objects.
        ("OutOfMemoryError", scenes.EXABYTE, "failed-rank"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 12.5 EiB.", "failed-rank"),
        ("MemoryError", "Unable to allocate 12 GiB for an array", "failed-rank"),
    ],
)
def test_what_is_want_of_gpu_memory(type_: str, message: str, rule: str) -> None:
    assert rules_found(scenes.failed(NCCL, type_, message)) == [rule]


def test_a_full_gpu_is_possible_if_the_others_have_room_and_not_reported_otherwise() -> None:
    def job_with(free_of_others: int) -> JobFacts:
        facts = scenes.at_work(NCCL, gpu=scenes.gpu_of(100_000_000))
        others = scenes.gpu_of(free_of_others)
        ranks = (one if one.rank == 2 else scenes.with_machine(one, gpu=others) for one in facts.ranks)
        return replace(facts, ranks=tuple(ranks))

    finding = first(job_with(40 * GB))
    assert (finding.rule, finding.confidence) == ("gpu-memory-exhausted", Confidence.POSSIBLE)
    assert rules_found(job_with(GB)) == ["rank-behind"]


def test_where_nobody_knows_what_has_started_no_gpu_stands_out() -> None:
    nobody = dict.fromkeys(range(4), False)
    assert rules_found(scenes.on_nccl(nobody, {})) == ["all-joined"]


def test_where_most_gpus_have_not_started_none_of_them_is_to_blame() -> None:
    assert rules_found(scenes.on_nccl({1: False, 2: False, 3: False}, {})) == ["all-joined"]


def test_a_root_that_is_done_before_the_others_blames_nobody() -> None:
    ranks = []
    for rank in range(4):
        facts = NCCL.in_sigterm_broadcast(rank, seq=63)
        last = replace(facts.collectives[-1], started=True, completed=rank in (0, 1))
        ranks.append(replace(facts, collectives=(*facts.collectives[:-1], last)))
    assert "gpu-stuck" not in rules_found(job(*ranks))


def test_a_gpu_that_waits_in_another_group_is_not_stuck() -> None:
    """Rank 2 has called in group "pair" before, which its device is still in."""
    facts = scenes.not_started_on_one_gpu(NCCL)
    call = Collective(group="pair", seq=5, op="all_reduce", backend="nccl", started=True, created_ns=1)
    pair = Group(name="pair", ranks=(2, 3), last_enqueued=5, last_completed=4)
    stuck = facts.ranks[2]
    waits = replace(stuck, groups=(*stuck.groups, pair), collectives=(call, *stuck.collectives))
    assert "gpu-stuck" not in rules_found(replace(facts, ranks=(*facts.ranks[:2], waits, facts.ranks[3])))


def test_a_rank_that_answers_from_within_the_driver_waits_for_its_gpu() -> None:
    line = user("training_step", 44, code="loss.backward()")
    blocked = thread(state="disk-sleep", wait_channel="nv_wait_for_lock", blocked_looks=11)
    assert rules_found(scenes.at_work(NCCL, line, main_thread=blocked)) == ["gpu-stuck"]


@pytest.mark.parametrize(
    ("channel", "is_of_gpu"),
    [("", True), ("nv_wait_for_lock", True), ("hrtimer_nanosleep", False), ("do_nanosleep", False)],
)
def test_a_rank_that_sleeps_between_looks_at_a_store_does_not_wait_for_its_gpu(channel: str, is_of_gpu: bool) -> None:
    line = user("on_train_epoch_end", 80, code='best = float(store.get("best"))')
    polls = NCCL.working(2, line, seq=60, action=EPOCH_END)
    facts = scenes.late(NCCL, scenes.with_machine(polls, main_thread=thread(wait_channel=channel)))
    assert ("gpu-stuck" in rules_found(facts)) is is_of_gpu
    assert first(facts).ranks == (2,)


def test_what_a_gpu_does_is_reported() -> None:
    state = GpuStateFacts(gpu=GpuFacts(index=0, xids=("74 (NVLink error)",)), utilization=1.0, power_w=71.0)
    finding = first(scenes.on_nccl({2: False}, {}, gpu={2: state}))
    texts = [item.text for item in finding.evidence if item.source == "gpu"]
    assert texts == ["Its GPU is 100% busy, draws 71 W.", "Of its GPU: the kernel's log has Xid 74 (NVLink error)."]


def recorded(facts: JobFacts) -> JobFacts:
    """As it is read from the Flight Recorder's dumps: groups and collectives, and nothing else."""
    progress = replace(facts.ranks[0].progress, phase=Phase.UNKNOWN, actions=(), batch_idx=-1, idle_s=0.0)
    ranks = (
        RankFacts(rank=one.rank, progress=progress, groups=one.groups, collectives=one.collectives)
        for one in facts.ranks
    )
    return replace(facts, ranks=tuple(ranks), incident=replace(facts.incident, kind=IncidentKind.RECORDED))


@pytest.mark.parametrize("scene", [scenes.not_started_on_one_gpu, scenes.not_ended_on_one_gpu])
def test_dumps_alone_show_a_stuck_gpu(scene: object) -> None:
    finding = first(recorded(scene(NCCL)))  # type: ignore[operator]
    assert (finding.rule, finding.ranks) == ("gpu-stuck", (2,))


def test_p2p_is_not_blamed_between_hosts_or_if_it_is_off() -> None:
    facts = scenes.first_collective_of_all_gpus(NCCL)
    assert rules_found(facts) == ["p2p-blocked", "all-joined"]
    assert rules_found(replace(facts, ranks=scenes.on_two_hosts(*facts.ranks))) == ["all-joined"]
    off = (scenes.with_machine(one, settings={"NCCL_P2P_DISABLE": "1"}) for one in facts.ranks)
    assert rules_found(replace(facts, ranks=tuple(off))) == ["all-joined"]
    # Dumps do not say on which host a rank was.
    assert rules_found(recorded(facts)) == ["all-joined"]


def test_p2p_is_not_blamed_for_a_later_collective() -> None:
    assert rules_found(scenes.on_nccl({}, {})) == ["all-joined"]


def test_p2p_is_not_blamed_after_a_collective_that_completed() -> None:
    ranks = (NCCL.rank(rank, ENGINE, seq=2, outstanding=1, phase=Phase.INIT, batch=-1) for rank in range(4))
    assert rules_found(job(*ranks)) == ["all-joined"]


def test_p2p_is_possible_only_where_nobody_knows_whether_it_has_started() -> None:
    facts = scenes.first_collective_of_all_gpus(NCCL)
    unknown = (replace(one, collectives=(replace(one.collectives[-1], started=False),)) for one in facts.ranks)
    found = judge(replace(facts, ranks=tuple(unknown))).findings
    assert [(finding.rule, finding.confidence) for finding in found] == [
        ("all-joined", Confidence.LIKELY),
        ("p2p-blocked", Confidence.POSSIBLE),
    ]


def lost(*said: str, finished: bool = False, hosts: bool = True) -> list[str]:
    """Ranks 0, 1, … have been told so by their connections."""
    ranks = [GLOO.waiting(rank, seq=61) for rank in range(4)]
    for rank, text in enumerate(said):
        told = transport_error(ranks[rank])
        assert told.exception is not None
        ranks[rank] = replace(told, exception=replace(told.exception, message=text))
    if finished:
        ranks[3] = GLOO.finished(3, seq=60, batch=19)
    return rules_found(job(*(scenes.on_two_hosts(*ranks) if hosts else ranks)))


RESET = "[gloo/transport/tcp/pair.cc:547] Connection reset by peer [10.0.0.2]:31337"
LIMIT = "[gloo/transport/tcp/unbound_buffer.cc:81] Application timeout caused pair closure"
NET_IB = "ncclRemoteError: … NET/IB : Got completion from peer 10.0.0.2<51000> with status=12 opcode=129"


def test_what_is_a_cut_network() -> None:
    assert lost(RESET, RESET)[0] == "network-cut"
    assert lost(NET_IB)[0] == "network-cut"
    # On one host there is no cable.
    assert lost(RESET, RESET, hosts=False)[0] == "network-cut"
    # Who has finished has left; who was too late has closed.
    assert "network-cut" not in lost(RESET, RESET, finished=True)
    assert "network-cut" not in lost(LIMIT, RESET)


def test_the_host_that_others_have_lost_is_named() -> None:
    ranks = [*scenes.on_two_hosts(*(NCCL.waiting(rank, seq=61) for rank in range(4)))]
    for rank in (0, 1):
        told = transport_error(ranks[rank])
        assert told.exception is not None
        message = "socketProgress: Connection closed by remote peer node-2<40321>"
        ranks[rank] = replace(told, exception=replace(told.exception, message=message))
    finding = first(job(*ranks))
    assert (finding.rule, finding.ranks, finding.confidence) == ("network-cut", (2, 3), Confidence.LIKELY)


def test_a_rank_that_is_silent_or_has_failed_is_no_cut_network() -> None:
    ranks = scenes.on_two_hosts(*(transport_error(GLOO.waiting(rank, seq=61)) for rank in range(4)))
    assert rules_found(job(*ranks))[0] == "network-cut"
    assert "network-cut" not in rules_found(job(*ranks[:3]))
    assert "network-cut" not in rules_found(job(*ranks[:3], witnessed=(process(3, "gone"),)))


def taking(*taken: InterfaceFacts, net: Backend = GLOO, seq: int = 1) -> list[Finding]:
    ranks = scenes.on_two_hosts(*(net.in_barrier(n, "x", seq=seq, phase=Phase.INIT, batch=-1) for n in range(4)))
    told = (scenes.with_machine(one, interface=by) for one, by in zip(ranks, taken, strict=True))
    return [*judge(job(*told)).findings]


def eth(rank: int, network: str = "10.0.0.0/24") -> InterfaceFacts:
    return scenes.interface(rank, "eth0", f"10.0.0.{rank}", network)


def test_interfaces_are_blamed_only_if_their_networks_differ() -> None:
    found = taking(eth(0), eth(1), eth(2), eth(3, "192.168.1.0/24"))
    assert {finding.rule: (finding.ranks, finding.confidence) for finding in found}["wrong-interface"] == (
        (3,),
        Confidence.POSSIBLE,
    )
    assert "wrong-interface" not in [finding.rule for finding in taking(*(eth(rank) for rank in range(4)))]


def test_once_something_has_come_through_the_interface_is_right() -> None:
    docker = [scenes.interface(rank, "docker0", "172.17.0.1") for rank in range(4)]
    assert taking(*docker)[0].rule == "wrong-interface"
    assert "wrong-interface" not in [finding.rule for finding in taking(*docker, seq=7)]


def test_a_connection_that_could_not_be_made_is_no_death() -> None:
    """Gloo gives up at the start; of the rank on the other host nothing is known."""
    taken = scenes.interface(0, "docker0", "172.17.0.1", "172.17.0.0/16")
    progress = Progress(phase=Phase.INIT, last_action="init_process_group", idle_s=0.1)
    message = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error"
    said = raised(RankFacts(rank=1, progress=progress), "RuntimeError", message, consequence=True)
    facts = job(scenes.with_machine(said, interface=taken), world=2)
    assert rules_found(facts) == ["wrong-interface", "frozen-rank"]
    assert rules_found(job(transport_error(GLOO.waiting(1, seq=61)), world=2)) == ["dead-rank"]


def test_on_one_host_any_interface_will_do() -> None:
    facts = scenes.bridges_of_docker(GLOO)
    assert "wrong-interface" not in rules_found(
        replace(facts, ranks=tuple(replace(one, host="node-1") for one in facts.ranks))
    )


def test_the_older_causes_keep_their_names_beside_facts_of_the_machine() -> None:
    """A rank that waits on NCCL with a busy core, in backward, as all do."""
    busy = MainThreadFacts(over_s=20.0, state="running", looks=11, ran_s=19.5, queued_s=0.4)
    ranks = (
        scenes.with_machine(NCCL.rank(rank, ENGINE, seq=63, outstanding=1), main_thread=busy) for rank in (0, 1, 3)
    )
    slow = scenes.with_machine(NCCL.working(2, user("slow", 9), seq=62, action=TRAINING_STEP), main_thread=busy)
    assert rules_found(job(*ranks, slow)) == ["rank-behind"]


def test_a_silent_process_is_reported_with_the_cpu_time_it_got() -> None:
    seen = ProcessFacts(pid=7, rank=2, state="running", wait_channel="", cpu_s=3.2, ran_share=0.05)
    (evidence,) = first(scenes.without_answer(GLOO, seen)).evidence
    assert evidence.text == ("Process 7 is running, 3.2 s of CPU time used, got 5% of a core while observed.")


def test_swap_in_use_is_reported_with_a_rank_that_lacks_memory() -> None:
    finding = first(scenes.swapped_out(GLOO))
    assert any("9.0 GB of it swapped out" in item.text for item in finding.evidence)
    assert "too little memory" in finding.remedy


def joined_on_two_hosts(*tried: TriedAddress) -> list[Finding]:
    ranks = scenes.on_two_hosts(*(GLOO.waiting(rank, seq=61) for rank in range(4)))
    return [*judge(replace(job(*ranks), tried=tried)).findings]


def test_a_host_that_is_not_reached_where_its_data_goes_is_cut_off() -> None:
    lost = TriedAddress(host="node-2", address="10.1.0.2", answers=False, seen_from="node-1", tried="no route to host")
    finding, *others = joined_on_two_hosts(lost)
    assert (finding.rule, finding.ranks, finding.confidence) == ("network-cut", (2, 3), Confidence.LIKELY)
    assert "node-2 cannot be reached from node-1 at 10.1.0.2" in finding.summary
    assert [other.rule for other in others] == ["all-joined"]
    # That none is reached speaks of the host that tries.
    finding, *_ = joined_on_two_hosts(lost, replace(lost, host="node-3"))
    assert (finding.rule, finding.ranks) == ("network-cut", (0, 1))


def test_where_nothing_answers_a_firewall_may_be_the_reason() -> None:
    lost = TriedAddress(host="node-2", address="10.1.0.2", answers=False, seen_from="node-1", tried="no answer")
    other = replace(lost, host="node-3", answers=True)
    assert [(finding.rule, finding.confidence) for finding in joined_on_two_hosts(lost)] == [
        ("all-joined", Confidence.LIKELY),
        ("network-cut", Confidence.POSSIBLE),
    ]
    assert joined_on_two_hosts(lost, other)[0].rule == "network-cut"


@pytest.mark.parametrize("answers", [True, None])
def test_a_host_that_is_reached_or_unknown_is_not_cut_off(answers: bool | None) -> None:
    tried = TriedAddress(host="node-2", address="10.1.0.2", answers=answers, seen_from="node-1")
    assert [finding.rule for finding in joined_on_two_hosts(tried)] == ["all-joined"]


def test_a_late_rank_is_late_whatever_can_be_reached() -> None:
    lost = TriedAddress(host="node-2", address="10.1.0.2", answers=False, seen_from="node-1")
    late = scenes.at_work(GLOO)
    ranks = scenes.on_two_hosts(*late.ranks)
    assert rules_found(replace(late, ranks=ranks, tried=(lost,))) == ["rank-behind"]


def test_a_process_of_the_users_own_is_no_worker_of_a_loader() -> None:
    """What is to be done about it has nothing to do with the loader, and a call that kills so comes first."""
    kills = ExitCall(code="os.kill(os.getpid(), 9)", place="/home/me/train.py:49 in end", signal="SIGKILL")
    facts = scenes.queue_that_nobody_fills(GLOO)
    ranks = tuple(replace(one, loaders=(LoaderFacts(dataset="Digits"),), exit_calls=(kills,)) for one in facts.ranks)
    finding = first(replace(facts, ranks=ranks))
    assert not any(item.source == "loader" for item in finding.evidence)
    assert [item.source for item in finding.evidence][:2] == ["process", "source code"]
    assert finding.remedy.startswith("Look first at what leads to os.kill(os.getpid(), 9) at train.py:49 in end.")
    assert "SIGKILL comes from outside" in finding.remedy
    assert "num_workers" not in finding.remedy
    assert "prefetch_factor" not in finding.remedy
    assert finding.remedy.endswith("wait with a timeout and check Process.is_alive() or its exitcode.")
    exited = (EndedProcess(pid=9, exit_code=1),)
    ranks = tuple(replace(one, machine=replace(one.machine, ended=exited if one.rank == 2 else ())) for one in ranks)
    assert "in what it runs" in first(replace(facts, ranks=ranks)).remedy


@pytest.mark.parametrize(("reads_alone", "done"), [(True, (8, 9)), (True, ()), (False, (8, 9))])
def test_who_reads_from_a_pipe_that_only_ended_processes_had_waits_in_vain(
    reads_alone: bool, done: tuple[int, ...]
) -> None:
    """Others may have exited as they should, while the one that answers lives."""
    facts = scenes.queue_that_nobody_fills(GLOO)
    ranks = tuple(
        replace(one, reads_alone=reads_alone, machine=replace(one.machine, ended=(), done=done)) if ended else one
        for one in facts.ranks
        for ended in [bool(one.machine.ended)]
    )
    finding = first(replace(facts, ranks=ranks))
    assert (finding.rule == "worker-died") == (reads_alone and bool(done))
    if finding.rule == "worker-died":
        assert finding.confidence is Confidence.LIKELY
        assert (
            "a pipe that no other process has open, and some of its child processes have exited with" in finding.summary
        )
        assert finding.evidence[0].text == "Child processes that have exited with status 0: 8, 9."


@pytest.mark.parametrize("lines", [(), (27,), (27, 40)])
def test_a_line_of_the_job_that_stops_processes_is_told_of_a_stopped_one(lines: tuple[int, ...]) -> None:
    places = tuple(f"/home/me/project/governor.py:{line} in main" for line in lines)
    ranks = (GLOO.waiting(rank, seq=61) for rank in (0, 1, 3))
    finding = first(job(*ranks, witnessed=(process(2, "stopped", stopping_at=places),)))
    assert (finding.rule, finding.ranks) == ("stopped-process", (2,))
    assert finding.location == (places[0] if len(places) == 1 else "")
    listed = ", ".join(f"governor.py:{line} in main" for line in lines)
    assert finding.summary.endswith(f" This job's own code may have done that, at {listed}.") == bool(lines)
    assert ("always continues them." in finding.remedy) == bool(lines)
