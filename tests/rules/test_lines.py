"""Where ranks have taken different ways: of a source, the lines of a rank that calls, and those of one that does not.

A comment says who is at a line: ``call`` those that have come to the call, ``here`` the others, and ``both`` the last
call that all have made. In several functions, in the order of their lines from the bottom up.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent

import pytest
from builders import EPOCH_END, GLOO, MAIN, RUN, SITE, TRAINING_STEP, USER_FILE, Backend, job, user
from judged import first
from scenes import decorated_callback, hook_that_others_left, rank_zero_evaluates
from test_shifts import of

from lightning_ncclsafe.facts import (
    Action,
    Branch,
    CaughtException,
    Collective,
    Decides,
    Frame,
    JobFacts,
    ModelUnit,
    Phase,
    RankFacts,
    UnitKind,
)
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.probes.source.control_flow import ControlFlow
from lightning_ncclsafe.rules.kit import finding
from lightning_ncclsafe.rules.kit.frames import is_in_loop_below, loop_left
from lightning_ncclsafe.rules.kit.shifts import shift
from lightning_ncclsafe.rules.kit.timeline import timeline
from lightning_ncclsafe.rules.kit.user_lines import (
    DecidingBranches,
    branches_around,
    decision,
    leading_branches,
)

FILE = USER_FILE
# Between the user's code and what FSDP calls.
HELPER = (Frame(file=f"{SITE}/torch/utils/_contextlib.py", line=124, function="decorate_context"),)


def frames(source: str, who: str) -> tuple[Frame, ...]:
    """The lines of those, outermost first: helpers stand above what calls them."""
    tree, flow = ast.parse(source), ControlFlow(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()
    numbers = [number for number, code in enumerate(lines, 1) if re.search(rf"#.*\b{who}\b", code)]
    names = {number: next(f.name for f in functions if f.lineno <= number <= (f.end_lineno or 0)) for number in numbers}
    return tuple(
        Frame(file=FILE, line=number, function=names[number], user=True, **flow.around(number)._asdict())
        for number in reversed(numbers)
    )


def decided(source: str) -> list[str]:
    """The code of each line that may have decided."""
    text = dedent(source).strip()
    others = frames(text, "here")
    ways = branches_around(frames(text, "call"), before=frames(text, "both"), instead=[others] if others else [])
    return [text.splitlines()[branch.line - 1].partition("#")[0].strip() for _, branch in leading_branches(ways)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            """
            def training_step(self, batch, batch_idx):
                if not batch.any():
                    return None
                dist.all_reduce(self.count)  # call
            """,
            "return None",
            id="an early return",
        ),
        pytest.param(
            """
            def check(self):
                if not self.pending:
                    return
                dist.all_reduce(self.done)  # call

            def helper(self):
                self.check()  # call

            def on_train_batch_end(self, trainer):
                self.helper()  # call
            """,
            "return",
            id="a guard clause in the function that calls",
        ),
        pytest.param(
            """
            def reduce(self):
                dist.all_reduce(self.total)  # call

            def average(self):
                self.reduce()  # call

            def on_train_epoch_end(self):
                if self.tokens:
                    self.average()  # call
            """,
            "if self.tokens:",
            id="a condition two levels up",
        ),
        pytest.param(
            """
            def log_all(self, metrics):
                for name, value in metrics.items():
                    if value.isnan():
                        continue
                    dist.all_reduce(value)  # call both

            def on_validation_epoch_end(self):
                log_all(self, self.metrics)  # call both
            """,
            "continue",
            id="a continue in a helper's loop",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                for part in self.parts:
                    dist.all_reduce(part)  # call both
            """,
            "for part in self.parts:",
            id="another number of passes",
        ),
        pytest.param(
            """
            def assign(self, scores):
                for number in range(10):
                    dist.all_reduce(scores)  # call both
                    if settled(scores):
                        break
            """,
            "break",
            id="a loop that ends sooner",
        ),
        pytest.param(
            """
            def forward(self, tokens):
                for block in self.blocks:
                    tokens = block(tokens)  # call both
                return tokens

            def generate(self, tokens):
                for _ in range(self.most):
                    tokens = self(tokens)  # call both
                    if tokens[-1] == END:
                        break
            """,
            "break",
            id="a loop around the function that has another loop",
        ),
        pytest.param(
            """
            def search(self):
                while time.monotonic() < self.until:
                    best = self.all_gather(self.trial())  # call both
            """,
            "while time.monotonic() < self.until:",
            id="a clock",
        ),
        pytest.param(
            """
            def on_validation_epoch_end(self):
                self.total += self.seen
                mean = self.mean.compute() if self.seen else 0.0  # call
            """,
            "mean = self.mean.compute() if self.seen else 0.0",
            id="a conditional expression",
        ),
        pytest.param(
            """
            def is_over(self):
                return self.patience == 0 and reduce_over_all(self.stop)  # call
            """,
            "return self.patience == 0 and reduce_over_all(self.stop)",
            id="a short circuit",
        ),
        pytest.param(
            """
            def save(self, path):
                dist.barrier()  # call

            def on_train_epoch_end(self):
                try:
                    self.upload()
                    self.save(self.path)  # call
                except OSError:
                    self.failures += 1
            """,
            "except OSError:",
            id="a handler that skips the rest",
        ),
        pytest.param(
            """
            def training_step(self, batch):
                try:
                    loss = self.loss(batch)
                except RuntimeError:
                    return None
                self.all_gather(loss)  # call
            """,
            "return None",
            id="a return in a handler",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                probe = DistributedDataParallel(self.probe)
                with Join([probe]):  # here
                    for batch in self.batches:
                        probe(batch).sum().backward()
                        dist.all_gather(self.parts, batch)  # call both
            """,
            "for batch in self.batches:",
            id="a loop within a Join",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                if self.quiet:
                    return
                if self.global_rank != 0:
                    return
                if self.dirty:
                    dist.barrier()  # call
            """,
            "return",
            id="the rank comes before data",
        ),
        pytest.param(
            """
            def on_train_batch_end(self, batch_idx):
                if batch_idx % self.every:
                    return
                if self.is_due():
                    self.average()  # call
            """,
            "if self.is_due():",
            id="a number that all count alike decides nothing",
        ),
        pytest.param(
            """
            def training_step(self, batch):
                if batch is None:
                    return None
                dist.all_reduce(self.count)  # both
                if self.count.isnan():
                    return None
                self.all_gather(self.count)  # call
            """,
            "return None",
            id="what both have passed decides nothing",
        ),
        pytest.param(
            """
            def helper(self, batch):
                dist.all_reduce(batch)  # both
                if batch.isnan():
                    return
                dist.all_gather(batch)  # call

            def training_step(self, batch):
                if batch is None:
                    return None
                self.helper(batch)  # call both
            """,
            "return",
            id="nor what stands around a function that both were in",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                if self.skips:
                    return
                if self.best > self.last:
                    dist.broadcast(self.best)  # call
                dist.barrier()  # here
            """,
            "if self.best > self.last:",
            id="the others have not left the function",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                if self.is_ready:
                    if self.best > self.last:
                        dist.broadcast(self.best)  # call
                    dist.barrier()  # here
            """,
            "if self.best > self.last:",
            id="the others are in what stands around both",
        ),
        pytest.param(
            """
            def one(self):
                if self.skips:
                    return
                dist.barrier()  # call

            def other(self):
                dist.all_reduce(self.total)  # here

            def on_train_epoch_end(self):
                if self.is_ready:
                    (self.one if self.flag else self.other)()  # call here
            """,
            "return",
            id="both are at one line, and beyond",
        ),
        pytest.param(
            """
            def sync(self):
                dist.all_reduce(self.total)  # call both

            def on_train_epoch_end(self):
                if self.skips:
                    return
                for part in self.parts:
                    if part.is_empty:
                        continue
                    self.sync()  # call both
            """,
            "continue",
            id="a loop around a helper, whose last pass both have made",
        ),
        pytest.param(
            """
            def on_train_epoch_end(self):
                dist.barrier()  # call
            """,
            "",
            id="nothing decides",
        ),
    ],
)
def test_the_line_where_ranks_took_different_ways_is_found(source: str, expected: str) -> None:
    assert decided(source) == ([expected] if expected else [])


def test_of_loops_in_one_another_any_may_have_decided() -> None:
    source = """
    def forward(self, tokens):
        for block in self.blocks:
            tokens = block(tokens)  # call both

    def training_step(self, batch):
        if batch is None:
            return None
        for piece in batch.pieces:
            self(piece)  # call both
    """
    assert decided(source) == ["for piece in batch.pieces:", "for block in self.blocks:"]


def test_a_comprehension_decides_once_although_it_may_be_a_function_of_its_own() -> None:
    """Before Python 3.12 it is one, with the same loop as the function around it."""
    loop = Branch(line=7, test="for size in sizes  (line 7)", on=Decides.PASSES, until=7)
    outer, inner = user("loss", 7), user("<listcomp>", 7)
    assert leading_branches([(outer, loop), (inner, loop)]) == ((inner, loop),)


def test_where_several_may_have_decided_all_are_known() -> None:
    source = """
    def training_step(self, batch):
        if not batch.any():
            return None
        if self.frozen:
            return None
        if self.due:
            self.all_gather(batch)  # call
    """
    assert decided(source) == ["return None", "return None", "if self.due:"]


def test_a_deciding_branch_is_described_in_words_unless_it_is_a_condition_on_the_rank() -> None:
    call = Frame(file=FILE, line=44, function="check", user=True)
    outer = Frame(file=FILE, line=60, function="step", user=True)
    value = Branch(line=43, test="if not pending:  (line 42)", on=Decides.VALUE, jump="return")
    assert DecidingBranches(call, ((call, value),)).words() == (
        "The call at train.py:44 in check may have been skipped by `return` (line 43), under "
        "`if not pending:` (line 42)."
    )
    around = replace(value, line=59, test="if due:  (line 59)", jump="", until=61)
    told = DecidingBranches(call, ((outer, around),))
    assert (
        told.words()
        == "Whether the call at train.py:44 in check is made may be decided by `if due:` (line 59) in step."
    )
    assert told.decided_at == f"{FILE}:59 in step"
    passes = replace(around, test="for x in y:  (line 59)", on=Decides.PASSES)
    assert "How often the call at" in DecidingBranches(call, ((outer, passes),)).words()
    behind = replace(value, line=46, test="if done:  (line 45)", jump="break")
    assert DecidingBranches(call, ((call, behind),)).words() == (
        "How often the call at train.py:44 in check is made may be decided by `break` (line 46), under "
        "`if done:` (line 45)."
    )
    assert DecidingBranches(call, ((outer, replace(around, on=Decides.RANK)),)).words() == ""
    both = DecidingBranches(call, ((outer, around), (call, value)))
    assert (both.words(), both.decided_at) == ("", "")
    (evidence,) = both.evidence()
    assert evidence.text == (
        "What may have led around train.py:44 in check: train.py:59 in step: `if due:` (line 59); "
        "train.py:43 in check: `return` (line 43), under `if not pending:` (line 42)."
    )


def test_the_loop_that_a_rank_has_left_is_one_whose_passes_may_differ() -> None:
    source = dedent("""
        def main(loader):
            for epoch in range(3):
                for batch in loader:
                    backward(batch)  # inside
                report()  # between
            evaluate()  # past
    """).strip()
    inside, between, past = (frames(source, who) for who in ("inside", "between", "past"))
    for own in (between, past):
        loop = loop_left(own, inside)
        assert loop is not None and (loop.line, loop.code) == (3, "for batch in loader:")
    assert loop_left(past, between) is None  # all ranks pass a counted loop equally often
    assert loop_left(inside, past) is None


def test_a_loop_below_a_line_is_one_of_a_function_that_is_called_there() -> None:
    calls = user("step", 40)
    loop = Branch(line=8, test="for part in parts:  (line 8)", on=Decides.PASSES, until=9)
    inside = replace(user("reduced", 9), branches=(loop,))
    assert is_in_loop_below((calls,), (calls, inside))
    assert not is_in_loop_below((calls, inside), (calls, inside))
    assert not is_in_loop_below((calls,), (calls, user("reduced", 9)))
    elsewhere = replace(calls, file="/home/me/project/other.py")
    assert not is_in_loop_below((elsewhere,), (calls, inside))
    assert not is_in_loop_below((calls, inside, calls), (calls,))


RETURN = Branch(line=39, test="if not batch.any():  (line 38)", on=Decides.VALUE, jump="return")
LOOP = Branch(line=30, test="for part in parts:  (line 30)", on=Decides.PASSES, until=45)


def with_branches(facts: JobFacts, *branches: Branch, lines: tuple[int, ...] = (40,)) -> JobFacts:
    """The same job; this is known of line 40, or of these."""

    def known(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
        return tuple(replace(frame, branches=branches) if frame.line in lines else frame for frame in stack)

    ranks = (
        replace(one, collectives=tuple(replace(call, stack=known(call.stack)) for call in one.collectives))
        for one in facts.ranks
    )
    return replace(facts, ranks=tuple(ranks))


def test_ranks_that_have_skipped_a_call_are_told_the_jump_that_may_have_led_around_it() -> None:
    skipped = of("rgrgrb", "rgrrb", "rgrgrb")
    finding = first(with_branches(skipped, RETURN))
    assert (finding.ranks, finding.location) == ((1,), f"{FILE}:39 in step")
    assert (finding.decided_at, finding.confidence) == (f"{FILE}:38 in step", Confidence.LIKELY)
    assert finding.remedy.startswith("Make this call on all ranks or on none: move it out of what train.py")
    assert first(skipped).remedy.startswith("Make every rank call the same collectives in the same order")
    assert finding.summary.endswith(
        "The call at train.py:40 in step may have been skipped by `return` (line 39), under "
        "`if not batch.any():` (line 38)."
    )
    # What to do is about that line.
    assert "what train.py:38 in step decides" in finding.remedy and "log_dict" not in finding.remedy
    assert "log_dict" in first(skipped).remedy


@pytest.mark.parametrize(
    ("branches", "decided_at"),
    [
        ((), ""),
        ((replace(RETURN, line=36), RETURN), ""),
        ((replace(RETURN, line=38, jump="", until=40),), f"{FILE}:38 in step"),
    ],
    ids=["nothing known", "two jumps", "a condition around it"],
)
def test_without_a_single_jump_they_are_told_the_call(branches: tuple[Branch, ...], decided_at: str) -> None:
    finding = first(with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), *branches))
    assert (finding.ranks, finding.location, finding.decided_at) == ((1,), f"{FILE}:40 in step", decided_at)
    is_listed = any("What may have led around train.py:40 in step" in item.text for item in finding.evidence)
    assert is_listed is (len(branches) > 1)


def test_ranks_that_have_left_a_loop_are_told_the_call_in_it_and_not_the_jump_behind_it() -> None:
    finding = first(with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), replace(RETURN, line=41, jump="break")))
    assert (finding.ranks, finding.location) == ((1,), f"{FILE}:40 in step")
    assert finding.decided_at == f"{FILE}:41 in step"


def test_ranks_that_alone_have_made_a_call_are_told_the_call_and_not_the_jump_of_the_others() -> None:
    finding = first(with_branches(of("rgrrb", "rgrgrb", "rgrrb"), RETURN))
    assert (finding.ranks, finding.location) == ((1,), f"{FILE}:40 in step")
    assert finding.decided_at == f"{FILE}:39 in step"


@pytest.mark.parametrize(
    ("branch", "ranks", "line"),
    [
        (RETURN, (1,), 39),
        (replace(RETURN, line=38, jump="", until=40), (0,), 40),
        (replace(RETURN, on=Decides.EXCEPTION), (0,), 40),
    ],
    ids=["an early exit", "a condition around it", "an exception"],
)
def test_of_two_ranks_the_one_that_has_left_early_is_the_odd_one(
    branch: Branch, ranks: tuple[int, ...], line: int
) -> None:
    """One has made a new call, the other has gone on as usual: without the source, the call is the odd one."""
    finding = first(with_branches(of("rrrrrrz", "rrrrrrr"), branch, lines=(60,)))
    location = f"{FILE}:{line if line < 40 else 60} in step"
    assert (finding.ranks, finding.location, finding.confidence) == (ranks, location, Confidence.LIKELY)


def test_half_of_more_ranks_that_have_left_early_are_not_the_odd_ones() -> None:
    facts = with_branches(of("rrrrrrz", "rrrrrrz", "rrrrrrr", "rrrrrrr"), RETURN, lines=(60,))
    assert first(facts).ranks == (0, 1)


def test_of_two_ranks_one_that_has_caught_an_exception_has_not_left_early() -> None:
    facts = with_branches(of("rrrrrrz", "rrrrrrr"), RETURN, lines=(60,))
    caught = CaughtException(type="OSError", message="No space", ago_s=23.0)
    raising = replace(facts, ranks=(replace(facts.ranks[0], caught=(caught,)), facts.ranks[1]))
    assert first(raising).ranks != (1,)


def test_the_line_of_a_context_manager_decides_where_it_handles_what_is_raised() -> None:
    handled = Branch(
        line=38, test="except OSError:  (line 9)", on=Decides.EXCEPTION, until=40, handled_at=f"{FILE}:9 in kept"
    )
    finding = first(with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), handled))
    assert (finding.ranks, finding.decided_at) == ((1,), f"{FILE}:9 in kept")
    two = first(with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), handled, replace(handled, line=39, handled_at="")))
    assert two.decided_at == ""
    assert any(
        "train.py:9 in kept: `except OSError:` (line 9); train.py:39 in step" in one.text for one in two.evidence
    )


def test_a_rank_is_not_said_to_have_skipped_what_all_have_called() -> None:
    alike = with_branches(of("rgrgrb", "rgrgrb", "rgrgrb"), RETURN)
    assert decision(timeline(alike), f"{FILE}:40 in step") is None
    apart = with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), RETURN)
    assert decision(timeline(apart), f"{FILE}:40 in step") is not None
    assert decision(timeline(apart), f"{FILE}:41 in step") is None
    assert decision(timeline(apart), "") is None


def test_a_loop_decides_where_the_last_call_of_all_was_of_the_same_line() -> None:
    apart = with_branches(of("rgggrb", "rggrbr", "rgggrb"), replace(RETURN, line=20), LOOP)
    found = decision(timeline(apart), f"{FILE}:40 in step")
    assert found is not None and found.decided_at == f"{FILE}:30 in step"


@pytest.mark.parametrize(
    ("letters", "ranks", "said"),
    [
        (("rggg", "rggs", "rggs"), (0,), "Rank 0 called all_gather"),
        (("rggg", "rggs", "rggg"), (1,), "Rank 1 skipped all_gather"),
        (("rggg", "rggs"), (0, 1), "Rank 0 called all_gather"),
        (("rggs", "rggg"), (0, 1), "Rank 1 called all_gather"),
        (("rggg", "rggr"), (0, 1), "Rank 0 called all_gather"),
    ],
    ids=["still in it", "has left it", "of two, the first", "of two, the second", "at no line of the user's"],
)
def test_the_call_in_a_loop_that_others_have_left_is_the_one(
    letters: tuple[str, ...], ranks: tuple[int, ...], said: str
) -> None:
    finding = first(with_branches(of(*letters), LOOP))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", ranks, f"{FILE}:40 in step")
    assert finding.summary.startswith(f"{said} (8 elements of Float) at train.py:40 in step")
    assert finding.decided_at == f"{FILE}:30 in step"


@pytest.mark.parametrize(
    ("goes_through_parts", "knowing"),
    [(False, (0, 1)), (True, (0, 1)), (False, (0,)), (False, (1,))],
    ids=["one part", "in a loop of the model's", "known where it waits", "known to the other"],
)
def test_of_a_part_of_the_model_the_loop_around_the_model_is_told(
    goes_through_parts: bool, knowing: tuple[int, ...]
) -> None:
    """The line that runs the part is in a function of the model; nobody has written a collective there.

    A rank knows the units only of calls in which it waits.
    """
    parts = replace(LOOP, line=39, until=40, test="for block in self.blocks:  (line 39)")
    loop = replace(LOOP, line=49, test="for _ in range(most):  (line 49)")
    facts = in_helper(of("rggg", "rggr"))

    def known(rank: RankFacts, units: tuple[ModelUnit, ...]) -> RankFacts:
        calls = []
        for call in rank.collectives:
            stack = tuple(replace(one, branches=(loop,)) if one.line == 50 else one for one in call.stack)
            if goes_through_parts and units:
                forward = {"function": "forward", "branches": (parts,)}
                stack = tuple(replace(one, **forward) if one.function == "each" else one for one in stack)
            calls.append(replace(call, stack=(*stack, *HELPER) if call.site == "g" else stack))
        return replace(rank, collectives=tuple(calls), units=units)

    unit = ModelUnit(kind=UnitKind.FSDP_UNIT, name="block", elements=16, shard_elements=8, groups=("0",))
    units = {rank: (unit,) for rank in knowing}
    of_unit = first(replace(facts, ranks=tuple(known(one, units.get(one.rank, ())) for one in facts.ranks)))
    assert (of_unit.rule, of_unit.location) == ("diverged-collectives", f"{FILE}:49 in step")
    # Of two ranks, the one that still runs the model goes through the loop more often.
    assert (of_unit.ranks, of_unit.confidence) == ((0,), Confidence.LIKELY)
    own = first(replace(facts, ranks=tuple(known(rank, ()) for rank in facts.ranks)))
    assert (own.ranks, own.location, own.decided_at) == ((0, 1), f"{FILE}:40 in each", f"{FILE}:49 in step")


@pytest.mark.parametrize(
    ("function", "units", "rule", "line"),
    [
        ("forward", (UnitKind.FSDP_UNIT,), "unused-parameters", 39),
        ("forward", (), "diverged-collectives", 40),
        ("rollout", (UnitKind.FSDP_UNIT,), "diverged-collectives", 40),
    ],
    ids=["a part of the model", "the user's own call", "the whole model"],
)
def test_a_part_that_forward_leaves_out_on_some_ranks(
    function: str, units: tuple[UnitKind, ...], rule: str, line: int
) -> None:
    """Units of one size, whose calls look alike; FSDP gathers them where the module is run."""
    known = tuple(ModelUnit(kind=kind, name="tower", elements=16, shard_elements=8, groups=("0",)) for kind in units)
    branch = Branch(line=39, test="if rows.numel():  (line 39)", on=Decides.VALUE, until=40)

    def placed(call: Collective) -> Collective:
        at = tuple(replace(one, function=function, branches=(branch,)) for one in call.stack if one.line == 40)
        return replace(call, stack=(*at, *HELPER)) if at else call

    ranks = of("rgrgrb", "rgrrb", "rgrgrb").ranks
    made = (replace(one, units=known, collectives=tuple(map(placed, one.collectives))) for one in ranks)
    finding = first(job(*made, world=3))
    assert (finding.rule, finding.ranks) == (rule, (1,))
    assert (finding.location, finding.decided_at) == (f"{FILE}:{line} in {function}", f"{FILE}:39 in {function}")


def in_helper(facts: JobFacts, *branches: Branch, file: str = FILE) -> JobFacts:
    """The same job, where line 50 of a file has called the function with line 40, of which this is known."""
    outer = replace(user("step", 50), file=file)
    below = (outer, replace(user("each", 40), branches=branches))

    def placed(call: Collective) -> Collective:
        return replace(call, stack=below) if call.site == "g" else call

    ranks = (replace(one, collectives=tuple(map(placed, one.collectives))) for one in facts.ranks)
    return replace(facts, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("letters", "ranks", "said"),
    [(("rggg", "rggs", "rggg"), (1,), "Rank 1 skipped"), (("rggg", "rggs", "rggs"), (0,), "Rank 0 called")],
    ids=["has left it", "still in it"],
)
def test_a_rank_at_the_line_that_called_the_function_with_the_loop_has_left_it(
    letters: tuple[str, ...], ranks: tuple[int, ...], said: str
) -> None:
    """`dist.all_reduce(self.each(parts))`: what the loop has made is reduced at the line that called it."""
    finding = first(in_helper(of(*letters), LOOP))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", ranks, f"{FILE}:40 in each")
    assert finding.summary.startswith(f"{said} all_gather (8 elements of Float) at train.py:40 in each")
    assert finding.decided_at == f"{FILE}:30 in each"


@pytest.mark.parametrize(
    ("letters", "branches", "file"),
    [
        (("rgrg", "rgrs", "rgrg"), (LOOP,), FILE),
        (("rggg", "rggs", "rggg"), (), FILE),
        (("rggg", "rggs", "rggg"), (LOOP,), "/home/me/project/other.py"),
    ],
    ids=["was elsewhere before", "no loop", "the same number in another file"],
)
def test_a_rank_that_was_in_no_loop_below_its_line_has_made_a_call_of_its_own(
    letters: tuple[str, ...], branches: tuple[Branch, ...], file: str
) -> None:
    finding = first(in_helper(of(*letters), *branches, file=file))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (1,), f"{FILE}:50 in step")


def test_a_rank_at_no_line_of_the_users_is_judged_by_what_is_usual() -> None:
    """Of two: both have called twice in the loop of each step before, and rank 1 reduces gradients after one call."""
    finding = first(with_branches(of("rggrggrgg", "rggrggrgr"), LOOP))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (1,), f"{FILE}:40 in step")


@pytest.mark.parametrize("lines", [(), (40, 50)], ids=["no loop", "around both lines"])
def test_without_a_loop_that_a_rank_has_left_what_is_usual_decides(lines: tuple[int, ...]) -> None:
    finding = first(with_branches(of("rggg", "rggs", "rggs"), replace(LOOP, until=55), lines=lines))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (0,), f"{FILE}:50 in step")


def waiting_at(facts: JobFacts, lines: dict[int, Frame], hooks: dict[int, str] | None = None) -> JobFacts:
    """The same job, whose ranks wait at these lines of the user's, in these hooks."""
    named = hooks or {}
    ranks = (
        replace(
            one,
            stack=(MAIN, RUN, lines[one.rank], one.stack[-1]),
            progress=replace(one.progress, actions=(Action(name=named.get(one.rank, TRAINING_STEP), for_s=23),)),
        )
        for one in facts.ranks
    )
    return replace(facts, ranks=tuple(ranks))


AROUND_BOTH = replace(LOOP, until=55)
ABOVE = replace(LOOP, until=35)


@pytest.mark.parametrize(
    ("letters", "lines", "branches", "said", "line"),
    [
        (("rrg", "rrs", "rrg"), (40, 50, 40), (), "Rank 1 skipped all_gather", 40),
        (("rrg", "rrs", "rrg"), (40, 50, 40), (ABOVE,), "Rank 1 skipped all_gather", 40),
        (("rrs", "rrg", "rrs"), (50, 40, 50), (), "Rank 1 called all_gather", 40),
        (("rrg", "rrs", "rrg"), (40, 50, 40), (AROUND_BOTH,), "Rank 1 called all_reduce", 50),
        (("rrg", "rrs", "rrg", "rrg"), (40, 50, 40, 52), (), "Rank 1 called all_reduce", 50),
        (("rrg", "rrs", "rrs", "rrg", "rrg"), (40, 50, 50, 40, 40), (), "Ranks 1-2 skipped all_gather", 40),
        (("rrg", "rrs", "rrs", "rrg", "rrg"), (40, 50, 38, 40, 40), (), "Ranks 1-2 called all_reduce", 50),
    ],
    ids=[
        "past it",
        "a loop before both",
        "before it",
        "in a loop around both",
        "not past all of the others",
        "two past it",
        "one of two past it",
    ],
)
def test_a_rank_further_down_the_function_has_skipped_the_call(
    letters: tuple[str, ...], lines: tuple[int, ...], branches: tuple[Branch, ...], said: str, line: int
) -> None:
    stacks = {rank: replace(user("step", number), branches=branches) for rank, number in enumerate(lines)}
    finding = first(waiting_at(of(*letters), stacks))
    assert (finding.rule, finding.location) == ("diverged-collectives", f"{FILE}:{line} in step")
    assert finding.summary.startswith(f"{said} (8 elements of Float) at train.py:{line} in step")


def test_a_rank_in_the_other_arm_of_a_condition_has_skipped_nothing() -> None:
    """One calls all_gather there, and one all_reduce: which of them is odd is not a matter of lines."""
    condition = Branch(line=39, test="if is_even:  (line 39)", on=Decides.VALUE, until=48)
    other = replace(condition, test="else of if is_even:  (line 39)", until=52)
    for branch, said in ((condition, "skipped all_gather"), (other, "called all_reduce")):
        arms = {rank: replace(user("step", 40), branches=(condition,)) for rank in (0, 2)}
        lines = arms | {1: replace(user("step", 50), branches=(branch,))}
        assert first(waiting_at(of("rrg", "rrs", "rrg"), lines)).summary.startswith(f"Rank 1 {said}")


@pytest.mark.parametrize("letters", [("rrg", "rrs", "rrg"), ("rgg", "rgs", "rgg"), ("rghrg", "rghrs", "rghrg")])
def test_a_call_that_all_have_made_before_may_be_made_again(letters: tuple[str, ...]) -> None:
    """In the next pass of a loop, and loops whose passes are counted are not in the facts."""
    is_new = letters[0].count("g") == 1
    lines = {rank: user("step", 50 if rank == 1 else 40) for rank in range(3)}
    finding = first(waiting_at(of(*letters), lines))
    assert finding.summary.startswith("Rank 1 skipped all_gather" if is_new else "Rank 1 called all_reduce")


@pytest.mark.parametrize("moved", [{"batch_idx": 12}, {"epoch": 2}, {"phase": Phase.VALIDATE}])
def test_lines_of_different_batches_are_not_compared(moved: dict[str, object]) -> None:
    lines = {rank: user("step", 50 if rank == 1 else 40) for rank in range(3)}
    facts = waiting_at(of("rrg", "rrs", "rrg"), lines)
    other = replace(facts.ranks[1], progress=replace(facts.ranks[1].progress, **moved))  # type: ignore[arg-type]
    found = shift(timeline(replace(facts, ranks=(facts.ranks[0], other, facts.ranks[2]))), "0")
    assert found is not None and (found.ranks, found.callers) == ((1,), (1,))


BATCH_START, BATCH_END = (f"[LightningModule]Net.on_train_batch_{moment}" for moment in ("start", "end"))


@pytest.mark.parametrize(
    ("here", "there", "moved", "is_skipped"),
    [
        (BATCH_END, TRAINING_STEP, {}, True),
        ("[Callback]Notifying.on_train_batch_end", TRAINING_STEP, {}, True),
        (EPOCH_END, TRAINING_STEP, {}, True),
        (BATCH_END, TRAINING_STEP, {"batch_idx": 12}, False),
        (BATCH_END, TRAINING_STEP, {"batch_idx": 10}, False),
        (BATCH_END, TRAINING_STEP, {"epoch": 1}, False),
        (BATCH_START, TRAINING_STEP, {}, False),
        (BATCH_END, BATCH_START, {}, False),
        (BATCH_END, BATCH_END, {}, False),
    ],
    ids=[
        "its end",
        "its end, in a callback",
        "the end of its epoch",
        "the end of the next batch",
        "the end of the batch before",
        "the end of another epoch",
        "its start",
        "others at its start",
        "others at its end",
    ],
)
def test_a_rank_that_has_done_the_step_of_a_batch_has_skipped_the_call_in_it(
    here: str, there: str, moved: dict[str, int], is_skipped: bool
) -> None:
    """The others are in batch 11; they wait in another function, so that lines tell nothing."""
    lines = {0: user("step", 40), 1: user("average", 50), 2: user("step", 40)}
    facts = waiting_at(of("rrg", "rrs", "rrg"), lines, {0: there, 1: here, 2: there})
    past = replace(facts.ranks[1], progress=replace(facts.ranks[1].progress, **moved))  # type: ignore[arg-type]
    found = shift(timeline(replace(facts, ranks=(facts.ranks[0], past, facts.ranks[2]))), "0")
    assert found is not None and found.ranks == (1,)
    expected = ("g", (0, 2), (1,)) if is_skipped else ("s", (1,), (0, 2))
    assert (found.call.site, found.callers, found.others) == expected
    assert found.frame == user("step", 40 if is_skipped else 50)


def test_of_a_batch_that_is_not_known_no_rank_has_done_the_step() -> None:
    lines = {0: user("step", 40), 1: user("average", 50), 2: user("step", 40)}
    facts = waiting_at(of("rrg", "rrs", "rrg"), lines, {1: BATCH_END})
    assert first(facts).summary.startswith("Rank 1 skipped all_gather")
    unknown = (replace(one, progress=replace(one.progress, batch_idx=-1)) for one in facts.ranks)
    assert first(replace(facts, ranks=tuple(unknown))).summary.startswith("Rank 1 called all_reduce")


@pytest.mark.parametrize(
    ("branch", "kind", "below", "hook", "rule"),
    [
        (replace(RETURN, jump="continue"), UnitKind.FSDP_UNIT, HELPER, TRAINING_STEP, "skipped-step"),
        (replace(RETURN, jump="", until=45), UnitKind.FSDP_UNIT, HELPER, TRAINING_STEP, "diverged-collectives"),
        (replace(RETURN, jump="continue"), UnitKind.PARAMETER, HELPER, TRAINING_STEP, "diverged-collectives"),
        (replace(RETURN, jump="continue"), UnitKind.FSDP_UNIT, (), TRAINING_STEP, "diverged-collectives"),
        (replace(RETURN, jump="continue"), UnitKind.FSDP_UNIT, HELPER, EPOCH_END, "diverged-collectives"),
    ],
    ids=["a jump", "a condition", "no unit", "a call of the user's", "in another hook"],
)
def test_a_jump_around_a_forward_pass_of_a_sharded_model_skips_a_step(
    branch: Branch, kind: UnitKind, below: tuple[Frame, ...], hook: str, rule: str
) -> None:
    unit = ModelUnit(kind=kind, name="trunk", elements=24, shard_elements=8)
    facts = with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), branch)
    called = {
        one.rank: tuple(replace(call, stack=(*call.stack, *below)) for call in one.collectives) for one in facts.ranks
    }
    facts = replace(facts, ranks=tuple(replace(one, collectives=called[one.rank]) for one in facts.ranks))
    in_step = (
        replace(one, units=(unit,), progress=replace(one.progress, actions=(Action(name=hook, for_s=5),)))
        for one in facts.ranks
    )
    finding = first(replace(facts, ranks=tuple(in_step)))
    assert (finding.rule, finding.ranks) == (rule, (1,))
    is_named = finding.location == f"{FILE}:39 in step" and "skipped a forward pass" in finding.summary
    assert is_named is (rule == "skipped-step")


AROUND = replace(RETURN, jump="", until=45)


@pytest.mark.parametrize(
    ("branch", "code", "hook", "rule", "location"),
    [
        (AROUND, "self.manual_backward(loss)", TRAINING_STEP, "skipped-step", f"{FILE}:40 in step"),
        (AROUND, "loss.backward()", TRAINING_STEP, "skipped-step", f"{FILE}:40 in step"),
        (RETURN, "self.manual_backward(loss)", TRAINING_STEP, "skipped-step", f"{FILE}:39 in step"),
        (AROUND, "self.all_gather(loss)", TRAINING_STEP, "diverged-collectives", f"{FILE}:40 in step"),
        (AROUND, "self.manual_backward(loss)", EPOCH_END, "diverged-collectives", f"{FILE}:40 in step"),
    ],
    ids=["a condition", "of torch", "a jump", "another call", "in another hook"],
)
def test_what_leads_around_a_backward_pass_skips_a_step(
    branch: Branch, code: str, hook: str, rule: str, location: str
) -> None:
    """With manual optimization, of a model whose gradients are reduced by shards: nothing else is counted there."""
    facts = with_branches(of("rgrgrb", "rgrrb", "rgrgrb"), branch)
    called = {
        one.rank: tuple(
            replace(call, stack=tuple(replace(frame, code=code) if frame.user else frame for frame in call.stack))
            for call in one.collectives
        )
        for one in facts.ranks
    }
    in_hook = (
        replace(
            one,
            collectives=called[one.rank],
            progress=replace(one.progress, actions=(Action(name=hook, for_s=5),)),
        )
        for one in facts.ranks
    )
    finding = first(replace(facts, ranks=tuple(in_hook)))
    assert (finding.rule, finding.ranks, finding.location) == (rule, (1,), location)
    assert ("skipped a backward pass" in finding.summary) is (rule == "skipped-step")


def test_where_nothing_is_recorded_the_lines_of_the_ranks_decide() -> None:
    there = replace(user("step", 40), branches=(RETURN, replace(LOOP, on=Decides.VALUE)))
    here = user("step", 35)
    facts = job(GLOO.rank(0, MAIN, RUN, there, seq=7), GLOO.rank(1, MAIN, RUN, here, seq=7), world=2)
    bare = replace(facts, ranks=tuple(replace(one, collectives=()) for one in facts.ranks))
    assert decision(timeline(bare), f"{FILE}:40 in step") is None  # not returned, and in what holds both
    gone = replace(bare, ranks=(bare.ranks[0], replace(bare.ranks[1], stack=(MAIN, RUN))))
    found = decision(timeline(gone), f"{FILE}:40 in step")
    assert found is not None and [branch.line for _, branch in found.branches] == [39, 30]


@pytest.mark.parametrize(
    ("phase", "epoch", "batch", "decided_at"),
    [
        (Phase.TRAIN, 0, 12, f"{FILE}:39 in step"),
        (Phase.TRAIN, 1, 0, f"{FILE}:39 in step"),
        (Phase.TRAIN, 0, 11, ""),
        (Phase.TRAIN, 0, 10, ""),
        (Phase.VALIDATE, 0, 12, ""),
    ],
    ids=["the next batch", "the next epoch", "the same", "an earlier one", "of validation"],
)
def test_a_rank_in_a_later_batch_has_left_the_function_of_the_call(
    phase: Phase, epoch: int, batch: int, decided_at: str
) -> None:
    """It is in the same function again, at a line before the `return` that it took there."""
    there = GLOO.rank(0, MAIN, RUN, replace(user("step", 40), branches=(RETURN,)), seq=7)
    here = GLOO.rank(1, MAIN, RUN, user("step", 35), seq=7, phase=phase, epoch=epoch, batch=batch)
    bare = job(*(replace(one, collectives=()) for one in (there, here)), world=2)
    found = decision(timeline(bare), f"{FILE}:40 in step")
    assert (found.decided_at if found is not None else "") == decided_at


@pytest.mark.parametrize(
    ("build", "decided_at"),
    [
        pytest.param(rank_zero_evaluates, f"{FILE}:70 in evaluate", id="of the function"),
        pytest.param(decorated_callback, "", id="a decorator has no line"),
        pytest.param(hook_that_others_left, "", id="without a condition"),
    ],
)
def test_where_a_condition_on_the_rank_is(build: Callable[[Backend], JobFacts], decided_at: str) -> None:
    finding = first(build(GLOO))
    assert (finding.rule, finding.decided_at) == ("rank-zero-only-work", decided_at)


def test_a_condition_below_the_line_that_is_named_is_not_around_it() -> None:
    inside = user("evaluate", 73, condition="if rank == 0:  (line 70)")
    view = timeline(job(GLOO.working(0, user("step", 9), inside, seq=60), GLOO.waiting(1, seq=61)))
    outer, inner = (finding(view, (0,), "", location=f"{FILE}:{place}") for place in ("9 in step", "73 in evaluate"))
    assert (outer.decided_at, inner.decided_at) == ("", f"{FILE}:70 in evaluate")
