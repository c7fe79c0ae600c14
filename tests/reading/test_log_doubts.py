"""Logs that mislead: exceptions that ended nothing, several starts in one file, lines that run into one another."""

import io
from pathlib import Path

import pytest
from made_logs import TRACEBACK, judged, prefixed, timeout

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.lines import parts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

LIKELY, POSSIBLE = Confidence.LIKELY, Confidence.POSSIBLE
BANNER = "All distributed processes registered. Starting with {} processes\n"
NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
AGAIN = "W0411 api.py:875] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"


def first_of(folder: Path) -> tuple[Finding, JobFacts]:
    evidence = Artifacts()
    evidence.read(str(folder))
    diagnosis = judge(evidence.job() or pytest.fail(), RECORDED_RULES)
    return diagnosis.findings[0], diagnosis.job


@pytest.mark.parametrize("error", ["ValueError: bad label 11", NO_MEMORY], ids=["label", "memory"])
def test_a_waiting_rank_has_survived_its_exception(error: str) -> None:
    text = prefixed("2: ", TRACEBACK.replace("ValueError: bad label 11", error))
    diagnosis = judged("world_size=4\n" + text + timeout(1) + timeout(2) + timeout(3))
    first = diagnosis.findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (0,), LIKELY)
    assert len(diagnosis.findings) == 1
    (told,) = [line for line in diagnosis.unanswered if "also raised" in line]
    assert told.startswith(f"Rank 2 also raised {error.rpartition('torch.')[2][:20]}") and "train.py:42" in told


def test_a_rank_in_another_collective_has_not_survived_its_exception() -> None:
    text = prefixed("2: ", TRACEBACK) + timeout(1) + timeout(3) + timeout(2, op="BROADCAST")
    assert judged(text).findings[0].rule == "failed-rank"


def test_an_exception_of_an_unknown_rank_may_have_been_caught() -> None:
    diagnosis = judged("world_size=4\n" + TRACEBACK + timeout(1) + timeout(2) + timeout(3))
    found = [(finding.rule, finding.ranks, finding.confidence) for finding in diagnosis.findings]
    assert found == [("silent-rank", (0,), LIKELY), ("failed-rank", (), POSSIBLE)]
    assert "the log does not say whether that ended it" in diagnosis.findings[1].summary


def test_an_exit_seen_by_the_launcher_makes_it_likely() -> None:
    ended = "Root Cause (first observed failure):\n  host : a\n  rank : 3 (local_rank: 3)\n  exitcode : 1 (pid: 77)\n"
    assert judged(TRACEBACK + ended).findings[0].confidence is LIKELY
    assert judged(prefixed("3: ", TRACEBACK)).findings[0].confidence is POSSIBLE


def test_a_lost_peer_reported_by_an_unknown_rank_is_a_consequence() -> None:
    lost = TRACEBACK.replace("ValueError: bad label 11", "RuntimeError: [gloo/pair.cc:547] Connection closed by peer")
    first = judged(lost * 3).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("dead-rank", (), POSSIBLE)
    assert "the log does not say which rank that was" in first.summary


@pytest.mark.parametrize("again", [AGAIN + BANNER.format(4), "requeued\n" + BANNER.format(4)], ids=["torchrun", "srun"])
def test_a_log_with_a_second_start_is_split(again: str) -> None:
    """Rank 3 of 8 raised; in the next start, rank 0 of 4 never arrived."""
    before = BANNER.format(8) + prefixed("[rank3]: ", TRACEBACK) + timeout(0) + timeout(1)
    diagnosis = judged(before + again + timeout(1, seq=7) + timeout(2, seq=7) + timeout(3, seq=7))
    first = diagnosis.findings[0]
    assert (first.rule, first.ranks, diagnosis.job.world_size) == ("silent-rank", (0,), 4)
    assert any(line.startswith("The run was started several times") for line in diagnosis.unanswered)


def test_starts_in_logs_of_two_hosts_are_matched(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("world_size=4\n" + timeout(0) + AGAIN + timeout(0, seq=9) + timeout(1, seq=9))
    (tmp_path / "b.log").write_text(timeout(2) + timeout(3) + AGAIN + timeout(3, seq=9))
    first, job = first_of(tmp_path)
    assert (first.rule, first.ranks, job.world_size) == ("silent-rank", (2,), 4)


def test_torchrun_attempt_folders_are_separate_starts(tmp_path: Path) -> None:
    for attempt, (seq, silent) in enumerate(((61, 0), (9, 2))):
        for rank in range(3):
            folder = tmp_path / "run" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text("world_size=3\n" + ("" if rank == silent else timeout(rank, seq=seq)))
    first, _ = first_of(tmp_path)
    assert (first.rule, first.ranks) == ("silent-rank", (2,))


def test_interleaved_lines_are_separated() -> None:
    """Ranks share standard error, and write a line and its end separately."""
    text = "world_size=4\n" + "".join(timeout(rank).splitlines()[0] for rank in (1, 2, 3))
    first = judged(text).findings[0]
    assert (first.rule, first.ranks) == ("silent-rank", (0,))
    old = b"[E ProcessGroupNCCL.cpp:821] [Rank 0] Watchdog.[E ProcessGroupNCCL.cpp:821] [Rank 1] Watchdog."
    assert len(parts(old)) == 2


@pytest.mark.parametrize("cut", ["OpType=ALLREDUC", "NumelIn=40", "SeqNum=6"])
def test_a_word_cut_in_half_is_not_another_word(cut: str) -> None:
    """Another rank's line starts in the middle of rank 1's."""
    whole = timeout(1).splitlines(keepends=True)[0]
    at = whole.index(cut) + len(cut)
    diagnosis = judged("world_size=4\n" + whole[:at] + timeout(2) + whole[at:] + timeout(3))
    assert {finding.rule for finding in diagnosis.findings} == {"silent-rank"}
    assert 0 in diagnosis.findings[0].ranks


@pytest.mark.parametrize("width", [72, 80, 96, 120])
def test_lines_wrapped_by_a_terminal_are_joined(width: int) -> None:
    whole = [line for rank in (1, 2, 3) for line in timeout(rank).splitlines()]
    text = "\n".join(line[at : at + width] for line in whole for at in range(0, len(line), width))
    first = judged(f"world_size=4\n{text}\n").findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (0,), LIKELY)


def test_windows_line_endings_are_accepted() -> None:
    text = ("world_size=4\n" + timeout(1) + timeout(2) + timeout(3)).replace("\n", "\r\n")
    assert judged(text).findings[0].ranks == (0,)


def test_a_rank_ended_by_the_launcher_is_not_the_cause() -> None:
    ended = "  host : a\n  rank : {0} (local_rank: {0})\n  exitcode : {1} (pid: 77)\n"
    text = ended.format(2, -9) + "Root Cause (first observed failure):\n" + ended.format(0, -11)
    assert [finding.ranks for finding in judged(text).findings] == [(0,)]


def test_the_memory_of_many_starts_is_bounded() -> None:
    evidence = Artifacts()
    text = ("world_size=4\n" + AGAIN).encode() * 1000 + (timeout(1).encode() + AGAIN.encode()) * 10
    evidence.log.read(io.BytesIO(text), len(text) + 1)
    assert len(evidence.log._starts._by_number) <= 2


def test_sequence_numbers_of_sends_and_receives_are_not_compared() -> None:
    text = "world_size=4\n" + timeout(0, seq=9, op="SEND") + timeout(1, seq=9, op="RECV") + timeout(2, seq=5, op="RECV")
    found = judged(text).findings
    assert not {"diverged-collectives", "out-of-step"} & {finding.rule for finding in found}
    assert all(finding.confidence is POSSIBLE for finding in found)


def test_a_single_silent_rank_among_many_groups_is_named() -> None:
    """Rank 2 waits in a pair with the silent rank 3; the others wait in their own groups."""
    text = timeout(0, group="11") + timeout(1, group="12") + timeout(2, seq=300, group="17")
    (only,) = judged("world_size=4\n" + text).findings
    assert (only.rule, only.ranks, only.confidence) == ("silent-rank", (3,), LIKELY)


def test_a_device_error_in_a_watchdog_line_is_the_cause() -> None:
    end = (
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    )
    text = f"[rank2]:[E1126 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 2] {end}\n"
    first = judged("world_size=4\n" + text + timeout(0) + timeout(1) + timeout(3)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("failed-rank", (2,), LIKELY)
    assert first.summary.startswith("Rank 2 raised CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("tail", "confidence"),
    [
        (
            "[rank0]:[E x ProcessGroupNCCL.cpp:577] [Rank 0] To avoid data inconsistency, we are taking the ent",
            POSSIBLE,
        ),
        ("[rank0]:[E x ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0", POSSIBLE),
        ("[rank0]:[E x ProcessGroupNCCL.cpp:577] [Rank 0] To avoid data inconsistency, we go down.\n", LIKELY),
        ("[rank0]:[E x ProcessGroupNCCL.cpp:577] \x1b[36m[Rank 0] We go down.\x1b[0m\n", LIKELY),
    ],
    ids=["within a word", "within brackets", "whole", "whole, in colours"],
)
def test_a_log_cut_off_in_a_line_lowers_the_confidence(tail: str, confidence: Confidence) -> None:
    text = timeout(0) + timeout(1) + timeout(3)
    whole = "[rank0]:[E x ProcessGroupNCCL.cpp:537] Some NCCL operations have failed or timed out.\n"
    first = judged(text + whole + tail).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (2,), confidence)


def test_two_ranks_of_an_unknown_world_size_may_be_an_excerpt() -> None:
    text = timeout(1) + timeout(2)
    behind = "[rank1]:[E x ProcessGroupNCCL.cpp:537] Some NCCL operations have failed or timed out.\n" * 12
    spoke = "[rank0]:[E x ProcessGroupNCCL.cpp:1806] Observed flight recorder dump signal from another rank.\n"
    for given, confidence in ((text, POSSIBLE), ("world_size=3\n" + text, LIKELY), (spoke + text, LIKELY)):
        first = judged(given + behind).findings[0]
        assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (0,), confidence)


def test_gloo_timeouts_name_the_awaited_rank() -> None:
    """Proposed in pytorch/gloo#511, and merged since."""
    where = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81]"
    message = f"{where} Rank {{}} timed out after 1800000ms waiting for recv from rank 2 (slot 7)"
    raised = TRACEBACK.replace("ValueError: bad label 11", message)
    text = "".join(prefixed(f"[rank{rank}]: ", raised.replace("Rank {}", f"Rank {rank}")) for rank in (0, 1, 3))
    first = judged("world_size: 4\n" + text).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (2,), LIKELY)
