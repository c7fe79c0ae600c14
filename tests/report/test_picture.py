"""The picture: outliers on top, alike ranks in one lane, and everything at its time."""

from dataclasses import replace

import pytest
from diagnoses import diagnosis
from incidents import NOW_NS, STALL_S, S, all_different, incident_of, job_of, recorded_incident

from lightning_ncclsafe.facts import ExceptionFacts, Frame, JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.html.picture import Axis, Lane, Picture, picture
from lightning_ncclsafe.report.ranks import RankStates
from lightning_ncclsafe.rules.kit.timeline import Timeline


def drawn(of: Diagnosis) -> Picture:
    return picture(of, RankStates(Timeline(of.job)))


def of_job(job: JobFacts) -> Diagnosis:
    """With what was found in the job of the tests' usual incident."""
    return replace(incident_of(4), job=job)


def lane(of: Picture, ranks: str) -> Lane:
    (found,) = (one for one in of.lanes if one.ranks == ranks)
    return found


@pytest.mark.parametrize("world", [4, 64])
def test_ranks_named_by_a_finding_come_first(world: int) -> None:
    made = drawn(incident_of(world, late=2))
    assert [one.is_named for one in made.lanes] == [True] + [False] * (len(made.lanes) - 1)
    assert made.lanes[0].ranks == "Rank 2"


def test_few_ranks_have_their_own_lanes_and_many_share_one() -> None:
    assert [one.ranks for one in drawn(incident_of(4)).lanes] == ["Rank 0", "Rank 1", "Rank 2", "Rank 3"]
    assert [one.ranks for one in drawn(incident_of(64, late=7)).lanes] == ["Rank 7", "Ranks 0-6, 8-63"]


def test_ranks_in_the_same_collective_share_a_lane_at_any_line() -> None:
    made = drawn(all_different(64))
    assert made.lanes[1].ranks == "Ranks 1-63" and made.lanes[1].line == "63 different lines"


def test_surplus_lanes_are_counted() -> None:
    base = job_of(64)
    apart = (replace(facts, progress=replace(facts.progress, batch_idx=facts.rank)) for facts in base.ranks)
    made = drawn(of_job(replace(base, ranks=tuple(apart))))
    assert (len(made.lanes), made.left_out) == (16, 48)


def test_silent_ranks_are_marked() -> None:
    made = drawn(diagnosis())
    assert lane(made, "Rank 3").is_silent and lane(made, "Rank 3").does == "did not answer; its process is stopped"
    assert lane(made, "Rank 3").calls == () and [one.ranks for one in made.lanes][1] == "Rank 3"
    named = drawn(incident_of(4, silent=(3,)))
    assert named.lanes[0].ranks == "Rank 3" and named.lanes[0].is_named


def test_everything_is_drawn_at_its_time() -> None:
    made = drawn(incident_of(2))
    late, waits = made.lanes
    # Rank 0 stopped 41 s ago, 57.4 s are shown: the standstill and what was before it.
    (action,) = (bar for bar in late.actions if bar.kind == "works")
    assert action.words == "Net.on_train_epoch_end for 41 s"
    assert (
        late.stop == pytest.approx(action.x, abs=0.1) == pytest.approx(100 * (1 - STALL_S / (STALL_S * 1.4)), abs=1.5)
    )
    (call,) = waits.waits
    assert call.words.startswith(
        "all_reduce (25,557,032 elements of Float), sequence number 346, not completed after 41"
    )
    assert call.x + call.width == pytest.approx(100, abs=0.1) and late.waits == ()
    assert len(late.calls) == 63 and max(late.calls) <= action.x + 0.1


def test_enclosing_actions_are_distinguished() -> None:
    kinds = [[bar.kind for bar in one.actions] for one in drawn(incident_of(2)).lanes]
    assert kinds == [["outer", "outer", "works"], ["outer", "outer", "waits"]]


def test_lanes_have_text_labels() -> None:
    label = drawn(incident_of(2)).lanes[0].label
    assert label == (
        "Rank 0 is in user code, no progress for 41 s; Net.on_train_epoch_end, batch 118 of epoch 1; "
        "model.py:93 in evaluate"
    )


def test_a_lane_of_a_rank_that_raised_has_the_line_that_raised_and_no_standstill() -> None:
    base = job_of(2)
    at = Frame(file="/home/me/train.py", line=57, function="read", user=True)
    raised = replace(
        base.ranks[0],
        progress=replace(base.ranks[0].progress, idle_s=0.0),
        exception=ExceptionFacts(type="KeyError", message="'label'", stack=(at,)),
    )
    (lane, _) = drawn(of_job(replace(base, ranks=(raised, base.ranks[1])))).lanes
    assert (lane.does, lane.line) == ("raised KeyError", "train.py:57 in read")


def test_lanes_of_several_ranks_have_plural_verbs() -> None:
    assert [lane.does.split(" ")[0] for lane in drawn(incident_of(16)).lanes] == ["is", "wait"]


def test_standstills_of_a_shared_lane_form_a_range() -> None:
    base = job_of(16)
    longer = tuple(replace(facts, progress=replace(facts.progress, idle_s=20.0 + facts.rank)) for facts in base.ranks)
    assert drawn(of_job(replace(base, ranks=longer))).lanes[1].does.endswith("no progress for 21 s to 35 s")


@pytest.mark.parametrize(
    ("span_s", "marks"),
    [
        (3, ["\u22123 s", "\u22122 s", "\u22121 s", "now"]),
        (57, ["\u221245 s", "\u221230 s", "\u221215 s", "now"]),
        (1800, ["\u221230 min", "\u221220 min", "\u221210 min", "now"]),
        (20_000, ["\u22124 h", "\u22122 h", "now"]),
    ],
    ids=["seconds", "a minute", "half an hour", "hours"],
)
def test_marks_are_round_and_few(span_s: int, marks: list[str]) -> None:
    axis = Axis(begin_ns=NOW_NS - span_s * S, end_ns=NOW_NS, zero_ns=NOW_NS)
    assert [words for _, words in axis.marks()] == marks
    assert [*axis.marks()][-1][0] == 100


def test_a_recorded_job_ends_at_its_last_call() -> None:
    made = drawn(recorded_incident(2))
    assert made.marks[-1][1] == "last call" and made.marks[-1][0] < 90
    assert [one.stop for one in made.lanes] == [None, None]
    assert "no progress" not in made.lanes[0].label
    assert made.lanes[1].waits[0].words.endswith("sequence number 346")


def test_a_record_without_times_has_no_marks() -> None:
    base = recorded_incident(2).job
    assert drawn(of_job(replace(base, ranks=tuple(replace(facts, collectives=()) for facts in base.ranks)))).marks == ()


@pytest.mark.parametrize("idle_s", [0.0, 1e-9, 1e9])
def test_any_standstill_fits_the_axis(idle_s: float) -> None:
    base = job_of(2)
    ranks = tuple(replace(facts, progress=replace(facts.progress, idle_s=idle_s)) for facts in base.ranks)
    made = drawn(of_job(replace(base, ranks=ranks)))
    bars = [bar for one in made.lanes for bar in (*one.actions, *one.waits)]
    assert all(0 <= bar.x <= 100 and 0 < bar.width <= 100.2 for bar in bars)
    assert 1 <= len(made.marks) <= 6 or idle_s > 1e6
