"""What a finding tells besides its cause: the words that a user acts on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import builders
import machine_scenes
import pytest
import scenes
from builders import GLOO, NCCL, RUN, Backend, user

from lightning_ncclsafe.facts import (
    EndedProcess,
    Frame,
    HostFacts,
    JobFacts,
    LastSeen,
    Phase,
    Progress,
    RankFacts,
    StorageFacts,
)
from lightning_ncclsafe.facts.findings import Finding, Plan
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.machine import directories, directory_words, short_of_memory, swaps

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("scene", "parts"),
    [
        (
            scenes.rank_zero_evaluates,
            (
                "Rank 0 is working alone under `if self.trainer.is_global_zero:` (line 70) in Net.on_train_epoch_end",
                "at train.py:73 in evaluate, batch 23 of epoch 0, for 10 min 12 s",
                "ranks 1-3 wait in Lightning's per-batch SIGTERM broadcast (broadcast, sequence number 61, 1 element",
            ),
        ),
        (scenes.late_in_setup, ("still in Data.setup at train.py:18 in setup", "its host is swapping")),
        (
            scenes.not_yet_joined,
            (
                "Rank 3 has not joined the process group, and is at train.py:9 in main, with 10.0 GB resident",
                "while ranks 0-2 wait for it in init_process_group.",
            ),
        ),
        (scenes.short_rank_finished, ("Rank 1 has run out of data (after 20 batches of epoch 0)", "in batch 20")),
        (scenes.logger_flushes, ("which writes to /mnt/logs (nfs4)", "at event_file_writer.py:120 in flush")),
        (scenes.checkpoint_is_written, ("to /mnt/ckpt (nfs4)", "Lightning's barrier 'Trainer.save_checkpoint'")),
        (scenes.loader_workers_stall, ("(its 2 workers are in disk-sleep at train.py:8 in read)",)),
        (scenes.one_rank_fails, ("Rank 3 raised ValueError: bad label 11 at train.py:42 in training_step, batch 11",)),
        (scenes.one_rank_was_killed, ("The process of rank 1 is gone", "out-of-memory killer was active")),
        (scenes.one_rank_skips_a_step, ("rank 1 called broadcast (1 element", "as number 61 of the default group")),
        (scenes.stopped_by_a_signal, ("stopped by a signal (SIGSTOP)",)),
        (scenes.holds_the_gil, ("global interpreter lock held by native code called at train.py:41 in training_step",)),
        (scenes.host_does_not_answer, ("it is unknown whether the host, the network or the process",)),
        (
            scenes.slow_step,
            ("Rank 2 is behind, in training_step at train.py:90 in slow, batch 11 of epoch 0",),
        ),
    ],
)
def test_summaries(scene: Callable[[Backend], JobFacts], parts: tuple[str, ...]) -> None:
    summary = judge(scene(GLOO)).findings[0].summary
    for part in parts:
        assert part in summary


@pytest.mark.parametrize(
    ("scene", "part"),
    [
        (scenes.late_in_setup, "61.0 GB resident, 12.3 GB of it swapped out, 900.0 MB read back from swap"),
        (scenes.loader_workers_stall, "Digits is read with num_workers=2 with prefetch_factor=250."),
        (scenes.loader_workers_stall, "Worker 77 is in disk-sleep at train.py:8 in read"),
        (scenes.logger_flushes, "TensorBoardLogger writes to /mnt/logs (nfs4)."),
        (scenes.logger_flushes, "Has spent 23 s in SummaryWriter.flush on /mnt/logs (nfs4)."),
        (
            scenes.offloaded_logger_blocks,
            "the training thread to /mnt/logs: a write has been running for 41 s, the longest took 0.0 s, 1.1 GB wait",
        ),
        (scenes.short_rank_finished, "Ranks 0, 2-3: batch 20 of epoch 0; its loader has 22 batches."),
        (scenes.rank_zero_evaluates, "Rank 0 has called 60 collectives of the default group; ranks 1-3 wait"),
        (scenes.one_rank_was_killed, "out-of-memory killer has ended 1 process on node-1."),
    ],
)
def test_evidence(scene: Callable[[Backend], JobFacts], part: str) -> None:
    evidence = [item.text for item in judge(scene(GLOO)).findings[0].evidence]
    assert any(part in text for text in evidence), evidence


def test_a_killed_rank_needs_less_memory() -> None:
    assert "memory" in judge(scenes.one_rank_was_killed(GLOO)).findings[0].remedy


def test_a_loggers_directory_is_not_a_checkpoints() -> None:
    facts = RankFacts(
        rank=0,
        progress=Progress(phase=Phase.TRAIN),
        storage=(
            StorageFacts(owner="TensorBoardLogger", path="/logs", filesystem="nfs4"),
            StorageFacts(owner="ModelCheckpoint", path="/ckpt"),
        ),
    )
    assert [directory_words(entry) for entry in directories(facts, of_checkpoints=True)] == ["/ckpt"]
    assert [directory_words(entry) for entry in directories(facts, of_checkpoints=False)] == ["/logs (nfs4)"]


def test_only_gloo_hides_whether_a_collective_has_started() -> None:
    assert any("Gloo does not report" in line for line in judge(scenes.link_is_broken(GLOO)).unanswered)
    assert judge(scenes.link_is_broken(NCCL)).unanswered == ()
    assert "Started on every device." in [item.text for item in judge(scenes.link_is_broken(NCCL)).findings[0].evidence]


@pytest.mark.parametrize(
    ("host", "swapping", "short"),
    [
        (HostFacts(), False, False),
        (HostFacts(swapped_in_bytes=3 * GB), False, False),
        (HostFacts(process_swap_bytes=3 * GB), True, False),
        (HostFacts(memory_total_bytes=100 * GB, memory_available_bytes=4 * GB), False, True),
        (HostFacts(memory_total_bytes=100 * GB, memory_available_bytes=40 * GB), False, False),
        (HostFacts(rss_bytes=31 * GB, memory_limit_bytes=32 * GB), False, True),
    ],
)
def test_memory(host: HostFacts, swapping: bool, short: bool) -> None:
    assert (swaps(host), short_of_memory(host)) == (swapping, short)


def ended(*ends: dict[str, Any]) -> Finding:
    """Rank 0 is left of some, whose processes have ended so."""
    peers = tuple(replace(builders.process(rank, "zombie"), **end) for rank, end in enumerate(ends, start=1))
    seen = replace(GLOO.waiting(0, seq=61), peers=peers)
    return judge(replace(scenes.one_rank_was_killed(GLOO), ranks=(seen,), world_size=len(ends) + 1)).findings[0]


@pytest.mark.parametrize(
    ("end", "text", "remedy"),
    [
        ({"exit_code": 2}, "The process of rank 1 has exited with status 2, while rank 0 waits", "os._exit"),
        ({"exit_code": 0}, "has exited with status 0", "os._exit"),
        (
            {"ended_by": "SIGKILL"},
            "was killed by SIGKILL (by the kernel's out-of-memory killer or someone else)",
            "SIGKILL comes from outside",
        ),
        ({"ended_by": "SIGSEGV"}, "was ended by SIGSEGV (a segmentation fault)", "native code"),
        ({"ended_by": "SIGTERM"}, "was ended by SIGTERM, while", "Find out what ends processes there"),
        ({"ended_by": "SIGUSR1"}, "was ended by SIGUSR1, while", "Look at the end of this rank's own output"),
        ({}, "The process of rank 1 is gone, while", "Look at the end of this rank's own output"),
    ],
)
def test_a_rank_that_has_ended_is_reported_with_how_it_has(end: dict[str, Any], text: str, remedy: str) -> None:
    finding = ended(end)
    assert (finding.rule, finding.ranks) == ("dead-rank", (1,))
    assert text in finding.summary
    assert remedy in finding.remedy
    told = f"{finding.summary}{finding.remedy}"
    assert ("out-of-memory" in told) == (end == {"ended_by": "SIGKILL"})
    assert ("segmentation" in told) == (end == {"ended_by": "SIGSEGV"})


def test_a_fatal_signal_says_at_which_line() -> None:
    words = {
        "ended_by": "SIGSEGV",
        "stack": (RUN, user("decode", 31), Frame(file="/usr/lib/x.py", line=1, function="f")),
    }
    finding = ended(words)
    assert finding.location.endswith(":31 in decode")
    assert "(a segmentation fault) at train.py:31 in decode, while" in finding.summary
    assert ended(words, words | {"stack": (RUN, user("other", 7))}).location == "", "two lines"
    assert ended({"ended_by": "SIGSEGV", "stack": (user("main", 3), RUN)}).location == "", "not the user's"


def test_ranks_that_have_ended_differently_are_reported_one_by_one() -> None:
    finding = ended({"exit_code": 2}, {"ended_by": "SIGABRT"}, {})
    assert "The processes of ranks 1-3 are gone" in finding.summary
    assert [item.text.partition(" ")[2].partition(" ")[2] for item in finding.evidence] == [
        "has exited with status 2.",
        "was ended by SIGABRT (it aborted itself, as a failed assertion does).",
        "is gone; how it ended is not known here, but its launcher may report it.",
    ]


def test_a_kill_for_memory_elsewhere_does_not_explain_an_exit() -> None:
    killed = scenes.one_rank_was_killed(GLOO)
    exited = replace(killed.ranks[0], peers=(replace(killed.ranks[0].peers[0], state="zombie", exit_code=3),))
    finding = judge(replace(killed, ranks=(exited, *killed.ranks[1:]))).findings[0]
    assert "exited with status 3" in finding.summary
    assert "memory" not in f"{finding.summary}{finding.remedy}"


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        ("SystemExit", "0", "Rank 3 left the others by SystemExit with status 0 at train.py:42 in training_step"),
        ("SystemExit", "", "with status 0 at"),
        ("SystemExit", "None", "with status 0 at"),
        ("SystemExit", "3", "with status 3 at"),
        ("SystemExit", "no space left", "with status 1 (no space left) at"),
        ("KeyboardInterrupt", "", "Rank 3 was interrupted (KeyboardInterrupt: SIGINT, as by Ctrl-C) at train.py:42"),
    ],
)
def test_a_rank_that_leaves_is_reported_with_its_status(kind: str, message: str, text: str) -> None:
    failed = scenes.one_rank_fails(GLOO)
    left = tuple(
        replace(facts, exception=replace(facts.exception, type=kind, message=message)) if facts.exception else facts
        for facts in failed.ranks
    )
    finding = judge(replace(failed, ranks=left)).findings[0]
    assert text in finding.summary
    assert "Correct the" not in finding.remedy


def test_ranks_that_wait_for_nobody_wait_by_themselves() -> None:
    alike = judge(scenes.each_waits_by_itself(GLOO)).findings[0]
    assert alike.summary.startswith("Ranks 0-3 wait by themselves, in training_step")
    (working, *_) = judge(scenes.rank_zero_works_and_the_others_look_for_its_file(GLOO)).findings
    assert "wait by themselves" in working.summary


def test_a_handler_of_pythons_logging_is_told_as_one_with_its_own_remedy() -> None:
    """Where Lightning's loggers write has nothing to do with it."""
    finding = judge(scenes.a_handler_of_logging_sends(GLOO)).findings[0]
    assert finding.summary.startswith("Rank 1 is held up in a handler of Python's logging, in ")
    assert "QueueHandler" in finding.remedy and "LoggerOffload" not in finding.remedy
    assert not any("/mnt/logs" in item.text for item in finding.evidence)


def test_a_step_that_was_left_out_has_not_ended_the_loop() -> None:
    (finding, *_) = judge(scenes.an_optimizer_step_left_out_on_one_rank(GLOO)).findings
    told = [item.text for item in finding.evidence if item.source == "source code"]
    assert told == [f"{builders.USER_FILE}:70 in training_step may have led around the optimizer's step."]
    assert "Steps of optimizer 0 in batch 7 of epoch 0: 0 on rank 1 but 1 on ranks 0, 2-3." in finding.summary


@pytest.mark.parametrize(
    ("host", "is_first"),
    [
        (HostFacts(), False),
        (HostFacts(oom_kills=0, memory_total_bytes=100 * GB, memory_available_bytes=40 * GB), False),
        (HostFacts(memory_total_bytes=100 * GB, memory_available_bytes=4 * GB), True),
    ],
)
def test_memory_is_named_first_only_if_something_speaks_for_it(host: HostFacts, is_first: bool) -> None:
    seen = replace(GLOO.waiting(0, seq=61), host_facts=host, peers=(builders.process(1, "gone", ended_by="SIGKILL"),))
    rank = judge(replace(scenes.one_rank_was_killed(GLOO), ranks=(seen,), world_size=2)).findings[0]
    facts = machine_scenes.queue_that_nobody_fills(GLOO)
    ranks = tuple(replace(one, host_facts=host) for one in facts.ranks)
    worker = judge(replace(facts, ranks=ranks)).findings[0]
    assert (rank.rule, worker.rule) == ("dead-rank", "worker-died")
    for remedy in (rank.remedy, worker.remedy):
        assert "CPU time (RLIMIT_CPU, ulimit -t)" in remedy
        assert (remedy.index("dmesg") < remedy.index("ulimit -t")) is is_first


def test_a_process_that_has_used_up_its_cpu_time_has_not_crashed() -> None:
    facts = machine_scenes.queue_that_nobody_fills(GLOO)
    of_time = (EndedProcess(pid=4711, signal="SIGXCPU"),)
    ranks = tuple(machine_scenes.with_machine(one, ended=of_time) if one.machine.ended else one for one in facts.ranks)
    worker = judge(replace(facts, ranks=ranks)).findings[0]
    text = "DataLoader worker (pid 4711) is killed by signal: CPU time limit exceeded. "
    of_loader = judge(machine_scenes.failed(GLOO, "RuntimeError", text)).findings[0]
    assert (worker.rule, of_loader.rule) == ("worker-died", "worker-died")
    for finding in (worker, of_loader, ended({"ended_by": "SIGXCPU"})):
        assert finding.remedy.startswith("The process had used up its CPU time: find out what limits it (RLIMIT_CPU: ")
        assert finding.plan is Plan.UNKNOWN


def test_a_process_with_a_bus_error_has_lost_a_page_of_a_mapped_file() -> None:
    facts = machine_scenes.queue_that_nobody_fills(GLOO)
    of_file = (EndedProcess(pid=4711, signal="SIGBUS"),)
    ranks = tuple(machine_scenes.with_machine(one, ended=of_file) if one.machine.ended else one for one in facts.ranks)
    worker = judge(replace(facts, ranks=ranks)).findings[0]
    assert worker.rule == "worker-died"
    for finding in (worker, ended({"ended_by": "SIGBUS"})):
        assert "rename it (os.replace)" in finding.remedy and "native code" not in finding.remedy


@pytest.mark.parametrize(
    ("below", "is_passed"),
    [
        ((), True),
        ((Frame(file="/usr/lib/python3.12/ctypes/__init__.py", line=528, function="string_at"),), True),
        ((Frame(file="/usr/lib/site-packages/decord/video_reader.py", line=9, function="get_batch"),), False),
    ],
)
def test_a_line_that_crashes_by_itself_may_pass_on_what_is_wrong(below: tuple[Frame, ...], is_passed: bool) -> None:
    finding = ended({"ended_by": "SIGSEGV", "stack": (RUN, user("__getitem__", 31), *below)})
    assert "at train.py:31 in __getitem__" in finding.summary
    assert ("check what that line passes to it" in finding.remedy) is is_passed
    assert ("This is a bug in native code" in finding.remedy) is not is_passed
    unknown = ended({"ended_by": "SIGSEGV"}, {"ended_by": "SIGSEGV"})
    assert unknown.remedy.startswith("This is a bug in native code")
    assert unknown.remedy.endswith("PYTHONFAULTHANDLER=1 prints it.")


def test_a_line_that_crashed_is_told_with_the_batch_in_which_the_rank_was_last_seen() -> None:
    seen = LastSeen(progress=Progress(phase=Phase.TRAIN, epoch=0, batch_idx=10, idle_s=0.1))
    finding = ended({"ended_by": "SIGSEGV", "stack": (RUN, user("__getitem__", 31)), "last_seen": seen})
    assert " at train.py:31 in __getitem__, last seen in batch 10 of epoch 0, while rank 0 waits" in finding.summary
    long_ago = replace(seen, progress=replace(seen.progress, batch_idx=3))
    finding = ended({"ended_by": "SIGSEGV", "stack": (RUN, user("__getitem__", 31)), "last_seen": long_ago})
    assert " at train.py:31 in __getitem__, while rank 0 waits" in finding.summary
    assert finding.summary.endswith(", in batch 11 of epoch 0."), "the others wait for it there"
