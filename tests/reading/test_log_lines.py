"""Lines that users have pasted into public issues, of torch 2.0 to 2.13, and what they say.

The files in ``logs`` are named after the issue that they are from (project and number) and are short excerpts, some of
which were shortened where they stand and have been completed by the wording of their version of torch; those
of torchrun and gloo were recorded with torch 2.13, rank 1 of 3 raising, being killed, or asleep.
"""

import gzip
import io
from pathlib import Path

import pytest
from made_logs import TRACEBACK, judged, prefixed, read, timeout

from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.lines import lines, taken_apart
from lightning_ncclsafe.reading.logs import Log
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

LOGS = Path(__file__).with_name("logs")

# File without suffix, the first finding's name, its ranks, how sure it is, and the number of ranks that is concluded.
CASES = [
    ("accelerate_3861", "silent-rank", (0,), "likely", 3),
    ("arctic_219", "watchdog-stuck", (5, 7), "possible", 8),
    ("colossalai_3514", "dead-rank", (3,), "likely", 4),
    ("dgx_spark_desync", "host-stuck", (1,), "likely", 1),
    ("frontier_dump_signal", "host-stuck", (0, 2), "likely", 15),
    ("llamafactory_6269", "silent-rank", (1, 5, 7), "possible", 8),
    ("milabench_269", "silent-rank", (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13), "possible", 15),
    ("nccl_1610", "rank-behind", (), "possible", 16),
    ("nccl_849", "host-stuck", (4, 5, 6, 7), "likely", 1),
    ("open_clip_1024", "silent-rank", (0, 1, 2, 3, 6), "possible", 8),
    ("open_clip_1087", "rank-behind", (), "possible", 4),
    ("open_r1_620", "rank-behind", (), "possible", 3),
    ("pytorch_20630", "diverged-collectives", (3,), "likely", 4),
    ("recbole_2069", "late-at-init", (0,), "likely", 6),
    ("torchrun_gloo_kill", "dead-rank", (1,), "likely", 3),
    ("torchrun_gloo_raise", "failed-rank", (1,), "likely", 3),
    ("torchrun_gloo_sleep", "silent-rank", (1,), "likely", 3),
    ("vllm_2734", "rank-behind", (), "possible", 5),
]


@pytest.mark.parametrize(("name", "rule", "ranks", "confidence", "world"), CASES, ids=[case[0] for case in CASES])
def test_pasted_logs_are_diagnosed(name: str, rule: str, ranks: tuple[int, ...], confidence: str, world: int) -> None:
    diagnosis = judged((LOGS / f"{name}.log").read_bytes())
    first = diagnosis.findings[0]
    assert (first.rule, first.ranks, first.confidence.value) == (rule, ranks, confidence), first.summary
    assert diagnosis.job.world_size == world
    for finding in diagnosis.findings:
        assert finding.evidence and finding.remedy and finding.summary.endswith(".")
        assert "  " not in finding.summary


def test_every_excerpt_has_a_test() -> None:
    assert {case[0] for case in CASES} == {path.stem for path in LOGS.glob("*.log")}


PREFIXES = {
    "none": "{}",
    "torchrun": "[default1]:{}",
    "srun": "3: {}",
    "kubectl": "[pod/train-worker-0/pytorch] {}",
    "ray": "(RayTrainWorker pid=615, ip=10.72.7.6) {}",
    "time": "2026-11-21T18:44:12.123Z {}",
    "time and bar": "  | 2024-08-23T22:22:52.876Z | {}",
    "line number": "[80746] {}",
    "clock": "18:11:06.680 {}",
    "colours": "\x1b[36m{}\x1b[0m",
    "progress bar": " 24/1752 [01:08<1:22:56,  2.88s/it]\r{}",
    "quoted": "> {}",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_launcher_prefixes_are_stripped(prefix: str) -> None:
    text = "".join(PREFIXES[prefix].format(line) + "\n" for rank in (0, 1, 3) for line in timeout(rank).splitlines())
    first = judged(f"world_size: 4\n{text}").findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (2,), Confidence.LIKELY)


def test_a_different_operation_with_the_same_number_has_diverged() -> None:
    text = timeout(0) + timeout(1) + timeout(2, op="BROADCAST", numel=1)
    first = judged(text).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (2,), Confidence.CERTAIN)
    assert any(
        "An all_reduce of 1 element" in item.text or "A broadcast of 1 element" in item.text for item in first.evidence
    )


def test_a_different_size_with_the_same_number_mismatches() -> None:
    first = judged(timeout(0) + timeout(1) + timeout(2, numel=8)).findings[0]
    assert (first.rule, first.ranks) == ("mismatched-collective", (2,))


# What cases of public issues come down to: rank, number, operation and elements of each that timed out.
FAR_APART = {
    "Lightning 20832": (
        ((1, 532339, "BROADCAST", 5164000), (2, 532339, "BROADCAST", 5164000), (0, 532341, "_ALLGATHER_BASE", 513)),
        (0,),
    ),
    "LlamaFactory 2902": (
        ((0, 1516, "ALLREDUCE", 4096), (1, 1517, "ALLREDUCE", 4096), (2, 1517, "ALLREDUCE", 4096)),
        (0,),
    ),
    "accelerate 3250": (((0, 126, "ALLREDUCE", 1), (1, 122, "_ALLGATHER_BASE", 8192)), (1,)),
}


@pytest.mark.parametrize("name", FAR_APART)
def test_ranks_with_different_numbers_are_out_of_step(name: str) -> None:
    calls, ranks = FAR_APART[name]
    first = judged("".join(timeout(*call) for call in calls)).findings[0]
    assert (first.rule, first.ranks) == ("out-of-step", ranks)


def test_all_ranks_in_the_same_collective_have_joined() -> None:
    first = judged("world_size=3\n" + timeout(0) + timeout(1) + timeout(2)).findings[0]
    assert (first.rule, first.ranks) == ("all-joined", (0, 1, 2))


def test_without_a_world_size_no_higher_rank_is_silent() -> None:
    diagnosis = judged(timeout(0) + timeout(1))
    first = diagnosis.findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("all-joined", (0, 1), Confidence.POSSIBLE)
    assert any("it had 2 ranks or more" in line for line in diagnosis.unanswered)
    assert all(2 not in finding.ranks for finding in diagnosis.findings)


def test_a_subgroup_of_unknown_size_has_no_silent_ranks() -> None:
    """Ranks 0 and 1 of a group of unknown size, in a job of 8."""
    first = judged("world_size=8\n" + timeout(0, group="5") + timeout(1, group="5")).findings[0]
    assert (first.rule, first.confidence) == ("all-joined", Confidence.POSSIBLE)
    assert judged(timeout(0, group="5") + timeout(3, group="5")).job.is_sized is False


def test_a_rank_with_nothing_outstanding_is_stuck_on_the_host() -> None:
    signal = (
        "[rank2]:[E ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a "
        "collective timeout from  rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 60, "
        "last completed NCCL work: 60.This is most likely caused by incorrect usages of collectives\n"
    )
    first = judged(timeout(0) + timeout(1) + signal).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("host-stuck", (2,), Confidence.LIKELY)


def test_a_position_in_one_group_does_not_apply_to_another() -> None:
    """Rank 2 has finished in the default group; the others wait in group 1."""
    signal = (
        "[rank2]:[E] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from "
        "rank 1. Last enqueued NCCL work: 6, last completed NCCL work: 6.\n"
    )
    text = timeout(0, group="1") + timeout(1, group="1") + signal
    assert "host-stuck" not in {finding.rule for finding in judged(text).findings}


def test_an_exception_explains_the_timeouts() -> None:
    text = prefixed("[rank3]: ", TRACEBACK) + timeout(0) + timeout(1) + timeout(2)
    first, *others = judged(text).findings
    assert (first.rule, first.ranks, first.location) == ("failed-rank", (3,), "/home/me/train.py:42 in training_step")
    assert first.summary.startswith("Rank 3 raised ValueError: bad label 11 at train.py:42")
    assert "silent-rank" not in {finding.rule for finding in others}


def test_interleaved_tracebacks_of_several_ranks_are_separated() -> None:
    both = [prefixed(f"[rank{rank}]: ", TRACEBACK.replace("42", str(rank))).splitlines() for rank in (1, 2)]
    text = "".join(f"{line}\n" for pair in zip(*both, strict=True) for line in pair)
    job = read(text)
    assert job is not None
    assert [(facts.rank, facts.exception.stack[-1].line) for facts in job.ranks if facts.exception] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("prefix", "ranks"), [("3: ", (3,)), ("[default3]:", ()), ("[pod/w-3/main] ", ())])
def test_the_prefix_gives_the_rank_of_a_traceback(prefix: str, ranks: tuple[int, ...]) -> None:
    """An srun task is a rank; torchrun's local rank is one only on a single node, which cannot be known."""
    first = judged(prefixed(prefix, TRACEBACK)).findings[0]
    assert (first.rule, first.ranks) == ("failed-rank", ranks)


def test_a_stream_keeps_the_rank_it_has_named() -> None:
    started = "[rank7]:[I1126 18:44:12.7 ProcessGroupNCCL.cpp:616] [Rank 7] Process group watchdog thread started!"
    text = prefixed("[pod/w-3/main] ", started) + prefixed("[pod/w-3/main] ", TRACEBACK)
    assert judged(text).findings[0].ranks == (7,)


def test_gpu_out_of_memory_has_its_own_rule() -> None:
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11"
    )
    error += " GiB of which 1.20 GiB is free."
    text = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", error)) + timeout(0)
    first = judged(text).findings[0]
    assert (first.rule, first.ranks) == ("gpu-memory-exhausted", (1,))
    assert "epoch" not in first.summary


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
            "shm-exhausted",
        ),
        ("RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly", "worker-died"),
    ],
    ids=["shared memory", "worker"],
)
def test_the_death_of_a_loader_worker_is_explained(error: str, rule: str) -> None:
    text = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", error)) + timeout(0)
    findings = judged(text).findings
    assert (findings[0].rule, findings[0].ranks) == (rule, (1,))
    assert "failed-rank" not in {finding.rule for finding in findings}


def test_a_rank_with_only_a_position_joins_the_others_collective() -> None:
    status = timeout(1).splitlines(keepends=True)[1]
    first = judged("world_size=3\n" + timeout(0) + status + timeout(2)).findings[0]
    assert (first.rule, first.ranks) == ("all-joined", (0, 1, 2))


def test_a_position_is_not_guessed_if_the_others_disagree() -> None:
    status = timeout(1).splitlines(keepends=True)[1]
    first = judged("world_size=3\n" + timeout(0) + status + timeout(2, op="BROADCAST")).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (0, 2))


def test_an_impossible_allocation_follows_from_a_mismatch() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
    text = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", error))
    text += timeout(0) + timeout(2) + timeout(1, op="BROADCAST")
    first = judged(text).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (1,))
    assert any("taken other data for a length" in item.text for item in first.evidence)


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15",
    ],
)
def test_consequential_exceptions_are_not_causes(error: str) -> None:
    text = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", error)) + timeout(0)
    assert "failed-rank" not in {finding.rule for finding in judged(text).findings}


def test_the_stack_of_the_failed_collective_is_read() -> None:
    stack = (
        "[rank0]:[E710 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective: \n"
        "#0 all_reduce from /usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py:3174\n"
        "#1 training_step from /home/me/train.py:42\n"
        "#2 <module> from /home/me/train.py:90\n\n"
    )
    first = judged("world_size 2\n" + timeout(0) + stack + timeout(1, op="BROADCAST")).findings[0]
    assert first.rule == "diverged-collectives"
    assert "at train.py:42 in training_step" in first.summary


def test_the_last_of_several_starts_counts() -> None:
    again = "W0411 api.py:875] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    text = (
        "world_size=3\n" + timeout(0, seq=900) + timeout(1, seq=900) + again + timeout(1, seq=70) + timeout(2, seq=70)
    )
    first = judged(text).findings[0]
    assert (first.rule, first.ranks) == ("silent-rank", (0,))
    assert "number 70" in first.summary
    # A start that ended well, or of which nothing is said, does not hide the one before.
    assert judged(timeout(0) + timeout(1, op="BROADCAST") + again).findings[0].rule == "diverged-collectives"


def test_a_rank_in_an_unknown_group_is_not_a_global_rank() -> None:
    """Rank 13 is number 1 of its group; the line that names the group is missing."""
    text = timeout(0) + timeout(1) + timeout(13, op="BROADCAST").replace("[Rank 13] W", "[Rank 1] W").splitlines()[0]
    diagnosis = judged(text)
    assert "diverged-collectives" not in {finding.rule for finding in diagnosis.findings}
    assert next(facts for facts in diagnosis.job.ranks if facts.rank == 13).groups[0].name == "unknown"


def test_an_exception_hides_its_consequences() -> None:
    text = prefixed("[rank2]: ", TRACEBACK) + timeout(0) + timeout(1) + timeout(2, op="BROADCAST")
    text += "srun: error: node-7: task 3: Segmentation fault\n"
    assert [finding.rule for finding in judged(text).findings] == ["failed-rank"]


def test_srun_names_the_task_out_of_memory() -> None:
    first = judged(timeout(0) + "srun: error: node-7: task 3: Out Of Memory\n").findings[0]
    assert (first.rule, first.ranks) == ("dead-rank", (3,))


def test_a_child_exit_seen_by_lightning_is_mentioned() -> None:
    child = "[rank: 3] Child process with PID 4711 terminated with code {}. Forcefully terminating all other\n"
    diagnosis = judged(timeout(0) + timeout(1) + child.format(-9) + child.format(-6))
    (told,) = [line for line in diagnosis.unanswered if "child process" in line]
    assert told.startswith(
        "Lightning reports that its child process 4711, local rank 3, was the first to exit, with code -9"
    )


def test_an_abort_is_attributed_to_the_watchdog() -> None:
    summary = "  host      : node-7\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 77)\n"
    rules = [finding.rule for finding in judged("world_size=3\n" + timeout(0) + timeout(1) + summary).findings]
    assert rules == ["silent-rank"]


def test_the_first_exit_is_named_without_another_cause() -> None:
    ended = "  host      : node-7\n  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 77)\n"
    text = "Failures:\n" + ended.format(0, 0, -15) + "Root Cause (first observed failure):\n" + ended.format(3, 3, 1)
    first = judged(text).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("failed-rank", (3,), Confidence.POSSIBLE)


def test_ranks_that_only_report_a_lost_peer_name_nobody() -> None:
    lost = TRACEBACK.replace("ValueError: bad label 11", "RuntimeError: gloo/pair.cc:547 Connection closed by peer")
    text = "".join(prefixed(f"[rank{rank}]: ", lost) for rank in range(3))
    first = judged(text).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("dead-rank", (), Confidence.POSSIBLE)


def test_the_file_name_gives_the_rank_of_a_log() -> None:
    job = read(TRACEBACK, rank=5)
    assert job is not None
    assert [facts.rank for facts in job.ranks] == [5]


def test_an_exception_of_an_unknown_rank_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(TRACEBACK + timeout(0) + timeout(1))
    evidence = Artifacts()
    evidence.read(str(tmp_path))
    first = judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings[0]
    assert (first.rule, first.ranks, first.location) == ("failed-rank", (), "/home/me/train.py:42 in training_step")
    assert first.summary.startswith("A rank that the log does not name raised ValueError: bad label 11")
    assert judged(TRACEBACK).findings[0].rule == "failed-rank"


def test_a_log_of_json_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.out").write_text("{'loss': 3.5534, 'epoch': 0.01}\n" + timeout(0) + timeout(1, op="BROADCAST"))
    evidence = Artifacts()
    evidence.read(str(tmp_path))
    assert evidence.errors == []
    assert judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings[0].rule == "diverged-collectives"


def test_a_compressed_log_and_a_dump_form_one_job(tmp_path: Path) -> None:
    from made_dumps import idle, write

    (tmp_path / "all.log.gz").write_bytes(gzip.compress(timeout(0).encode() + timeout(1).encode()))
    write(tmp_path, {2: idle()})
    evidence = Artifacts()
    evidence.read(str(tmp_path))
    first = judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings[0]
    assert (first.rule, first.ranks) == ("host-stuck", (2,))


def test_long_lines_are_truncated_and_blocks_joined() -> None:
    data = b"a" * 40_000 + b"\nsecond\rthird\r\n" + b"b" * (1024 * 1024) + b"\nlast"
    found = list(lines(io.BytesIO(data), len(data) + 1))
    assert [line for line in found if len(line) < 100] == [b"second", b"third", b"last"]
    assert max(map(len, found)) <= 16_384


def test_a_stream_is_read_up_to_a_limit() -> None:
    assert sum(map(len, lines(io.BytesIO(b"x\n" * 5_000_000), 1024))) <= 2 * 1024 * 1024


def test_line_prefixes_are_parsed() -> None:
    line = taken_apart(b"(Worker[rank=97] pid=3421713, ip=10.1.2.206) [rank97]:[E323 05:14:22] [Rank 6] Watchdog")
    assert (line.rank, line.text) == (97, "[E323 05:14:22] [Rank 6] Watchdog")
    assert taken_apart(b"[5] is setting up NCCL").text == "[5] is setting up NCCL"


def test_a_log_without_statements_is_not_a_job() -> None:
    assert read("epoch 3, loss 0.1\nNCCL INFO comm 0x1 rank 0 nranks 8\n") is None
    assert Log().rank_logs() == ()
