"""What small trainings on 2 or 3 gloo ranks have recorded must still be judged as it was seen to have happened.

Each is the job of a real report, without what its cause does not rest on; paths and process ids are others.
"""

from pathlib import Path

import pytest

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.codec import decode
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge

FOLDER = Path(__file__).parent / "recordings"
CERTAIN, LIKELY = Confidence.CERTAIN, Confidence.LIKELY


@pytest.mark.parametrize(
    ("name", "rule", "ranks", "confidence", "line"),
    [
        ("mismatched-size", "mismatched-collective", (1,), CERTAIN, "train.py:57 in training_step"),
        ("mismatched-type", "mismatched-collective", (1,), CERTAIN, "train.py:62 in training_step"),
        ("overrun-rank", "mismatched-collective", (1,), LIKELY, "train.py:61 in training_step"),
        ("overrun-rank-of-two", "mismatched-collective", (0, 1), LIKELY, "train.py:59 in training_step"),
        ("overrun-rank-fsdp2", "mismatched-collective", (1,), LIKELY, "train.py:52 in forward"),
        ("crossed-groups", "crossed-groups", (1,), CERTAIN, "train.py:70 in training_step"),
        ("crossed-receives", "unmatched-p2p", (0, 1), CERTAIN, "train.py:73 in training_step"),
        ("log-key-of-one-rank", "diverged-log-keys", (1,), CERTAIN, "train.py:90 in training_step"),
        ("log-key-of-an-epoch", "diverged-log-keys", (1,), CERTAIN, "train.py:104 in validation_step"),
        # Two lines return nothing.
        ("step-returned-none", "skipped-step", (1,), LIKELY, "train.py:88 in training_step"),
        ("step-returned-none-fsdp2", "skipped-step", (1,), LIKELY, "train.py:88 in training_step"),
        ("step-skipped-by-hand", "skipped-step", (1,), LIKELY, "train.py:88 in training_step"),
        ("unused-branch", "unused-parameters", (1,), CERTAIN, "train.py:51 in forward"),
        ("unused-before-validation", "unused-parameters", (1,), LIKELY, ""),
        ("short-group-timeout", "timeout-misuse", (0, 2), CERTAIN, "train.py:79 in training_step"),
        ("one-rank-compiles", "compile-skew", (1,), LIKELY, "train.py:82 in training_step"),
        ("caught-save", "checkpoint-skipped-barrier", (0,), CERTAIN, "train.py:131 in save_checkpoint"),
        ("rank0-evaluates-fsdp2", "rank-zero-only-work", (0,), CERTAIN, "train.py:33 in zero_shot_evaluation"),
        ("rank0-runs-a-part-fsdp2", "rank-zero-only-work", (0,), LIKELY, "train.py:13 in forward"),
        ("rank0-reads-weights-fsdp2", "rank-zero-only-work", (0,), LIKELY, "train.py:30 in export"),
        ("return-under-rank-condition", "diverged-collectives", (0,), LIKELY, "train.py:294 in on_train_epoch_end"),
        ("receives-once-more", "unmatched-p2p", (0, 1), LIKELY, "train.py:188 in from_before"),
        ("sends-more-than-others", "diverged-collectives", (0,), LIKELY, "train.py:420 in on_validation_start"),
        ("reduces-at-its-own-count", "skipped-step", (1,), LIKELY, "train.py:635 in training_step"),
        ("failed-save", "exception-during-save", (0,), CERTAIN, "train.py:131 in save_checkpoint"),
    ],
)
def test_what_was_recorded(name: str, rule: str, ranks: tuple[int, ...], confidence: Confidence, line: str) -> None:
    first, *others = judge(decode(JobFacts, (FOLDER / f"{name}.json").read_bytes())).findings
    assert (first.rule, first.ranks, first.confidence) == (rule, ranks, confidence)
    assert first.location.endswith(f"/{line}" if line else "")
    if rule == "rank-zero-only-work":
        # That ranks have diverged, or that one was ended, is how it is known, and no cause of its own.
        assert others == []
        assert "cannot be run, saved or read by one rank alone" in first.remedy


def test_every_recording_is_judged() -> None:
    told = {mark.args[1][index][0] for mark in test_what_was_recorded.pytestmark for index in range(len(mark.args[1]))}
    assert told == {path.stem for path in FOLDER.glob("*.json")}
