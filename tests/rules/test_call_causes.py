"""Causes in what ranks call and how their code goes: their words, how sure they are, and what they must not claim."""

from collections.abc import Callable
from dataclasses import replace

import call_scenes as scenes
import pytest
import scenes as scenes_of_all
from builders import (
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    BROADCAST,
    ENGINE,
    GLOO,
    NCCL,
    NEXT,
    NEXT_DATA,
    RUN,
    SIGTERM,
    SITE,
    TRAINING_STEP,
    USER_FILE,
    Backend,
    job,
    raised,
    transport_error,
    user,
)

from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import (
    VOTE_GROUP,
    Branch,
    Collective,
    Decides,
    Frame,
    Group,
    HostFacts,
    JobFacts,
    LoggedKey,
    MachineFacts,
    ModelUnit,
    Phase,
    RankFacts,
    StepFacts,
    TrainerFacts,
    UnitKind,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.facts.wording import location_of
from lightning_ncclsafe.rules.hang.crossed_groups import creation
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.timeline import Timeline


def found(facts: JobFacts) -> dict[str, Finding]:
    return {finding.rule: finding for finding in judge(facts).findings}


@pytest.mark.parametrize(
    ("scene", "confidence", "parts"),
    [
        (
            scenes.another_size,
            Confidence.CERTAIN,
            (
                "rank 2 called all_reduce (9,000 elements of Float) as number 61 of the default group",
                "the operation differs in size between ranks",
            ),
        ),
        (scenes.another_type, Confidence.CERTAIN, ("25,557 elements of Double", "differs in type")),
        (
            scenes.overrun_rank,
            Confidence.CERTAIN,
            ("Gloo ended the process of rank 0, which was sent more than it had room for.",),
        ),
        (
            scenes.groups_in_another_order,
            Confidence.CERTAIN,
            ("group '1') of group '1' (side 1) for rank 1, and rank 1 waits in", "wait for each other in a circle"),
        ),
        (
            scenes.both_receive,
            Confidence.CERTAIN,
            ("Rank 0 waits in recv for rank 1, rank 1 waits in recv for rank 0",),
        ),
        (
            scenes.key_of_one_rank,
            Confidence.CERTAIN,
            (
                "Rank 1 alone logs 'val_extra' with sync_dist=True in validation_step: ",
                "rank 1 waits in the reduction of the logged value 'val_extra'",
            ),
        ),
        (
            scenes.key_that_one_rank_lacks,
            Confidence.CERTAIN,
            ("Ranks 0-1, 3 log 'val_extra' with sync_dist=True in validation_step, and rank 2 does not: ",),
        ),
        (
            scenes.step_that_lightning_refuses,
            Confidence.CERTAIN,
            (
                "Rank 1 has skipped batch 11 of epoch 0: its training_step returned without a backward pass",
                "(its only `return` without a value is train.py:88 in training_step), which Lightning refuses",
            ),
        ),
        (scenes.step_skipped_by_hand, Confidence.LIKELY, ("skipped batch 3 of epoch 0", "past the end of the Trainer")),
        (
            scenes.branch_without_gradient,
            Confidence.CERTAIN,
            ("Rank 1 had no gradient for branch.weight, branch.bias in the step before batch 12 of epoch 0",),
        ),
        (
            scenes.branch_unused_before_validation,
            Confidence.LIKELY,
            (
                "Rank 1 has left the backward pass in which its peers wait, without a gradient for a part of the",
                "in valid",
            ),
        ),
        (
            scenes.expert_left_out,
            Confidence.LIKELY,
            ("Rank 2 waits in the all-gather of FSDP unit head, in forward, and rank 0 in the all-gather of FSDP",),
        ),
        (
            scenes.group_with_a_shorter_timeout,
            Confidence.CERTAIN,
            (
                "gave up waiting after 4.0 s, although the strategy's timeout is 30 min: group '1' (metrics) has",
                "group '1' (metrics) has its own timeout",
            ),
        ),
        (scenes.one_rank_compiles, Confidence.LIKELY, ("Rank 1 compiles, in training_step at train.py:82",)),
        (
            scenes.save_failed_and_was_caught,
            Confidence.CERTAIN,
            (
                "Saving a checkpoint on rank 0 raised OSError: [Errno 28] No space left on device",
                "; the exception was caught",
                "ranks 1-3 wait",
            ),
        ),
        (
            scenes.save_failed,
            Confidence.CERTAIN,
            (
                "Rank 0 raised OSError: [Errno 28] No space left on device",
                "while it saved a checkpoint at train.py:117",
            ),
        ),
        (scenes.aborted_alone, Confidence.LIKELY, ("The process of rank 1 aborted itself (SIGABRT)",)),
    ],
)
def test_words_and_confidence(
    scene: Callable[[Backend], JobFacts], confidence: Confidence, parts: tuple[str, ...]
) -> None:
    names = {"overrun_rank": "mismatched-collective", "aborted_alone": "mismatched-collective"}
    findings = judge(scene(GLOO)).findings
    finding = next(item for item in findings if item.rule == names.get(scene.__name__, findings[0].rule))
    assert finding.confidence is confidence
    for part in parts:
        assert part in finding.summary


def test_a_process_that_gloo_has_ended_is_the_consequence() -> None:
    findings = judge(scenes.overrun_rank(GLOO)).findings
    assert [(item.rule, item.ranks) for item in findings] == [("mismatched-collective", (1,)), ("dead-rank", (0,))]


def test_a_process_that_is_merely_gone_may_have_been_ended_by_gloo() -> None:
    """Both are told where the signal is not known, unless the killer is, or no tensor of the user's was sent."""
    scene = scenes.aborted_alone(GLOO)
    assert list(found(scene)) == ["mismatched-collective"]
    blind = replace(scene, ranks=tuple(replace(facts, machine=MachineFacts()) for facts in scene.ranks))
    assert list(found(blind)) == ["dead-rank", "mismatched-collective"]
    assert "op.preamble.length <= op.nbytes" in found(blind)["mismatched-collective"].remedy
    killed = replace(blind, ranks=tuple(replace(f, host_facts=HostFacts(oom_kills=1)) for f in blind.ranks))
    assert list(found(killed)) == ["dead-rank"]
    crashed = replace(blind, witnessed=(replace(blind.witnessed[0], ended_by="SIGSEGV"),))
    assert list(found(crashed)) == ["dead-rank"]
    assert "mismatched-collective" not in found(scenes_of_all.one_rank_was_killed(GLOO))


def test_of_two_ranks_none_is_known_to_be_wrong() -> None:
    scene = scenes.aborted_alone(GLOO)
    assert found(scene)["mismatched-collective"].ranks == (0, 1)
    other = replace(scene.ranks[0], rank=2, machine=MachineFacts())
    three = replace(scene, ranks=(*scene.ranks, other), world_size=3)
    assert found(three)["mismatched-collective"].ranks == (1,)


def test_the_line_of_a_rank_that_has_ended_itself_is_its_own() -> None:
    scene = scenes.aborted_alone(GLOO)
    words = replace(scene.witnessed[0], ended_by="SIGABRT", stack=(RUN, user("training_step", 59), ALL_REDUCE))
    finding = found(replace(scene, witnessed=(words,)))["mismatched-collective"]
    assert finding.location.endswith("train.py:59 in training_step")
    assert "Process 1001 is zombie, by SIGABRT." in [item.text for item in finding.evidence]


def test_a_consequence_is_not_reported_beside_its_cause() -> None:
    assert set(found(scenes.key_of_one_rank(NCCL))) == {"diverged-log-keys"}
    assert set(found(scenes.save_failed(NCCL))) == {"exception-during-save"}
    assert set(found(scenes.branch_without_gradient(NCCL))) == {"unused-parameters"}
    assert set(found(scenes.save_failed_and_was_caught(NCCL))) == {"checkpoint-skipped-barrier"}


@pytest.mark.parametrize(
    ("deepest", "rule"),
    [
        ("_save_topk_checkpoint", "failed-rank"),
        ("_save_checkpoint", "exception-during-save"),
        ("_link_checkpoint", "exception-during-save"),
        ("_remove_checkpoint", "exception-during-save"),
    ],
)
def test_an_exception_before_the_save_is_not_one_of_the_save(deepest: str, rule: str) -> None:
    """ModelCheckpoint looks first whether what it monitors has been logged."""
    file = f"{SITE}/lightning/pytorch/callbacks/model_checkpoint.py"
    stack = (RUN, *(Frame(file=file, line=1, function=name) for name in ("on_validation_end", deepest)))
    culprit = raised(GLOO.working(1, seq=60, batch=2), "MisconfigurationException", "could not find val_auc", *stack)
    assert set(found(job(culprit, *(GLOO.waiting(n, seq=61) for n in (0, 2, 3))))) == {rule}


def test_a_rank_that_works_may_be_late_for_a_group_and_one_that_waits_elsewhere_is_not() -> None:
    makers = tuple(scenes.makes_group(GLOO, n, 3) for n in (0, 1, 2))
    waits = replace(GLOO.in_barrier(3, "resume_end", seq=8, phase=Phase.INIT, batch=-1), steps=StepFacts(groups_made=2))
    told = found(job(*makers, waits))["crossed-groups"]
    assert (told.ranks, told.confidence) == ((3,), Confidence.LIKELY)
    assert told.location.endswith("train.py:22 in setup"), "which rank 3 has not called"
    all_make = tuple(replace(maker, steps=StepFacts(groups_made=3 - (maker.rank == 2))) for maker in makers)
    assert found(job(*all_make, world=3))["crossed-groups"].location == "", "it is an earlier one"
    place = f"{USER_FILE}:19 in build"
    of_set = (replace(maker, steps=replace(maker.steps, unordered_groups_at=place)) for maker in all_make)
    in_order = found(job(*of_set, world=3))["crossed-groups"]
    assert in_order.location == place
    assert " The groups are created at train.py:19 in build, in the order of a set, which may " in in_order.summary
    assert "ranks 0-2 are creating number 3, rank 3 has created 2 and waits elsewhere" in told.summary
    works = replace(GLOO.working(3, user("setup", 20), seq=7), steps=StepFacts(groups_made=2))
    assert "crossed-groups" not in found(job(*makers, works))
    assert "crossed-groups" not in found(job(*makers, scenes.makes_group(GLOO, 3, 3)))
    unknown = tuple(replace(facts, steps=StepFacts()) for facts in makers)
    assert "crossed-groups" not in found(job(*unknown, waits))


@pytest.mark.parametrize(
    ("others", "is_told"),
    [((2, 3), True), ((0, 1), False), ((), False)],
    ids=["other members", "the same members", "unknown members"],
)
def test_groups_of_other_members_under_one_number_are_made_by_their_members(
    others: tuple[int, ...], is_told: bool
) -> None:
    """Each pair makes its own group. All have made as many; rank 0 waits, as ranks 2-3 have answered for rank 1."""
    place = "/home/me/project/train.py:20 in setup"
    maker = scenes.makes_group(GLOO, 0, 3, place)

    def has_made(number: int, members: tuple[int, ...]) -> RankFacts:
        waits = GLOO.in_barrier(number, "resume_end", seq=8, phase=Phase.INIT, batch=-1)
        own = Group(name="2", description="undefined", ranks=members)
        return replace(waits, groups=(*waits.groups, own), steps=StepFacts(groups_made=3))

    told = found(job(maker, has_made(1, (0, 1)), *(has_made(n, others) for n in (2, 3)))).get("crossed-groups")
    assert (told is not None) is is_told
    if told is not None:
        assert (told.ranks, told.location, told.confidence) == ((0, 1, 2, 3), place, Confidence.LIKELY)
        assert "has the members ranks 0-1 on rank 1, ranks 2-3 on ranks 2-3; rank 0 still waits" in told.summary


@pytest.mark.parametrize("is_of_all", [True, False], ids=["a call of all ranks", "a call of members"])
def test_a_group_that_is_being_made_has_other_members_than_the_one_under_its_number(is_of_all: bool) -> None:
    place = f"{scenes.USER_FILE}:22 in setup"
    steps = StepFacts(groups_made=2, making=(0, 1), new_groups_at=(place,) if is_of_all else ())
    makers = [replace(scenes.makes_group(GLOO, number, 2), steps=steps) for number in (0, 1)]
    others = [replace(one, steps=StepFacts(groups_made=2)) for one in in_pairs(GLOO)[2:]]
    told = found(job(*makers, *others)).get("crossed-groups")
    assert (told is not None) is is_of_all
    if told is not None:
        assert (told.ranks, told.location, told.confidence) == ((0, 1, 2, 3), place, Confidence.LIKELY)
        assert "ranks 0-1 still wait in new_group" in told.summary


PAIR_CALL = Frame(file=f"{scenes.SITE}/torch/distributed/distributed_c10d.py", line=3000, function="all_reduce")


def in_pairs(net: Backend, *, name: str = "1", made: tuple[str, ...] = (), alike: bool = False) -> list[RankFacts]:
    """Each pair has made its own group under one number; ranks 0-1 have got through its first call, ranks 2-3 not."""
    ranks = []
    for number in range(4):
        is_through = number < 2
        members = (0, 1, 2, 3) if alike else (0, 1) if is_through else (2, 3)
        base = net.waiting(number, seq=61) if is_through else net.rank(number, user("step", 79), PAIR_CALL, seq=60)
        call = Collective(
            group=name, seq=1, op="all_reduce", backend=net.name, completed=is_through, input_sizes=((4,),)
        )
        own = Group(name=name, ranks=members, last_enqueued=1, last_completed=int(is_through))
        steps = StepFacts(groups_made=2, new_groups_at=made)
        both = (*base.collectives, call)
        ranks.append(replace(base, groups=(*base.groups, own), collectives=both, steps=steps))
    return ranks


def test_ranks_that_have_met_others_under_the_number_of_their_group_wait_in_its_first_call() -> None:
    place = f"{scenes.USER_FILE}:20 in group"
    told = judge(job(*in_pairs(GLOO, made=(place,)))).findings[0]
    assert (told.rule, told.ranks, told.location) == ("crossed-groups", (0, 1, 2, 3), place)
    assert told.confidence is Confidence.LIKELY
    assert "ranks 0-1 on ranks 0-1, ranks 2-3 on ranks 2-3; ranks 2-3 wait in its first call" in told.summary
    # One of each pair has got through, with one of the other pair.
    first, second, _, fourth = in_pairs(GLOO)
    of_second = replace(first.groups[1], ranks=(2, 3))
    through = replace(second, rank=2, groups=(second.groups[0], of_second))
    of_first = replace(fourth.groups[1], ranks=(0, 1))
    stuck = replace(fourth, rank=0, groups=(fourth.groups[0], of_first))
    crossed = found(job(stuck, second, through, fourth))["crossed-groups"]
    assert "ranks 0, 3 wait in its first call" in crossed.summary
    two = found(job(*in_pairs(GLOO, made=(place, f"{scenes.USER_FILE}:24 in other"))))["crossed-groups"]
    assert two.location == f"{scenes.USER_FILE}:79 in step"


def test_members_of_a_group_are_looked_up_once_however_many_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(view: Timeline, rank: int, call: Collective) -> bool:
        asked.append(rank)
        return False

    monkeypatch.setattr(creation, "_has_called", counted)
    assert "crossed-groups" not in found(job(*in_pairs(GLOO)))
    assert asked == [2]


def test_groups_of_other_members_may_have_one_number_or_members_may_not_all_be_there() -> None:
    # A hash is the name of a group that its members alone make, or that is a part of another one.
    assert "crossed-groups" not in found(job(*in_pairs(GLOO, name="5f3a09c1")))
    assert "crossed-groups" not in found(job(*in_pairs(GLOO, alike=True)))
    third, fourth = in_pairs(GLOO, alike=True)[2:]
    assert {*found(job(*(replace(third, rank=number) for number in range(3)), fourth))} == {"all-joined"}
    # NCCL can split groups.
    assert "crossed-groups" not in found(job(*in_pairs(NCCL)))
    made = in_pairs(NCCL, made=(f"{scenes.USER_FILE}:20 in group",))
    assert "crossed-groups" in found(job(*made))
    for description in ("mesh_tp", "default_pg:split:1"):
        parts = [replace(one, groups=(one.groups[0], replace(one.groups[1], description=description))) for one in made]
        assert "crossed-groups" not in found(job(*parts))
    first, second, third, fourth = in_pairs(GLOO)
    works = GLOO.working(3, user("step", 70), seq=60)
    late = replace(works, groups=(*works.groups, replace(fourth.groups[-1], last_enqueued=0)))
    assert "crossed-groups" not in found(job(first, second, third, late))
    # It has worked before.
    used = [replace(one, groups=(one.groups[0], replace(one.groups[1], last_completed=1))) for one in (third, fourth)]
    assert "crossed-groups" not in found(job(first, second, *used))
    assert "crossed-groups" not in found(job(second, third, fourth))


@pytest.mark.parametrize("name", ["1", "2"], ids=["earlier", "the last one"])
def test_parts_of_a_split_group_have_one_number_and_other_members(name: str) -> None:
    """A mesh of devices, in older versions of torch; then rank 0 waits for a group with a number, or with a hash."""

    def after_split(facts: RankFacts) -> RankFacts:
        part = Group(name=name, description="mesh_dp", ranks=(0, 1) if facts.rank < 2 else (2, 3))
        return replace(facts, groups=(*facts.groups, part), steps=StepFacts(groups_made=3))

    waits = (GLOO.in_barrier(n, "resume_end", seq=8, phase=Phase.INIT, batch=-1) for n in (1, 2, 3))
    split = job(*map(after_split, (scenes.makes_group(GLOO, 0, 3), *waits)))
    assert "crossed-groups" not in found(split)


def test_ranks_that_create_groups_in_a_circle_wait_for_each_other() -> None:
    """Each links itself to the next one first, then to the one before."""
    makers = [scenes.makes_group(GLOO, n, 2) for n in range(4)]
    links = [(n, (n + 1) % 4) for n in range(4)]
    pairs = [replace(maker, steps=replace(maker.steps, making=link)) for maker, link in zip(makers, links, strict=True)]
    told = found(job(*pairs))["crossed-groups"]
    assert (told.ranks, told.location) == ((0, 1, 2, 3), f"{scenes.USER_FILE}:22 in setup")
    assert told.summary.startswith(
        "Rank 0 creates the group of ranks 0-1 and waits for rank 1; rank 1 creates the group"
    )
    in_order = [replace(one, steps=replace(one.steps, making=(0, 1))) for one in pairs]
    assert "crossed-groups" not in found(job(*in_order)), "they create the same group"
    line = [*pairs[:3], replace(pairs[3], steps=replace(pairs[3].steps, making=()))]
    assert "crossed-groups" not in found(job(*line)), "rank 3 may still come"


def test_in_a_smaller_group_fewer_ranks_wait_whichever_side_is_wrong() -> None:
    """Rank 3 waits in its pair for rank 2, and the three others in the group of all."""
    scene = scenes.call_of_a_pair_left_out(GLOO)
    told = found(scene)["crossed-groups"]
    assert (told.ranks, told.confidence) == ((2,), Confidence.LIKELY)
    assert "rank 2 skipped what it called in every step before" in told.summary
    forgotten = tuple(replace(facts, collectives=facts.collectives[-2:]) for facts in scene.ranks)
    told = found(replace(scene, ranks=forgotten))["crossed-groups"]
    assert (told.ranks, told.confidence) == ((2, 3), Confidence.CERTAIN)


def test_a_rank_that_works_may_be_the_other_side_of_what_is_sent() -> None:
    scene = scenes.tags_that_do_not_match(GLOO)
    works = GLOO.working(2, user("training_step", 40), seq=60, world=3)
    assert "unmatched-p2p" not in found(replace(scene, ranks=(*scene.ranks[:2], works)))
    assert "unmatched-p2p" not in found(replace(scene, ranks=scene.ranks[:2])), "one does not answer"


def test_a_receive_without_a_send_is_more_certain_if_its_peer_waits_in_a_collective() -> None:
    scene = scenes.microbatch_too_few(GLOO)
    told = found(scene)["unmatched-p2p"]
    assert "rank 1 waits in" in told.summary.lower() and "for rank 0, which waits in" in told.summary
    works = GLOO.working(0, user("training_step", 40), seq=61, world=2)
    assert "unmatched-p2p" not in found(replace(scene, ranks=(works, scene.ranks[1])))
    unknown = replace(scene.ranks[1], steps=StepFacts())
    told = found(replace(scene, ranks=(scene.ranks[0], unknown)))["unmatched-p2p"]
    assert (told.ranks, told.confidence) == ((0, 1), Confidence.POSSIBLE)


def test_keys_that_all_have_logged_before_are_only_possible() -> None:
    """Then both are told, and what decides between them."""
    scene = scenes.key_of_one_rank(GLOO)
    alike = tuple(
        replace(facts, steps=replace(facts.steps, logged=scene.ranks[1].steps.logged)) for facts in scene.ranks
    )
    rules = found(replace(scene, ranks=alike))
    assert list(rules) == ["diverged-collectives", "diverged-log-keys"]
    assert rules["diverged-log-keys"].confidence is Confidence.POSSIBLE
    assert "If the other ranks do not log it in this step" in rules["diverged-log-keys"].remedy


def test_keys_of_both_ranks_are_the_fault_of_both() -> None:
    scene = scenes.key_of_one_rank(GLOO)
    own = replace(scene.ranks[0], steps=replace(scene.ranks[0].steps, logged=scenes.logged("val_loss", "val_other")))
    two = found(replace(scene, ranks=(own, scene.ranks[1]), world_size=2))["diverged-log-keys"]
    assert two.ranks == (0, 1)
    assert "Rank 1 alone logs 'val_extra'" in two.summary
    assert ", and rank 0 logs other keys: " in two.summary


@pytest.mark.parametrize(
    ("code", "rule"),
    [("table.append(float(error))", "unmatched-p2p"), ("render(table)", "rank-zero-only-work")],
)
def test_on_nccl_a_receive_is_waited_for_where_its_result_is_read(code: str, rule: str) -> None:
    """``recv`` has returned. A rank that reads no result does something else meanwhile."""
    line = replace(user("collect", 327, condition="if trainer.is_global_zero:  (line 334)"), code=code)
    receives = NCCL.rank(0, RUN, line, seq=60)
    call = Collective(group="0", seq=12, op="recv 0<-2", backend="nccl", is_p2p=True, input_sizes=((1,),))
    receives = replace(receives, collectives=(*receives.collectives, call))
    rules = found(job(receives, *(NCCL.waiting(rank, seq=61) for rank in range(1, 4))))
    assert next(iter(rules)) == rule
    if rule == "unmatched-p2p":
        assert rules[rule].location == f"{USER_FILE}:327 in collect"
        assert "Rank 0 waits in recv for rank 2, which waits in" in rules[rule].summary


def test_an_exabyte_is_not_what_was_allocated() -> None:
    """Objects are gathered on one rank while the others reduce: it takes their numbers for a length."""
    line = user("gather_metrics", 77)
    called = NCCL.rank(1, line, ALL_REDUCE, seq=61, outstanding=1, op="all_gather", sizes=((1,),))
    message = "CUDA out of memory. Tried to allocate more than 1EB memory."
    garbled = raised(called, "OutOfMemoryError", message, RUN, line)
    rules = found(job(*(garbled if n == 1 else NCCL.waiting(n, seq=61) for n in range(4))))
    assert list(rules) == ["diverged-collectives"]
    assert rules["diverged-collectives"].ranks == (1,)


def test_a_key_is_not_missed_before_its_hook_is_over() -> None:
    """Rank 2 is in another reduction of the same hook: it may log the key yet."""
    scene = scenes.key_that_one_rank_lacks(GLOO)
    inside = tuple(
        replace(facts, progress=scenes.in_hook(facts.progress, "validation_step")) if facts.rank == 2 else facts
        for facts in scene.ranks
    )
    assert found(replace(scene, ranks=inside))["diverged-log-keys"].confidence is Confidence.LIKELY


def test_skipped_steps_are_not_counted_where_backward_is_not_seen() -> None:
    """loss.backward() of one's own leaves no trace: batches without a backward pass say nothing then."""
    scene = scenes.step_skipped_by_hand(GLOO)
    blind = tuple(replace(facts, steps=replace(facts.steps, with_backward=0)) for facts in scene.ranks)
    assert "skipped-step" not in found(replace(scene, ranks=blind))


def test_steps_skipped_alike_are_no_cause() -> None:
    scene = scenes.step_skipped_by_hand(GLOO)
    alike = tuple(replace(facts, steps=replace(facts.steps, skipped=2)) for facts in scene.ranks)
    assert "skipped-step" not in found(replace(scene, ranks=alike))


def test_a_backward_pass_that_is_not_over_lacks_gradients_by_nature() -> None:
    steps = StepFacts(without_gradient=("branch.weight",), without_gradient_count=1)
    slow = replace(GLOO.working(1, user("hook", 40), seq=60, action=BACKWARD), steps=steps)
    assert "unused-parameters" not in found(job(*(slow if n == 1 else scenes.in_backward(GLOO, n) for n in range(4))))


def test_parameters_that_one_rank_alone_does_not_use_are_named() -> None:
    scene = scenes.branch_unused_before_validation(GLOO)
    steps = StepFacts(with_backward=11, without_gradient=("branch.weight",), without_gradient_count=1)
    lacking = replace(scene, ranks=tuple(replace(f, steps=steps) if f.rank == 1 else f for f in scene.ranks))
    assert "without a gradient for branch.weight, and is now" in found(lacking)["unused-parameters"].summary
    # With find_unused_parameters=True all ranks may lack the same.
    everywhere = tuple(replace(facts, steps=replace(steps, with_backward=12)) for facts in scene.ranks)
    assert "unused-parameters" not in found(
        replace(lacking, ranks=everywhere[:1] + lacking.ranks[1:2] + everywhere[2:])
    )


def test_a_bucket_that_a_device_has_still_to_reduce_is_not_left_out() -> None:
    """NCCL: a rank that has called one collective more before it has left its backward pass all the same."""
    scene = scenes.branch_unused_before_validation(NCCL)
    culprit = scene.ranks[1]
    bucket = next(call for call in scene.ranks[0].collectives if call.seq == 61)
    late = replace(culprit, collectives=(*culprit.collectives, replace(bucket, seq=62)))
    assert "unused-parameters" not in found(replace(scene, ranks=(scene.ranks[0], late, *scene.ranks[2:])))


def test_a_rank_that_has_gone_through_fewer_backward_passes_has_used_all() -> None:
    """It has run out of data, or is late: there is nothing that it has left out."""
    scene = scenes.branch_unused_before_validation(GLOO)
    fewer = (replace(f, steps=StepFacts(with_backward=11)) if f.rank == 1 else f for f in scene.ranks)
    assert "unused-parameters" not in found(replace(scene, ranks=tuple(fewer)))


def test_reading_a_checkpoint_is_not_saving_one() -> None:
    load = Frame(file="/venv/lib/python3.12/site-packages/torch/serialization.py", line=1500, function="load")
    culprit = raised(GLOO.working(3, seq=60), "OSError", "No space left on device", RUN, user("setup", 9), load)
    assert list(found(job(*(GLOO.waiting(n, seq=61) for n in range(3)), culprit))) == ["failed-rank"]


VOTE = Frame(file="/venv/ours.py", line=240, function="wait", mark=Mark.VOTE.value)


def _in_group(name: str, description: str, timeout_ms: int) -> JobFacts:
    def rank(number: int) -> RankFacts:
        frame = VOTE if description == VOTE_GROUP else ALL_REDUCE
        base = GLOO.rank(number, user("training_step", 79), frame, seq=60, action=TRAINING_STEP)
        call = Collective(
            group=name, seq=1, op="all_reduce", backend="gloo", input_sizes=((4,),), timeout_ms=timeout_ms
        )
        own = Group(name=name, description=description, ranks=(0, 1, 2, 3), last_enqueued=1)
        return replace(base, groups=(*base.groups, own), collectives=(*base.collectives, call))

    slow = GLOO.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP)
    return job(rank(0), slow, rank(2), rank(3))


def test_a_shorter_timeout_is_reported_before_it_strikes() -> None:
    rules = found(_in_group("1", "metrics", 4000))
    assert (rules["timeout-misuse"].confidence, rules["timeout-misuse"].ranks) == (Confidence.POSSIBLE, (0, 2, 3))
    assert judge(_in_group("1", "metrics", 4000)).findings[0].rule != "timeout-misuse"
    assert "timeout-misuse" not in found(_in_group("1", "metrics", 1_815_000))
    assert "timeout-misuse" not in found(_in_group("1", VOTE_GROUP, 4000))


@pytest.mark.parametrize(
    ("waited_s", "is_over"), [(3.9, False), (4.1, True), (9.0, False)], ids=["not yet", "over", "nothing enforces it"]
)
def test_a_shorter_timeout_that_is_used_up_comes_before_the_rank_that_is_late(waited_s: float, is_over: bool) -> None:
    facts = _in_group("1", "metrics", 4000)
    begun_ns, now_ns = 10**18, 10**18 + round(waited_s * 1e9)

    def timed(one: RankFacts) -> RankFacts:
        calls = tuple(replace(call, created_ns=begun_ns) for call in one.collectives)
        return replace(one, collectives=calls, taken_ns=now_ns)

    findings = judge(replace(facts, ranks=tuple(map(timed, facts.ranks)))).findings
    assert [one.rule for one in findings[:2]] == ["timeout-misuse", "rank-behind"][:: 1 if is_over else -1]
    assert findings[0].confidence is Confidence.LIKELY
    behind = next(one for one in findings if one.rule == "rank-behind")
    gives_up = "Group '1', in which ranks 0, 2-3 wait, gives up after 4.0 s."
    # It has not given up after far longer.
    assert behind.summary.endswith(gives_up) is (waited_s < 8)
    misuse = next(one for one in findings if one.rule == "timeout-misuse")
    assert ("gives up after 4.0 s" if waited_s < 8 else "has a timeout of 4.0 s") in misuse.summary


@pytest.mark.parametrize(
    ("message", "is_short"),
    [
        ("[gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete", True),
        ("[gloo/unbound_buffer.cc:78] Timed out waiting 1815000ms for recv operation to complete", False),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, Timeout(ms)=600000) ran for 600971", True),
        ("[1] is setting up NCCL communicator, but store->get('0') got error: wait timeout after 60000ms", True),
        ("Rank 0 timed out: Ranks 1 failed to pass monitoredBarrier in 30000 ms", True),
        ("Connection closed by peer", False),
    ],
)
def test_timeouts_that_are_reported(message: str, is_short: bool) -> None:
    lost = raised(GLOO.working(0, seq=60), "RuntimeError", message, RUN, user("training_step", 79), consequence=True)
    slow = GLOO.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP)
    assert ("timeout-misuse" in found(job(lost, slow, world=2))) is is_short


def test_a_variable_that_nothing_reads_is_named() -> None:
    scene = scenes.group_with_a_shorter_timeout(GLOO)
    machine = replace(scene.ranks[0].machine, settings={"NCCL_TIMEOUT": "7200"})
    finding = found(replace(scene, ranks=(replace(scene.ranks[0], machine=machine), *scene.ranks[1:])))
    assert "Nothing reads NCCL_TIMEOUT" in finding["timeout-misuse"].remedy


def test_what_a_compiler_calls_is_not_the_line_that_compiles() -> None:
    """A back end of the user's, or a function that is traced."""
    scene = scenes.one_rank_compiles(GLOO)
    ranks = [replace(one, stack=(*one.stack, user("__call__", 12))) if one.rank == 1 else one for one in scene.ranks]
    finding = found(replace(scene, ranks=tuple(ranks)))["compile-skew"]
    assert finding.location == f"{USER_FILE}:82 in training_step"
    assert finding.summary.startswith("Rank 1 compiles, in training_step at train.py:82 in training_step")


def test_a_cold_cache_is_that_of_a_host() -> None:
    scene = scenes.one_rank_compiles(GLOO)
    apart = tuple(replace(facts, host="node-2") if facts.rank == 1 else facts for facts in scene.ranks)
    assert "on node-2 seem to be cold" in found(replace(scene, ranks=apart))["compile-skew"].summary
    assert "cold" not in found(scene)["compile-skew"].summary


@pytest.mark.parametrize(
    ("line", "members", "name", "is_located"),
    [(45, (0, 1, 2), "3", True), (0, (0, 1, 2), "3", False), (45, (0, 1), "3", False), (45, (0, 1, 2), "0", False)],
    ids=["in a set's order", "in no such order", "other members", "the default group"],
)
def test_groups_of_the_same_members_are_numbered_where_a_set_is_gone_through(
    line: int, members: tuple[int, ...], name: str, is_located: bool
) -> None:
    """Groups of different members cannot be taken for each other, and the default group is the first one everywhere."""
    scene = scenes.groups_in_another_order(GLOO)
    place = f"{USER_FILE}:{line} in __init__" if line else ""
    of_group = {"1": members, "2": (0, 1, 2)}
    ranks = tuple(
        replace(
            facts,
            steps=StepFacts(unordered_groups_at=place),
            groups=tuple(
                replace(one, ranks=of_group.get(one.name, one.ranks), name=name if one.name == "1" else one.name)
                for one in facts.groups
            ),
            collectives=tuple(replace(one, group=name if one.group == "1" else one.group) for one in facts.collectives),
        )
        for facts in scene.ranks
    )
    finding = judge(replace(scene, ranks=ranks)).findings[0]
    assert finding.rule == "crossed-groups"
    assert (finding.location == f"{USER_FILE}:45 in __init__") == is_located
    assert ("The groups are created at train.py:45 in __init__, in the order of a set" in finding.summary) == is_located
    assert (finding.confidence is Confidence.LIKELY) == is_located


def test_no_circle_where_the_last_one_works() -> None:
    """Rank 0 waits for 1, which waits in another group for 2, and that one is slow: it alone is behind."""
    scene = scenes.groups_in_another_order(GLOO)
    slow = replace(scene.ranks[2], stack=(RUN, user("slow", 90)), collectives=())
    groups = tuple(replace(group, last_enqueued=0) for group in slow.groups)
    first = replace(scene.ranks[0], groups=tuple(replace(g, last_enqueued=1) for g in scene.ranks[0].groups))
    moved = (first, scene.ranks[1], replace(slow, groups=groups))
    assert "crossed-groups" not in found(replace(scene, ranks=moved))


def test_a_circle_by_way_of_three_ranks() -> None:
    """0 waits in a for 1, 1 in b for 2, 2 in c for 0."""
    waits_in = {0: "a", 1: "b", 2: "c"}
    members = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}

    def rank(number: int) -> RankFacts:
        groups = tuple(
            Group(name=name, ranks=ranks, last_enqueued=int(waits_in[number] == name))
            for name, ranks in members.items()
            if number in ranks
        )
        call = Collective(group=waits_in[number], seq=1, op="all_reduce", backend="gloo", input_sizes=((4,),))
        base = GLOO.rank(number, user("step", 5), ALL_REDUCE, seq=0, world=3)
        return replace(base, groups=groups, collectives=(call,))

    finding = judge(job(*(rank(n) for n in range(3)), world=3)).findings[0]
    assert (finding.rule, finding.ranks) == ("crossed-groups", (0, 1, 2))
    assert "rank 2 waits in all_reduce (sequence number 1, 4 elements, group 'c') for rank 0" in finding.summary


@pytest.mark.parametrize("of_model", [0, 1])
def test_of_a_circle_the_users_own_call_is_named_before_that_of_a_sharded_model(of_model: int) -> None:
    def rank(number: int) -> RankFacts:
        name, other = ("dp", "tp") if number == of_model else ("tp", "dp")
        groups = tuple(
            Group(name=each, ranks=(0, 1), last_enqueued=8 if each == name else 7, last_completed=7)
            for each in sorted((name, other))
        )
        size = 24 if number == of_model else 4
        call = Collective(group=name, seq=8, op="all_gather", backend="gloo", input_sizes=((size,),))
        line = user("loss" if number == of_model else "count", 5 + number)
        unit = ModelUnit(kind=UnitKind.FSDP_UNIT, name="trunk", elements=48, shard_elements=24, groups=("dp",))
        base = GLOO.rank(number, line, ALL_REDUCE, seq=0, world=2)
        return replace(base, groups=groups, collectives=(call,), units=(unit,))

    finding = judge(job(rank(0), rank(1), world=2)).findings[0]
    assert (finding.rule, finding.location) == ("crossed-groups", f"{USER_FILE}:{6 - of_model} in count")


PAIRS = {0: "5", 1: "6", 2: "5", 3: "6"}
FSDP = Frame(
    file=f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line=658, function="foreach_reduce"
)


def replicas(*before: str, reduced_by: Frame = FSDP, of: tuple[int, ...] = (0, 1, 2, 3)) -> JobFacts:
    """Hybrid sharding: ranks 0 and 1 are in a barrier, the others reduce gradients with them, in pairs.

    Args:
        before: Sites of what all ranks have called earlier.
        reduced_by: What has called the reductions.
        of: The members of the barrier's group.
    """

    def rank(number: int) -> RankFacts:
        pair, is_in_barrier = PAIRS[number], number < 2
        members = {"0": of, pair: tuple(other for other, name in PAIRS.items() if name == pair)}
        waits_in = "0" if is_in_barrier else pair
        done = [("0" if site == "barrier" else pair, site) for site in before]
        calls = [*done, ("0", "barrier") if is_in_barrier else (pair, "gradients")]
        line = user("on_train_epoch_end", 62) if is_in_barrier else reduced_by
        return replace(
            GLOO.rank(number, line, BARRIER if is_in_barrier else ALL_REDUCE, seq=0),
            groups=tuple(
                Group(name=name, ranks=ranks, last_enqueued=7 + (name == waits_in), last_completed=7)
                for name, ranks in members.items()
            ),
            collectives=tuple(
                Collective(
                    group=group,
                    seq=8 if index == len(done) else 7,
                    op="barrier" if site == "barrier" else "all_reduce",
                    backend="gloo",
                    completed=index < len(done),
                    site=site,
                )
                for index, (group, site) in enumerate(calls)
            ),
        )

    return job(*map(rank, range(4)))


def test_a_new_call_that_only_some_ranks_have_come_to_is_no_matter_of_order() -> None:
    facts = replicas("gradients")
    finding = judge(facts).findings[0]
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0, 1))
    assert finding.location == f"{USER_FILE}:62 in on_train_epoch_end"
    assert "crossed-groups" not in found(facts)


@pytest.mark.parametrize(
    ("before", "reduced_by"),
    [
        (("barrier", "gradients"), FSDP),
        ((), FSDP),
        (("gradients",), SIGTERM),
        ((), user("average", 80)),
    ],
    ids=["it was made before", "nor have the others", "they are in a call of Lightning's", "in one of the user's"],
)
def test_calls_of_several_groups_that_are_not_new_may_be_in_another_order(
    before: tuple[str, ...], reduced_by: Frame
) -> None:
    assert judge(replicas(*before, reduced_by=reduced_by)).findings[0].rule == "crossed-groups"


def test_a_new_call_that_only_some_ranks_have_to_make_may_be_in_another_order() -> None:
    assert judge(replicas("gradients", of=(0, 1, 2))).findings[0].rule == "crossed-groups"


def _voting(description: str, frame: Frame) -> JobFacts:
    """Rank 1 is between batches, in a group of this description; the others are in a call of the batch before."""

    def rank(number: int) -> RankFacts:
        if number == 1:
            base = GLOO.rank(1, frame, seq=60, action=NEXT, batch=12)
        else:
            line = user("training_step", 79)
            base = GLOO.rank(number, line, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP)
        votes = Group(name="1", description=description, ranks=(0, 1, 2, 3), last_enqueued=7, last_completed=7)
        vote = Collective(group="1", seq=8, op="all_reduce", backend="gloo", input_sizes=((1,),))
        groups, calls = (replace(votes, last_enqueued=8), (vote,)) if number == 1 else (votes, ())
        return replace(base, groups=(*base.groups, groups), collectives=(*base.collectives, *calls))

    return job(*map(rank, range(4)))


def test_a_rank_that_votes_on_the_next_batch_is_in_no_circle() -> None:
    told = judge(_voting(VOTE_GROUP, VOTE)).findings
    assert "crossed-groups" not in {finding.rule for finding in told}
    assert (told[0].rule, told[0].ranks) == ("diverged-collectives", (1,))
    assert judge(_voting("metrics", ALL_REDUCE)).findings[0].rule == "crossed-groups"


def test_nccl_says_between_whom_a_receive_is() -> None:
    def rank(number: int) -> RankFacts:
        call = Collective(group="0", seq=1, op=f"recv {number}<-{1 - number}", backend="nccl", is_p2p=True)
        base = NCCL.working(number, user("exchange", 73), scenes.RECV, seq=60, world=2)
        return replace(base, collectives=(*base.collectives, call))

    finding = judge(job(rank(0), rank(1), world=2)).findings[0]
    assert (finding.rule, finding.ranks) == ("unmatched-p2p", (0, 1))


def test_gradients_that_one_rank_alone_reduces_are_no_mismatch() -> None:
    """Buckets of the model and a value of the user's: the same operation, and another purpose."""
    line = user("on_train_epoch_end", 50)
    alone = GLOO.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((10,),))
    others = (scenes.in_backward(GLOO, n) for n in (1, 2, 3))
    assert list(found(job(alone, *others))) == ["diverged-collectives"]


def test_a_rank_that_works_may_come_to_log_the_key_yet() -> None:
    """The first batch: rank 2 is slow before its self.log, in which the others wait already."""
    scene = scenes.key_that_one_rank_lacks(GLOO)
    slow = replace(GLOO.working(2, user("validation_step", 100), seq=60, phase=Phase.VALIDATE), steps=StepFacts())
    rules = found(replace(scene, ranks=(*scene.ranks[:2], slow, scene.ranks[3])))
    assert list(rules) == ["rank-behind"]


@pytest.mark.parametrize(
    ("line", "loop", "first"),
    [
        (100, 0, "diverged-collectives"),
        (100, 102, "diverged-collectives"),
        (100, 99, "diverged-log-keys"),
        (106, 0, "diverged-log-keys"),
    ],
    ids=["before it", "before its loop", "in its loop", "past it"],
)
def test_a_rank_that_waits_at_an_earlier_line_is_yet_to_log_the_key(line: int, loop: int, first: str) -> None:
    """The others reduce the key in line 104; what comes before it, rank 2 has called too early or too often."""
    loops = (Branch(line=loop, test="for part in parts:", on=Decides.PASSES, until=110),)
    logs = replace(user("validation_step", 104), branches=loops if loop else ())
    waiting = {facts.rank: facts for facts in scenes.key_that_one_rank_lacks(GLOO).ranks}
    waiting = {rank: replace(facts, stack=(RUN, logs, *facts.stack[-2:])) for rank, facts in waiting.items()}
    stack = (RUN, user("validation_step", line), ALL_REDUCE)
    earlier = replace(waiting[2], progress=waiting[0].progress, stack=stack)
    told = found(scenes.ordered(waiting | {2: earlier}))
    assert next(iter(told)) == first
    assert ("does not: " in told["diverged-log-keys"].summary) is (first == "diverged-log-keys")
    ahead = replace(earlier.progress, batch_idx=earlier.progress.batch_idx + 1)
    told = found(scenes.ordered(waiting | {2: replace(earlier, progress=ahead)}))
    assert next(iter(told)) == "diverged-log-keys", "it was there in the batch before"


@pytest.mark.parametrize(
    ("line", "function", "loop", "batches_ahead", "first"),
    [
        (100, "validation_step", 0, 0, "diverged-collectives"),
        (100, "validation_step", 99, 0, "diverged-log-keys"),
        (106, "validation_step", 0, 0, "diverged-log-keys"),
        (100, "forward", 0, 0, "diverged-log-keys"),
        (100, "validation_step", 0, 1, "diverged-log-keys"),
    ],
    ids=["before it", "in its loop", "past it", "elsewhere", "in a later batch"],
)
def test_a_rank_in_the_function_that_others_have_left_is_yet_to_log_the_key(
    line: int, function: str, loop: int, batches_ahead: int, first: str
) -> None:
    """The others reduce the key at the end of the epoch, line 104 logs it; rank 2 makes another call before."""
    ranks = {facts.rank: facts for facts in scenes.key_that_one_rank_lacks(GLOO).ranks}
    key = LoggedKey(name="val_loss", hook="validation_step", place=f"{USER_FILE}:104 in validation_step")
    for rank, facts in ranks.items():
        left = tuple(frame for frame in facts.stack if not frame.user)
        logged = replace(facts.steps, logged=() if rank == 2 else (key,), reducing="" if rank == 2 else key.name)
        ranks[rank] = replace(facts, stack=(RUN, *left), steps=logged)
    loops = (Branch(line=loop, test="for part in parts:", on=Decides.PASSES, until=110),)
    at = replace(user(function, line), branches=loops if loop else ())
    moved = replace(ranks[0].progress, batch_idx=ranks[0].progress.batch_idx + batches_ahead)
    ranks[2] = replace(ranks[2], stack=(RUN, at, ALL_REDUCE), progress=moved)
    assert next(iter(found(scenes.ordered(ranks)))) == first


def test_a_rank_that_is_ahead_may_have_skipped_more() -> None:
    """Every other batch has no backward pass, on all ranks; rank 1 is a batch further."""
    passes = {0: (10, 5), 1: (10, 6), 2: (10, 5), 3: (10, 5)}
    ranks = (
        replace(GLOO.waiting(n, seq=61), steps=StepFacts(with_backward=with_it, skipped=without))
        for n, (with_it, without) in passes.items()
    )
    assert "skipped-step" not in found(job(*ranks))


def _after_skipping(hook: str = TRAINING_STEP, *, epoch: int = 0, batch: int = 11, is_slow: bool = False) -> JobFacts:
    """Rank 1 has skipped batch 11 of epoch 0; the others have not got past this batch, and are in this hook of it."""
    made = StepFacts(with_backward=11, passes_epoch=0, passes_batch=10)
    skipped = replace(made, skipped=1, skipped_epoch=0, skipped_batch=11)
    ahead = GLOO.in_sigterm_broadcast(1, seq=61, batch=12)
    here = {"action": hook, "epoch": epoch, "batch": batch}
    line = user("training_step", 44)
    if is_slow:
        ranks = {n: GLOO.working(n, line, seq=60, **here) for n in (0, 2, 3)}
    else:
        ranks = {n: GLOO.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, **here) for n in (0, 2, 3)}  # type: ignore[arg-type]
    ranks = {n: replace(facts, steps=made) for n, facts in ranks.items()}
    ranks[1] = replace(ahead, steps=skipped)
    return scenes.ordered(ranks)


def test_only_lightning_refuses_a_step_and_no_broken_connection_does() -> None:
    """With manual optimization it refuses nothing; a rank that has raised for another reason is no longer there."""
    facts = _after_skipping()
    ranks = tuple(transport_error(one) if one.rank == 1 else one for one in facts.ranks)
    finding = judge(replace(facts, ranks=ranks)).findings[0]
    assert (finding.rule, finding.ranks) == ("skipped-step", (1,))
    assert "refuses" not in finding.summary
    assert "is now" not in finding.summary
    assert not any(item.source == "stack" for item in finding.evidence)
    assert "Raised RuntimeError, batch 12 of epoch 0." in [item.text for item in finding.evidence]


def test_a_rank_has_skipped_the_batch_in_whose_step_the_others_wait() -> None:
    finding = judge(_after_skipping()).findings[0]
    assert (finding.rule, finding.ranks, finding.confidence) == ("skipped-step", (1,), Confidence.LIKELY)
    assert finding.summary.startswith("Rank 1 has skipped batch 11 of epoch 0")


@pytest.mark.parametrize(
    "facts",
    [
        _after_skipping("[LightningModule]Net.on_train_batch_start"),
        _after_skipping(batch=10),
        _after_skipping(epoch=1),
        _after_skipping(is_slow=True),
    ],
    ids=["before its step", "in an earlier batch", "in another epoch", "at work in its step"],
)
def test_ranks_that_do_not_wait_in_the_step_of_a_skipped_batch_may_skip_it_yet(facts: JobFacts) -> None:
    assert "skipped-step" not in found(facts)


@pytest.mark.parametrize(
    ("passes", "under_way", "is_skipped"),
    [
        (((0, 0, 1, 1),), (), False),
        (((0, 0, 2, 2, 2), (0, 3, 1, 1, 1)), (0, 11, 1, 1), False),
        (((0, 0, 1, 1), (0, 3, 1)), (), True),
        (((0, 0, 2, 1),), (), True),
        (((0, 0, 1, 1),), (0, 11, 1), True),
        ((), (), True),
    ],
    ids=["none", "none, in several passes", "one in the end", "every other one", "the one under way", "unknown"],
)
def test_passes_that_reduce_nothing_keep_nobody_waiting(
    passes: tuple[tuple[int, ...], ...], under_way: tuple[int, ...], is_skipped: bool
) -> None:
    scene = scenes.step_skipped_by_hand(GLOO)
    alike = (replace(f, steps=replace(f.steps, passes=passes, under_way=under_way)) for f in scene.ranks)
    assert ("skipped-step" in found(replace(scene, ranks=tuple(alike)))) is is_skipped


def test_passes_of_one_rank_that_are_reduced_keep_it_waiting() -> None:
    scene = scenes.step_skipped_by_hand(GLOO)
    kept = (replace(f, steps=replace(f.steps, passes=((0, 0, 1, 1)[: 3 + (f.rank != 2)],))) for f in scene.ranks)
    assert next(iter(found(replace(scene, ranks=tuple(kept))))) == "skipped-step"


def _given_up(shortest_s: float) -> JobFacts:
    """Rank 0 gave up after 21 s, the timeout of all recent calls of the default group; the limit is half an hour."""
    message = "[gloo/unbound_buffer.cc:78] Timed out waiting 21000ms for recv operation to complete"
    base = GLOO.working(0, seq=60)
    known = replace(base, collectives=tuple(replace(call, timeout_ms=21_000) for call in base.collectives))
    lost = raised(known, "RuntimeError", message, RUN, consequence=True)
    slow = GLOO.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP)
    facts = job(lost, slow, world=2)
    return replace(facts, incident=replace(facts.incident, shortest_timeout_s=shortest_s))


@pytest.mark.parametrize("shortest_s", [0.0, 6.0, 21.0], ids=["unknown", "shorter", "equal"])
def test_the_limit_of_another_phase_is_no_misuse(shortest_s: float) -> None:
    """The default group's timeout follows the phases; the rank that asked is in one with a longer limit."""
    assert "timeout-misuse" not in found(_given_up(shortest_s))


def test_a_usual_timeout_that_is_shorter_than_every_limit_is_the_groups_own() -> None:
    finding = found(_given_up(1800.0))["timeout-misuse"]
    assert (finding.ranks, finding.confidence) == ((0,), Confidence.LIKELY)
    assert "gave up waiting after 21 s" in finding.summary
    assert "default group has its own timeout" in finding.summary


@pytest.mark.parametrize(("shortest_s", "is_reported"), [(1800.0, True), (0.0, False), (6.0, False)])
def test_a_usual_timeout_that_is_shorter_than_every_limit_is_reported_before_it_strikes(
    shortest_s: float, is_reported: bool
) -> None:
    scene = job(*(GLOO.waiting(n, seq=61) for n in (0, 2, 3)), GLOO.working(1, user("slow", 78), seq=60))
    ranks = (
        replace(facts, collectives=tuple(replace(call, timeout_ms=21_000) for call in facts.collectives))
        for facts in scene.ranks
    )
    incident = replace(scene.incident, shortest_timeout_s=shortest_s)
    told = found(replace(scene, ranks=tuple(ranks), incident=incident))
    assert ("timeout-misuse" in told) is is_reported
    if is_reported:
        misuse = told["timeout-misuse"]
        assert (misuse.confidence, misuse.ranks) == (Confidence.POSSIBLE, (0, 2, 3))


def test_a_save_that_failed_on_all_ranks_left_nobody_behind() -> None:
    """It is over; in the present one rank 0 is late."""
    scene = scenes.save_failed_and_was_caught(GLOO)
    everywhere = tuple(replace(facts, failed_save=scene.ranks[0].failed_save) for facts in scene.ranks)
    assert "checkpoint-skipped-barrier" not in found(replace(scene, ranks=everywhere))


def test_what_of_a_checkpoint_cannot_be_pickled_is_told_with_where_it_was_kept() -> None:
    stack = (RUN, scenes.SAVE, scenes.CHECKPOINT_IO, scenes.TORCH_SAVE)
    culprit = raised(GLOO.working(0, seq=60, batch=2), "TypeError", "cannot pickle 'Iterator' object", *stack)
    others = [GLOO.in_barrier(n, "Trainer.save_checkpoint", seq=61) for n in (1, 2, 3)]
    kept = f"{USER_FILE}:40 in on_save_checkpoint"
    steps = StepFacts(unsaved="checkpoint['older'] (Iterator)", unsaved_at=(kept,))
    told = found(job(replace(culprit, steps=steps), *others))["exception-during-save"]
    at = "kept at train.py:40 in on_save_checkpoint"
    assert told.summary.endswith(f" What cannot be pickled is checkpoint['older'] (Iterator), {at}.")
    assert told.location == kept and told.remedy.startswith("Keep what can be pickled of it")
    several = replace(steps, unsaved_at=(kept, f"{USER_FILE}:44 in state_dict"))
    assert found(job(replace(culprit, steps=several), *others))["exception-during-save"].location == ""
    plain = found(job(culprit, *others))["exception-during-save"]
    assert "cannot be pickled is" not in plain.summary


def test_ranks_are_apart_once_a_save_was_left_and_its_barrier_has_completed_with_another_call() -> None:
    scene = scenes.save_failed_and_was_caught(GLOO)
    failed = scene.ranks[0].failed_save
    here = [GLOO.waiting(0, seq=62), *(GLOO.in_barrier(n, "later", seq=62) for n in (1, 2, 3))]
    told = found(job(replace(here[0], failed_save=failed), *here[1:]))["checkpoint-skipped-barrier"]
    assert (told.ranks, told.confidence) == ((0,), Confidence.LIKELY)
    # A save that failed on all ranks, or ranks that wait for a straggler, are not apart because of it.
    assert "checkpoint-skipped-barrier" not in found(job(*(replace(one, failed_save=failed) for one in here)))
    late = GLOO.working(0, user("evaluate", 9), seq=61)
    assert "checkpoint-skipped-barrier" not in found(job(replace(late, failed_save=failed), *here[1:]))


def test_the_line_of_a_caught_save_is_in_the_try_that_has_caught_it() -> None:
    """The user's CheckpointIO has one, too, out of which the exception came."""
    scene = scenes.save_failed_and_was_caught(GLOO)
    first, *others = scene.ranks
    assert first.failed_save is not None
    run, hook, save, *_ = first.failed_save.stack
    called, raised_at = (
        replace(
            frame, branches=(Branch(line=line, test=f"{text}  (line {line})", on=Decides.EXCEPTION, until=line - 2),)
        )
        for frame, line, text in (
            (hook, 119, "except OSError as error:"),
            (replace(hook, line=30, function="save_checkpoint"), 33, "except OSError:"),
        )
    )
    clause = f"{USER_FILE}:119 in {hook.function}"
    for stack, at, decided_at in (
        ((run, called, save, raised_at), called, clause),
        ((run, hook, save, raised_at), raised_at, ""),
    ):
        failed = replace(first.failed_save, stack=stack)
        one = found(replace(scene, ranks=(replace(first, failed_save=failed), *others)))["checkpoint-skipped-barrier"]
        assert (one.location, one.decided_at) == (location_of(at), decided_at)
        assert ("caught by `except OSError as error:` (line 119) around" in one.summary) is bool(decided_at)
    # What raised is the call in the `try` itself.
    failed = replace(first.failed_save, stack=(run, called, save))
    one = found(replace(scene, ranks=(replace(first, failed_save=failed), *others)))["checkpoint-skipped-barrier"]
    assert "caught by `except OSError as error:` (line 119), so the rank never reached" in one.summary


@pytest.mark.parametrize(
    ("line", "test", "until", "is_it"),
    [
        (119, "except OSError as error:", 117, True),
        (119, "except (ValueError, IOError):", 117, True),
        (119, "except Exception as ValueError:", 117, True),
        (119, "except StorageError:", 117, True),
        (119, "except (ValueError, errors.Storage):", 117, True),
        (119, "except:", 117, True),
        (116, "with contextlib.suppress(OSError):", 117, True),
        (116, "with contextlib.suppress(KeyError):", 117, False),
        (119, "except ValueError:", 117, False),
        # The line is in the handler itself, as is a save for emergencies; or in the `else` block.
        (116, "except OSError:", 118, False),
        (115, "except OSError:", 113, False),
    ],
)
def test_a_handler_of_other_exceptions_has_not_caught_a_save(line: int, test: str, until: int, is_it: bool) -> None:
    scene = scenes.save_failed_and_was_caught(GLOO)
    first, *others = scene.ranks
    assert first.failed_save is not None
    run, hook, *inside = first.failed_save.stack
    branch = Branch(line=line, test=f"{test}  (line {line})", on=Decides.EXCEPTION, until=until)
    failed = replace(first.failed_save, stack=(run, replace(hook, branches=(branch,)), *inside))
    one = found(replace(scene, ranks=(replace(first, failed_save=failed), *others)))["checkpoint-skipped-barrier"]
    assert (f"caught by `{test}` (line {line}), so the rank" in one.summary) is is_it


def on_two(facts: RankFacts, *, on_gloo: RankFacts) -> RankFacts:
    """The same rank, whose default group has gloo beside NCCL, and has called there what another builder says."""
    groups = (replace(group, name="0:gloo", description="default_pg:gloo") for group in on_gloo.groups)
    calls = (replace(call, group="0:gloo") for call in on_gloo.collectives)
    return replace(facts, groups=(*facts.groups, *groups), collectives=(*calls, *facts.collectives))


def test_the_timeout_of_a_second_back_end_is_that_of_the_default_group() -> None:
    def timed(facts: RankFacts) -> RankFacts:
        return replace(facts, collectives=tuple(replace(call, timeout_ms=21_000) for call in facts.collectives))

    waits = timed(GLOO.waiting(0, seq=61, world=2))
    late = GLOO.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP, world=2)
    gloo_alone = replace(on_two(replace(waits, groups=(), collectives=()), on_gloo=waits), stack=waits.stack)
    assert "timeout-misuse" not in found(job(gloo_alone, on_two(late, on_gloo=late), world=2))
    other = replace(waits, collectives=tuple(replace(call, group="1") for call in waits.collectives))
    assert "timeout-misuse" in found(job(other, late, world=2))


def test_numbers_of_two_back_ends_are_not_compared() -> None:
    """Rank 0 has left a loop of broadcasts on gloo before the others, and waits in number 3 of NCCL."""
    idle = [GLOO.rank(rank, seq=5, world=3) for rank in range(3)]
    sends = user("configure_model", 40)
    others = [
        GLOO.rank(rank, sends, BROADCAST, seq=6, outstanding=1, op="broadcast", world=3, phase=Phase.INIT)
        for rank in (1, 2)
    ]
    barrier = NCCL.in_barrier(0, "", seq=3, world=3, phase=Phase.INIT)
    waits = [replace(NCCL.rank(facts.rank, seq=2, world=3), stack=facts.stack) for facts in others]
    scene = job(
        on_two(barrier, on_gloo=idle[0]),
        *(
            on_two(replace(facts, progress=other.progress), on_gloo=other)
            for facts, other in zip(waits, others, strict=True)
        ),
        world=3,
    )
    findings = judge(scene).findings
    assert [finding.rule for finding in findings] == ["diverged-collectives"]
    (summary,) = (finding.summary for finding in findings)
    assert "in a different place" in summary and "can never complete together" not in summary
    assert (
        "ranks 1-2 wait in broadcast (sequence number 6, 25,557 elements of Float, the default group (gloo))" in summary
    )
    assert "rank 0 waits in a barrier of Lightning's (barrier, sequence number 3)" in summary


def test_a_circle_is_not_certain_with_more_outstanding_on_a_device() -> None:
    scene = scenes.groups_in_another_order(NCCL)
    more = tuple(
        replace(facts, collectives=(*facts.collectives, replace(facts.collectives[0], group="0", seq=9)))
        for facts in scene.ranks
    )
    assert found(scene)["crossed-groups"].confidence is Confidence.CERTAIN
    assert found(replace(scene, ranks=more))["crossed-groups"].confidence is Confidence.LIKELY


def test_another_size_of_unknown_purpose_is_only_possible() -> None:
    """NCCL with more outstanding: the stacks say nothing about this call."""
    scene = scenes.another_size(NCCL)
    more = tuple(
        replace(facts, collectives=(*facts.collectives, replace(facts.collectives[-1], seq=62)))
        for facts in scene.ranks
    )
    rules = found(replace(scene, ranks=more))
    assert [(name, rules[name].confidence) for name in rules] == [
        ("diverged-collectives", Confidence.CERTAIN),
        ("mismatched-collective", Confidence.POSSIBLE),
    ]
    assert "If the stacks show different functions" in rules["mismatched-collective"].remedy


@pytest.mark.parametrize(
    ("function", "line", "rules"),
    [
        ("validation_step", 90, {"diverged-collectives": Confidence.CERTAIN}),
        ("training_step", 57, {"mismatched-collective": Confidence.CERTAIN}),
        (
            "training_step",
            58,
            {"diverged-collectives": Confidence.LIKELY, "mismatched-collective": Confidence.POSSIBLE},
        ),
    ],
    ids=["another function", "one line", "one function"],
)
def test_recorded_stacks_show_the_purpose_although_ranks_have_moved_on(
    function: str, line: int, rules: dict[str, Confidence]
) -> None:
    lines = {rank: user(function, line) if rank == 2 else user("training_step", 57) for rank in range(4)}
    moved_on = (
        replace(
            facts,
            collectives=(
                *facts.collectives[:-1],
                replace(facts.collectives[-1], stack=(RUN, lines[facts.rank], ALL_REDUCE)),
                replace(facts.collectives[-1], seq=62),
            ),
        )
        for facts in scenes.another_size(NCCL).ranks
    )
    told = found(job(*moved_on))
    assert {rule: finding.confidence for rule, finding in told.items()} == rules


RESUME_END = Frame(
    file=f"{SITE}/lightning/pytorch/trainer/connectors/checkpoint_connector.py", line=180, function="resume_end"
)


def _resumes(path: str = "", *stack: Frame, rank: int = 0) -> RankFacts:
    """A rank before training, with this path of a checkpoint; without one, it waits for those that load theirs."""
    waits = GLOO.rank(rank, *stack, BARRIER, seq=8, outstanding=1, op="barrier", sizes=(), phase=Phase.INIT, batch=-1)
    return replace(waits, trainer=TrainerFacts(settings={"ckpt_path": path} if path else {}))


LOADS = user("load_state_dict", 21)


def _own_path(rank: int) -> RankFacts:
    return _resumes(f"/scratch-{rank}/last.ckpt", LOADS, rank=rank)


@pytest.mark.parametrize(
    ("with_path", "ranks", "words"),
    [
        (1, (0,), "ckpt_path is set on rank 0 but not set on ranks 1-3"),
        (3, (3,), "ckpt_path is set on ranks 0-2 but not set on rank 3"),
    ],
)
def test_ranks_of_which_only_some_resume_have_different_settings(
    with_path: int, ranks: tuple[int, ...], words: str
) -> None:
    """Each host may have a path of its own."""
    others = (_resumes("", RESUME_END, rank=rank) for rank in range(with_path, 4))
    told = found(job(*map(_own_path, range(with_path)), *others))["different-trainer-settings"]
    assert (told.ranks, told.confidence) == (ranks, Confidence.LIKELY)
    assert words in told.summary
    assert told.remedy.startswith("Let all ranks resume from the same checkpoint")


def test_ranks_that_all_resume_from_paths_of_their_own_have_no_different_settings() -> None:
    assert "different-trainer-settings" not in found(job(*map(_own_path, range(4))))


def test_a_rank_that_has_not_come_to_resuming_may_have_a_checkpoint_yet() -> None:
    waiting = [_resumes("", RESUME_END, rank=rank) for rank in (1, 2)]
    assert "different-trainer-settings" not in found(job(_own_path(0), *waiting, _resumes(rank=3)))


def test_a_logged_metric_is_to_be_logged_on_all_ranks_whatever_sync_dist_is() -> None:
    scene = scenes.key_that_one_rank_lacks(GLOO)
    value = found(scene)["diverged-log-keys"]
    assert "with sync_dist=True" in value.summary and value.remedy.startswith("Log the same keys")
    ranks = [
        replace(one, steps=replace(one.steps, logged=tuple(replace(key, states=("n",)) for key in one.steps.logged)))
        for one in scene.ranks
    ]
    metric = found(replace(scene, ranks=tuple(ranks)))["diverged-log-keys"]
    assert "log the metric 'val_extra' in validation_step" in metric.summary
    assert metric.remedy.startswith("Log this metric on all ranks")


def test_settings_of_a_rank_that_has_not_begun_to_train_are_unknown() -> None:
    """On a busy machine it is still on its way out of a barrier that the others have left."""
    settings = {"max_steps": "-1", "first step": "0"}
    begun = [replace(GLOO.waiting(n, seq=9), trainer=TrainerFacts(settings=settings)) for n in (0, 2, 3)]
    assert "different-trainer-settings" not in found(job(begun[0], _resumes(rank=1), *begun[1:]))


def test_the_line_of_a_mismatch_is_that_of_the_recorded_call() -> None:
    """Rank 2 is past it by now, in the next call."""
    ranks = {facts.rank: facts for facts in scenes.another_size(NCCL).ranks}
    *before, last = ranks[2].collectives
    called = replace(last, stack=(RUN, user("training_step", 57), ALL_REDUCE))
    past = replace(ranks[2], stack=(RUN, user("training_step", 66), ALL_REDUCE))
    recorded = replace(past, collectives=(*before, called, replace(last, seq=62, op="all_gather")))
    told = found(scenes.ordered(ranks | {2: recorded}))
    assert told["mismatched-collective"].location.endswith("train.py:57 in training_step")
    blind = replace(recorded, collectives=(*before, last, recorded.collectives[-1]))
    assert found(scenes.ordered(ranks | {2: blind}))["mismatched-collective"].location.endswith(
        "train.py:66 in training_step"
    )


def test_the_line_in_a_loaders_worker_is_that_of_its_traceback() -> None:
    message = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
        '  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/fetch.py", line 52, in fetch\n'
        '  File "/home/me/project/data.py", line 12, in __getitem__\n'
        '  File "/usr/lib/python3.12/json/decoder.py", line 355, in raw_decode\nValueError: truncated file'
    )
    culprit = raised(GLOO.working(1, seq=60), "ValueError", message, RUN, NEXT_DATA)
    finding = found(job(GLOO.waiting(0, seq=61), culprit, world=2))["failed-rank"]
    assert finding.location == "/home/me/project/data.py:12 in __getitem__"
    assert "truncated file at data.py:12 in __getitem__, batch 11" in finding.summary


def test_a_rank_that_has_finished_a_whole_epoch_before_has_run_out_of_data() -> None:
    """It has ended each epoch early, without validation; the others are at the end of their first one."""
    scene = scenes.key_that_one_rank_lacks(GLOO)
    done = GLOO.finished(2, seq=60, batch=-1, epoch=2)
    rules = found(replace(scene, ranks=(*scene.ranks[:2], done, scene.ranks[3])))
    assert (next(iter(rules)), rules["uneven-batches"].ranks) == ("uneven-batches", (2,))
    same = replace(done, progress=replace(done.progress, epoch=1))
    assert "uneven-batches" not in found(replace(scene, ranks=(*scene.ranks[:2], same, scene.ranks[3])))


def test_a_rank_that_waits_alone_after_all_others_have_finished() -> None:
    """A second Trainer on rank 0 only, from a hook at the end of the first one."""
    line = user("on_fit_end", 96, condition="if trainer.is_global_zero:  (line 95)")
    alone = GLOO.in_sigterm_broadcast(0, seq=61, epoch=1, batch=5, last=True, world=2)
    alone = replace(alone, stack=(RUN, line, *alone.stack[-2:]))
    done = GLOO.finished(1, seq=60, batch=-1, epoch=1, world=2)
    finding = judge(job(alone, done, world=2)).findings[0]
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert finding.location.endswith("train.py:96 in on_fit_end")


def _rooted(rank: int, root: int, world: int = 2) -> RankFacts:
    line = user("on_train_epoch_start", 6, code="dist.broadcast_object_list(config, src=source)")
    waiting = GLOO.rank(rank, line, BROADCAST, seq=61, outstanding=1, op="broadcast", sizes=((1,),), world=world)
    return replace(waiting, steps=StepFacts(root=root))


def test_ranks_that_name_different_roots_are_at_fault_and_no_link_is() -> None:
    two = judge(job(_rooted(0, 0), _rooted(1, 1), world=2)).findings
    assert [(item.rule, item.confidence, item.ranks) for item in two] == [
        ("mismatched-collective", Confidence.CERTAIN, (0, 1))
    ]
    assert "with different roots: rank 0 on rank 0 but rank 1 on rank 1." in two[0].summary
    assert two[0].location.endswith("train.py:6 in on_train_epoch_start")
    many = found(job(*(_rooted(rank, 2 if rank == 2 else 0, world=4) for rank in range(4))))
    assert many["mismatched-collective"].ranks == (2,)
    assert set(found(job(_rooted(0, 0), _rooted(1, 0), world=2))) == {"all-joined"}


def test_roots_that_nobody_knows_may_differ() -> None:
    told = found(job(_rooted(0, 0), _rooted(1, -1), world=2))["all-joined"]
    assert told.confidence is Confidence.POSSIBLE
    assert told.summary.endswith("unless ranks have named different sources or destinations.")


def after_other_data(*called: Frame) -> Finding:
    """Rank 1 raises after a broadcast that it called, as its last call, where the others called an all-reduce."""
    culprit = GLOO.rank(1, user("training_step", 42), seq=60)
    *before, last = culprit.collectives
    mixed = replace(last, op="broadcast", completed=True, input_sizes=((24,),), dtypes=("Long",), stack=called)
    culprit = raised(replace(culprit, collectives=(*before, mixed)), "IndexError", "index 4401 is out of bounds")
    return found(job(*(GLOO.waiting(n, seq=61) for n in (0, 2, 3)), culprit))["failed-rank"]


def test_a_rank_that_raised_after_an_unmatched_call_received_other_data() -> None:
    finding = after_other_data(user("__iter__", 125))
    assert "rank 1 called broadcast (24 elements of Long)" in finding.summary
    assert "as number 60, rank 1 at train.py:125 in __iter__, so they received the wrong data" in finding.summary
    assert (finding.confidence, finding.location.rpartition("/")[2]) == (Confidence.LIKELY, "train.py:125 in __iter__")


def test_what_is_called_after_an_exception_has_not_caused_it() -> None:
    file = f"{SITE}/lightning/pytorch/trainer/call.py"
    finding = after_other_data(Frame(file=file, line=78, function="_interrupt"), user("on_exception", 125))
    assert "broadcast" not in finding.summary
    assert (finding.confidence, finding.location) == (Confidence.CERTAIN, "")


EARLY_STOPPING = Frame(
    file=f"{SITE}/lightning/pytorch/callbacks/early_stopping.py", line=168, function="_validate_condition_metric"
)
MISSED = "Early stopping conditioned on metric `dice/val` which is not available. Use any of the following: `loss`"
DICE = LoggedKey(
    name="dice/val",
    place=f"{USER_FILE}:70 in on_validation_epoch_end",
    rank_condition="if self.trainer.is_global_zero:  (line 69)",
)


def missed(message: str, *keys: LoggedKey, stack: tuple[Frame, ...] = (RUN, EARLY_STOPPING)) -> Finding:
    """Ranks 1 and 2 raise this, and have never logged these keys; rank 0 waits."""
    steps = StepFacts(unmonitored=keys)
    ranks = (raised(GLOO.working(n, seq=60, world=3), "RuntimeError", message, *stack) for n in (1, 2))
    facts = job(GLOO.waiting(0, seq=61, world=3), *(replace(one, steps=steps) for one in ranks), world=3)
    return found(facts)["failed-rank"]


def test_an_error_of_lightning_that_names_a_key_has_the_line_that_logs_it() -> None:
    finding = missed(MISSED, replace(DICE, name="recall", place="train.py:9 in validation_step"), DICE)
    assert (finding.ranks, finding.location) == ((1, 2), DICE.place)
    assert finding.summary.endswith(
        "Ranks 1-2 have never logged 'dice/val', which is logged at train.py:70 in on_validation_epoch_end, under "
        "`if self.trainer.is_global_zero:` (line 69)."
    )
    assert missed(MISSED, replace(DICE, rank_condition="")).summary.endswith("in on_validation_epoch_end.")
    scheduler = "ReduceLROnPlateau conditioned on metric dice/val which is not available. Available metrics are: []."
    assert missed(scheduler, DICE).location == DICE.place
    assert missed(scheduler, DICE).remedy.startswith("Log 'dice/val' on all ranks, with sync_dist=True")
    assert missed(scheduler).remedy.startswith("Correct the RuntimeError")


def test_a_key_that_no_rank_has_logged_is_not_left_out_by_one_ranks_data() -> None:
    steps = StepFacts(unmonitored=(DICE,))
    ranks = (raised(GLOO.working(n, seq=60, world=2), "RuntimeError", MISSED, RUN, EARLY_STOPPING) for n in (0, 1))
    finding = found(job(*(replace(one, steps=steps) for one in ranks), world=2))["failed-rank"]
    assert (finding.ranks, finding.location) == ((0, 1), DICE.place)
    assert finding.remedy.startswith("Correct the RuntimeError")


@pytest.mark.parametrize(
    ("message", "name", "stack", "location"),
    [
        (MISSED, "recall", (RUN, EARLY_STOPPING), ""),
        (MISSED, "val", (RUN, EARLY_STOPPING), ""),
        ("CUDA error: misaligned address in loss", "loss", (RUN, ENGINE), ""),
        ("no metric `dice/val`", "dice/val", (RUN, user("training_step", 42), EARLY_STOPPING), ":42 in training_step"),
    ],
    ids=["another key", "a part of a key", "an error of torch", "raised below a line of the user's"],
)
def test_a_key_that_the_error_is_not_about_has_no_line(
    message: str, name: str, stack: tuple[Frame, ...], location: str
) -> None:
    finding = missed(message, replace(DICE, name=name), stack=stack)
    assert finding.location == (f"{USER_FILE}{location}" if location else "")
    assert "never logged" not in finding.summary


def test_an_error_of_ddp_that_numbers_a_parameter_has_its_name_and_line() -> None:
    message = (
        "[2]: params[4] in this process with sizes [5, 8] appears not to match sizes of the same param in process 0."
    )
    wraps = Frame(file=f"{SITE}/torch/distributed/utils.py", line=294, function="_verify_param_shape_across_processes")
    culprit = raised(GLOO.working(2, seq=6, phase=Phase.INIT, batch=-1), "RuntimeError", message, RUN, wraps)
    others = [GLOO.in_barrier(n, "x", seq=7, phase=Phase.INIT, batch=-1) for n in (0, 1, 3)]

    def told(steps: StepFacts) -> Finding:
        return found(job(*others, replace(culprit, steps=steps)))["failed-rank"]

    place = f"{USER_FILE}:12 in __init__"
    finding = told(StepFacts(other_size="embed.weight", other_size_at=place))
    assert (finding.ranks, finding.location) == ((2,), place)
    assert finding.summary.endswith("This is the parameter 'embed.weight', made at train.py:12 in __init__.")
    unplaced = told(StepFacts(other_size="embed.weight"))
    assert (unplaced.location, unplaced.summary.endswith("This is the parameter 'embed.weight'.")) == ("", True)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("[Errno 27] File too large", "Let files there be larger (RLIMIT_FSIZE, ulimit -f, or a limit of the file"),
        ("[Errno 122] Disk quota exceeded: '/home/me/last.ckpt'", "Free space there, or ask for a larger quota."),
        ("[Errno 30] Read-only file system: '/mnt'", "Find out why the file system is mounted read-only"),
        ("[Errno 13] Permission denied: '/mnt'", "Let the user of the job write there"),
        ("[Errno 116] Stale file handle", "Look at the network file system's server."),
        ("[Errno 5] Input/output error", "Look at the storage: the kernel's log (dmesg)"),
        ("[Errno 2] No such file or directory: '/mnt/x'", "Create the directory on every host"),
        ("PytorchStreamWriter failed writing file data/0: file write failed", "Look whether the file system there is"),
        ("something that nobody knows", "Find out why the save fails: "),
    ],
)
def test_what_to_do_about_a_save_suits_its_error(message: str, words: str) -> None:
    scene = scenes.save_failed_and_was_caught(GLOO)
    culprit, *others = scene.ranks
    assert culprit.failed_save is not None
    failed = replace(culprit, failed_save=replace(culprit.failed_save, message=message))
    finding = judge(replace(scene, ranks=(failed, *others))).findings[0]
    assert finding.rule == "checkpoint-skipped-barrier"
    assert finding.remedy.startswith(words)
