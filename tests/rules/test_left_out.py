"""Which line has left something out, made it once more, or ended the loop, as far as facts of one rank tell it."""

from dataclasses import replace

import pytest
from builders import ALL_REDUCE, BACKWARD, BARRIER, ENGINE, GLOO, RUN, SITE, USER_FILE, job, raised, user
from call_scenes import RESULT, UNUSED, expert_left_out, in_backward
from judged import first
from judged import found as rules

from lightning_ncclsafe.facts import (
    Action,
    Branch,
    Decides,
    Frame,
    JobFacts,
    LoggedKey,
    LoopEnd,
    Phase,
    RankFacts,
    StepFacts,
    TrainerFacts,
    UnitKind,
)
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.positions import finished_ahead, out_of_data_first
from lightning_ncclsafe.rules.kit.timeline import timeline

CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE
CRITIC, GENERATOR = f"{USER_FILE}:61 in training_step", f"{USER_FILE}:46 in train_generator"
RETURN, GUARD = f"{USER_FILE}:58 in training_step", f"{USER_FILE}:50 in training_step"
HALVES = f"{USER_FILE}:70 in training_step"
FIT_LOOP_END = Frame(file=f"{SITE}/lightning/pytorch/loops/fit_loop.py", line=486, function="on_advance_end")
EARLY_STOPPING = Frame(
    file=f"{SITE}/lightning/pytorch/callbacks/early_stopping.py", line=200, function="_run_early_stopping_check"
)


def stepping(*steps: StepFacts) -> JobFacts:
    """Ranks in their own lines of the same batch, one more of them in each collective."""
    world = len(steps)
    line = user("training_step", 44)
    ranks = [GLOO.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, batch=19, world=world) for n in range(world)]
    return job(*(replace(facts, steps=steps[facts.rank]) for facts in ranks), world=world)


def batches(*made: tuple[int, ...], called: tuple[tuple[str, ...], ...] = (), under_way: bool = False) -> StepFacts:
    """What batches have made from batch 0 on; the last of them may be under way."""
    over = made[:-1] if under_way else made
    last = len(over) - 1
    return StepFacts(
        with_backward=len(made),
        passes=tuple((0, index, *one) for index, one in enumerate(over)),
        passes_epoch=0 if over else -1,
        passes_batch=last,
        under_way=(0, len(over), *made[-1]) if under_way else (),
        passes_from=called,
    )


@pytest.mark.parametrize(
    ("ways", "differs_around", "location"),
    [
        ((RETURN,), {}, RETURN),
        ((RETURN,), {RETURN: HALVES}, HALVES),
        ((GUARD, RETURN), {RETURN: HALVES}, CRITIC),
        ((), {}, CRITIC),
    ],
)
def test_a_skipped_pass_is_blamed_on_the_only_line_that_leads_around_it(
    ways: tuple[str, ...], differs_around: dict[str, str], location: str
) -> None:
    whole, short = (GENERATOR, CRITIC), (GENERATOR,)
    waits = batches((2,), (2,), called=(whole, whole), under_way=True)
    waits = replace(waits, led_around={GENERATOR: (GUARD,), CRITIC: ways}, differs_around=differs_around)
    left = batches((2,), (1,), called=(whole, short))
    finding = first(stepping(waits, left))
    assert (finding.rule, finding.ranks, finding.confidence) == ("skipped-step", (1,), LIKELY)
    assert finding.location == location
    assert any("train.py:61" in evidence.text for evidence in finding.evidence)


def test_a_condition_around_the_pass_decides_and_the_pass_is_named() -> None:
    whole, short = (GENERATOR, CRITIC), (GENERATOR,)
    waits = batches((2,), (2,), called=(whole, whole), under_way=True)
    waits = replace(waits, led_around={GENERATOR: (), CRITIC: (GUARD,)}, conditions_around=(GUARD,))
    finding = first(stepping(waits, batches((2,), (1,), called=(whole, short))))
    assert (finding.rule, finding.location, finding.decided_at) == ("skipped-step", CRITIC, GUARD)


def test_later_batches_show_the_line_of_a_pass_that_was_skipped_long_ago() -> None:
    """An optimizer has its turn by each rank's own values, now and then; places are kept of the last batches only."""
    whole, short = (GENERATOR, CRITIC), (GENERATOR,)
    ways = {GENERATOR: (), CRITIC: (RETURN,)}
    many = replace(batches((2,), (1,), (2,), (1,), (2,), called=((), (), (), short, whole)), led_around=ways)
    few = replace(batches((1,), (1,), (2,), (1,), (2,), called=(short, short, whole, short, whole)), led_around=ways)
    finding = first(stepping(many, few))
    assert (finding.rule, finding.ranks, finding.location) == ("skipped-step", (1,), RETURN)
    other = replace(many, passes_from=((), (), (HALVES, CRITIC), short, whole))
    assert first(stepping(other, few)).location == ""


@pytest.mark.parametrize(
    ("made", "odd"),
    [([(1, 1), (1,)] * 2, 1), ([(1, 1), (1,)], 1), ([(1, 1)] * 5, 0)],
    ids=["in turns", "in turns, once", "always"],
)
def test_where_batches_take_turns_the_odd_one_is_out_of_turn(made: list[tuple[int, ...]], odd: int) -> None:
    """Gradients of two batches accumulate, until one rank's exchange comes a batch later; the call is the same one."""
    made = [*made, (1, 1)]
    last = len(made)
    usual, late = ((*made, one) for one in ((1,), (1, 1)))
    calls = ((CRITIC,),) * (last + 1)
    finding = first(stepping(batches(*usual, called=calls), batches(*late, called=calls)))
    assert (finding.rule, finding.ranks, finding.location) == ("skipped-step", (odd,), CRITIC)


def test_different_accumulation_is_blamed_on_the_only_line_that_sets_it() -> None:
    sets = f"{USER_FILE}:33 in on_train_batch_start"
    usual = batches((1,), (1,), (1,))
    odd = replace(batches((1,), (1, 1), (1,)), accumulates_at=(sets,))
    finding = first(stepping(usual, odd))
    assert (finding.rule, finding.ranks, finding.location) == ("skipped-step", (1,), sets)
    assert first(stepping(usual, replace(odd, accumulates_at=(sets, HALVES)))).location == ""
    fewer = replace(batches((2,), (1,), called=((CRITIC, CRITIC), (CRITIC,))), accumulates_at=(sets,))
    assert first(stepping(batches((2,), (2,)), fewer)).location != sets


def test_a_rank_that_stepped_after_fewer_passes_will_not_make_the_missing_one() -> None:
    """All are in the first batch; only rank 1 has made the optimizer's step."""
    call = CRITIC
    others = replace(batches((2,), called=((call, call),), under_way=True), led_around={call: (RETURN,)})
    early = batches((1, 0, 1), called=((call,),), under_way=True)
    finding = first(stepping(others, early, others))
    assert (finding.rule, finding.ranks, finding.location) == ("skipped-step", (1,), RETURN)
    late = batches((1,), called=((call,),), under_way=True)
    assert "skipped-step" not in rules(stepping(others, late, others))
    stepped = batches((2, 0, 1), called=((call, call),), under_way=True)
    assert "skipped-step" not in rules(stepping(stepped, early, stepped))


def in_a_loop_of_passes(*, outer: bool) -> JobFacts:
    """Rank 0 in the sixth pass of a batch; the others have made four, as in no batch before, and are past that loop."""
    each = Branch(line=40, test="for part in parts:  (line 40)", on=Decides.PASSES, until=46)
    again = Branch(line=39, test="for _ in range(4):  (line 39)", on=Decides.PASSES, until=52)
    around = (again,) if outer else ()
    inside = replace(user("training_step", 44), branches=(*around, each))
    past = replace(user("training_step", 50), branches=around)
    call = f"{USER_FILE}:44 in training_step"
    own, left = (batches((8,), (made,), called=((call,) * 8, (call,) * made), under_way=True) for made in (6, 4))
    others = (GLOO.rank(n, past, BARRIER, seq=61, outstanding=1, batch=1, world=3) for n in (1, 2))
    waits = GLOO.rank(0, inside, ALL_REDUCE, seq=61, outstanding=1, batch=1, world=3)
    return job(replace(waits, steps=own), *(replace(facts, steps=left) for facts in others), world=3)


def test_a_rank_that_has_left_the_loop_of_passes_makes_no_more_of_them() -> None:
    finding = first(in_a_loop_of_passes(outer=False))
    assert (finding.rule, finding.ranks) == ("skipped-step", (1, 2))
    assert "4 on ranks 1-2 but 6 on rank 0" in finding.summary


def test_a_rank_that_a_loop_may_lead_back_may_make_more_passes() -> None:
    assert "skipped-step" not in rules(in_a_loop_of_passes(outer=True))


def test_a_batch_without_any_pass_is_blamed_on_the_call_if_nothing_else_is_known() -> None:
    """Each micro-batch of a batch has its pass, and a batch has none."""
    made = replace(in_backward(GLOO, 0, batch=3, world=2), steps=batches(*[(2,)] * 3, called=((CRITIC, CRITIC),) * 3))
    skipped = replace(made.steps, with_backward=2, skipped=1, skipped_epoch=0, skipped_batch=2)
    gone_on = GLOO.rank(
        1, user("training_step", 44), ALL_REDUCE, seq=61, outstanding=1, sizes=((1,),), batch=4, world=2
    )
    finding = first(job(made, replace(gone_on, steps=skipped), world=2))
    assert (finding.rule, finding.ranks, finding.location) == ("skipped-step", (1,), CRITIC)
    several = replace(skipped, passes_from=((CRITIC, GENERATOR),) * 3)
    assert first(job(made, replace(gone_on, steps=several), world=2)).location == ""
    handled = replace(skipped, handlers_around=(GUARD,))
    assert first(job(made, replace(gone_on, steps=handled), world=2)).location == GUARD
    unclear = replace(skipped, handlers_around=(GUARD, RETURN))
    assert first(job(made, replace(gone_on, steps=unclear), world=2)).location == CRITIC
    returns = replace(skipped, returns_nothing=(GUARD, RETURN), handlers_around=(HALVES,))
    assert first(job(made, replace(gone_on, steps=returns), world=2)).location == GUARD


def test_a_rank_that_makes_more_passes_than_usual_has_not_skipped_any() -> None:
    usual = batches((1,), (1,), (1,), called=((CRITIC,),) * 3)
    more = batches((1,), (1,), (2,), called=((CRITIC,), (CRITIC,), (HALVES, HALVES)))
    for ranks in ((usual, usual, more), (usual, more)):
        finding = first(stepping(*ranks))
        assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (len(ranks) - 1,), LIKELY)
        assert finding.location == HALVES
        assert "more backward passes" in finding.summary and "batch 2 of epoch 0" in finding.summary


def test_a_line_that_makes_its_pass_once_more_is_the_one() -> None:
    """A loop over micro-batches of which one rank has one more."""
    usual = batches((2,), (2,), (2,), called=((CRITIC, CRITIC),) * 3)
    more = batches((2,), (2,), (3,), called=((CRITIC, CRITIC), (CRITIC, CRITIC), (CRITIC, CRITIC, CRITIC)))
    finding = first(stepping(usual, usual, more))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (2,), CRITIC)


def test_additional_passes_are_neither_unused_parameters_nor_uneven_batches() -> None:
    """Rank 1 has made a pass more, and so comes to its end while the others wait in its last gradients."""
    usual = replace(in_backward(GLOO, 0, batch=2, world=2), steps=batches((1,), (1,), (1,), under_way=True))
    more = replace(GLOO.finished(1, seq=60, batch=2, world=2), steps=batches((1,), (2,), (1,)))
    found = job(usual, more, world=2)
    assert (first(found).rule, first(found).ranks) == ("diverged-collectives", (1,))
    assert {"unused-parameters", "uneven-batches"}.isdisjoint(rules(found))


def test_a_pass_more_that_reduces_nothing_lets_nobody_wait() -> None:
    told = judge(stepping(batches((1,), (1,)), batches((1,), (2, 1)))).findings
    assert not any("batch 1 of epoch 0" in finding.summary for finding in told)
    assert "skipped-step" in rules(stepping(batches((2,), (2,)), batches((2,), (2, 1))))


def test_gradients_that_are_not_reduced_are_not_unused_parameters() -> None:
    """DDP's flag is off on rank 1, say as an exception came before it was switched on again."""
    usual = replace(in_backward(GLOO, 0, batch=2, world=3), steps=batches((1,), (1,), (1,), under_way=True))
    gone_on = replace(GLOO.in_barrier(1, "x", seq=60, batch=4, world=3), steps=batches((1,), (1,), (1, 1), (1, 1)))
    found = job(usual, gone_on, replace(usual, rank=2), world=3)
    assert (first(found).rule, first(found).ranks) == ("skipped-step", (1,))
    assert "1 on rank 1" in first(found).summary
    assert "unused-parameters" not in rules(found)


def test_different_numbers_of_loss_evaluations_are_diverged_collectives() -> None:
    finding = first(stepping(batches((15,)), batches((16,))))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0, 1))
    finding = first(stepping(batches((16,)), batches((16,)), batches((15,))))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (2,))


def _refused(steps: StepFacts) -> JobFacts:
    culprit = raised(replace(GLOO.working(1, seq=60), steps=steps), "RuntimeError", UNUSED, RUN)
    return job(*(culprit if n == 1 else in_backward(GLOO, n) for n in range(4)))


def test_what_was_frozen_is_blamed_on_the_line_that_froze_it() -> None:
    steps = StepFacts(with_backward=11, frozen=("trunk.weight",), frozen_at=(RETURN,), unused_at=GUARD)
    finding = first(_refused(steps))
    assert (finding.rule, finding.location) == ("unused-parameters", RETURN)
    assert "frozen in the course of training: trunk.weight" in finding.summary
    assert finding.remedy.startswith("Freeze the same parameters on all ranks")
    assert not any("or left out" in item.text for item in finding.evidence)
    assert first(_refused(replace(steps, frozen_at=(RETURN, GUARD)))).location == ""


def test_the_condition_under_which_alone_a_part_is_used_is_told() -> None:
    under = Branch(line=50, test="if is_new.any():  (line 50)", on=Decides.VALUE, until=52)
    used_at = f"{USER_FILE}:51 in encoded"
    steps = StepFacts(with_backward=11, without_gradient=("tower.weight",), unused_at=used_at, unused_under=under)
    finding = first(_refused(steps))
    assert (finding.location, finding.decided_at) == (f"{USER_FILE}:50 in encoded",) * 2
    assert finding.summary.endswith(
        " Whether train.py:51 in encoded is run may be decided by `if is_new.any():` (line 50)."
    )
    frozen = first(_refused(replace(steps, frozen=("tower.weight",), frozen_at=(RETURN,))))
    assert (frozen.location, frozen.decided_at) == (RETURN, "")


@pytest.mark.parametrize(("test", "line"), [("random() < self.drop", 50), ("not rows.numel()", 51)])
def test_the_condition_of_a_jump_that_skips_a_part_is_told_beside_it(test: str, line: int) -> None:
    """Where a value is compared with a limit, ranks differ in the condition."""
    differs_at = 50 if line == 50 else 0
    skips = Branch(line=51, test=f"if {test}:  (line 50)", on=Decides.VALUE, jump="continue", differs_at=differs_at)
    steps = StepFacts(with_backward=11, without_gradient=("tower.weight",), unused_under=skips)
    finding = first(_refused(replace(steps, unused_at=f"{USER_FILE}:51 in encoded")))
    assert (finding.location, finding.decided_at) == (f"{USER_FILE}:{line} in encoded", f"{USER_FILE}:50 in encoded")
    assert f" The `continue` at train.py:51 in encoded is under `if {test}:` (line 50)." in finding.summary


def test_a_loss_from_nothing_is_blamed_on_the_line_that_makes_it() -> None:
    steps = StepFacts(with_backward=13, without_graph=1, leaves_at=(RETURN,))
    past = replace(GLOO.finished(1, seq=60, batch=19), steps=steps)
    finding = first(job(*(past if n == 1 else in_backward(GLOO, n) for n in range(4))))
    assert (finding.rule, finding.ranks, finding.location) == ("unused-parameters", (1,), RETURN)
    assert "its loss depends on no parameters" in finding.summary


FSDP, DDP = UnitKind.FSDP_UNIT, UnitKind.DDP_BUCKET
USUAL = StepFacts(with_backward=13)
DETACHED = StepFacts(with_backward=13, without_graph=2, leaves_at=(RETURN,))
FROZEN = StepFacts(with_backward=13, frozen=("trunk.weight",), frozen_at=(RETURN,))


def _sharded(kind: UnitKind, steps: StepFacts, *ranks: int, others: StepFacts = USUAL) -> JobFacts:
    """Rank 2 gathers another unit than the others; these have trained without gradients for some parameters."""
    told = (
        replace(
            facts,
            steps=steps if facts.rank in ranks else others,
            units=tuple(replace(unit, kind=kind) for unit in facts.units),
        )
        for facts in expert_left_out(GLOO).ranks
    )
    return job(*told)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (DETACHED, "The loss of rank 1 depended on no parameter in 2 of its batches"),
        (FROZEN, "Rank 1 froze trunk.weight after training began"),
    ],
    ids=["a loss from nothing", "frozen"],
)
def test_where_fsdp_reduces_less_on_a_rank_its_later_calls_are_paired_wrongly(steps: StepFacts, why: str) -> None:
    finding = first(_sharded(FSDP, steps, 1))
    assert (finding.rule, finding.ranks, finding.location) == ("unused-parameters", (1,), RETURN)
    assert finding.summary.startswith(f"{why}, so FSDP reduced fewer gradients there")


def test_what_one_rank_has_frozen_beside_what_all_have_frozen_is_its_own() -> None:
    more = replace(FROZEN, frozen=("trunk.weight", "head.weight"))
    assert first(_sharded(FSDP, more, 1, others=FROZEN)).ranks == (1,)


@pytest.mark.parametrize("steps", [DETACHED, FROZEN], ids=["a loss from nothing", "frozen"])
@pytest.mark.parametrize(("kind", "ranks"), [(DDP, (1,)), (FSDP, (0, 1, 2, 3))], ids=["not sharded", "on all ranks"])
def test_ranks_that_reduce_alike_are_not_blamed_for_what_has_no_gradient(
    steps: StepFacts, kind: UnitKind, ranks: tuple[int, ...]
) -> None:
    told = judge(_sharded(kind, steps, *ranks)).findings
    assert told and not any("reduced fewer gradients" in finding.summary for finding in told)


def test_what_ranks_in_a_later_epoch_have_frozen_the_others_may_freeze_yet() -> None:
    ranks = [*_sharded(FSDP, FROZEN, 1).ranks]
    ranks[1] = replace(ranks[1], progress=replace(ranks[1].progress, epoch=1))
    told = judge(job(*ranks)).findings
    assert told and not any("reduced fewer gradients" in finding.summary for finding in told)


def test_what_has_no_gradient_on_a_rank_is_no_cause_where_all_are_in_one_call() -> None:
    diverged = _sharded(FSDP, FROZEN, 1)
    alike = replace(diverged.ranks[0], rank=2)
    assert "unused-parameters" not in rules(job(*diverged.ranks[:2], alike, diverged.ranks[3]))


def trained(facts: RankFacts, end: LoopEnd = LoopEnd.UNKNOWN, *, begun: int = 3, **changed: str) -> RankFacts:
    told = TrainerFacts(settings={"max_epochs": "6"}, changed=changed, end=end, batches_begun=begun, batches=6)
    return replace(facts, trainer=replace(told, ended_at=(RETURN,)))


def test_a_rank_that_is_past_an_epoch_that_has_not_run_out_has_stopped_early() -> None:
    """Rank 1 reduces what it has logged on the epoch, in its third batch of six; the others are in that batch."""
    options = {"outstanding": 1, "op": "barrier", "sizes": (), "batch": 2, "world": 3}
    past = GLOO.rank(1, FIT_LOOP_END, RESULT, BARRIER, seq=61, **options)  # type: ignore[arg-type]
    ranks = [trained(past if n == 1 else GLOO.waiting(n, seq=61, batch=2, world=3)) for n in range(3)]
    finding = first(job(*ranks, world=3))
    assert (finding.rule, finding.ranks, finding.confidence) == ("stopped-early", (1,), LIKELY)
    assert finding.location == RETURN
    inside = trained(GLOO.rank(1, RESULT, BARRIER, seq=61, **options))  # type: ignore[arg-type]
    assert "stopped-early" not in rules(job(ranks[0], inside, ranks[2], world=3))


@pytest.mark.parametrize(
    ("epoch", "words"), [(1, "after batch 2 (of 6 batches),"), (2, "after batch 2 of epoch 1 (of 6 batches),")]
)
def test_a_rank_that_has_finished_may_have_left_a_later_epoch(epoch: int, words: str) -> None:
    """Whatever ended its epoch may have ended all others, too: its batches are of the last one."""
    done = GLOO.finished(1, seq=60, batch=-1, epoch=epoch, world=3)
    ranks = (trained(done if n == 1 else GLOO.waiting(n, seq=61, batch=3, world=3)) for n in range(3))
    finding = first(job(*ranks, world=3))
    assert (finding.rule, finding.ranks) == ("stopped-early", (1,))
    assert f" {words} while ranks 0, 2 are still in batch 3 of epoch 0" in finding.summary
    assert f"Rank 1: finished, {words[:-1]}." in [item.text for item in finding.evidence]


def _ahead(
    *still: int, batch: int = 3, action: str = BACKWARD, begun: int = 6, epochs: str = "6", later: int = 0
) -> JobFacts:
    """A rank of four, or of two, has trained on all of six batches; these others wait in one of theirs."""
    world = 4 if len(still) > 1 else 2
    finished = GLOO.finished(1, seq=60, batch=5, world=world)
    # Lightning counts on at the end.
    finished = replace(finished, progress=replace(finished.progress, epoch=finished.progress.epoch + 1 + later))
    ended = trained(finished, LoopEnd.DATA, begun=begun)
    waiting = {n: trained(GLOO.waiting(n, seq=61, batch=batch, action=action, world=world)) for n in still}
    told = {rank: (facts, facts.trainer) for rank, facts in (waiting | {1: ended}).items()}
    ranks = {
        rank: replace(facts, trainer=replace(trainer, settings={"max_epochs": epochs if rank == 1 else "6"}))
        for rank, (facts, trainer) in told.items()
        if trainer is not None
    }
    return job(*(ranks[rank] for rank in sorted(ranks)), world=world)


@pytest.mark.parametrize(("still", "odd"), [((0, 2, 3), (1,)), ((0,), (0, 1))])
def test_a_rank_that_is_through_as_many_batches_before_the_others_has_made_fewer_calls(
    still: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    finding = first(_ahead(*still))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", odd, "")
    assert finding.summary.startswith("Rank 1 has trained on all batches while rank")
    assert "although an epoch has 6 on all ranks" in finding.summary
    assert not out_of_data_first(timeline(_ahead(*still)))


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (_ahead(0, 2, 3, epochs="2"), "different-trainer-settings"),
        (_ahead(0, 2, 3, begun=4), "uneven-batches"),
        (_ahead(0, 2, 3, later=1), "uneven-batches"),
        (_ahead(0, 2, 3, batch=-1), "uneven-batches"),
        (_ahead(0, 2, 3, action=""), "uneven-batches"),
        (_ahead(0, 2), "uneven-batches"),
    ],
    ids=["other settings", "fewer batches", "in a later epoch", "before batches", "between batches", "a silent rank"],
)
def test_a_rank_that_is_through_first_for_another_reason_is_not_ahead(facts: JobFacts, rule: str) -> None:
    assert first(facts).rule == rule
    assert finished_ahead(timeline(facts)) is None


def _generates(made: int) -> JobFacts:
    """As recorded: rank 0 generates, in the third of four batches of validation, and rank 1 trains on after it."""
    line, here = user("validation_step", 46), {"seq": 87, "outstanding": 1, "world": 2}
    long = GLOO.rank(0, line, ALL_REDUCE, phase=Phase.VALIDATE, batch=2, op="all_gather", sizes=((536,),), **here)  # type: ignore[arg-type]
    gone_on = trained(GLOO.waiting(1, seq=87, batch=0, epoch=1, world=2), begun=1)
    assert gone_on.trainer is not None
    gone_on = replace(gone_on, trainer=replace(gone_on.trainer, validated=made, ended_at=()))
    validates = trained(long, LoopEnd.DATA)
    assert validates.trainer is not None
    return job(replace(validates, trainer=replace(validates.trainer, validated=2)), gone_on, world=2)


@pytest.mark.parametrize("made", [3, 4])
def test_a_rank_that_validated_after_the_others_batch_has_neither_less_data_nor_stopped(made: int) -> None:
    finding = first(_generates(made))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert finding.location == f"{USER_FILE}:46 in validation_step"
    assert {"uneven-batches", "stopped-early"}.isdisjoint(rules(_generates(made)))


def test_a_rank_that_did_not_validate_after_the_others_batch_has_less_data() -> None:
    fewer = first(_generates(2))
    assert (fewer.rule, fewer.ranks, fewer.confidence) == ("uneven-batches", (1,), LIKELY)


@pytest.mark.parametrize(("made", "is_short"), [(3, True), (4, False), (0, False)])
def test_a_rank_that_had_fewer_batches_in_the_validation_that_others_end_has_less_data(
    made: int, is_short: bool
) -> None:
    """Rank 1 trains on, and rank 0 waits at the end of a validation of four batches."""
    ranks = {facts.rank: facts for facts in _generates(made).ranks}
    validates = ranks[0].trainer
    assert validates is not None
    last = replace(ranks[0].progress, batch_idx=3, is_last_batch=True, actions=())
    facts = job(replace(ranks[0], progress=last, trainer=replace(validates, validated=4)), ranks[1], world=2)
    assert (first(facts).rule == "uneven-batches") == is_short
    assert out_of_data_first(timeline(facts)) == ((1,) if is_short else ())


@pytest.mark.parametrize(
    ("made", "hook", "is_short"),
    [
        (3, "on_validation_batch_end", True),
        (4, "on_validation_batch_end", False),
        (0, "on_validation_batch_end", False),
        (3, "on_validation_epoch_end", False),
    ],
    ids=["one fewer", "equally many", "unknown", "past it"],
)
@pytest.mark.parametrize("of", ["[LightningModule]Net", "[Callback]Notifying"])
def test_a_batch_whose_last_hook_others_are_in_counts_for_them(made: int, hook: str, is_short: bool, of: str) -> None:
    """Rank 1 trains on, and rank 0 waits in a hook after the fourth batch, when it has completed three."""
    ranks = {facts.rank: facts for facts in _generates(made).ranks}
    validates = ranks[0].trainer
    assert validates is not None
    actions = (Action(name=f"{of}.{hook}", for_s=23.0),)
    last = replace(ranks[0].progress, batch_idx=3, is_last_batch=True, actions=actions)
    facts = job(replace(ranks[0], progress=last, trainer=replace(validates, validated=3)), ranks[1], world=2)
    assert (first(facts).rule == "uneven-batches") == is_short
    assert out_of_data_first(timeline(facts)) == ((1,) if is_short else ())


def test_of_ranks_that_end_a_validation_the_one_with_the_fewest_batches_counts() -> None:
    """Rank 0 waits after its fourth batch, rank 2 after its third, as many as rank 1 has had."""
    ranks = {facts.rank: facts for facts in _generates(3).ranks}
    validates = ranks[0].trainer
    assert validates is not None
    actions = (Action(name="[LightningModule]Net.on_validation_batch_end", for_s=23.0),)
    last = replace(ranks[0].progress, batch_idx=3, is_last_batch=True, actions=actions)
    long = replace(ranks[0], progress=last, trainer=replace(validates, validated=3))
    other = replace(long, rank=2, trainer=replace(validates, validated=2))
    assert out_of_data_first(timeline(job(long, ranks[1], world=2))) == (1,)
    assert out_of_data_first(timeline(job(long, ranks[1], other, world=3))) == ()


@pytest.mark.parametrize("short", [(1,), (1, 2)])
def test_ranks_in_the_next_epoch_had_fewer_batches_in_the_one_that_others_end(short: tuple[int, ...]) -> None:
    told = {n: TrainerFacts(settings={}, batches_begun=10, batches_before=0, validated=5) for n in range(4)}
    told |= {n: TrainerFacts(settings={}, batches_begun=1, batches_before=8, validated=2) for n in short}
    own = user("validation_step", 44)
    here = {
        "outstanding": 1,
        "sizes": ((10,),),
        "phase": Phase.VALIDATE,
        "action": "[LightningModule]Net.validation_step",
        "batch": 5,
    }
    ranks = {n: GLOO.rank(n, own, ALL_REDUCE, seq=61, **here) for n in range(4)}  # type: ignore[arg-type]
    ranks |= {n: GLOO.waiting(n, seq=61, epoch=1, batch=0) for n in short}
    finding = first(job(*(replace(facts, trainer=told[n]) for n, facts in ranks.items())))
    assert (finding.rule, finding.ranks) == ("uneven-batches", short)
    assert "run out of data (after 8 batches by the end of epoch 0; others had 10) while ranks" in finding.summary


def test_a_rank_that_was_asked_to_stop_has_not_left_out_a_validation() -> None:
    """With NCCL, rank 0 may come as far as the next validation before it waits for the batch that is not trained on."""
    ranks = {facts.rank: facts for facts in _generates(4).ranks}
    validates, trains = ranks[0].trainer, ranks[1].trainer
    assert validates is not None and trains is not None
    inside = replace(ranks[0], steps=StepFacts(validated=7), trainer=replace(validates, validated=2))
    asked = replace(trains, end=LoopEnd.SHOULD_STOP, ended_at=(GUARD,))
    finished = replace(ranks[1].progress, phase=Phase.FINISHED, actions=())
    stopped = replace(ranks[1], steps=StepFacts(validated=4), trainer=asked, progress=finished)
    finding = first(job(inside, stopped, world=2))
    assert (finding.rule, finding.ranks, finding.location) == ("stopped-early", (1,), GUARD)
    assert "trainer.should_stop is set there, and not on rank 0" in finding.summary


@pytest.mark.parametrize(
    ("made", "rule", "location"),
    [
        (4, "stopped-early", GUARD),
        (7, "diverged-collectives", f"{USER_FILE}:46 in validation_step"),  # in this validation, too
    ],
)
def test_a_rank_that_has_gone_on_without_a_validation_has_left_it_out(made: int, rule: str, location: str) -> None:
    """Of four batches each, rank 0 is in the third of the second one; in the first, rank 1 has had all four."""
    ranks = {facts.rank: facts for facts in _generates(4).ranks}
    validates, trains = ranks[0].trainer, ranks[1].trainer
    assert validates is not None and trains is not None
    inside = replace(ranks[0], steps=StepFacts(validated=7), trainer=replace(validates, validated=2))
    gone_on = replace(ranks[1], steps=StepFacts(validated=made), trainer=replace(trains, validates_at=(GUARD,)))
    finding = first(job(inside, gone_on, world=2))
    assert (finding.rule, finding.confidence, finding.location) == (rule, LIKELY, location)
    has_left_out = "Rank 1 has continued without the validation that rank 0 is in" in finding.summary
    assert has_left_out == (rule == "stopped-early")
    assert has_left_out == (finding.ranks == (1,))
    # Asked to stop since, it has not for certain been the only one.
    assert gone_on.trainer is not None
    stopped = replace(gone_on, trainer=replace(gone_on.trainer, end=LoopEnd.SHOULD_STOP))
    assert CERTAIN not in rules(job(inside, stopped, world=2)).values()
    # What is logged is reduced after the last batch.
    last = replace(inside.progress, batch_idx=3, is_last_batch=True, actions=())
    assert inside.trainer is not None
    ended = replace(inside, progress=last, steps=StepFacts(validated=8), trainer=replace(inside.trainer, validated=4))
    if has_left_out:
        assert first(job(ended, gone_on, world=2)).rule == rule


def test_a_rank_that_has_finished_while_the_others_validate_has_stopped_early() -> None:
    """A StopIteration has ended each of its epochs; the others are in the validation of their first."""
    ended = trained(GLOO.finished(1, seq=60, batch=3), begun=4)
    others = [trained(GLOO.waiting(n, seq=61, phase=Phase.VALIDATE, batch=5), LoopEnd.DATA, begun=6) for n in (0, 2, 3)]
    finding = first(job(others[0], ended, *others[1:]))
    assert (finding.rule, finding.ranks, finding.location) == ("stopped-early", (1,), RETURN)
    # It has validated nothing, and the others six batches: what ends an epoch ends it without its validation.
    told = [(facts, facts.trainer) for facts in others]
    counted = [
        replace(facts, steps=StepFacts(validated=6), trainer=replace(trainer, validated=6))
        for facts, trainer in told
        if trainer is not None
    ]
    finding = first(job(counted[0], ended, *counted[1:]))
    assert (finding.rule, finding.ranks, finding.location) == ("stopped-early", (1,), RETURN)


def test_a_rank_that_has_changed_when_it_ends_has_stopped_early() -> None:
    ended = trained(GLOO.finished(1, seq=60, batch=5), LoopEnd.DATA, begun=6, max_epochs="2")
    others = [trained(GLOO.waiting(n, seq=61, batch=0, epoch=2)) for n in (0, 2, 3)]
    finding = first(job(others[0], ended, *others[1:]))
    assert (finding.rule, finding.ranks, finding.confidence) == ("stopped-early", (1,), LIKELY)
    assert "max_epochs was changed there during training, from 6 to 2" in finding.summary
    assert finding.location == RETURN
    alike = [trained(GLOO.waiting(n, seq=61, batch=0, epoch=2), max_epochs="2") for n in (0, 2, 3)]
    assert "stopped-early" not in rules(job(alike[0], ended, *alike[1:]))


@pytest.mark.parametrize(("end", "is_told"), [(LoopEnd.SHOULD_STOP, True), (LoopEnd.DATA, False)])
def test_a_rank_that_was_asked_to_stop_has_left_a_stream_that_the_others_read_on(end: LoopEnd, is_told: bool) -> None:
    """As recorded: all are in the same batch, which may be the last of a stream; the others ask for the next one."""
    vote = "[Callback]ModelCheckpoint.on_train_epoch_end"
    ahead = trained(GLOO.rank(1, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), batch=2, action=vote), end)
    others = [trained(GLOO.waiting(n, seq=61, batch=2), LoopEnd.DATA) for n in (0, 2, 3)]
    told = [replace(facts, trainer=replace(facts.trainer, batches=None)) for facts in (others[0], ahead, *others[1:])]  # type: ignore[type-var, arg-type]
    assert ("stopped-early" in rules(job(*told))) is is_told


def test_a_rank_that_has_set_its_count_of_epochs_has_stopped_early() -> None:
    ended = trained(GLOO.finished(1, seq=60, batch=5), LoopEnd.DATA, begun=6, **{"first epoch": "4"})
    others = [trained(GLOO.waiting(n, seq=61, batch=0, epoch=2)) for n in (0, 2, 3)]
    told = [replace(facts, trainer=replace(facts.trainer, settings={"first epoch": "0"})) for facts in (ended, *others)]  # type: ignore[type-var, arg-type]
    finding = first(job(told[1], told[0], *told[2:]))
    assert (finding.rule, finding.ranks, finding.confidence) == ("stopped-early", (1,), LIKELY)
    assert "its epoch counter was set there during training, as if it had begun with epoch 4, not 0" in finding.summary
    assert finding.location == RETURN


def test_a_rank_that_has_changed_when_it_ends_and_trains_on_has_other_settings() -> None:
    """As StochasticWeightAveraging does where there are norms: it makes an epoch more."""
    ended = [trained(GLOO.finished(n, seq=60, batch=5), LoopEnd.DATA, begun=6) for n in (0, 2, 3)]
    longer = trained(GLOO.waiting(1, seq=61, batch=0, epoch=6), max_epochs="7")
    finding = first(job(ended[0], longer, *ended[1:]))
    assert (finding.rule, finding.ranks, finding.confidence) == ("different-trainer-settings", (1,), LIKELY)
    assert "max_epochs is 6 on ranks 0, 2-3 but 7 on rank 1" in finding.summary
    assert finding.summary.endswith(" Ranks 0, 2-3 have finished.")
    assert finding.location == RETURN
    assert longer.trainer is not None
    several = replace(longer, trainer=replace(longer.trainer, ended_at=(RETURN, GUARD)))
    assert first(job(ended[0], several, *ended[1:])).location == ""
    unchanged = replace(longer, trainer=replace(longer.trainer, settings={"max_epochs": "7"}, changed={}))
    assert first(job(ended[0], unchanged, *ended[1:])).location == ""
    other = replace(longer, trainer=replace(longer.trainer, settings={"max_epochs": "6", "accumulate": "2"}))
    assert first(job(ended[0], other, *ended[1:])).location == "", "not all that differs has been changed"


def test_where_lightnings_own_callback_may_have_stopped_no_line_is_blamed() -> None:
    ended = trained(GLOO.finished(1, seq=60, batch=2), LoopEnd.SHOULD_STOP)
    others = [trained(GLOO.waiting(n, seq=61, batch=3)) for n in (0, 2, 3)]
    assert first(job(others[0], ended, *others[1:])).location == RETURN
    assert ended.trainer is not None
    watched = replace(ended, trainer=replace(ended.trainer, callbacks=("EarlyStopping",)))
    finding = first(job(others[0], watched, *others[1:]))
    assert (finding.rule, finding.ranks, finding.location) == ("stopped-early", (1,), "")


FIT_END = "[Callback]Best.on_fit_end"


def _tests_again(rank: int, *, inner: bool = True, hook: str = FIT_END, phase: Phase = Phase.TEST) -> RankFacts:
    stack = (user("on_fit_end", 54), RUN, BARRIER) if inner else (user("on_fit_end", 54), BARRIER)
    return GLOO.rank(rank, *stack, seq=61, outstanding=1, phase=phase, batch=-1, epoch=1, world=2, action=hook)


def test_a_rank_that_fetches_a_batch_to_test_has_batches_left() -> None:
    ended = GLOO.finished(1, seq=60, batch=-1, epoch=1, world=2)
    for action, is_unfinished in ((FIT_END, True), ("[_EvaluationLoop].test_next", False)):
        left = GLOO.working(
            0, user("on_fit_end", 54), seq=60, phase=Phase.TEST, batch=3, world=2, action=action, epoch=1
        )
        assert ("unfinished-rank" in rules(job(left, ended, world=2))) is is_unfinished


def test_a_rank_that_called_the_trainer_again_is_unfinished_and_has_not_run_out_of_data() -> None:
    ended = GLOO.finished(1, seq=60, batch=-1, epoch=1, world=2)
    found = job(_tests_again(0), ended, world=2)
    finding = first(found)
    assert (finding.rule, finding.ranks, finding.confidence) == ("unfinished-rank", (0,), LIKELY)
    assert finding.location == f"{USER_FILE}:54 in on_fit_end"
    assert {"uneven-batches", "diverged-collectives"}.isdisjoint(rules(found))
    assert "rank-behind" not in rules(found), "that the other one has finished is told"
    both = job(_tests_again(0), _tests_again(1), world=2)
    assert "unfinished-rank" not in rules(both)
    for other in (_tests_again(0, inner=False), _tests_again(0, hook=""), _tests_again(0, phase=Phase.TRAIN)):
        assert "unfinished-rank" not in rules(job(other, ended, world=2))


def test_a_rank_whose_batches_are_unknown_has_not_run_out_of_data() -> None:
    ended = GLOO.finished(1, seq=60, batch=-1, epoch=1)
    others = [GLOO.waiting(n, seq=61, batch=3, epoch=0) for n in (0, 2, 3)]
    found = job(others[0], ended, *others[1:])
    finding = next(finding for finding in judge(found).findings if finding.rule == "uneven-batches")
    assert finding.confidence is POSSIBLE
    assert "has ended its training" in finding.summary and "run out of data" not in finding.summary
    known = replace(ended, progress=replace(ended.progress, batch_idx=4))
    finding = first(job(others[0], known, *others[1:]))
    assert (finding.rule, finding.confidence) == ("uneven-batches", LIKELY)
    assert "has run out of data" in finding.summary


def test_a_key_that_a_callback_monitors_on_one_rank_only() -> None:
    key = LoggedKey(name="score", hook="on_validation_epoch_end", place=RETURN)
    options = {"outstanding": 1, "op": "barrier", "sizes": (), "world": 2}
    asks = GLOO.rank(0, EARLY_STOPPING, BARRIER, seq=61, **options)  # type: ignore[arg-type]
    asks = replace(asks, steps=StepFacts(with_backward=12, monitored=(key,)))
    waits = GLOO.rank(1, ENGINE, seq=61, outstanding=1, world=2)
    finding = first(job(asks, replace(waits, steps=StepFacts(with_backward=12)), world=2))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (0,), LIKELY)
    assert finding.location == RETURN
    assert "has logged 'score' in on_validation_epoch_end, which a callback monitors" in finding.summary
    both = replace(waits, steps=StepFacts(with_backward=12, monitored=(key,)))
    assert "'score'" not in first(job(asks, both, world=2)).summary
