"""The line that gives ranks different settings, or a group its short timeout, as far as the source shows only one."""

from dataclasses import replace

import call_scenes
import pytest
import scenes
from builders import GLOO, USER_FILE
from judged import first

from lightning_ncclsafe.facts import JobFacts, Limited, RankFacts, StepFacts, TimeoutLine, TrainerFacts
from lightning_ncclsafe.facts.codec import decode, encode, from_plain, to_plain
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge

GIVEN, OTHER = f"{USER_FILE}:31 in main", f"{USER_FILE}:47 in make_trainer"
CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE
# Where the ranks of the scene are when they give up.
CALL = f"{USER_FILE}:79 in training_step"


def _given(facts: JobFacts, **more: dict[str, tuple[str, ...]] | dict[str, str]) -> JobFacts:
    def of(rank: RankFacts) -> RankFacts:
        return replace(rank, trainer=replace(rank.trainer, **more)) if rank.trainer is not None else rank

    return replace(facts, ranks=tuple(map(of, facts.ranks)))


@pytest.mark.parametrize(
    ("set_at", "location"),
    [
        ({"accumulate_grad_batches": (GIVEN,)}, GIVEN),
        ({"accumulate_grad_batches": (GIVEN, OTHER)}, ""),
        ({"accumulate_grad_batches": (GIVEN,), "max_steps": (OTHER,)}, GIVEN),
        ({"max_steps": (OTHER,)}, ""),
        ({}, ""),
    ],
)
def test_the_only_line_that_gives_a_setting(set_at: dict[str, tuple[str, ...]], location: str) -> None:
    finding = first(_given(scenes.another_accumulation_on_one_rank(GLOO), set_at=set_at))
    assert (finding.rule, finding.location, finding.confidence) == ("different-trainer-settings", location, LIKELY)
    assert any(GIVEN in one.text for one in finding.evidence) == bool(location)


@pytest.mark.parametrize(("step", "location"), [(GIVEN, GIVEN), (OTHER, "")])
def test_one_line_for_all_settings_that_differ(step: str, location: str) -> None:
    facts = scenes.two_ranks_resumed_elsewhere(GLOO)
    steps = {rank.rank: str(60 * (rank.rank > 1)) for rank in facts.ranks}
    ranks = []
    for rank in facts.ranks:
        assert rank.trainer is not None
        settings = rank.trainer.settings | {"first step": steps[rank.rank]}
        ranks.append(replace(rank, trainer=replace(rank.trainer, settings=settings)))
    given = _given(replace(facts, ranks=tuple(ranks)), set_at={"first epoch": (GIVEN,), "first step": (step,)})
    assert (first(given).rule, first(given).location) == ("different-trainer-settings", location)


def test_a_setting_that_has_changed_during_training_was_given_elsewhere() -> None:
    facts = scenes.two_ranks_resumed_elsewhere(GLOO)
    changed = _given(facts, set_at={"first epoch": (GIVEN,)}, changed={"first epoch": "9"})
    assert (first(changed).rule, first(changed).location) == ("different-trainer-settings", "")


def _timed(*lines: TimeoutLine, message: str = "") -> JobFacts:
    def of(rank: RankFacts) -> RankFacts:
        raised = rank.exception and replace(rank.exception, message=message or rank.exception.message)
        return replace(rank, steps=StepFacts(timeouts_at=lines), exception=raised)

    facts = call_scenes.group_with_a_shorter_timeout(GLOO)
    return replace(facts, ranks=tuple(map(of, facts.ranks)))


def _line(number: int, timeout_ms: int, limits: Limited = Limited.GROUP) -> TimeoutLine:
    place = f"{USER_FILE}:{number} in on_fit_start"
    return TimeoutLine(place=place, call=limits.value, limits=(limits,), timeout_ms=timeout_ms)


STORE = "wait timeout after 4000ms, keys: /default_pg/0//vocabulary"
FILE_STORE = "Timeout waiting for key: mapping after 4000 ms"
NEW_GROUP = "wait timeout after 4000ms, keys: /default_pg/0//1//cpu//0/1"
BARRIER = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 4000 ms"
USUAL = first(call_scenes.group_with_a_shorter_timeout(GLOO)).confidence


@pytest.mark.parametrize(
    ("lines", "message", "location"),
    [
        ((_line(5, 4000),), "", f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000), _line(6, 9000)), "", f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000), _line(6, 4000)), "", CALL),
        ((_line(5, 4000), _line(6, 0)), "", CALL),
        ((_line(5, 9000),), "", CALL),
        ((_line(5, 4000, Limited.BARRIER),), "", CALL),
        ((_line(5, 4000, Limited.BARRIER),), BARRIER, f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000),), STORE, CALL),
        ((_line(5, 4000, Limited.STORE),), STORE, f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000, Limited.STORE),), FILE_STORE, f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000),), NEW_GROUP, f"{USER_FILE}:5 in on_fit_start"),
        ((_line(5, 4000, Limited.STORE),), NEW_GROUP, CALL),
        ((_line(5, 4000, Limited.STORE),), "", CALL),
        ((), "", CALL),
    ],
)
def test_the_only_line_that_sets_the_timeout(lines: tuple[TimeoutLine, ...], message: str, location: str) -> None:
    finding = first(_timed(*lines, message=message))
    assert (finding.rule, finding.location, finding.confidence) == ("timeout-misuse", location, USUAL)
    sets = [one.text for one in finding.evidence if "sets a timeout" in one.text]
    assert len(sets) == (location != CALL)


@pytest.mark.parametrize(("message", "is_store"), [(STORE, True), (FILE_STORE, True), (NEW_GROUP, False)])
def test_the_store_is_named_only_if_the_timeout_is_its_own(message: str, is_store: bool) -> None:
    assert ("the store has its own timeout" in first(_timed(message=message)).summary) is is_store


@pytest.mark.parametrize("error", [STORE, FILE_STORE])
def test_how_long_a_barrier_at_the_store_waits_each_time_is_no_timeout(error: str) -> None:
    message = (
        "Timed out initializing process group in store based barrier on rank 0, for key: store_based_barrier_key:1 "
        f"(world_size=2, num_workers_joined=1, timeout=0:30:00 error={error})"
    )
    told = _timed(message=message)
    assert all(finding.rule != "timeout-misuse" for finding in judge(told).findings)


def _certain(*lines: TimeoutLine) -> JobFacts:
    """The default group has had calls with the usual timeout."""

    def of(rank: RankFacts) -> RankFacts:
        calls = [replace(c, timeout_ms=c.timeout_ms or 75_000) for c in rank.collectives]
        return replace(rank, collectives=tuple(calls))

    facts = _timed(*lines)
    return replace(facts, ranks=tuple(map(of, facts.ranks)))


def test_a_timeout_that_is_not_written_out_is_likely() -> None:
    assert [first(_certain(_line(5, ms))).confidence for ms in (4000, 0, 9000)] == [CERTAIN, LIKELY, CERTAIN]
    assert first(_certain(_line(5, 0))).location == f"{USER_FILE}:5 in on_fit_start"


def test_a_default_of_torch_is_set_by_no_line() -> None:
    message = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=61, Timeout(ms)=600000) ran for 600 s"
    facts = _timed(_line(5, 0), message=message)
    longer = replace(facts, incident=replace(facts.incident, timeout_s=3600.0))
    assert (first(longer).rule, first(longer).location) == ("timeout-misuse", CALL)


def test_the_lines_travel_and_older_reports_have_none() -> None:
    trainer = TrainerFacts(settings={}, set_at={"max_steps": (GIVEN,)})
    steps = StepFacts(timeouts_at=(_line(5, 4000),))
    assert decode(TrainerFacts, encode(trainer)) == trainer
    assert decode(StepFacts, encode(steps)) == steps
    old = to_plain(trainer), to_plain(steps)
    del old[0]["set_at"], old[1]["timeouts_at"]
    assert from_plain(TrainerFacts, old[0]).set_at == {}
    assert from_plain(StepFacts, old[1]).timeouts_at == ()
