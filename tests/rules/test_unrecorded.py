"""Ranks of whose collectives no recorder tells: what is said of them, and what is not concluded."""

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    BARRIER,
    EMPTY_CACHE,
    FETCH,
    GLOO,
    MAIN,
    NCCL,
    NEXT,
    NEXT_DATA,
    OPTIMIZER,
    RUN,
    TEARDOWN,
    TRAINING_STEP,
    job,
    process,
    unread,
    user,
)
from judged import first

from lightning_ncclsafe.facts import Frame, NotRecorded, RankFacts, UnrecordedGroup
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.timeline import timeline
from lightning_ncclsafe.rules.unknowns import not_recorded, unknowns


def unrecorded(why: NotRecorded, *calls: int, backend: str = "gloo", name: str = "0") -> dict[int, Any]:
    return {
        rank: [UnrecordedGroup(name=name, why=why, backend=backend, calls=count)] for rank, count in enumerate(calls)
    }


@pytest.mark.parametrize(
    ("by_rank", "said"),
    [
        (
            unrecorded(NotRecorded.NO_ENTRY, 12),
            "Rank 0 called 12 collectives with gloo, and the Flight Recorder has",
        ),
        (unrecorded(NotRecorded.NO_ENTRY, 12, 12), "Ranks 0-1 called 12 collectives with gloo, and"),
        (unrecorded(NotRecorded.NO_ENTRY, 1200, 1), "Ranks 0-1 called 1 to 1,200 collectives with gloo, and"),
        (unrecorded(NotRecorded.NO_DUMP, 1), "Rank 0 called 1 collective with gloo, and this build of PyTorch cannot"),
        (unrecorded(NotRecorded.UNKNOWN_BACKEND, -1, backend="ucc"), "Rank 0 called collectives with ucc, an unknown"),
        (
            unrecorded(NotRecorded.DRIVER_SILENT, 3, backend="nccl"),
            "Rank 0 called 3 collectives with nccl, and CUDA's",
        ),
        (unrecorded(NotRecorded.LOST, 3, name="tp"), "Rank 0 called 3 collectives in group 'tp' of which the Flight"),
    ],
)
def test_collectives_that_no_recorder_has_are_reported_in_one_sentence(by_rank: dict[int, Any], said: str) -> None:
    (sentence,) = not_recorded(by_rank)
    assert sentence.startswith(said)


def test_a_rank_without_a_recorder_has_not_called_nothing() -> None:
    """It works, and as far as anybody knows it has called all that the others have."""
    waiting = GLOO.rank(0, MAIN, RUN, BARRIER, seq=5, outstanding=1, world=2)
    working = replace(GLOO.rank(1, MAIN, RUN, user("training_step", 40), seq=5, world=2), groups=(), collectives=())
    dark = replace(working, unrecorded=(*unrecorded(NotRecorded.NO_ENTRY, 5)[0],))
    (group,) = timeline(job(waiting, dark, world=2)).groups
    assert (group.enqueued, group.behind) == ({0: 5}, ())
    (said,) = (text for text in unknowns(job(waiting, dark, world=2)) if "Flight Recorder" in text)
    assert said.startswith("Rank 1 called 5 collectives")
    # One that is recorded, and has not been in the group, is.
    assert timeline(job(waiting, working, world=2)).groups[0].behind == (1,)
    assert timeline(job(waiting, dark, world=2)).stragglers == (1,)


def ahead(rank: int, *stack: Frame, **more: Any) -> RankFacts:
    """A rank that waits for its device at the end of the training, where memory is freed, or elsewhere."""
    return unread(NCCL.rank(rank, *(stack or (TEARDOWN, EMPTY_CACHE)), seq=61, world=3, **more))


def test_a_rank_in_its_loader_holds_up_those_whose_devices_wait() -> None:
    read = user("__getitem__", 12)
    loading = NCCL.working(1, NEXT_DATA, FETCH, read, seq=60, action=NEXT, world=3)
    for late in (loading, unread(loading)):
        facts = job(ahead(0), late, ahead(2), world=3)
        found = judge(facts).findings
        assert [(finding.rule, finding.ranks) for finding in found] == [("data-stall", (1,))]
        assert found[0].location.endswith("train.py:12 in __getitem__")
        view = timeline(facts)
        assert (view.waiting, view.behind, view.stragglers) == ((0, 2), (), (1,))


def test_a_rank_that_works_holds_up_those_whose_devices_wait() -> None:
    for stack in ((OPTIMIZER,), (user("training_step", 44, code="loss.item()"),)):
        slow = unread(NCCL.working(1, user("training_step", 40), seq=60, action=TRAINING_STEP, world=3))
        finding = first(job(ahead(0, *stack), slow, ahead(2, *stack), world=3))
        assert (finding.rule, finding.ranks) == ("rank-behind", (1,))


def test_a_rank_that_waits_for_its_device_at_the_end_is_not_unfinished() -> None:
    done = (NCCL.finished(rank, seq=61, batch=19, world=3) for rank in (0, 2))
    waits = ahead(1, action="", batch=19, last=True)
    facts = job(waits, *done, world=3)
    assert "unfinished-rank" not in {finding.rule for finding in judge(facts).findings}
    answered = replace(waits, unrecorded=())
    assert first(replace(facts, ranks=(answered, *facts.ranks[1:]))).rule == "unfinished-rank"


def test_what_a_rank_does_is_unknown_unless_its_process_has_ended_or_its_stack_was_seen() -> None:
    seen = (process(1, "gone"), process(2, "running"))
    said = unknowns(job(GLOO.waiting(0, seq=61, world=3), world=3, witnessed=seen))
    assert [text for text in said if "answer" in text] == ["Rank 2 did not answer: what it does is unknown."]
    seen = (process(1, "gone"), process(2, "running", stack=(user("training_step", 40),)))
    said = unknowns(job(GLOO.waiting(0, seq=61, world=3), world=3, witnessed=seen))
    assert not [text for text in said if "answer" in text]
