"""What looks like one cause in what ranks call and is another, or two at once: what a report may claim then."""

from dataclasses import replace
from typing import Any

import call_scenes as scenes
import machine_scenes
import pytest
import scenes as scenes_of_all
from builders import (
    ALL_REDUCE,
    BARRIER,
    EMPTY_CACHE,
    ENGINE,
    EPOCH_END,
    GLOO,
    MAIN,
    NCCL,
    NEXT,
    NEXT_DATA,
    OPTIMIZER,
    OWN_WAIT,
    RUN,
    SITE,
    TEARDOWN,
    TRAINING_STEP,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    transport_error,
    unread,
    user,
)
from call_scenes import RESULT
from judged import first, found

from lightning_ncclsafe.facts import (
    Action,
    Branch,
    Collective,
    Decides,
    Frame,
    GarbageFacts,
    Group,
    JobFacts,
    LastSeen,
    LoaderFacts,
    LoggedKey,
    MainThreadFacts,
    ModelUnit,
    NotRecorded,
    Phase,
    Progress,
    RankFacts,
    StepFacts,
    UnitKind,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.judging import judge

CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE
BACKENDS = pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])
CONDITION = "if self.trainer.is_global_zero:  (line 70)"
EVALUATE = user("evaluate", 73, condition=CONDITION)
FORWARD = user("forward", 21)
FSDP = Frame(file=f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line=364, function="all_gather")
GATHER = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=4394, function="all_gather_single")
WEIGHTS = ((25_557,),)
ROOT = ModelUnit(
    kind=UnitKind.FSDP_UNIT,
    parameters=("head.weight",),
    parameter_count=1,
    elements=4 * 25_557,
    shard_elements=25_557,
    groups=("0",),
    is_root=True,
)


def ranks_of(facts: JobFacts) -> dict[str, tuple[int, ...]]:
    return {finding.rule: finding.ranks for finding in judge(facts).findings}


def gathers(rank: int, *stack: Frame, net: Backend = GLOO, world: int = 2) -> RankFacts:
    """A rank that waits in the all-gather of the root FSDP unit."""
    facts = net.rank(
        rank, *stack, FSDP, GATHER, seq=61, outstanding=1, op="all_gather", sizes=WEIGHTS, action=EPOCH_END, world=world
    )
    calls = tuple(replace(call, output_sizes=((4 * 25_557,),)) for call in facts.collectives[-1:])
    return replace(facts, collectives=(*facts.collectives[:-1], *calls), units=(ROOT,))


@BACKENDS
def test_a_spread_model_that_one_rank_runs_alone_is_work_of_one_rank(net: Backend) -> None:
    alone = gathers(0, EVALUATE, FORWARD, net=net)
    finding = first(job(alone, net.in_barrier(1, "x", seq=61, world=2), world=2))
    assert found(job(alone, net.in_barrier(1, "x", seq=61, world=2), world=2)) == {
        "rank-zero-only-work": CERTAIN if net is GLOO else LIKELY
    }
    assert finding.ranks == (0,)
    assert "Rank 0 runs the model alone under `if self.trainer.is_global_zero:` (line 70)" in finding.summary
    assert "waits there in the all-gather of the root FSDP unit (head) (all_gather" in finding.summary
    assert "while rank 1 waits in Lightning's barrier 'x'" in finding.summary
    assert [item.rank for item in finding.evidence if item.source == "flight recorder"] == [0, 1]


def test_the_same_holds_if_the_unit_is_unknown_or_another_group_gathers_it() -> None:
    alone, other = gathers(0, EVALUATE, FORWARD), GLOO.in_barrier(1, "x", seq=61, world=2)
    assert found(job(replace(alone, units=()), other, world=2)) == {"rank-zero-only-work": CERTAIN}
    mesh = Group(name="1", description="mesh_data_parallel", ranks=(0, 1), last_enqueued=5, last_completed=4)
    base = GLOO.working(0, EVALUATE, FORWARD, FSDP, GATHER, seq=60, action=EPOCH_END, world=2)
    call = Collective(group="1", seq=5, op="all_gather", backend="gloo", input_sizes=WEIGHTS)
    in_mesh = replace(base, groups=(*base.groups, mesh), collectives=(*base.collectives, call))
    left = replace(other, groups=(*other.groups, replace(mesh, last_enqueued=4)))
    assert found(job(in_mesh, left, world=2)) == {"rank-zero-only-work": CERTAIN}


def test_the_same_holds_if_the_others_are_in_another_part_of_the_model() -> None:
    """They have gone on to the next batch, whose forward pass was paired with that of rank 0 before."""
    next_unit = ModelUnit(
        kind=UnitKind.FSDP_UNIT, name="trunk", elements=4 * 700, shard_elements=700, parameters=("trunk.weight",)
    )
    other = GLOO.rank(1, FORWARD, FSDP, GATHER, seq=61, outstanding=1, op="all_gather", sizes=((700,),), world=2)
    facts = job(gathers(0, EVALUATE, FORWARD), replace(other, units=(ROOT, next_unit)), world=2)
    assert found(facts) == {"rank-zero-only-work": CERTAIN}


def test_what_a_rank_calls_itself_under_a_condition_is_a_divergence() -> None:
    """No part of the model: the user's own reduction, and all ranks under conditions."""
    own = GLOO.rank(0, EVALUATE, ALL_REDUCE, seq=61, outstanding=1, action=EPOCH_END, world=2)
    barrier = GLOO.in_barrier(1, "x", seq=61, world=2)
    assert found(job(own, barrier, world=2)) == {"diverged-collectives": CERTAIN}
    both = GLOO.rank(1, EVALUATE, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), world=2)
    assert found(job(gathers(0, EVALUATE, FORWARD), both, world=2)) == {"diverged-collectives": CERTAIN}


def test_a_rank_that_waits_for_a_rank_at_work_is_not_blamed_for_its_condition() -> None:
    slow = GLOO.working(2, user("training_step", 40), seq=60, action=TRAINING_STEP, world=3)
    rules = ranks_of(job(gathers(0, EVALUATE, world=3), gathers(1, FORWARD, world=3), slow, world=3))
    assert rules == {"rank-behind": (2,)}


def test_on_a_device_a_rank_may_wait_for_what_training_has_called() -> None:
    """Several are outstanding: a line under a condition reads a value behind them."""
    item = user("log_loss", 44, condition=CONDITION, code="loss.item()")
    reads = NCCL.rank(0, item, seq=63, outstanding=3, world=2)
    alone = replace(reads, units=(ROOT,))
    other = NCCL.rank(1, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), world=2)
    assert "rank-zero-only-work" not in found(job(alone, other, world=2))


STEP = user("training_step", 30)


def gathers_ahead(*calls: tuple[str, tuple[Frame, ...]], under: str = CONDITION) -> RankFacts:
    """Rank 0 of three, as its device has several all-gathers outstanding, each with its site and recorded stack."""
    evaluate = replace(EVALUATE, rank_condition=under)
    facts = NCCL.rank(
        0,
        *(evaluate, FORWARD, FSDP, GATHER),
        seq=60 + len(calls),
        outstanding=len(calls),
        op="all_gather",
        sizes=WEIGHTS,
        action=EPOCH_END,
        world=3,
    )
    outstanding = facts.collectives[-len(calls) :]
    recorded = (replace(one, site=site, stack=own) for one, (site, own) in zip(outstanding, calls, strict=True))
    return replace(facts, collectives=(*facts.collectives[: -len(calls)], *recorded), units=(ROOT,))


def beside_silent_devices(own: RankFacts, *, last: RankFacts | None = None) -> JobFacts:
    """Rank 1 waits for its device, in the backward pass or later, and rank 2 does, unless told otherwise."""
    steps = unread(NCCL.rank(1, ENGINE, seq=61, world=3))
    return job(own, steps, last or unread(NCCL.rank(2, TEARDOWN, EMPTY_CACHE, seq=61, world=3)), world=3)


IN_EVALUATE = (EVALUATE, FORWARD)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((("a", IN_EVALUATE),), id="one"),
        pytest.param((("a", IN_EVALUATE), ("b", IN_EVALUATE)), id="two"),
        pytest.param((("a", ()), ("b", IN_EVALUATE), ("a", IN_EVALUATE)), id="three, two from one site"),
        pytest.param((("a", (STEP,)),), id="one, whatever its stack"),
    ],
)
def test_a_spread_model_that_one_rank_runs_beside_silent_devices(
    calls: tuple[tuple[str, tuple[Frame, ...]], ...],
) -> None:
    facts = beside_silent_devices(gathers_ahead(*calls))
    finding = first(facts)
    assert (ranks_of(facts), finding.confidence) == ({"rank-zero-only-work": (0,)}, LIKELY)
    assert "Rank 0 runs the model alone under `if self.trainer.is_global_zero:` (line 70)" in finding.summary


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(gathers_ahead(("t", (STEP,)), ("a", IN_EVALUATE)), id="the training's own"),
        pytest.param(gathers_ahead(("a", IN_EVALUATE), ("t", (STEP,))), id="the training's own, later"),
        pytest.param(gathers_ahead(("", ()), ("a", IN_EVALUATE)), id="one from nowhere"),
        pytest.param(gathers_ahead(("a", IN_EVALUATE), ("b", IN_EVALUATE), under=""), id="no condition"),
    ],
)
def test_a_spread_model_beside_silent_devices_is_not_known_to_be_run_alone(own: RankFacts) -> None:
    assert "rank-zero-only-work" not in ranks_of(beside_silent_devices(own))


def test_a_spread_model_beside_ranks_that_are_merely_unrecorded_is_not_known_to_be_run_alone() -> None:
    own = gathers_ahead(("a", IN_EVALUATE), ("b", IN_EVALUATE))
    facts = beside_silent_devices(own)
    assert "rank-zero-only-work" in ranks_of(facts)
    others = (
        machine_scenes.with_machine(unread(NCCL.rank(rank, ENGINE, seq=61, world=3), NotRecorded.NO_ENTRY))
        for rank in (1, 2)
    )
    assert "rank-zero-only-work" not in ranks_of(replace(facts, ranks=(own, *others)))
    works = unread(NCCL.working(2, STEP, seq=60, action=TRAINING_STEP, world=3))
    assert ranks_of(beside_silent_devices(own, last=works)) == {"rank-behind": (2,)}


def reduces(rank: int, condition: str = CONDITION) -> RankFacts:
    """Waits in a reduction of the user's own."""
    line = user("on_train_epoch_end", 71, condition=condition)
    return NCCL.rank(rank, line, ALL_REDUCE, seq=61, outstanding=1, action=EPOCH_END, world=3)


def test_a_rank_in_a_call_of_its_own_beside_silent_devices_is_out_of_step() -> None:
    facts = beside_silent_devices(reduces(0))
    finding = first(facts)
    assert (ranks_of(facts), finding.ranks) == ({"diverged-collectives": (0,)}, (0,))
    assert finding.location.endswith("train.py:71 in on_train_epoch_end")
    assert (
        "Rank 0 waits in a different place from the others, under `if self.trainer.is_global_zero:`" in finding.summary
    )
    assert ranks_of(beside_silent_devices(reduces(0), last=reduces(2))) == {"diverged-collectives": (0, 2)}


def test_a_rank_in_a_call_beside_silent_devices_may_be_in_step() -> None:
    """Without a condition; beside a rank that works, or does not answer."""
    works = unread(NCCL.working(2, STEP, seq=60, action=TRAINING_STEP, world=3))
    assert "diverged-collectives" not in ranks_of(beside_silent_devices(reduces(0, "")))
    assert "diverged-collectives" not in ranks_of(beside_silent_devices(reduces(0), last=works))
    two = beside_silent_devices(reduces(0)).ranks[:2]
    silent = job(*two, world=3, witnessed=(process(2, "running", gil_held=True, stack=(STEP,)),))
    assert "diverged-collectives" not in ranks_of(silent)
    # Nobody waits for a device.
    assert "diverged-collectives" not in ranks_of(job(*map(reduces, range(3)), world=3))


def test_a_rank_that_waits_for_its_device_under_a_condition_is_out_of_step() -> None:
    """As where it prints what it has gathered alone: the collective is queued, and the host is at the print."""
    prints = user("show", 39, condition="if self.speaks:  (line 37)")
    alone = unread(NCCL.rank(0, prints, OPTIMIZER, seq=60, action=EPOCH_END, world=3))
    facts = job(alone, NCCL.waiting(1, seq=61, world=3), NCCL.waiting(2, seq=61, world=3), world=3)
    finding = first(facts)
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert "under `if self.speaks:` (line 37)" in finding.summary
    assert finding.location.endswith("train.py:39 in show")


@BACKENDS
def test_two_stragglers_have_each_their_own_line(net: Backend) -> None:
    """Rank 0 works under a condition; rank 3 is slow elsewhere, which must not be hidden behind it."""
    evaluates = net.working(0, EVALUATE, seq=60, action=EPOCH_END)
    slow = net.working(3, user("load_shard", 12), seq=60, action=TRAINING_STEP)
    findings = judge(job(evaluates, net.waiting(1, seq=61), net.waiting(2, seq=61), slow)).findings
    assert [(item.rule, item.ranks) for item in findings] == [("rank-zero-only-work", (0,)), ("rank-behind", (3,))]
    assert findings[1].location.endswith("train.py:12 in load_shard")


def test_many_stragglers_at_many_lines_are_four_findings_at_most() -> None:
    slow = (GLOO.working(n, user("step", n), seq=60, action=TRAINING_STEP, world=12) for n in range(1, 12))
    told = [item.ranks for item in judge(job(GLOO.waiting(0, seq=61, world=12), *slow, world=12)).findings]
    assert told == [(1,), (2,), (3,), (4, 5, 6, 7, 8, 9, 10, 11)]


def test_why_ranks_gave_up_does_not_hide_for_whom_they_waited() -> None:
    assert ranks_of(scenes.group_with_a_shorter_timeout(GLOO)) == {"timeout-misuse": (0, 2, 3), "rank-behind": (1,)}


def test_two_calls_in_one_function_may_be_one_that_was_skipped() -> None:
    """Rank 2 has left out the first of two reductions: the sizes are right, and the line is not that of its call."""
    lines = (user("training_step", 57), user("training_step", 58))
    ranks = [
        GLOO.rank(n, lines[n == 2], ALL_REDUCE, seq=61, outstanding=1, sizes=((900 + (n == 2),),)) for n in range(4)
    ]
    assert found(job(*ranks)) == {"diverged-collectives": LIKELY, "mismatched-collective": POSSIBLE}


def test_stacks_of_the_trainer_alone_show_no_purpose() -> None:
    """A public case: number 4176 is of one element on rank 0, and of 402,653,184 on rank 1, in another branch."""
    sizes = (((1,),), ((402_653_184,),))
    ranks = (NCCL.rank(n, BARRIER, seq=4176, outstanding=1, op="all_gather", sizes=sizes[n], world=2) for n in range(2))
    assert found(job(*ranks, world=2)) == {"diverged-collectives": CERTAIN, "mismatched-collective": POSSIBLE}


def model_run_before_an_abort(*earlier: Frame, op: str = "all_gather") -> JobFacts:
    """Rank 0 has gathered some calls ago at a line; gloo ends rank 1 in the backward pass, rank 0 is in forward."""
    left = GLOO.rank(0, FORWARD, FSDP, GATHER, seq=61, outstanding=1, op="all_gather", sizes=WEIGHTS, world=2)
    *before, old, last = left.collectives
    site = replace(old, op=op, completed=True, site="a", stack=earlier)
    left = replace(left, collectives=(*before, replace(site, seq=59, stack=()), site, last))
    lost = raised(left, "RuntimeError", "Read error", RUN, FORWARD, FSDP, GATHER, consequence=True)
    said = "op.preamble.length <= op.nbytes. 528 vs 34"
    gone = process(1, "gone", ended_by="SIGABRT", said=said, stack=(RUN, ENGINE))
    return job(lost, world=2, witnessed=(gone,))


def test_a_model_that_one_rank_has_run_before_is_to_blame_for_a_later_abort() -> None:
    finding = first(model_run_before_an_abort(EVALUATE, FORWARD))
    assert (finding.rule, finding.ranks, finding.confidence) == ("rank-zero-only-work", (0,), LIKELY)
    assert "Rank 0 ran the model alone under `if self.trainer.is_global_zero:` (line 70)" in finding.summary
    assert finding.location.endswith("in evaluate")


def test_a_line_that_all_ranks_come_to_in_each_step_is_not_run_alone() -> None:
    scene = model_run_before_an_abort(EVALUATE, FORWARD)
    (facts,) = scene.ranks
    site = facts.collectives[-2]
    long_ago = tuple(replace(site, seq=number) for number in range(20, 40))
    often = replace(facts, collectives=(*long_ago, *facts.collectives))
    assert "rank-zero-only-work" not in found(replace(scene, ranks=(often,)))


def test_other_calls_before_an_abort_say_nothing() -> None:
    assert "rank-zero-only-work" not in found(model_run_before_an_abort(FORWARD))
    assert "rank-zero-only-work" not in found(model_run_before_an_abort(EVALUATE, op="broadcast"))


def test_sizes_below_fsdp_whose_units_are_not_known_are_only_possible() -> None:
    scene = scenes.expert_left_out(GLOO)
    blind = replace(scene, ranks=tuple(replace(facts, units=()) for facts in scene.ranks))
    assert found(blind).get("mismatched-collective", POSSIBLE) is POSSIBLE


def test_the_line_of_a_process_that_gloo_has_ended_is_not_that_of_the_others() -> None:
    scene = scenes.aborted_alone(GLOO)
    words = replace(scene.witnessed[0], ended_by="SIGABRT", stack=(RUN, user("export", 30), ALL_REDUCE))
    summary = first(replace(scene, witnessed=(words,))).summary
    assert "The process of rank 1 aborted itself (SIGABRT) at train.py:30 in export, as gloo ends" in summary
    assert summary.count("export") == 1


def _ended_while_it_reduced(*stack: Frame, unlogged: tuple[LoggedKey, ...]) -> JobFacts:
    """As recorded: a rank alone reduces what it has logged, the other is in ModelCheckpoint, and both send a number."""
    own = Frame(file=f"{SITE}/lightning/pytorch/callbacks/model_checkpoint.py", line=1005, function="file_exists")
    sync = Frame(file=f"{SITE}/lightning/fabric/utilities/distributed.py", line=214, function="_sync_ddp")
    left = GLOO.rank(1, RUN, own, sync, ALL_REDUCE, seq=61, outstanding=1, sizes=((1,),), world=2)
    called = (*left.collectives[:-1], replace(left.collectives[-1], dtypes=("Long",), stack=(sync,)))
    left = raised(replace(left, collectives=called), "RuntimeError", "Read error", *left.stack, consequence=True)
    left = replace(left, steps=StepFacts(unlogged=unlogged))
    said = "op.preamble.length <= op.nbytes. 8 vs 4"
    gone = process(0, "gone", ended_by="SIGABRT", said=said, stack=(RUN, *stack, RESULT, sync, ALL_REDUCE))
    return job(left, world=2, witnessed=(gone,))


WHAT = "what(): [enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 9612 vs 8"
HARD = LoggedKey(name="hard", hook="validation_step", place="train.py:9 in validation_step")
EMA = LoggedKey(name="ema", hook="score", place="train.py:30 in score")
EVALUATION = Frame(file=f"{SITE}/lightning/pytorch/loops/evaluation_loop.py", line=1, function="on_run_end")
TRAINING = Frame(file=f"{SITE}/lightning/pytorch/loops/fit_loop.py", line=1, function="on_advance_end")


@pytest.mark.parametrize(("stack", "key"), [((EVALUATION,), HARD), ((TRAINING,), EMA)])
def test_a_rank_aborted_while_it_reduces_a_logged_value_has_logged_an_uncommon_key(
    stack: tuple[Frame, ...], key: LoggedKey
) -> None:
    """The key is the one that the source logs and the others never have, as far as the loop has it."""
    finding = first(_ended_while_it_reduced(*stack, unlogged=(HARD, EMA) if key is EMA else (HARD,)))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-log-keys", (0,), key.place)
    assert finding.confidence is LIKELY
    assert f"rank 1 has never logged {key.name!r}." in finding.summary


@pytest.mark.parametrize("lines", [(38, 38), (38, 40)], ids=["one line", "two lines"])
def test_a_line_that_logs_several_keys_is_what_differs_if_no_key_is_known(lines: tuple[int, int]) -> None:
    """``self.log(f"val_error/{accent}", …)`` under a condition: only the aborted rank knows what else it has logged."""
    logged = (
        LoggedKey(name=f"val_error/{name}", hook="validation_step", place=f"train.py:{line} in validation_step")
        for name, line in zip(("british", "indian"), lines, strict=True)
    )
    aborted = _ended_while_it_reduced(EVALUATION, unlogged=())
    (left,) = aborted.ranks
    steps = replace(left.steps, logged=tuple(logged))
    finding = first(replace(aborted, ranks=(replace(left, steps=steps),)))
    assert (finding.rule == "diverged-log-keys") is (lines == (38, 38))
    if finding.rule == "diverged-log-keys":
        assert (finding.ranks, finding.location) == ((0,), "train.py:38 in validation_step")
        assert finding.summary.startswith(
            "Rank 0 was reducing a logged value between ranks, which rank 1 was not: the keys that train.py:38 in "
            "validation_step logs probably differ between ranks."
        )
        assert left.exception is not None
        stack = (RUN, EVALUATION, *left.stack[1:])
        validates = replace(left, steps=steps, stack=stack, exception=replace(left.exception, stack=stack))
        assert first(replace(aborted, ranks=(validates,))).rule != "diverged-log-keys", "it may have had fewer batches"


def test_of_ranks_that_outlive_an_aborted_one_that_reduced_with_them_the_keys_are_compared() -> None:
    """As recorded: rank 1 lacks a key whose name the source does not show; rank 0 aborts, and rank 2 loses it."""
    sync = Frame(file=f"{SITE}/lightning/fabric/utilities/distributed.py", line=214, function="_sync_ddp")
    stack = (RUN, EVALUATION, RESULT, sync, ALL_REDUCE)
    studio, telephone = (
        LoggedKey(name=name, hook="on_validation_epoch_end", place="train.py:40 in on_validation_epoch_end")
        for name in ("studio", "telephone")
    )
    stopping = Frame(file=f"{SITE}/lightning/pytorch/callbacks/early_stopping.py", line=200, function="vote")
    vote = "[Callback]EarlyStopping.on_train_epoch_end"
    ahead = GLOO.rank(1, RUN, stopping, ALL_REDUCE, seq=61, outstanding=1, batch=5, last=True, world=3, action=vote)
    ahead = scenes.with_size(ahead, 61, ((1,),), "Long")
    reduces = GLOO.rank(
        2, *stack, seq=61, outstanding=1, sizes=((1,),), phase=Phase.VALIDATE, batch=1, last=True, world=3
    )
    reduces = raised(reduces, "RuntimeError", "Connection closed by peer", *stack, consequence=True)
    ahead = replace(ahead, steps=StepFacts(logged=(studio,)))
    reduces = replace(reduces, steps=StepFacts(logged=(studio, telephone)))
    said = "op.preamble.length <= op.nbytes. 8 vs 4"
    gone = process(0, "gone", ended_by="SIGABRT", said=said, stack=stack)
    finding = first(job(ahead, reduces, world=3, witnessed=(gone,)))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-log-keys", (1,), telephone.place)
    assert finding.summary.startswith(
        "Rank 2 logs 'telephone' with sync_dist=True in on_validation_epoch_end, and rank 1"
    )
    assert "Rank 0 was reducing a logged value when aborted, as gloo ended it" in finding.summary


def _aborted_in_tower(test: str, led_around: dict[str, tuple[str, ...]]) -> JobFacts:
    """As recorded: the model is split, and a modality is missing on one of two ranks."""
    gather = Frame(file=f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line=9, function="_pre_forward")
    branches = (Branch(line=46, test=test, on=Decides.VALUE, until=48),) if test else ()
    tower = replace(user("forward", 47), branches=branches)
    said = "op.preamble.length <= op.nbytes. 28224 vs 15456"
    gone = process(0, "gone", ended_by="SIGABRT", said=said, stack=(RUN, tower, gather, ALL_REDUCE))
    block = (RUN, user("forward", 50), gather, ALL_REDUCE)
    left = raised(GLOO.waiting(1, seq=61, world=2), "RuntimeError", "Connection closed", *block, consequence=True)
    left = replace(left, steps=replace(left.steps, led_around=led_around))
    return job(left, world=2, witnessed=(gone,))


@pytest.mark.parametrize(
    ("passes", "decided", "branch", "rule"),
    [
        ((48,), 46, "if", "skipped-step"),
        ((48,), 45, "if", "unused-parameters"),
        ((48, 52), 46, "if", "unused-parameters"),
        ((48,), 46, "else of if", "unused-parameters"),
    ],
    ids=["the same condition", "another one", "one in its else, too", "the part is in its else"],
)
def test_a_part_that_is_left_out_with_a_backward_pass_is_a_step(
    passes: tuple[int, ...], decided: int, branch: str, rule: str
) -> None:
    """Manual optimization: the condition decides about a forward pass and the backward pass behind it."""
    around = {f"{USER_FILE}:{line} in forward": (f"{USER_FILE}:{decided} in forward",) for line in passes}
    finding = first(_aborted_in_tower(f"{branch} accuracy > 0.6:  (line 46)", around))
    assert (finding.rule, finding.ranks, finding.location) == (rule, (1,), f"{USER_FILE}:46 in forward")
    said = "The backward pass at train.py:48 in forward is behind the same condition."
    assert (said in finding.summary) is (rule == "skipped-step")


@pytest.mark.parametrize("test", ["if figures is not None:  (line 46)", ""])
def test_a_rank_aborted_as_it_gathered_a_unit_that_others_left_out_shows_where_it_was_decided(test: str) -> None:
    finding = first(_aborted_in_tower(test, {}))
    if test:
        assert (finding.rule, finding.ranks) == ("unused-parameters", (1,))
        assert finding.location.endswith("train.py:46 in forward")
        assert "has left out the part of the model at train.py:47 in forward, and was gathering another one at" in (
            finding.summary
        )
    else:
        assert finding.rule != "unused-parameters"


def test_a_rank_that_is_still_in_the_hook_that_logs_a_key_may_log_it_yet() -> None:
    """As recorded: a callback of rank 1 runs a split model before the module logs; rank 0 has left the hook."""
    key = LoggedKey(name="match", hook="on_validation_epoch_end", place="train.py:29 in on_validation_epoch_end")
    end = {"phase": Phase.VALIDATE, "batch": 3, "last": True, "world": 2}
    left = GLOO.rank(0, RUN, EVALUATION, RESULT, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), **end)  # type: ignore[arg-type]
    hooked = "[Callback]Answers.on_validation_epoch_end"
    within = GLOO.rank(1, RUN, user("forward", 40), ALL_REDUCE, seq=61, outstanding=1, action=hooked, **end)  # type: ignore[arg-type]
    ranks = (replace(left, steps=StepFacts(logged=(key,), reducing="match")), replace(within, steps=StepFacts()))
    assert first(job(*ranks, world=2)).rule == "diverged-collectives"
    past = replace(ranks[1], progress=replace(ranks[1].progress, actions=()))
    assert first(job(ranks[0], past, world=2)).rule == "diverged-log-keys"


def test_which_of_several_keys_it_was_is_not_guessed() -> None:
    other = replace(EMA, name="other")
    finding = first(_ended_while_it_reduced(TRAINING, unlogged=(EMA, other)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0, 1))
    assert "in the reduction of a logged value, as gloo ended it" in finding.summary
    assert "while rank 1 was in ModelCheckpoint" in finding.summary


def test_a_rank_aborted_in_a_callback_monitors_a_key_that_others_never_logged() -> None:
    """As recorded: EarlyStopping has voted on rank 0 alone, which ModelCheckpoint's vote has made up for since."""
    own = Frame(file=f"{SITE}/lightning/pytorch/callbacks/model_checkpoint.py", line=1005, function="file_exists")
    score = LoggedKey(name="score", place="train.py:8 in on_validation_epoch_end")
    left = transport_error(GLOO.waiting(1, seq=61, world=2))
    left = replace(left, steps=StepFacts(unmonitored=(score,)))
    gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=(RUN, own, ALL_REDUCE))
    finding = first(job(left, world=2, witnessed=(gone,)))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (0,), score.place)
    assert finding.summary.endswith("A callback monitors 'score', which rank 1 has never logged.")
    other = replace(left, steps=StepFacts(unmonitored=(score, replace(score, name="dice"))))
    assert first(job(other, world=2, witnessed=(gone,))).location != score.place


def _sent(facts: RankFacts, *dtypes: str) -> tuple[Collective, ...]:
    """Calls of one line, each of another type."""
    line = (user("training_step", 57),)
    call = replace(facts.collectives[-1], input_sizes=((1,),), site="there", stack=line, completed=True)
    return tuple(replace(call, seq=57 + index, dtypes=(dtype,)) for index, dtype in enumerate(dtypes))


def test_a_rank_that_sends_more_than_ever_before_is_the_one_that_is_wrong() -> None:
    """Of two ranks, there is no majority; but the room of the other is what this one has always sent from there."""
    scene = scenes.aborted_alone(GLOO)
    (left,) = scene.ranks
    said, stack = WHAT.replace("9612 vs 8", "8 vs 4"), (RUN, user("training_step", 57), ALL_REDUCE)
    gone = replace(scene.witnessed[0], state="gone", ended_by="SIGABRT", said=said, stack=stack)

    def answer(*dtypes: str) -> Finding:
        ranks = (replace(left, collectives=_sent(left, *dtypes)),)
        return first(replace(scene, ranks=ranks, witnessed=(gone,)))

    odd = answer("Float", "Float", "Double")
    assert (odd.rule, odd.ranks) == ("mismatched-collective", (0,))
    words = "Rank 0 has called all_reduce (1 element of Double) at train.py:57 in training_step, and all_reduce"
    assert odd.summary.endswith(f"{words} (1 element of Float) before.")
    assert answer("Double", "Float", "Double").ranks == (0, 1), "it has always differed"
    more = [replace(left, rank=rank, collectives=_sent(left, "Float", "Float", "Double")) for rank in (0, 2)]
    three = replace(scene, world_size=3, ranks=tuple(more), witnessed=(gone,))
    assert first(three).ranks == (1,), "it has missed a change that most have made"


def test_a_process_that_gloo_has_ended_says_so_where_the_others_had_gone_on() -> None:
    """As recorded: what was too large was sent at once, and its sender is in backward when the connection breaks."""
    scene = scenes.aborted_alone(GLOO)
    words = replace(scene.witnessed[0], ended_by="SIGABRT", stack=(RUN, user("gather", 147), ALL_REDUCE))
    on = transport_error(GLOO.waiting(0, seq=62, world=2))
    facts = replace(scene, ranks=(replace(on, stack=()),), witnessed=(words,))
    assert found(facts) == {"mismatched-collective": LIKELY}
    assert first(facts).ranks == (0, 1)
    assert "while rank 0 had already moved on" in first(facts).summary
    segfault = replace(facts, witnessed=(replace(words, ended_by="SIGSEGV"),))
    assert found(segfault) == {"dead-rank": CERTAIN}
    both = replace(facts, witnessed=(replace(words, ended_by="SIGSEGV", said=WHAT),))
    assert found(both) == {"mismatched-collective": LIKELY}
    assert "The process of rank 1 has ended at train.py:147" in first(both).summary


def _broken(rank: int, *stack: Frame) -> RankFacts:
    return raised(
        transport_error(gathers(rank, *stack)),
        "RuntimeError",
        "Read error",
        RUN,
        *stack,
        FSDP,
        GATHER,
        consequence=True,
    )


def test_a_process_that_gloo_has_ended_is_a_consequence_of_work_alone() -> None:
    facts = job(_broken(0, EVALUATE, FORWARD), world=2, witnessed=(process(1, "zombie", ended_by="SIGABRT"),))
    finding = first(facts)
    assert found(facts) == {"rank-zero-only-work": LIKELY}
    assert (finding.ranks, finding.location) == ((0,), "/home/me/project/train.py:21 in forward")
    killed = replace(facts, witnessed=(process(1, "zombie", ended_by="SIGKILL"),))
    assert found(killed) == {"dead-rank": CERTAIN}
    plain = job(_broken(0, FORWARD), world=2, witnessed=facts.witnessed)
    assert "rank-zero-only-work" not in found(plain)


def test_a_process_that_is_gone_after_the_others_have_finished_may_have_finished_too() -> None:
    done = (GLOO.finished(n, seq=60, batch=19) for n in range(3))
    assert found(job(*done, witnessed=(process(3, "gone"),))) == {"dead-rank": POSSIBLE}


def test_a_process_that_is_gone_is_told_with_its_last_place() -> None:
    """The line is where it had stayed: what it was in for a moment, it may have left before it ended."""
    stack = (user("on_train_epoch_end", 60), user("evaluate", 73), user("score", 90))
    hook = (
        Action(name="run_training_epoch", for_s=9.0),
        Action(name="[LightningModule]Net.on_train_epoch_end", for_s=4),
    )

    def told(idle_s: float, stayed: int) -> tuple[str, str]:
        progress = Progress(phase=Phase.TRAIN, actions=hook, epoch=1, batch_idx=19, idle_s=idle_s)
        seen = LastSeen(progress=progress, stack=stack, stayed=stayed)
        gone = process(1, "gone", ended_by="SIGKILL", last_seen=seen)
        finding = first(job(*(GLOO.waiting(n, seq=61) for n in (0, 2, 3)), witnessed=(gone,)))
        assert finding.rule == "dead-rank"
        return finding.location, finding.summary.partition("last seen ")[2].partition(", while")[0]

    at = "/home/me/project/train.py:73 in evaluate"
    assert told(4.0, 2) == (at, "in Net.on_train_epoch_end at train.py:73 in evaluate, batch 19 of epoch 1")
    nowhere = ("", "in Net.on_train_epoch_end, batch 19 of epoch 1")
    assert told(0.4, 2) == nowhere, "for too short a time"
    assert told(4.0, 0) == nowhere


def test_each_of_several_processes_that_are_gone_has_its_last_place_in_the_evidence() -> None:
    seen = LastSeen(progress=Progress(phase=Phase.VALIDATE, epoch=0, batch_idx=3, idle_s=0.1))
    gone = (process(1, "gone", last_seen=seen), process(2, "gone"))
    finding = first(job(GLOO.waiting(0, seq=61), GLOO.waiting(3, seq=61), witnessed=gone))
    assert (finding.rule, finding.ranks, finding.location) == ("dead-rank", (1, 2), "")
    assert [one.rank for one in finding.evidence if one.text == "Last seen in batch 3 of epoch 0, in validation."] == [
        1
    ]


TIMED_OUT = "[gloo/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"


def test_a_wait_that_was_given_up_does_not_show_that_a_peer_is_dead() -> None:
    """Rank 0 does not answer, on a host that nobody sees; its peers had a limit, and their connections were fine."""
    lost = [transport_error(GLOO.waiting(n, seq=61)) for n in (1, 2, 3)]
    assert found(job(*lost)) == {"dead-rank": LIKELY}
    given_up = [raised(facts, "RuntimeError", TIMED_OUT, RUN, consequence=True) for facts in lost]
    for ranks in (given_up, [given_up[0], *lost[1:]]):
        rules = found(job(*ranks))
        assert rules["frozen-rank"] is POSSIBLE
        assert "dead-rank" not in rules
    summary = next(item.summary for item in judge(job(*given_up)).findings if item.rule == "frozen-rank")
    assert summary.endswith("while ranks 1-3 waited until the time was up.")


@pytest.mark.parametrize(
    "message",
    [
        "Rank 0 timed out: Ranks 2 failed to pass monitoredBarrier in 30000 ms",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=61, Timeout(ms)=600000) ran for 600971",
    ],
    ids=["monitored barrier", "watchdog"],
)
def test_an_error_about_late_peers_is_no_failure_of_its_rank(message: str) -> None:
    """Both are plain RuntimeErrors, and the rank that raises has done all it had to."""
    told = raised(NCCL.working(0, seq=60), "RuntimeError", message, RUN, user("training_step", 79))
    slow = NCCL.working(2, user("load_shard", 12), seq=60, action=TRAINING_STEP)
    rules = ranks_of(job(told, NCCL.waiting(1, seq=61), slow, NCCL.waiting(3, seq=61)))
    assert rules["rank-behind"] == (2,)
    assert "failed-rank" not in rules


def test_what_a_back_end_says_of_the_ranks_own_call_is_its_failure() -> None:
    """Two ranks were given one GPU: nobody waits for anybody."""
    message = "NCCL error in: ProcessGroupNCCL.cpp, ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both"
    lost = (raised(NCCL.working(n, seq=0), "DistBackendError", message, RUN, consequence=True) for n in range(4))
    assert found(job(*lost)) == {"failed-rank": CERTAIN}


def test_a_dead_process_may_have_been_ended_by_gloo() -> None:
    """In DDP's backward pass the main thread's stack does not say which collective it was."""
    remedies = [
        first(job(net.waiting(0, seq=61, world=2), world=2, witnessed=(process(1, "gone", ended_by=signal),))).remedy
        for net, signal in ((GLOO, "SIGABRT"), (GLOO, "SIGKILL"), (NCCL, "SIGABRT"))
    ]
    assert ["op.preamble.length <= op.nbytes" in remedy for remedy in remedies] == [True, False, False]


def test_a_dead_process_that_has_said_why_at_a_known_line_is_told_no_more() -> None:
    said = "free(): double free detected in tcache 2"
    seen = process(1, "gone", ended_by="SIGABRT", said=said, stack=(MAIN, RUN, user("close", 9)))
    finding = first(job(GLOO.waiting(0, seq=61, world=2), world=2, witnessed=(seen,)))
    assert finding.rule == "dead-rank" and "op.preamble" not in finding.remedy
    assert finding.remedy.endswith("at the line that it was in.")
    # It is no abort by gloo, either, if its line is not known.
    for stack in ((), (MAIN, RUN, user("close", 9))):
        alone = job(GLOO.waiting(0, seq=61, world=2), world=2, witnessed=(replace(seen, stack=stack),))
        assert (first(alone).rule, "mismatched-collective" in found(alone)) == ("dead-rank", False)
    unplaced = process(1, "gone", ended_by="SIGSEGV")
    finding = first(job(NCCL.waiting(0, seq=61, world=2), world=2, witnessed=(unplaced,)))
    assert finding.remedy.endswith("PYTHONFAULTHANDLER=1 prints it.")


def test_a_collective_that_has_ended_is_none_that_a_rank_is_in() -> None:
    """Rank 0 works since; what it called last says nothing of the process that is gone."""
    line = user("evaluate", 73)
    facts = job(GLOO.working(0, line, seq=60, world=2), world=2, witnessed=(process(1, "gone"),))
    assert found(facts) == {"dead-rank": CERTAIN}


DONE = GLOO.finished(1, seq=60, batch=19, world=2)


@pytest.mark.parametrize(
    "at_work",
    [
        GLOO.working(0, user("training_step", 40), seq=60, action=TRAINING_STEP, batch=12, world=2),
        GLOO.working(0, NEXT_DATA, seq=60, action=NEXT, batch=12, world=2),
    ],
    ids=["step", "loader"],
)
def test_a_rank_that_has_data_left_is_not_merely_unfinished(at_work: RankFacts) -> None:
    """It will wait for a rank that has left."""
    rules = ranks_of(job(at_work, DONE, world=2))
    assert rules["uneven-batches"] == (1,)
    assert "unfinished-rank" not in rules


def test_equally_long_loaders_have_not_run_out_of_data() -> None:
    waits = GLOO.waiting(0, seq=61, batch=3, epoch=1, world=2)
    assert "Rank 1 has run out of data" in first(job(waits, DONE, world=2)).summary
    alike = (replace(facts, loaders=(LoaderFacts(batches=20),)) for facts in (waits, DONE))
    finding = first(job(*alike, world=2))
    assert "Rank 1 has ended its training (after 20 batches of epoch 0)" in finding.summary
    assert "trainer.should_stop" in finding.remedy


def held_up(facts: RankFacts) -> dict[str, RankFacts]:
    """The same rank, held up by its machine whatever it does."""
    queued = MainThreadFacts(over_s=20.0, state="running", ran_s=1.0, queued_s=18.0)
    garbage = GarbageFacts(longest_s=19.0, ended_ago_s=0.4, total_s=19.0, count=1)
    return {
        "host-starved": machine_scenes.with_machine(facts, main_thread=queued),
        "gc-pause": machine_scenes.with_machine(facts, garbage=garbage),
    }


@pytest.mark.parametrize("rule", ["host-starved", "gc-pause"])
def test_a_machine_that_holds_a_rank_up_does_so_at_any_line(rule: str) -> None:
    """In a hook that all ranks have, and in our own callback."""
    in_hook = held_up(GLOO.working(0, user("on_train_epoch_end", 50), seq=60, action=EPOCH_END))[rule]
    others = (GLOO.waiting(rank, seq=61) for rank in (1, 2, 3))
    assert found(job(in_hook, *others)) == {rule: LIKELY, "rank-zero-only-work": POSSIBLE}
    in_ours = held_up(GLOO.working(2, *OWN_WAIT, seq=60))[rule]
    assert found(machine_scenes.late(GLOO, in_ours)) == {rule: LIKELY, "own-code": LIKELY}
    assert found(scenes_of_all.rank_zero_evaluates(GLOO))["rank-zero-only-work"] is CERTAIN


@pytest.mark.parametrize(
    ("condition", "late", "rule"),
    [
        ("if here.rank == 1:  (line 27)", (1,), "rank-zero-only-work"),
        ("else of if here.rank == 0:  (line 27)", (1,), "late-at-init"),
        ("else of if here.rank != 0:  (line 27)", (0,), "rank-zero-only-work"),
        ("if here.rank != 0:  (line 27)", (1, 2), "late-at-init"),
    ],
)
def test_work_of_a_few_ranks_is_distinguished_from_what_the_rest_waits_for(
    condition: str, late: tuple[int, ...], rule: str
) -> None:
    world = len(late) + 1
    options: dict[str, Any] = {"phase": Phase.INIT, "batch": -1, "world": world}
    line = user("setup", 30, condition=condition)
    ranks = (
        GLOO.working(n, line, seq=1, action="[LightningDataModule]Data.setup", **options)
        if n in late
        else GLOO.in_barrier(n, "post_setup", seq=2, **options)
        for n in range(world)
    )
    assert first(job(*ranks, world=world)).rule == rule


def test_a_program_that_was_started_by_a_debugger_stands_in_none() -> None:
    pdb = Frame(file="/usr/lib/python3.12/pdb.py", line=1700, function="_runscript")
    slow = GLOO.working(2, EVALUATE, seq=60, action=EPOCH_END)
    started = replace(slow, stack=(pdb, *slow.stack))
    assert found(machine_scenes.late(GLOO, started)) == {"rank-zero-only-work": CERTAIN}
    stands = replace(slow, stack=(*slow.stack, replace(pdb, function="interaction")))
    assert found(machine_scenes.late(GLOO, stands))["at-breakpoint"] is CERTAIN


def test_calls_of_a_group_that_was_destroyed_are_not_those_of_its_successor() -> None:
    """Rank 2 has called 12 in the group that has the name now, and 61 in the one before it."""
    ranks = [GLOO.in_barrier(n, "x", seq=20) for n in (0, 1, 3)]
    old = GLOO.recorded(22, op="broadcast")
    late = GLOO.working(2, user("training_step", 40), seq=12, action=TRAINING_STEP)
    stale = replace(late, collectives=(*old, *late.collectives))
    assert ranks_of(job(ranks[0], ranks[1], stale, ranks[2])) == {"rank-behind": (2,)}


def test_timeouts_of_many_sharded_collectives_do_not_hide_that_of_the_default_group() -> None:
    message = "[gloo/unbound_buffer.cc:78] Timed out waiting 21000ms for recv operation to complete"
    base = GLOO.working(0, seq=60)
    own = tuple(replace(call, timeout_ms=21_000) for call in base.collectives)
    sharded = tuple(
        Collective(group="7", seq=n, op="all_gather", completed=True, timeout_ms=600_000) for n in range(1, 40)
    )
    lost = raised(replace(base, collectives=(*own, *sharded)), "RuntimeError", message, RUN, consequence=True)
    slow = GLOO.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP)
    assert "timeout-misuse" not in found(job(lost, slow, world=2))


def test_a_circle_names_the_condition_under_which_it_was_entered() -> None:
    scene = scenes.groups_in_another_order(GLOO)
    line = user("sync", 9, condition=CONDITION)
    entered = (replace(f, stack=(*f.stack[:2], line, ALL_REDUCE)) if f.rank == 0 else f for f in scene.ranks)
    finding = first(replace(scene, ranks=tuple(entered)))
    assert finding.rule == "crossed-groups"
    assert any("`if self.trainer.is_global_zero:` (line 70) encloses" in item.text for item in finding.evidence)


@pytest.mark.parametrize(
    ("condition", "state", "named"),
    [
        ("if trainer.is_global_zero: trainer.test(model)  (line 201)", "sleeping", "diverged-collectives"),
        ("if rank == 0:  (line 200)", "sleeping", "diverged-collectives"),
        ("if not self.local_rank:  (line 200)", "sleeping", "diverged-collectives"),
        # These hold on all ranks, or on others.
        ("if rank != -1: main()  (line 200)", "sleeping", "frozen-rank"),
        ("if rank >= 0:  (line 200)", "sleeping", "frozen-rank"),
        ("", "sleeping", "frozen-rank"),
        # It does something.
        ("if rank == 0:  (line 200)", "running", "frozen-rank"),
    ],
)
def test_a_rank_that_does_not_answer_may_be_outside_the_trainer(condition: str, state: str, named: str) -> None:
    facts = scenes_of_all.trainer_called_on_one_rank(GLOO)
    (alone,) = facts.ranks
    stack = tuple(replace(frame, rank_condition=condition) if frame.user else frame for frame in alone.stack)
    facts = replace(facts, ranks=(replace(alone, stack=stack),), witnessed=(process(1, state),))
    assert judge(facts).findings[0].rule == named


@pytest.mark.parametrize(
    ("seen", "is_told"),
    [((0, -1), False), ((0, 9), False), ((0, 10), True), ((0, 11), True), ((1, 0), True)],
)
def test_where_a_process_was_last_seen_is_not_told_if_it_has_got_further(seen: tuple[int, int], is_told: bool) -> None:
    """The others wait for it in batch 11, which they have not reached without it."""
    progress = Progress(phase=Phase.TRAIN, epoch=seen[0], batch_idx=seen[1], idle_s=0.1)
    for net, ranks in ((GLOO, is_told), (NCCL, True)):
        gone = process(1, "gone", ended_by="SIGKILL", last_seen=LastSeen(progress=progress))
        finding = first(job(*(net.waiting(n, seq=61) for n in (0, 2, 3)), witnessed=(gone,)))
        assert (finding.rule, "last seen" in finding.summary) == ("dead-rank", ranks)


def test_after_an_epoch_a_process_may_have_been_last_seen_in_its_last_batch() -> None:
    seen = LastSeen(progress=Progress(phase=Phase.TRAIN, epoch=0, batch_idx=19, idle_s=0.1))
    gone = process(1, "gone", ended_by="SIGKILL", last_seen=seen)
    for batch, is_told in ((0, True), (1, False)):
        others = (GLOO.waiting(n, seq=61, epoch=1, batch=batch) for n in (0, 2, 3))
        assert ("last seen" in first(job(*others, witnessed=(gone,))).summary) is is_told


def test_a_bus_error_is_of_a_mapped_file() -> None:
    gone = process(1, "gone", ended_by="SIGBUS")
    finding = first(job(*(GLOO.waiting(n, seq=61) for n in (0, 2, 3)), witnessed=(gone,)))
    assert finding.remedy.startswith("A page of a mapped file could not be read or written")
