"""Who is named where ranks wait apart from one another: by a condition, by what is called on all ranks, by counts."""

from dataclasses import replace
from typing import Any

import call_scenes as scenes
import pytest
from builders import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    ENGINE,
    EPOCH_END,
    GLOO,
    MAIN,
    NEXT,
    NEXT_DATA,
    ONE,
    RUN,
    SITE,
    TRAINING_STEP,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    transport_error,
    user,
)
from judged import first
from judged import found as rules

from lightning_ncclsafe.facts import (
    ELSE,
    Branch,
    Collective,
    Decides,
    Frame,
    JobFacts,
    LastSeen,
    MetricFacts,
    ModelUnit,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    StepFacts,
    TrainerFacts,
    UnitKind,
)
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.gloo_aborts import bytes_at_once

CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE
ZERO = "if rank == 0:  (line 30)"
WHAT = "what(): [enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 9612 vs 8"
CONTEXT = Frame(file=f"{SITE}/torch/utils/_contextlib.py", line=120, function="decorate_context")
CHECKPOINT = Frame(
    file=f"{SITE}/lightning/pytorch/callbacks/model_checkpoint.py", line=700, function="check_monitor_top_k"
)


def calls(
    rank: int, *stack: Frame, op: str = "all_reduce", size: int = 11, world: int = 2, **more: object
) -> RankFacts:
    """A rank that waits in a collective of so many elements."""
    options = {"outstanding": 1, "op": op, "sizes": ((size,),), "action": TRAINING_STEP, "world": world} | more
    return GLOO.rank(rank, *stack, seq=61, **options)  # type: ignore[arg-type]


def test_a_condition_on_the_rank_outranks_a_majority() -> None:
    line = user("training_step", 40, condition="if self.global_rank > 0:  (line 39)")
    ranks = (GLOO.waiting(0, seq=61, world=3), *(calls(n, line, BARRIER, op="barrier", world=3) for n in (1, 2)))
    finding = first(job(*ranks, world=3))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (1, 2), CERTAIN)
    assert finding.location.endswith("train.py:40 in training_step")
    assert "under `if self.global_rank > 0:` (line 39)" in finding.summary


@pytest.mark.parametrize("condition", ["if self.global_rank != -1:", "past return under if self.global_rank == -1:"])
def test_a_condition_that_holds_on_all_ranks_says_nothing(condition: str) -> None:
    line = user("training_step", 40, condition=f"{condition}  (line 39)")
    ranks = (GLOO.waiting(0, seq=61, world=3), *(calls(n, line, ALL_REDUCE, world=3) for n in (1, 2)))
    assert first(job(*ranks, world=3)).ranks == (0,)


THREAD = Frame(file="/usr/lib/python3.12/threading.py", line=1010, function="run")
COUNTS = (THREAD, user("count", 90), ALL_REDUCE)


def test_a_collective_of_another_thread_is_named_by_its_line() -> None:
    """Rank 1's thread has reduced three numbers before the gradients that its main thread waits for."""
    ranks = [GLOO.waiting(0, seq=61, world=2), GLOO.waiting(1, seq=62, world=2, outstanding=2)]
    counted = tuple(replace(c, input_sizes=((3,),)) if c.seq == 61 else c for c in ranks[1].collectives)
    ranks[1] = replace(ranks[1], collectives=counted, thread_stack=COUNTS)
    finding = first(job(*ranks, world=2))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (1,), LIKELY)
    assert finding.location.endswith("train.py:90 in count")
    assert "in a different thread from the one that trains" in finding.summary
    # Rank 0's thread has come to the same line since.
    late = replace(ranks[0], thread_stack=COUNTS)
    assert first(job(late, ranks[1], world=2)).ranks == (0, 1)
    # A group of its own, of which that thread's call is.
    others = tuple(replace(call, site="5b1e", stack=(user("training_step", 40),)) for call in counted)
    apart = first(job(ranks[0], replace(ranks[1], collectives=others), world=2))
    assert "another thread" not in apart.summary


def test_a_rank_aborted_in_another_threads_collective_is_not_blamed_for_its_main_thread() -> None:
    lost = raised(calls(0, ENGINE), "RuntimeError", "Connection closed by peer", ENGINE, consequence=True)
    gone = process(1, "gone", ended_by="SIGABRT", said=WHAT, stack=(MAIN, RUN, user("training_step", 48)))
    finding = first(job(lost, world=2, witnessed=(replace(gone, thread_stack=COUNTS),)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (1,))
    assert finding.location.endswith("train.py:90 in count")


def test_between_two_what_is_called_on_all_ranks_decides() -> None:
    """Rank 1 reduces the gradients, as in every batch; rank 0 is in a line of the user's that it has not been in."""
    alone = calls(0, user("training_step", 40), ALL_REDUCE)
    finding = first(job(alone, GLOO.waiting(1, seq=61, world=2), world=2))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (0,), LIKELY)
    words = "in a call of the user's code, while the others are in one that Lightning makes on all ranks"
    assert words in finding.summary


def _stepping(rank: int, *sizes: int, stack: Frame) -> RankFacts:
    """A rank that has called reductions of these sizes, and waits in the last one."""
    facts = GLOO.rank(rank, stack, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP, world=2)
    last = facts.collectives[-1]
    called = tuple(
        replace(last, seq=61 - back, input_sizes=((size,),), completed=back > 0)
        for back, size in reversed([*enumerate(reversed(sizes))])
    )
    return replace(facts, collectives=called)


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ((9000, 9000, 9000, 9000), (0,)),  # as ever
        ((9000, 11, 9000, 11, 9000, 9000), (1,)),  # rank 1 has called it in each of two steps, and not now
        ((9000, 11, 9000, 9000), (0, 1)),  # in one step: too little to tell
        ((9000, 11, 9000, 9000, 9000), (0,)),  # long ago, as for a validation
    ],
)
def test_a_rank_that_has_left_out_what_it_always_calls_is_out_of_step(
    sizes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    before = sizes[:-1]
    alone = _stepping(0, *before, 11, stack=user("training_step", 40))
    facts = job(alone, _stepping(1, *sizes, stack=ENGINE), world=2)
    finding = first(facts)
    assert (finding.rule, finding.ranks) == ("diverged-collectives", ranks)
    assert ("after skipping all_reduce (11 elements of Float)" in finding.summary) is (ranks == (1,))


def test_two_lines_of_the_users_say_nothing_of_who_is_wrong() -> None:
    facts = job(
        calls(0, user("training_step", 40), ALL_REDUCE),
        calls(1, user("training_step", 44), BARRIER, op="barrier"),
        world=2,
    )
    assert first(facts).ranks == (0, 1)


def _outside(facts: RankFacts, line: int, condition: str = "", settings: dict[str, str] | None = None) -> RankFacts:
    """The same rank, whose Trainer was called at this line."""
    called = user("main", line, condition=condition, code="trainer.test(net)")
    trainer = TrainerFacts(settings=settings or {})
    return replace(facts, stack=(called, *facts.stack[1:]), trainer=trainer)


@pytest.mark.parametrize("others", [(1,), (1, 2, 3)])
def test_a_rank_that_calls_the_trainer_alone_is_named_and_not_what_differs_there(others: tuple[int, ...]) -> None:
    """An lr_find on rank 0: with another max_steps, in other batches, and with other collectives."""
    world = 1 + len(others)
    alone = _outside(GLOO.in_barrier(0, "x", seq=61, world=world), 31, ZERO, {"max_steps": "100"})
    fits = (_outside(GLOO.waiting(n, seq=61, batch=3, world=world), 32, settings={"max_steps": "-1"}) for n in others)
    facts = job(alone, *fits, world=world)
    finding = first(facts)
    assert rules(facts) == {"diverged-collectives": LIKELY}
    assert (finding.ranks, finding.location) == ((0,), "/home/me/project/train.py:31 in main")
    assert finding.summary.startswith(
        "Rank 0 has called the Trainer alone at train.py:31 in main, under `if rank == 0:`"
    )
    same = job(alone, *(_outside(replace(facts), 31, ZERO) for facts in facts.ranks[1:]), world=world)
    assert "called the Trainer alone" not in first(same).summary


BEST = Branch(line=30, test="if loss < best:  (line 30)", on=Decides.VALUE, until=32)
IF_DUE = Branch(line=29, test="if due:  (line 29)", on=Decides.VALUE, until=32)


def _calls_of_the_trainer(own: tuple[Branch, ...], others: tuple[Branch, ...] = (), *inside: Frame) -> JobFacts:
    """Rank 0 is in trainer.test at line 31, and the others are in trainer.fit at line 34."""
    tests = calls(0, *inside, BARRIER, op="barrier", size=0, world=3, phase=Phase.TEST, batch=-1)
    fits = [GLOO.waiting(n, seq=61, world=3) for n in (1, 2)]
    main = {0: replace(MAIN, line=31, branches=own)} | dict.fromkeys((1, 2), replace(MAIN, line=34, branches=others))
    return job(*(replace(one, stack=(main[one.rank], *one.stack[1:])) for one in (tests, *fits)), world=3)


def test_the_condition_around_a_call_of_the_trainer_is_the_line_to_look_at() -> None:
    finding = first(_calls_of_the_trainer((BEST,)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert finding.location == finding.decided_at == f"{USER_FILE}:30 in main"
    assert finding.summary.endswith(
        "Whether the call at train.py:31 in main is made may be decided by `if loss < best:` (line 30)."
    )
    inside = first(_calls_of_the_trainer((BEST,), (), user("on_test_start", 50)))
    assert inside.location == f"{USER_FILE}:50 in on_test_start"


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ((IF_DUE, BEST), ()),
        ((BEST,), (replace(BEST, line=33, until=35),)),
        ((replace(BEST, until=40),), ()),
        ((replace(BEST, on=Decides.COMMON),), ()),
    ],
    ids=["two conditions", "one around each call", "around both calls", "the same on all ranks"],
)
def test_which_of_several_conditions_led_to_a_call_of_the_trainer_is_not_guessed(
    own: tuple[Branch, ...], others: tuple[Branch, ...]
) -> None:
    finding = first(_calls_of_the_trainer(own, others))
    assert (finding.ranks, finding.location, finding.decided_at) == ((0,), f"{USER_FILE}:31 in main", "")


def test_peers_that_have_come_to_their_end_are_no_cause() -> None:
    alone = _outside(transport_error(GLOO.in_barrier(0, "x", seq=61, world=2)), 31, ZERO)
    gone = job(alone, world=2, witnessed=(process(1, "gone"),))
    assert rules(gone) == {"diverged-collectives": LIKELY}
    assert first(gone).summary.endswith("The process of rank 1 has ended.")
    assert first(gone).ranks == (0,)
    for how in ({"ended_by": "SIGKILL"}, {"exit_code": 3}):
        assert first(replace(gone, witnessed=(process(1, "gone", **how),))).rule == "dead-rank"


def test_a_rank_that_goes_on_after_rank_zero_has_returned_is_not_alone() -> None:
    """`if rank == 0: return` stands before the Trainer: its condition is about the rank that has gone."""
    waits = (_outside(GLOO.in_barrier(n, "x", seq=61, world=3), 31, f"{ELSE}{ZERO}") for n in (1, 2))
    facts = job(*(replace(one, local_rank=one.rank) for one in waits), world=3, witnessed=(process(0, "gone"),))
    assert (first(facts).rule, first(facts).ranks) == ("dead-rank", (0,))


def _aborted(line: int, condition: str = "", **more: object) -> JobFacts:
    """Two ranks on gloo, of which one has ended itself at this line; the other was at line 57."""
    scene = scenes.aborted_alone(GLOO)
    function = "training_step" if line == 57 else "export"
    stack = (RUN, user(function, line, condition=condition), ALL_REDUCE)
    words = replace(scene.witnessed[0], ended_by="SIGABRT", stack=stack, **more)  # type: ignore[arg-type]
    return replace(scene, witnessed=(words,))


def test_gloos_last_message_is_reported_with_its_sizes() -> None:
    finding = first(_aborted(57, said=WHAT))
    assert rules(_aborted(57, said=WHAT)) == {"mismatched-collective": LIKELY}
    assert "as gloo ended it: it was sent 9,612 bytes at once and had room for 8, while rank 0" in finding.summary
    assert f"Last output on stderr: {WHAT}" in [item.text for item in finding.evidence]


def test_gloos_own_word_is_enough() -> None:
    """Of the others nothing tells what they were in, and nobody knows the signal."""
    scene = scenes.aborted_alone(GLOO)
    blind = replace(transport_error(GLOO.working(0, seq=61, world=2)), collectives=())
    facts = replace(scene, ranks=(blind,), witnessed=(process(1, "gone", said=WHAT),))
    assert rules(facts) == {"mismatched-collective": LIKELY}
    assert set(rules(replace(facts, witnessed=(process(1, "gone"),)))) == {"dead-rank"}


def test_lines_that_differ_are_different_collectives() -> None:
    facts = _aborted(30)
    finding = first(facts)
    assert rules(facts) == {"diverged-collectives": LIKELY}
    assert "rank 1 aborted itself (SIGABRT) at train.py:30 in export, as gloo ends a process" in finding.summary
    assert "while rank 0 was at train.py:57 in training_step: these are different collectives." in finding.summary
    assert finding.ranks == (0, 1)
    alone = first(_aborted(30, ZERO))
    assert (alone.ranks, alone.location.rpartition("/")[2]) == ((1,), "train.py:30 in export")
    assert "Rank 1 was there under `if rank == 0:` (line 30)." in alone.summary


def test_a_rank_that_is_ended_in_what_lightning_calls_has_done_nothing_wrong() -> None:
    scene = scenes.aborted_alone(GLOO)
    words = replace(scene.witnessed[0], ended_by="SIGABRT", stack=(RUN, ENGINE), said=WHAT)
    finding = first(replace(scene, witnessed=(words,)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    assert finding.location.endswith("train.py:57 in training_step")


def test_what_modelcheckpoint_monitors_is_named_where_a_rank_is_in_it() -> None:
    inside = calls(0, CHECKPOINT, ALL_REDUCE, size=1)
    finding = first(job(inside, GLOO.waiting(1, seq=61, world=2), world=2))
    assert finding.rule == "diverged-collectives"
    assert "ModelCheckpoint needs the value that it monitors on all ranks" in finding.remedy
    assert (finding.ranks, finding.confidence) == ((0,), LIKELY)
    words = "in ModelCheckpoint, which decides on each rank whether to save, from the value that it monitors there"
    assert words in finding.summary


def test_a_rank_past_the_end_is_not_behind() -> None:
    finding = next(
        item
        for item in judge(
            job(GLOO.in_barrier(0, "x", seq=61, world=2, last=True), GLOO.finished(1, seq=60, batch=11), world=2)
        ).findings
        if item.ranks == (1,)
    )
    assert "behind" not in finding.summary


def test_a_loggers_hook_behind_a_save_is_no_save() -> None:
    saving = Frame(file=CHECKPOINT.file, line=640, function="_save_checkpoint")
    hook = user("after_save_checkpoint", 12, code="self.api.upload(path)")
    facts = job(GLOO.working(0, saving, hook, seq=60, action=EPOCH_END), *(GLOO.waiting(n, seq=61) for n in (1, 2, 3)))
    assert first(facts).rule == "slow-logger"


LOADER = Frame(file=f"{SITE}/torch/utils/data/_utils/fetch.py", line=36, function="fetch")
QUEUE = Frame(file="/usr/lib/python3.12/queue.py", line=171, function="get", code="self.not_empty.wait()")


def worker(*stack: Frame) -> ProcessFacts:
    return ProcessFacts(pid=7, state="sleeping", stack=(MAIN, RUN, *stack))


@pytest.mark.parametrize(
    ("stack", "remedy"),
    [
        ((user("__iter__", 9, code="row = self.rows.get()"), QUEUE), "a thread or a process of the dataset"),
        ((user("__getitem__", 9, code="with self.lock:"),), "waits for a lock that nobody releases"),
        ((user("__getitem__", 9, code="lock.acquire()"),), "waits for a lock that nobody releases"),
        ((user("__getitem__", 9, code="return read(path)"),), "Look at the sample"),
    ],
)
def test_what_a_loader_waits_for_decides_what_to_do(stack: tuple[Frame, ...], remedy: str) -> None:
    stalled = GLOO.working(0, LOADER, *stack, seq=60, action=NEXT)
    finding = first(job(stalled, *(GLOO.waiting(n, seq=61) for n in (1, 2, 3))))
    assert finding.rule == "data-stall"
    assert remedy in finding.remedy
    of_worker = replace(GLOO.working(0, NEXT_DATA, seq=60, action=NEXT), workers=(worker(*stack),))
    assert remedy in first(job(of_worker, *(GLOO.waiting(n, seq=61) for n in (1, 2, 3)))).remedy


def _with_steps(steps: dict[int, StepFacts], net: Backend = GLOO) -> JobFacts:
    world = len(steps)
    line = user("training_step", 44)
    ranks = [net.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, batch=19, world=world) for n in steps]
    return job(*(replace(facts, steps=steps[facts.rank]) for facts in ranks), world=world)


def test_a_pass_that_the_others_have_begun_and_one_will_not_make() -> None:
    """Rank 1 has left batch 3 with one pass; rank 0 is in its second one, and may make more."""
    waits = StepFacts(with_backward=4, passes=((0, 0, 2),), passes_epoch=0, passes_batch=2, under_way=(0, 3, 2))
    left = StepFacts(
        with_backward=5, passes=((0, 0, 2), (0, 3, 1)), passes_epoch=0, passes_batch=3, under_way=(0, 4, 1)
    )
    finding = first(_with_steps({0: waits, 1: left}))
    assert (finding.rule, finding.ranks, finding.confidence) == ("skipped-step", (1,), LIKELY)
    assert "backward passes in batch 3 of epoch 0 (1 on rank 1 but 2 on rank 0)" in finding.summary
    early = replace(waits, under_way=(0, 3, 1))
    assert "skipped-step" not in rules(_with_steps({0: early, 1: left}))


def test_gradients_that_ranks_do_not_reduce_in_the_same_batches() -> None:
    usual = StepFacts(with_backward=4, passes=((0, 0, 1, 1), (0, 1, 1, 0, 1)), passes_epoch=0, passes_batch=1)
    other = StepFacts(with_backward=4, passes=((0, 0, 1, 1),), passes_epoch=0, passes_batch=1)
    finding = first(_with_steps({0: usual, 1: usual, 2: other}))
    assert (finding.rule, finding.ranks, finding.confidence) == ("skipped-step", (2,), LIKELY)
    assert (
        "backward passes that reduce nothing in batch 1 of epoch 0 (0 on ranks 0-1 but 1 on rank 2)" in finding.summary
    )


def test_a_step_that_an_optimizer_has_left_out_lets_nobody_wait() -> None:
    usual = StepFacts(with_backward=4, passes=((0, 0, 1, 0, 1),), passes_epoch=0, passes_batch=5)
    other = replace(usual, passes=((0, 0, 1, 0, 1), (0, 2, 1), (0, 3, 1, 0, 1)))
    facts = _with_steps({0: usual, 1: usual, 2: other})
    assert rules(facts)["skipped-step"] is POSSIBLE
    finding = next(item for item in judge(facts).findings if item.rule == "skipped-step")
    assert "steps of optimizer 0 in batch 2 of epoch 0 (0 on rank 2 but 1 on ranks 0-1)" in finding.summary


GATHER = Frame(file=f"{SITE}/torchmetrics/utilities/distributed.py", line=137, function="gather_all_tensors")


def test_entries_of_a_state_that_is_gathered_one_by_one_have_to_be_as_many() -> None:
    """Rank 1 has had nothing to gather, and trains on."""
    unit = ModelUnit(kind=UnitKind.METRIC, name="module.box_map", type="Boxes", alike=1)

    def synchronises(by_entry: tuple[str, ...], condition: str = "") -> JobFacts:
        line = user("on_validation_epoch_end", 70, condition=condition)
        metric = MetricFacts(name="box_map", type="Boxes", states=("boxes",), by_entry=by_entry)
        steps = StepFacts(with_backward=4, metrics=(metric,))
        alone = replace(calls(0, line, GATHER, BARRIER, op="barrier", size=0), units=(unit,), steps=steps)
        return job(alone, replace(GLOO.waiting(1, seq=61, world=2), steps=steps), world=2)

    finding = first(synchronises(("boxes",)))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-log-keys", (0, 1), LIKELY)
    assert finding.location == f"{USER_FILE}:70 in on_validation_epoch_end"
    assert "'boxes' is gathered entry by entry" in finding.summary
    # Nothing has been logged, which is of no interest.
    assert "logger" not in {item.source for item in finding.evidence}
    assert first(synchronises(())).rule == "diverged-collectives"
    assert first(synchronises(("boxes",), ZERO)).rule == "diverged-collectives"


def test_states_of_an_unlogged_metric_are_compared_if_it_is_synchronized() -> None:
    def metrics(*states: str) -> StepFacts:
        return StepFacts(with_backward=4, metrics=(MetricFacts(name="score", type="Counted", states=states),))

    steps = {0: metrics("a", "b"), 1: metrics("a", "b"), 2: metrics("a")}
    ranks = [calls(n, user("on_train_epoch_end", 70), GATHER, ALL_REDUCE, world=3) for n in (0, 1)]
    ranks.append(GLOO.waiting(2, seq=61, world=3))
    facts = job(*(replace(one, steps=steps[one.rank]) for one in ranks), world=3)
    finding = first(facts)
    assert (finding.rule, finding.ranks) == ("diverged-log-keys", (2,))
    assert "the metric score (Counted) has different states to be reduced: 2 on ranks 0-1 (a, b), 1 on rank 2 (a)" in (
        finding.summary[0].lower() + finding.summary[1:]
    )
    elsewhere = job(*(replace(GLOO.waiting(n, seq=61, world=3), steps=steps[n]) for n in steps), world=3)
    assert "diverged-log-keys" not in rules(elsewhere)


@pytest.mark.parametrize(("line", "ranks"), [(user("training_step", 57), (2,)), (ENGINE, (1,))])
def test_the_place_of_an_aborted_process_counts_beside_the_others(line: Frame, ranks: tuple[int, ...]) -> None:
    """Rank 1 was in a line of the user's, rank 2 in the backward pass, when the process of rank 0 ended."""
    lost = [
        transport_error(scenes.with_size(facts, 61, ((size,),)))
        for facts, size in (
            (GLOO.rank(1, user("training_step", 57), ALL_REDUCE, seq=61, world=3), 5),
            (GLOO.waiting(2, seq=61, world=3), 25_557),
        )
    ]
    stacks = {1: (RUN, user("training_step", 57), ALL_REDUCE), 2: (RUN, ENGINE)}
    lost = [replace(facts, exception=replace(facts.exception, stack=stacks[facts.rank])) for facts in lost]
    gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=(RUN, line))
    finding = first(job(*lost, world=3, witnessed=(gone,)))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", ranks, LIKELY)


def test_a_rank_that_was_taken_out_of_its_last_batch_has_not_run_out_of_data() -> None:
    """Rank 1's connection broke in the backward pass of its last batch, rank 2's in the one before; rank 0 is gone."""
    automatic = Frame(file=f"{SITE}/lightning/pytorch/loops/optimization/automatic.py", line=150, function="run")
    stacks = {1: (RUN, automatic, ENGINE), 2: (RUN, automatic, user("training_step", 57), ALL_REDUCE)}
    lost = []
    for rank, stack in stacks.items():
        facts = transport_error(scenes.with_size(GLOO.waiting(rank, seq=61, world=3), 61, ((9 * rank,),)))
        now = replace(facts.progress, actions=(), batch_idx=6 - rank, is_last_batch=rank == 1)
        lost.append(replace(facts, progress=now, exception=replace(facts.exception, stack=stack)))
    gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=(RUN, user("training_step", 57), ALL_REDUCE))
    found = rules(job(*lost, world=3, witnessed=(gone,)))
    assert next(iter(found)) == "diverged-collectives"
    assert "uneven-batches" not in found


def test_a_rank_that_is_sent_too_much_in_an_uneven_exchange_is_not_to_blame() -> None:
    """Rank 1 or rank 2 has sent rank 0 more than had been agreed."""
    exchange = Frame(file=BARRIER.file, line=5000, function="all_to_all_single")
    line = user("exchanged", 57)
    lost = [
        raised(
            GLOO.rank(n, line, exchange, seq=61, world=3),
            "RuntimeError",
            "Connection reset by peer",
            RUN,
            line,
            consequence=True,
        )
        for n in (1, 2)
    ]
    for stack, ranks, confidence in (
        ((RUN, line, exchange), (0, 1, 2), POSSIBLE),
        ((RUN, line, ALL_REDUCE), (0,), LIKELY),
    ):
        gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=stack)
        finding = first(job(*lost, world=3, witnessed=(gone,)))
        assert (finding.rule, finding.ranks, finding.confidence) == ("mismatched-collective", ranks, confidence)
        assert finding.location.endswith("train.py:57 in exchanged")


def test_a_call_within_the_trainer_is_not_placed_at_the_line_that_called_the_trainer() -> None:
    """All were in the backward pass, whose gradients differ in size."""
    lost = [
        raised(
            GLOO.waiting(n, seq=61, world=3), "RuntimeError", "Connection reset", MAIN, RUN, ENGINE, consequence=True
        )
        for n in (1, 2)
    ]
    gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=(MAIN, RUN, ENGINE))
    finding = first(job(*lost, world=3, witnessed=(gone,)))
    assert (finding.rule, finding.location) == ("mismatched-collective", "")
    assert "train.py" not in finding.summary


def test_a_rank_that_receives_from_anybody_is_not_out_of_step_for_its_condition() -> None:
    """Rank 0 collects results, and one of the others has sent none."""
    receives = GLOO.working(0, user("collect", 31, condition=ZERO), scenes.RECV, seq=60, action=EPOCH_END, world=3)
    others = (GLOO.waiting(rank, seq=61, world=3) for rank in (1, 2))
    facts = job(receives, *others, world=3)
    finding = first(facts)
    assert (finding.rule, finding.ranks, finding.confidence) == ("unmatched-p2p", (0, 1, 2), POSSIBLE)
    assert "diverged-collectives" not in rules(facts)


def test_an_abort_after_diverged_calls_is_a_consequence() -> None:
    """Gloo's word is not known, as its stderr is no file; the signal is."""
    scene = scenes.overrun_rank(GLOO)
    stack = (RUN, user("training_step", 57), ALL_REDUCE)
    facts = replace(scene, witnessed=(process(0, "gone", ended_by="SIGABRT", stack=stack),))
    assert set(rules(facts)) == {"mismatched-collective"}
    assert set(rules(scene)) == {"mismatched-collective", "dead-rank"}


def test_a_crash_beside_diverged_calls_is_a_consequence_if_no_line_is_known_to_have_crashed() -> None:
    """While gloo aborts in one thread, another may crash; as recorded in two of a thousand runs."""
    last = {1: GLOO.waiting(1, seq=61, world=3, sizes=ONE), 2: GLOO.waiting(2, seq=61, world=3)}
    crashed = process(0, "gone", ended_by="SIGSEGV")
    facts = job(*last.values(), world=3, witnessed=(crashed,))
    assert rules(facts)["dead-rank"] == POSSIBLE
    assert first(facts).rule != "dead-rank"
    in_line = replace(crashed, stack=(RUN, user("decode", 57)))
    assert rules(replace(facts, witnessed=(in_line,)))["dead-rank"] == CERTAIN
    alike = job(*(GLOO.waiting(rank, seq=61, world=3) for rank in (1, 2)), world=3, witnessed=(crashed,))
    assert rules(alike) == {"dead-rank": LIKELY}


def test_a_rank_that_has_aborted_itself_elsewhere_has_died_by_itself() -> None:
    """In a line of the user's, below DDP's forward; nobody has seen that no collective has ended it."""
    forward = Frame(file=f"{SITE}/torch/nn/parallel/distributed.py", line=1500, function="forward")
    gone = process(1, "gone", ended_by="SIGABRT", stack=(RUN, forward, user("training_step", 57)))
    facts = job(GLOO.waiting(0, seq=61, world=2), world=2, witnessed=(gone,))
    assert rules(facts) == {"dead-rank": LIKELY}
    inside = replace(gone, stack=(RUN, ENGINE))
    assert "mismatched-collective" in rules(replace(facts, witnessed=(inside,)))
    assert rules(replace(facts, witnessed=(replace(gone, ended_by="SIGSEGV"),))) == {"dead-rank": CERTAIN}


def test_a_rank_that_waits_under_a_condition_does_not_wait_for_the_end_of_data() -> None:
    """Rank 1 goes through all batches of validation, in which nobody waits, and reduces what was logged."""
    line = user("validation_step", 62, condition=ZERO)
    options = {"phase": Phase.VALIDATE, "world": 2}
    alone = calls(0, line, ALL_REDUCE, batch=1, **options)
    other = GLOO.in_barrier(1, "x", seq=61, batch=5, last=True, **options)
    finding = first(job(alone, other, world=2))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,))
    plain = calls(0, replace(line, rank_condition=""), ALL_REDUCE, batch=1, **options)
    assert first(job(plain, other, world=2)).rule == "uneven-batches"


@pytest.mark.parametrize(
    ("sent", "rule", "ranks"),
    [
        (25_560, "diverged-collectives", (1,)),  # a segment of the ring in which 102,228 bytes are reduced by two
        (102_228, "diverged-collectives", (1,)),
        (9_612, "mismatched-collective", (0, 1)),
    ],
)
def test_the_data_sent_shows_whether_the_other_rank_was_at_that_line(
    sent: int, rule: str, ranks: tuple[int, ...]
) -> None:
    """Rank 1 has ended in a line of the user's, and rank 0 was in the backward pass: it may have come from there."""
    scene = scenes.aborted_alone(GLOO)
    stack = (RUN, user("gather", 147), ALL_REDUCE)
    said = f"what(): op.preamble.length <= op.nbytes. {sent} vs 12. Received data size"
    words = replace(scene.witnessed[0], ended_by="SIGABRT", said=said, stack=stack)
    waited = transport_error(GLOO.waiting(0, seq=62, world=2))
    finding = first(replace(scene, ranks=(replace(waited, stack=()),), witnessed=(words,)))
    assert (finding.rule, finding.ranks) == (rule, ranks)


@pytest.mark.parametrize(("room", "ranks"), [(4, (1,)), (8, (0,))])
def test_an_aborted_rank_counts_by_the_room_that_it_had(room: int, ranks: tuple[int, ...]) -> None:
    """Rank 2's code has caught that the connection broke and gone on, so that its line is another one by now."""
    line = user("on_validation_epoch_end", 607)
    waits = GLOO.waiting(1, seq=61, world=3)
    waits = replace(waits, collectives=tuple(replace(call, site="backward") for call in waits.collectives))
    *before, gradients = waits.collectives
    own = replace(gradients, input_sizes=((1,),), stack=(line,), site="end", completed=True)
    lost = transport_error(GLOO.waiting(2, seq=62, world=3))
    assert lost.exception is not None
    gone_on = replace(
        lost,
        collectives=(*before, own, replace(gradients, seq=62)),
        exception=replace(lost.exception, stack=(MAIN, RUN, ENGINE)),
    )
    gone = process(0, "gone", ended_by="SIGABRT", said=f"what(): op.preamble.length <= op.nbytes. 17040 vs {room}")
    gone = replace(gone, stack=(RUN, line, ALL_REDUCE))
    finding = first(job(waits, gone_on, world=3, witnessed=(gone,)))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", ranks)
    assert finding.location.endswith("train.py:607 in on_validation_epoch_end")


def _sized(world: int, room: int, *, at: tuple[Frame, ...] = (RUN, ENGINE), sites: str = "ab") -> JobFacts:
    """Rank 0 has been sent 20 bytes; the others have called 18 floats last, and 8 of them from a line before."""
    line = user("exchange", 13)

    def called(rank: int) -> RankFacts:
        facts = transport_error(GLOO.waiting(rank, seq=61, world=world))
        calls = [replace(call, dtypes=("Float",), stack=()) for call in facts.collectives[-4:]]
        sizes = (18, 8, 18, 18)
        told = [
            replace(call, input_sizes=((size,),), site=sites[size == 8], stack=(line,) if size == 8 else ())
            for call, size in zip(calls, sizes, strict=True)
        ]
        # A segment of it would fit as well, but a broadcast has none.
        rebuilt = replace(told[0], op="broadcast", seq=told[0].seq - 1, input_sizes=((5,),), dtypes=("Int",), site="c")
        assert facts.exception is not None
        lost = replace(facts.exception, stack=(MAIN, RUN, ENGINE))
        return replace(facts, collectives=(rebuilt, *told), exception=lost)

    sent = 20 if world == 2 else 12
    said = f"what(): op.preamble.length <= op.nbytes. {sent} vs {room}"
    gone = process(0, "gone", ended_by="SIGABRT", said=said, stack=at)
    return job(*(called(rank) for rank in range(1, world)), world=world, witnessed=(gone,))


def test_the_room_of_an_aborted_rank_shows_the_call_that_it_was_in() -> None:
    """It was under way in the background: the line that the rank has ended in is another one."""
    finding = first(_sized(2, 8))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (1,), Confidence.LIKELY)
    assert finding.location == f"{USER_FILE}:13 in exchange"
    assert "the room was for all_reduce (8 elements of Float) at train.py:13 in exchange" in finding.summary
    assert first(_sized(3, 8)).ranks == (0,)  # most have called something else
    assert first(_sized(2, 12)).rule == "mismatched-collective"  # of no call that is known
    assert first(_sized(2, 8, sites="aa")).rule == "mismatched-collective"  # one line, of different sizes
    elsewhere = (RUN, user("training_step", 80), ALL_REDUCE)
    assert f"{USER_FILE}:13 " not in first(_sized(2, 8, at=elsewhere)).location


@pytest.mark.parametrize(("elements", "rule"), [(2403, "mismatched-collective"), (11, "diverged-collectives")])
def test_what_was_sent_from_where_a_rank_has_ended_is_the_same_call(elements: int, rule: str) -> None:
    """The others have gone on from DDP's broadcast of its buffers to backward; 9,612 bytes are 2,403 floats."""
    ddp = f"{SITE}/torch/nn/parallel/distributed.py"
    sync = Frame(file=ddp, line=2425, function="_sync_buffers")
    send = Frame(file=ddp, line=2363, function="_distributed_broadcast_coalesced")
    other = transport_error(GLOO.waiting(0, seq=61, world=2))
    assert other.exception is not None
    earlier = replace(
        other.collectives[-2], op="broadcast", input_sizes=((elements,),), stack=(send,), dtypes=("Float",)
    )
    called = (*other.collectives[:-2], earlier, other.collectives[-1])
    other = replace(other, collectives=called, exception=replace(other.exception, stack=(MAIN, RUN, ENGINE)))
    gone = process(1, "gone", ended_by="SIGABRT", said=WHAT, stack=(RUN, sync, send, BARRIER))
    assert first(job(other, world=2, witnessed=(gone,))).rule == rule


INNER = user("exchange", 13)


@pytest.mark.parametrize(
    ("earlier", "ended_in", "is_same"),
    [
        ((INNER,), (user("training_step", 44), replace(INNER, line=17)), True),
        ((INNER, BROADCAST), (INNER,), True),
        ((user("training_step", 40),), (user("training_step", 44), INNER), False),
        ((CONTEXT,), (CONTEXT, INNER), False),
        ((CONTEXT, scenes.DDP_FORWARD), (CONTEXT, INNER), False),
        ((CONTEXT, scenes.DDP_FORWARD), (scenes.DDP_FORWARD, INNER), False),
        ((CONTEXT, scenes.DDP_FORWARD), (INNER, CONTEXT, scenes.DDP_FORWARD), True),
    ],
    ids=["another line", "another operation", "only a caller", "only a helper", "elsewhere", "around it", "below it"],
)
def test_what_was_sent_from_the_function_that_a_rank_has_ended_in_may_be_the_same_call(
    earlier: tuple[Frame, ...], ended_in: tuple[Frame, ...], is_same: bool
) -> None:
    """Rank 0 is in another function of the user's by now; 9,612 bytes are 2,403 floats."""
    line = user("validate", 70)
    other = raised(calls(0, line, ALL_REDUCE), "RuntimeError", "Read error", RUN, line, ALL_REDUCE, consequence=True)
    *before, old, last = other.collectives
    sent = replace(old, op="broadcast", input_sizes=((2403,),), dtypes=("Float",), stack=earlier)
    other = replace(other, collectives=(*before, sent, last))
    gone = process(1, "gone", ended_by="SIGABRT", said=WHAT, stack=(RUN, *ended_in, ALL_REDUCE))
    found = first(job(other, world=2, witnessed=(gone,)))
    assert found.rule == ("mismatched-collective" if is_same else "diverged-collectives")


@pytest.mark.parametrize(("op", "sizes"), [("all_gather", (2, 3)), ("broadcast", (5,)), ("all_reduce", (5, 2))])
def test_gloo_gathers_in_halves_reduces_in_segments_and_broadcasts_at_once(op: str, sizes: tuple[int, ...]) -> None:
    call = Collective(group="0", seq=1, op=op, backend="gloo", input_sizes=((5,),), dtypes=("Byte",))
    assert bytes_at_once(call, world_size=2) == sizes


def test_a_rank_past_a_validation_whose_last_batch_others_are_in_had_as_many_batches() -> None:
    """Rank 1 has left out a call in the last batch, and rank 2 has gone on to the next epoch."""
    last = {"phase": Phase.VALIDATE, "last": True, "batch": 5}
    ended = "[LightningModule]Net.on_validation_epoch_end"
    facts = job(
        calls(0, user("validation_step", 40), ALL_REDUCE, world=3, **last),
        calls(1, BARRIER, op="barrier", world=3, **last | {"action": ended}),
        GLOO.waiting(2, seq=61, world=3, epoch=1, batch=0),
        world=3,
    )
    assert first(facts).rule == "diverged-collectives"
    longer = replace(facts.ranks[0], progress=replace(facts.ranks[0].progress, batch_idx=6))
    assert first(replace(facts, ranks=(longer, *facts.ranks[1:]))).rule == "uneven-batches"


TIMED = TrainerFacts(
    settings={"val_check_interval": "60 s"},
    validates_by_clock=True,
    set_at={"val_check_interval": (f"{USER_FILE}:12 in main",)},
)


def aborted_beside_validation(by_clock: bool = True, seen: Phase | None = Phase.TRAIN) -> JobFacts:
    """Ranks 1 and 2 validate; rank 0 was aborted by gloo where it was last seen."""
    told = replace(TIMED, validates_by_clock=by_clock)
    ranks = (
        replace(transport_error(calls(rank, ALL_REDUCE, world=3, phase=Phase.VALIDATE, last=True)), trainer=told)
        for rank in (1, 2)
    )
    last = LastSeen(progress=Progress(phase=seen, epoch=0, batch_idx=4)) if seen is not None else None
    gone = process(0, "gone", ended_by="SIGABRT", said=WHAT, stack=(MAIN, RUN, ENGINE), last_seen=last)
    return job(*ranks, world=3, witnessed=(gone,))


def test_a_rank_that_gloo_aborts_as_another_validates_by_its_own_clock() -> None:
    finding = first(aborted_beside_validation())
    assert (finding.rule, finding.ranks, finding.confidence) == ("stopped-early", (1, 2), LIKELY)
    assert finding.location == f"{USER_FILE}:12 in main"
    assert finding.summary.startswith(
        "Ranks 1-2 have begun to validate by their own clock, while rank 0 is still in batch 4 of epoch 0; gloo has "
        "ended the process of rank 0"
    )


def test_what_gloo_has_said_needs_not_be_looked_for() -> None:
    facts = aborted_beside_validation(by_clock=False)
    told = [one for one in judge(facts).findings if one.rule == "mismatched-collective"]
    assert told
    assert not any("output decides" in one.remedy for one in told)


@pytest.mark.parametrize("other", [{"by_clock": False}, {"seen": None}, {"seen": Phase.VALIDATE}], ids=str)
def test_without_clocks_or_another_loop_it_is_something_else(other: dict[str, Any]) -> None:
    assert "stopped-early" not in rules(aborted_beside_validation(**other))
