"""Answers that are not certain, as something else explains the same facts: another line, a pass of a loop, a retry."""

from dataclasses import replace

import pytest
from builders import (
    AGREEMENT_WAIT,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    ENGINE,
    GLOO,
    MAIN,
    NEXT,
    NEXT_DATA,
    ONE,
    RUN,
    USER_FILE,
    job,
    raised,
    user,
)
from judged import first
from test_shifts import of

from lightning_ncclsafe.facts import (
    Branch,
    CaughtException,
    Collective,
    Decides,
    EndedProcess,
    Frame,
    LoaderFacts,
    RankFacts,
    StepFacts,
)
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge

CERTAIN, LIKELY = Confidence.CERTAIN, Confidence.LIKELY


@pytest.mark.parametrize(
    "letters",
    [("rrg", "rrs"), ("rrg", "rrs", "rrg", "rrs"), ("gsrg", "gsrs"), ("rrg", "rrs", "rrz")],
    ids=["both new", "two and two", "both made before", "three lines"],
)
def test_nothing_decides_between_the_lines_of_two_sides(letters: tuple[str, ...]) -> None:
    """The rank at line 40 may have left out line 50 as well, and the other way round."""
    found = first(of(*letters))
    assert (found.rule, found.ranks, found.confidence) == ("diverged-collectives", (*range(len(letters)),), LIKELY)


def test_only_one_of_the_lines_is_new_to_all() -> None:
    """One rank has called it and one has not, whichever of them is right."""
    found = first(of("gsgsrr", "gsgsrz"))
    assert (found.rule, found.location) == ("diverged-collectives", f"{USER_FILE}:60 in step")
    assert first(of("gsrg", "gsrz")).confidence is CERTAIN


def test_a_rank_in_lightning_has_left_out_what_the_others_are_in() -> None:
    """Without stacks in the recorder, its only line is the call of the Trainer, which all ranks have made."""
    scene = of("rrg", "rrb", "rrg")
    here = (MAIN, RUN, user("step", 40), ALL_REDUCE)
    ranks = (
        replace(
            facts,
            stack=(MAIN, RUN, BARRIER) if facts.rank == 1 else here,
            collectives=tuple(replace(call, site="", stack=()) for call in facts.collectives),
        )
        for facts in scene.ranks
    )
    found = first(replace(scene, ranks=tuple(ranks)))
    assert (found.rule, found.ranks, found.location) == ("diverged-collectives", (1,), f"{USER_FILE}:40 in step")


def _reduces(number: int, *sizes: int, loop: str = "") -> RankFacts:
    """One of three ranks that reduces tensors of these sizes at one line."""
    branches = (Branch(line=39, until=41, on=Decides.PASSES, test=loop),) if loop else ()
    line = replace(user("sync", 40, code="dist.all_reduce(p.grad)"), branches=branches)
    calls = [
        Collective(
            group="0",
            seq=seq,
            op="all_reduce",
            backend="gloo",
            completed=seq < len(sizes),
            input_sizes=((size,),),
            dtypes=("Float",),
            created_ns=1_000_000 * seq,
            site="sync",
            stack=(line,),
        )
        for seq, size in enumerate(sizes, 1)
    ]
    facts = GLOO.rank(number, line, ALL_REDUCE, seq=len(sizes), outstanding=1, world=3)
    return replace(facts, collectives=tuple(calls))


def test_a_rank_that_is_in_another_pass_of_a_loop_over_tensors() -> None:
    """``for p in params: if p.grad is not None: all_reduce(p.grad)``: rank 1 has left out the second of three."""
    often = [_reduces(number, 10, 20, 30, 10, 30 if number == 1 else 20) for number in range(3)]
    found = first(job(*often, world=3))
    assert (found.rule, found.ranks, found.confidence) == ("mismatched-collective", (1,), LIKELY)
    assert found.summary.endswith("so ranks may also have made different numbers of calls there.")
    for loop, confidence in (("for p in self.parameters():", LIKELY), ("for batch in self.data:", CERTAIN)):
        once = [_reduces(number, 10, 30 if number == 1 else 20, loop=loop) for number in range(3)]
        assert first(job(*once, world=3)).confidence is confidence


def test_the_call_of_the_trainer_is_not_the_line_of_a_rank_in_a_library() -> None:
    """All ranks have made it, whatever the rank does there."""
    late = GLOO.working(2, NEXT_DATA, seq=60, action=NEXT)
    found = first(job(late, *(GLOO.waiting(number, seq=61) for number in (0, 1, 3))))
    assert (found.rule, found.ranks, found.confidence, found.location) == ("data-stall", (2,), CERTAIN, "")


def _broadcasts(number: int, root: int, line: Frame) -> RankFacts:
    facts = GLOO.rank(number, line, BROADCAST, seq=61, outstanding=1, op="broadcast", sizes=ONE, world=3)
    return replace(facts, steps=StepFacts(root=root))


def test_ranks_with_different_roots_in_two_calls_or_in_two_passes_of_a_loop() -> None:
    """In ``for src in range(size): broadcast(x, src=src)``, rank 1 is in the next pass; or at another line."""
    plain = user("share", 6, code="dist.broadcast(x, src=src)")
    looped = replace(plain, branches=(Branch(line=5, until=7, on=Decides.PASSES, test="for src in range(size):"),))
    for line, other, confidence in (
        (plain, plain, CERTAIN),
        (plain, replace(plain, line=8), LIKELY),
        (looped, looped, LIKELY),
    ):
        ranks = (_broadcasts(number, number % 2, other if number == 1 else line) for number in range(3))
        found = first(job(*ranks, world=3))
        assert (found.rule, found.ranks, found.confidence) == ("mismatched-collective", (1,), confidence)


@pytest.mark.parametrize(("alone", "confidence"), [((3,), LIKELY), ((2, 3), LIKELY), ((1, 2, 3), CERTAIN)])
def test_ranks_that_ask_for_loaders_alone_may_be_at_fault(alone: tuple[int, ...], confidence: Confidence) -> None:
    """They may have come there under a condition on their data, which no other rank will."""
    line = user("training_step", 33)
    asking = {n: GLOO.rank(n, line, *AGREEMENT_WAIT, seq=60, action="agreement:val_dataloader") for n in alone}
    found = first(job(*(asking.get(number) or GLOO.waiting(number, seq=61) for number in range(4))))
    assert (found.rule, found.confidence) == ("unpresented-loader", confidence)


@pytest.mark.parametrize(
    ("lines", "led_around", "confidence"), [((40,), (), CERTAIN), ((40, 60), (), LIKELY), ((40, 60), (60,), CERTAIN)]
)
def test_which_of_several_lines_has_returned_nothing(
    lines: tuple[int, ...], led_around: tuple[int, ...], confidence: Confidence
) -> None:
    """Only one that leads around the backward pass of the others is known to have skipped it."""
    places, ways = (tuple(f"{USER_FILE}:{line} in training_step" for line in some) for some in (lines, led_around))
    message = "Skipping the `training_step` by returning None in distributed training is not supported"
    facts = raised(GLOO.rank(1, seq=60, world=2), "MisconfigurationException", message, RUN)
    steps = StepFacts(with_backward=5, skipped=1, skipped_epoch=0, skipped_batch=6, returns_nothing=places)
    facts = replace(facts, steps=replace(steps, led_around={"call": ways} if ways else {}))
    found = first(job(GLOO.waiting(0, seq=61, world=2), facts, world=2))
    assert (found.rule, found.confidence, found.location) == ("skipped-step", confidence, (ways or places)[0])


def test_a_backward_pass_that_an_exception_has_ended_leaves_gradients_out_as_well() -> None:
    """The rank has caught a lack of memory in backward; DDP raises in its next forward pass."""
    message = "Expected to have finished reduction in the prior iteration before starting a new one."
    facts = raised(GLOO.rank(1, seq=60, world=2), "RuntimeError", message, RUN, user("training_step", 44))
    facts = replace(facts, steps=StepFacts(with_backward=5, without_gradient=("w",), without_gradient_count=1))
    caught = CaughtException(type="OutOfMemoryError", stack=(RUN, user("training_step", 46), ENGINE), ago_s=30.0)
    for errors, confidence in (((), CERTAIN), ((caught,), LIKELY)):
        found = first(job(GLOO.waiting(0, seq=61, world=2), replace(facts, caught=errors), world=2))
        assert (found.rule, found.confidence) == ("unused-parameters", confidence)


@pytest.mark.parametrize(("ago_s", "confidence"), [(30.0, CERTAIN), (500.0, LIKELY)])
def test_a_child_that_was_killed_long_before_the_last_batch_may_be_no_worker(
    ago_s: float, confidence: Confidence
) -> None:
    """``subprocess.run(…, timeout=5)`` kills what it has started; of iterable data, workers end that are through."""
    late = replace(GLOO.working(2, NEXT_DATA, seq=60, action=NEXT), loaders=(LoaderFacts(num_workers=2),))
    killed = EndedProcess(pid=77, signal="SIGKILL", ago_s=ago_s, is_replaced=True)
    late = replace(late, machine=replace(late.machine, ended=(killed,)))
    found = first(job(late, *(GLOO.waiting(number, seq=61) for number in (0, 1, 3))))
    assert (found.rule, found.confidence) == ("worker-died", confidence)


def test_ranks_under_different_conditions_do_different_work() -> None:
    """Rank 1 is not under the condition of rank 0, nor at its line."""
    places = ((30, "if self.global_rank == 0:  (line 29)"), (70, "if self.global_rank == 1:  (line 69)"))
    working = (
        GLOO.working(number, user("step", line, condition=condition), seq=60)
        for number, (line, condition) in enumerate(places)
    )
    found = judge(job(*working, *(GLOO.waiting(number, seq=61) for number in (2, 3)))).findings
    assert [(one.rule, one.ranks, one.location) for one in found] == [
        ("rank-zero-only-work", (0,), f"{USER_FILE}:30 in step"),
        ("rank-zero-only-work", (1,), f"{USER_FILE}:70 in step"),
    ]


@pytest.mark.parametrize(("silent", "confidence"), [(0, CERTAIN), (1, CERTAIN), (2, LIKELY)])
def test_ranks_that_do_not_answer_may_have_called_the_same_as_the_odd_one(silent: int, confidence: Confidence) -> None:
    """Of five, three and one are known to differ in size; the others may be with either."""
    sizes = dict.fromkeys((0, 1, 2), ((8,),)) | {3: ((9,),)}
    line = user("training_step", 40)
    options = {"outstanding": 1, "world": 4 + silent}
    ranks = (GLOO.rank(rank, line, ALL_REDUCE, seq=61, sizes=size, **options) for rank, size in sizes.items())
    found = first(job(*ranks, world=4 + silent))
    assert (found.rule, found.ranks, found.confidence) == ("mismatched-collective", (3,), confidence)
