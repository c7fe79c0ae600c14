"""What NCCL runs without a guard leave: dumps of some ranks beside one log of all, and processes that are gone."""

import io
from pathlib import Path
from typing import Any

import pytest
from made_dumps import FRAMES, dump, entry, idle, waiting, write
from made_logs import TRACEBACK, judged, prefixed, timeout

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

BROADCAST = {"op": "nccl:broadcast", "input_sizes": [[1]], "output_sizes": [[1]], "input_dtypes": ["Long"]}
LOST = "socketProgress: Connection closed by remote peer localhost<40000>\n"
STORE = (
    '[rank{0}]:[W1126 ProcessGroupNCCL.cpp:1826] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Failed to check the "should '
    'dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe\n'
)
STOPPED = "`Trainer.fit` stopped: `max_epochs=2` reached.\n"
MODEL = "[rank{}]: RuntimeError: DDP expects same model across all ranks, but Rank {} has 4 params, while rank {} has "
MODEL += "inconsistent {} params.\n"
ENDED = "[ERROR] [launch.py:321:sigkill_handler] ['python', 'm.py', '--local_rank=1'] exits with return code = 1\n"
WORKER = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 90, in <module>
  File "/venv/lib/python3.12/site-packages/torch/_utils.py", line 785, in reraise
IndexError: Caught IndexError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 358, in _worker_loop
  File "/home/me/data.py", line 12, in __getitem__
IndexError: list index out of range
"""


def of(folder: Path, log: str) -> Diagnosis:
    (folder / "job.log").write_text(log)
    evidence = Artifacts()
    evidence.read(str(folder))
    return judge(evidence.job() or pytest.fail(), RECORDED_RULES)


def of_three(**more: Any) -> dict[str, Any]:
    """A rank of three that waits in number 61."""
    return dump(entry(60), entry(61, state="scheduled", **more), enqueued=61, completed=60, world=3)


def called_at(line: int, function: str) -> list[dict[str, Any]]:
    """The frames of a call of the user's."""
    return [FRAMES[0], {"name": function, "filename": "/home/me/train.py", "line": line}, FRAMES[2]]


def test_a_call_of_a_log_is_the_same_as_that_of_a_dump(tmp_path: Path) -> None:
    """A log has no types, and calls NCCL's barrier an all_reduce."""
    write(tmp_path, {2: of_three(**BROADCAST)})
    log = timeout(0, numel=1) + timeout(1, op="BROADCAST", numel=1) + timeout(2, op="BROADCAST", numel=1)
    first = of(tmp_path, "world_size=3\n" + log).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (0,))
    assert "Ranks 1-2 called broadcast (1 element of Long)" in first.summary


def test_a_log_does_not_decide_between_two_calls_of_dumps(tmp_path: Path) -> None:
    of_floats = {**BROADCAST, "input_dtypes": ["Float"]}
    write(tmp_path, {1: of_three(**BROADCAST), 2: of_three(**of_floats)})
    first = of(tmp_path, "world_size=3\n" + timeout(0, op="BROADCAST", numel=1)).findings[0]
    assert (first.rule, first.ranks) == ("mismatched-collective", (0, 1, 2))


def made(*lines: int, size: int = 1) -> dict[str, Any]:
    """A rank that has called at these lines, the last call being open; all are an all_reduce of one element."""
    small = {"input_sizes": [[1]], "output_sizes": [[1]]}
    calls = [entry(seq, frames=called_at(line, "step"), **small) for seq, line in enumerate(lines[:-1], start=1)]
    last = {"input_sizes": [[size]], "output_sizes": [[size]]}
    calls.append(entry(len(lines), state="scheduled", frames=called_at(lines[-1], "step"), **last))
    return dump(*calls, enqueued=len(lines), completed=len(lines) - 1, world=3)


def test_the_line_is_that_of_the_call_left_out(tmp_path: Path) -> None:
    """What the rank calls instead is where all of them go on."""
    write(tmp_path, {0: made(10, 20, 10, 20, 33), 1: made(10, 20, 10, 20, 33), 2: made(10, 20, 10, 20, 10, size=9)})
    first = of(tmp_path, "").findings[0]
    assert first.ranks == (2,)
    assert first.location == "/home/me/train.py:33 in step"
    (told,) = [one.text for one in first.evidence if "By their stacks" in one.text]
    assert "rank 2 skipped all_reduce (1 element of Float) at train.py:33 in step, which ranks 0-1 called" in told


def test_a_call_left_out_unnoticed_is_said(tmp_path: Path) -> None:
    """NCCL has completed number 3 with two different calls."""
    common = (10, 20, 10, 20)
    write(tmp_path, {0: made(*common, 33, 10, 20), 1: made(*common, 33, 10, 20), 2: made(*common, 10, 20, 10, size=9)})
    first = of(tmp_path, "").findings[0]
    assert first.location == "/home/me/train.py:33 in step"
    assert any("since then they are one call apart (number 5)" in one.text for one in first.evidence)


def test_without_stacks_nothing_is_said_of_lines(tmp_path: Path) -> None:
    """Calls of one size may be of any line."""

    def sized(*sizes: int) -> dict[str, Any]:
        calls = [entry(seq, input_sizes=[[size]], output_sizes=[[size]]) for seq, size in enumerate(sizes, start=1)]
        calls[-1] |= {"state": "scheduled", "retired": False}
        return dump(*calls, enqueued=len(sizes), completed=len(sizes) - 1, world=3)

    dumps = {rank: sized(1, 2, 1, 2, 7, 1, 2) if rank < 2 else sized(1, 2, 1, 2, 1, 2, 1) for rank in range(3)}
    write(tmp_path, dumps, "nccl_trace_rank_{}.json")
    first = of(tmp_path, "").findings[0]
    assert (first.ranks, first.location) == ((2,), "")
    assert not [one for one in first.evidence if "By their stacks" in one.text]


@pytest.mark.parametrize("stopped", [True, False])
def test_the_only_rank_not_heard_of_has_ended(stopped: bool, tmp_path: Path) -> None:
    write(tmp_path, {1: of_three()})
    diagnosis = of(tmp_path, STOPPED * stopped + LOST + STORE.format(2))
    first = diagnosis.findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("dead-rank", (0,), Confidence.LIKELY)
    assert ("after its Trainer had stopped (max_epochs=2 reached)" in first.summary) is stopped
    assert ("made all its steps" in first.remedy) is stopped
    assert "no-dump" not in {one.rule for one in diagnosis.findings}


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (LOST, "two ranks are not heard of"),
        (LOST + STORE.format(0) + STORE.format(2), "all ranks are heard of"),
        (LOST + STORE.format(2) + timeout(1), "a timeout ends processes, too"),
        (LOST + STORE.format(2) + ENDED, "a launcher knows more"),
        (STORE.format(2), "the store is lost at the end of any job"),
    ],
)
def test_no_rank_has_ended(log: str, why: str, tmp_path: Path) -> None:
    write(tmp_path, {1: of_three()})
    named = [one.ranks for one in of(tmp_path, log).findings if one.rule == "dead-rank"]
    assert named in ([], [()]), why


def test_a_store_that_is_lost_at_the_end_is_no_incident() -> None:
    evidence = Artifacts()
    evidence.log.read(io.BytesIO((STOPPED + STORE.format(2)).encode()), 10_000)
    assert evidence.job() is None


def test_a_rank_that_trains_again_has_not_come_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, {rank: waiting() for rank in (1, 2, 3)})
    again = "LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3]\n"
    first = of(tmp_path, STOPPED + again).findings[0]
    assert (first.rule, first.ranks) == ("no-dump", (0,))
    assert not any(one.text.startswith("`Trainer.fit` stopped") for one in first.evidence)


@pytest.mark.parametrize(
    ("dumps", "log", "rule"),
    [
        ({0: idle(), **{rank: waiting() for rank in (1, 2, 3)}}, "", "host-stuck"),
        ({rank: waiting() for rank in (1, 2, 3)}, "", "no-dump"),
        ({}, "world_size=3\n" + timeout(1) + timeout(2), "silent-rank"),
    ],
)
def test_a_rank_that_has_trained_to_the_end_says_so(dumps: Any, log: str, rule: str, tmp_path: Path) -> None:
    write(tmp_path, dumps)
    first = of(tmp_path, STOPPED + log).findings[0]
    assert (first.rule, first.ranks) == (rule, (0,))
    assert any(one.text == "`Trainer.fit` stopped: max_epochs=2 reached." for one in first.evidence)


def test_models_that_both_sides_find_different_are_different() -> None:
    first = judged(MODEL.format(1, 1, 0, 39) + MODEL.format(0, 0, 1, 4)).findings[0]
    assert (first.rule, first.ranks) == ("mismatched-collective", (0, 1))
    assert first.summary.endswith("the models differ.")


def test_a_number_of_parameters_that_one_side_has_read_may_be_other_data() -> None:
    first = judged(MODEL.format(1, 1, 0, 39)).findings[0]
    assert (first.rule, first.ranks) == ("mismatched-collective", (0, 1))
    assert "or rank 0 called something else there" in first.summary


def test_a_rank_that_has_found_no_difference_called_something_else() -> None:
    lost = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
    )
    first = judged(MODEL.format(1, 1, 0, 39) + MODEL.format(2, 2, 0, 39) + lost).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (0,), Confidence.LIKELY)
    assert first.summary.startswith("Rank 0 called something else where ranks 1-2 compared their models")


def test_a_rank_that_has_raised_is_no_stuck_host(tmp_path: Path) -> None:
    """It calls nothing more, and why is said in another way."""
    write(tmp_path, {0: of_three(), 2: of_three()})
    lost = "DistBackendError: NCCL error: remote process exited or there was a network error"
    diagnosis = of(tmp_path, prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", lost)))
    assert "host-stuck" not in {one.rule for one in diagnosis.findings}


def test_the_exception_of_a_worker_has_its_own_line() -> None:
    first = judged(prefixed("[rank1]: ", WORKER)).findings[0]
    assert first.location == "/home/me/data.py:12 in __getitem__"
    assert "IndexError: list index out of range (in DataLoader worker process 1)" in first.summary


@pytest.mark.parametrize("lines", [4, 5, 6, 7])
def test_the_traceback_of_a_worker_may_be_cut_off(lines: int) -> None:
    cut = "\n".join(WORKER.splitlines()[:lines])
    for after in ("", timeout(0) + prefixed("[rank1]: ", "bye")):
        first = judged(prefixed("[rank1]: ", cut) + after).findings[0]
        assert (first.rule, first.ranks) == ("failed-rank", (1,))
        known = "data.py:12 in __getitem__" if lines == 7 else "train.py:90 in <module>"
        assert first.location == f"/home/me/{known}"
        assert "Caught IndexError in DataLoader worker process 1" in first.summary


def test_another_traceback_after_that_of_a_worker_is_another_one() -> None:
    head = prefixed("[rank1]: ", "\n".join(WORKER.splitlines()[:4]))
    first = judged(head + prefixed("[rank1]: ", TRACEBACK)).findings[0]
    assert "Caught IndexError" in first.summary
