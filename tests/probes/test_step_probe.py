"""What a rank's steps leave out, what it logs and what failed to be saved, as its own Trainer shows it."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchmetrics import Metric

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.facts import MetricFacts, StepFacts
from lightning_ncclsafe.probes.trainer.actions import ActionTracker, _TrackedAction
from lightning_ncclsafe.probes.trainer.passes import MOST_BATCHES_WITH_CALLS, MOST_CALLS, MOST_RUNS
from lightning_ncclsafe.probes.trainer.steps import StepRecord

HERE = str(Path(__file__))


class Parameter:
    def __init__(self, *, grad: object = None, requires_grad: bool = True) -> None:
        self.grad = grad
        self.requires_grad = requires_grad


class Module:
    """What of a LightningModule is looked at."""

    def __init__(self, **parameters: Parameter) -> None:
        self.parameters = {name.replace("_", "."): parameter for name, parameter in parameters.items()}

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return list(self.parameters.items())

    def forward(self, x: Any) -> Any:
        return self.branch(x) if x else x  # type: ignore[attr-defined]  # <- branch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def inner() -> None:
            return None

        if batch is None:
            return None  # <- nothing
        if not batch:
            return  # <- bare
        self.log("loss", inner(), sync_dist=True)  # type: ignore[attr-defined]  # <- loss
        if self.global_rank == 0:  # type: ignore[attr-defined]
            self.log_dict({"a": 1, "b": 2}, sync_dist=True)  # type: ignore[attr-defined]  # <- dict
        self.more()
        return batch

    def more(self) -> None:
        self.log("faces", 1, sync_dist=True)  # type: ignore[attr-defined]  # <- faces


def line_of(mark: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))


def metric(
    name: str, *, hook: str = "training_step", synced: bool = True, tensor: bool = True, zero: bool = False
) -> Any:
    sync = SimpleNamespace(should=synced, rank_zero_only=zero)
    return SimpleNamespace(is_tensor=tensor, meta=SimpleNamespace(name=name, fx=hook, sync=sync))


def trainer(module: Module | None = None, **results: Any) -> Any:
    """What of a Trainer is looked at; ``begin`` below is its next batch."""
    counts = {name: SimpleNamespace(ready=0, processed=0) for name in ("current", "total")}
    epoch_loop = SimpleNamespace(
        batch_progress=SimpleNamespace(**counts), _results=results, val_loop=SimpleNamespace(_results=None)
    )
    return SimpleNamespace(
        current_epoch=0, lightning_module=module, fit_loop=SimpleNamespace(epoch_loop=epoch_loop), validate_loop=None
    )


def begin(of: Any, *, epoch: int = 0, batch: int) -> None:
    progress = of.fit_loop.epoch_loop.batch_progress
    of.current_epoch, progress.current.ready = epoch, batch + 1
    progress.total.ready += 1


def end(of: Any) -> None:
    progress = of.fit_loop.epoch_loop.batch_progress
    progress.current.processed = progress.current.ready


def skipped(record: StepRecord, error: str = "") -> tuple[int, int, int, int]:
    facts = record.facts(error=error)
    return facts.with_backward, facts.skipped, facts.skipped_epoch, facts.skipped_batch


def begun(module: Module | None = None) -> tuple[Any, StepRecord]:
    of = trainer(module)
    # Resumed: these batches were before.
    of.fit_loop.epoch_loop.batch_progress.total.ready = 100
    record = StepRecord(of)
    record.begin()
    return of, record


def test_a_batch_without_a_backward_pass_is_noted() -> None:
    of, record = begun(Module())
    for batch in range(4):
        begin(of, batch=batch)
        if batch != 1:
            record.backward()
            record.backward()
    assert skipped(record) == (3, 1, 0, 1)
    assert record.facts().returns_nothing == tuple(
        f"{HERE}:{line_of(mark)} in training_step" for mark in ("nothing", "bare")
    )


def test_the_last_batch_of_all_is_one_of_the_last_epoch() -> None:
    """After an epoch, Lightning's number is that of the next one."""
    of, record = begun(Module())
    begin(of, epoch=1, batch=5)
    end(of)
    of.current_epoch = 2
    of.fit_loop.epoch_progress = SimpleNamespace(current=SimpleNamespace(ready=2, completed=2))
    assert skipped(record) == (0, 1, 1, 5)


class SparingModule(torch.nn.Linear):
    automatic_optimization = True

    def training_step(self) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        if not torch.isfinite(loss):
            return  # <- spared
        loss.backward()


def test_a_backward_of_the_users_that_makes_no_pass_is_a_batch_without_one() -> None:
    module = SparingModule(2, 1)
    of, record = begun(module)
    for batch in range(4):
        begin(of, batch=batch)
        loss = module(torch.ones(2)).sum() * (float("nan") if batch == 2 else 1.0)
        module.zero_grad()
        record.backward(loss)
        module.backward(loss)
        record.passed()
    assert skipped(record) == (3, 1, 0, 2)
    assert record.facts().returns_nothing == (f"{HERE}:{line_of('spared')} in backward",)


def skipping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded(*args: Any) -> Any:
        try:
            return step(*args)
        except RuntimeError:
            return None  # <- by the decorator

    return guarded


class Decorated(Module):
    training_step = skipping(lambda self, batch, batch_idx: batch)


def test_a_decorator_that_skips_the_step_is_found() -> None:
    of, record = begun(Decorated())
    for batch in range(3):
        begin(of, batch=batch)
        if batch != 1:
            record.backward()
    assert record.facts().returns_nothing == (place("by the decorator", "guarded"),)


class Linking(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return {"loss": None, "lr": None}  # <- without a loss
        if batch_idx == 2:
            return {"scores": batch}  # <- without the key
        return {"loss": batch.mean(), **batch.extra} if batch_idx else {**batch.losses}


class Computed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outputs(batch)  # <- computed


@pytest.mark.parametrize(
    ("module", "marks"), [(Linking(), ("without a loss", "without the key")), (Computed(), ("computed",))]
)
def test_where_a_step_returns_no_loss_is_searched_once_lightning_has_raised_that(
    module: Module, marks: tuple[str, ...]
) -> None:
    _, record = begun(module)
    error = "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
    assert record.facts(error=error).returns_no_loss == tuple(place(mark, "training_step") for mark in marks)
    assert record.facts(error="CUDA out of memory").returns_no_loss == ()


def test_backward_passes_are_counted_per_batch_and_kept_at_changes() -> None:
    of, record = begun(Module())
    for batch, passes in enumerate((2, 2, 1, 2, 2)):
        begin(of, batch=batch)
        for _ in range(passes):
            record.backward()
    facts = record.facts()
    assert facts.passes == ((0, 0, 2), (0, 2, 1), (0, 3, 2))
    assert (facts.passes_epoch, facts.passes_batch) == (0, 3)  # the last one may have another pass to come
    end(of)
    facts = record.facts()
    assert (facts.passes_epoch, facts.passes_batch) == (0, 4) and len(facts.passes) == 3


def test_unreduced_passes_and_optimizer_steps_are_counted() -> None:
    of, record = begun(Module())
    generator, critic = of.optimizers = [object(), object()]
    for batch in range(4):
        begin(of, batch=batch)
        record.backward(is_reduced=batch != 1)
        record.stepped(critic)
        if batch == 2:
            record.stepped(generator)
        record.stepped(object())  # one of the user's own, which Lightning does not know
    facts = record.facts()
    assert facts.passes == ((0, 0, 1, 0, 0, 1), (0, 1, 1, 1, 0, 1), (0, 2, 1, 0, 1, 1))
    assert facts.under_way == (0, 3, 1, 0, 0, 1)
    end(of)
    assert record.facts().passes[-1] == (0, 3, 1, 0, 0, 1)
    assert record.facts().under_way == ()


def test_validation_batches_are_counted() -> None:
    _, record = begun()
    assert record.facts().validated == 0
    for _ in range(3):
        record.validates()
    assert record.facts().validated == 3


def test_only_the_last_of_many_changes_are_kept() -> None:
    of, record = begun(Module())
    for batch in range(1000):
        begin(of, batch=batch)
        for _ in range(1 + batch % 2):
            record.backward()
    assert record.facts().passes[0] == (0, 999 - MOST_RUNS, 2)
    assert len(record.facts().passes) == MOST_RUNS


class ByHand(Module):
    """Makes its backward passes itself."""

    automatic_optimization = False

    def training_step(self, record: StepRecord, turns: int) -> Any:
        record.backward()  # <- first turn
        for turn in range(turns):
            if turn == 7:
                continue  # <- continue
            self.turn(record)  # <- turn
        if turns > 4:
            return None
        return turns

    def turn(self, record: StepRecord) -> None:
        for _ in range(3):
            if not record:
                break  # leaves its own loop only
        record.backward()  # <- second turn


def as_lightning_does(step: Callable[..., Any], *args: Any) -> None:
    """Calls it from code that is not the user's."""
    names: dict[str, Any] = {}
    exec(compile("def call(step, args):\n    step(*args)\n", "/venv/site-packages/lightning/call.py", "exec"), names)
    names["call"](step, args)


def place(mark: str, function: str = "training_step") -> str:
    return f"{HERE}:{line_of(mark)} in {function}"


def test_manual_backward_calls_have_their_lines_and_branches() -> None:
    module = ByHand()
    of, record = begun(module)
    for batch, turns in enumerate((1, 1, 0, 2)):
        begin(of, batch=batch)
        if record is not None:  # what stands around training_step is Lightning's
            as_lightning_does(module.training_step, record, turns)
    facts = record.facts()
    first, second = place("first turn"), place("second turn", "turn")
    assert facts.passes == ((0, 0, 2), (0, 2, 1)) and facts.under_way == (0, 3, 3)
    assert facts.passes_from == ((first, second), (first,), (first, second, second))
    assert facts.led_around == {first: (), second: (place("continue"),)}


@contextmanager
def left_out() -> Iterator[None]:
    """Goes on without what has failed."""
    try:
        yield
    except RuntimeError:  # <- left out
        return


class Handles(Module):
    """Makes its pass in a context manager that handles exceptions."""

    automatic_optimization = False

    def training_step(self, record: StepRecord) -> None:
        with left_out():
            record.backward()


class HandlesSome(Handles):
    """The same, under a condition."""

    def training_step(self, record: StepRecord) -> None:
        if not record:
            return
        with left_out():
            record.backward()


@pytest.mark.parametrize(("module", "is_known"), [(Handles(), True), (HandlesSome(), False)])
def test_a_context_manager_around_a_pass_is_known_where_nothing_else_may_have_led_around_it(
    module: Handles, is_known: bool
) -> None:
    of, record = begun(module)
    begin(of, batch=0)
    as_lightning_does(module.training_step, record)
    assert record is not None
    assert record.facts().handlers_around == ((place("left out", "left_out"),) if is_known else ())


class StopsEarly(Module):
    """Leaves a loop before its second pass, and returns from it, by what it computes."""

    automatic_optimization = False

    def training_step(self, record: StepRecord, loss: float, limit: float) -> None:
        for _ in range(3):
            if loss < -7:  # <- left
                break  # <- break
            record.backward()  # <- pass of a loop
            if loss > 1.5 * limit:  # <- limit
                return  # <- over the limit
            if loss > 0:
                return  # <- below the limit


def test_the_condition_of_a_jump_is_first_where_a_loop_is_left_or_a_limit_is_reached() -> None:
    of, record = begun(StopsEarly())
    begin(of, batch=0)
    assert record is not None
    as_lightning_does(StopsEarly().training_step, record, -1.0, 1.0)
    facts = record.facts()
    marks = ("break", "over the limit", "below the limit")
    assert facts.led_around == {place("pass of a loop"): tuple(map(place, marks))}
    assert facts.differs_around == {place("break"): place("left"), place("over the limit"): place("limit")}


class LeavesOut(Module):
    """Makes a step of its optimizer under a condition."""

    automatic_optimization = False

    def training_step(self, record: StepRecord, is_large: bool) -> None:
        if record is None:
            return
        record.backward()
        if is_large:
            return  # <- without a step
        for optimizer in range(2):
            if optimizer:
                continue  # <- next optimizer
            self.optimizer.step()  # type: ignore[attr-defined]


def test_what_leads_around_an_optimizers_step_is_known() -> None:
    """But not what leads around the backward pass before it as well."""
    module = LeavesOut()
    of, record = begun(module)
    begin(of, batch=0)
    as_lightning_does(module.training_step, record, True)
    assert record is not None
    assert record.facts().skips_steps == (place("without a step"), place("next optimizer"))


def test_only_the_first_of_many_passes_have_their_lines() -> None:
    module = ByHand()
    of, record = begun(module)
    for batch in range(100):
        begin(of, batch=batch)
        as_lightning_does(module.training_step, record, batch % 2 * 100)
    calls = record.facts().passes_from
    assert len(calls) == MOST_RUNS + 1
    assert sum(map(len, calls)) <= MOST_BATCHES_WITH_CALLS * MOST_CALLS


def test_automatic_optimization_has_no_user_calls() -> None:
    of, record = begun(Module())
    begin(of, batch=0)
    record.backward()
    assert record.facts().passes_from == ()


def search(record: StepRecord, passes: int) -> None:
    for _ in range(passes):
        record.backward()  # <- asks again


def test_a_closure_called_again_by_an_optimizer_is_located() -> None:
    of, record = begun(Module())
    for batch, passes in enumerate((2, 1)):
        begin(of, batch=batch)
        search(record, passes)
    assert record.facts().passes_from == (("", place("asks again", "search")), ())


def test_a_new_batch_ends_the_previous_one() -> None:
    of, record = begun(Module())
    for batch in range(2):
        begin(of, batch=batch)
        record.backward()
    begin(of, batch=2)  # no pass in it yet
    facts = record.facts()
    assert (facts.passes_epoch, facts.passes_batch, facts.under_way) == (0, 1, ())


def graph(*variables: object, operations: int = 1) -> Any:
    """A loss that has been computed from these."""
    nodes = [SimpleNamespace(next_functions=(), variable=one) for one in variables]
    node = SimpleNamespace(next_functions=tuple((one, 0) for one in nodes))
    for _ in range(operations - 1):
        node = SimpleNamespace(next_functions=((node, 0), (None, 0)))
    return SimpleNamespace(grad_fn=node)


class WithLeaf(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch is None:
            return SimpleNamespace(requires_grad=True)  # <- leaf
        return batch

    def __init__(self, **parameters: Parameter) -> None:
        super().__init__(**parameters)
        self.table = SimpleNamespace(requires_grad=True)


@pytest.mark.parametrize(("operations", "is_noted"), [(0, True), (1, True), (4, True), (9, False)])
def test_a_loss_without_a_graph_is_noted(operations: int, is_noted: bool) -> None:
    weight = Parameter()
    of, record = begun(module := WithLeaf(weight=weight))
    module.parameters = lambda: [weight]  # type: ignore[assignment, method-assign]
    module.named_parameters = lambda: [("weight", weight)]  # type: ignore[method-assign]
    begin(of, batch=0)
    record.backward(graph(object(), operations=operations) if operations else SimpleNamespace(grad_fn=None))
    facts = record.facts()
    assert facts.without_graph == is_noted
    assert facts.leaves_at == ((place("leaf"),) if is_noted else ())


def test_a_loss_with_a_graph_is_not_noted() -> None:
    weight = Parameter()
    of, record = begun(module := WithLeaf(weight=weight))
    module.parameters = lambda: [weight]  # type: ignore[assignment, method-assign]
    module.named_parameters = lambda: [("weight", weight)]  # type: ignore[method-assign]
    begin(of, batch=0)
    record.backward(graph(weight))
    record.backward(graph(object(), object()))
    record.backward()
    assert record.facts().without_graph == 0


class Block:
    def forward(self, x: Any) -> Any:
        for part in self.parts:  # type: ignore[attr-defined]
            if not x:
                continue  # <- part left out
            x = part(x)
        return x


class Dropping:
    def forward(self, x: Any) -> Any:
        if not x:
            return x  # <- own part left out
        return self.inner(x)  # type: ignore[attr-defined]


class Deep(Module):
    def __init__(self, **parameters: Parameter) -> None:
        super().__init__(**parameters)
        self.block, self.drops = Block(), Dropping()

    def always(self, x: Any) -> Any:
        return self.drops(x)  # type: ignore[operator]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.always(batch))  # type: ignore[attr-defined]  # <- last

    def forward(self, x: Any) -> Any:
        return self.helper(self.block(x))  # type: ignore[operator]

    def helper(self, x: Any) -> Any:
        if x is None:
            return x  # <- head left out
        return self.head(x)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (["block.parts.1.weight"], place("part left out", "forward")),
        (["block.parts.0.weight", "block.parts.1.weight"], place("part left out", "forward")),
        (["last.weight"], place("last", "training_step")),
        (["head.weight"], place("head left out", "helper")),
        (["drops.inner.weight"], place("own part left out", "forward")),
    ],
)
def test_an_unused_part_is_located_by_its_call(missing: list[str], line: str) -> None:
    module = Deep()
    names = ("block.parts.0.weight", "block.parts.1.weight", "drops.inner.weight", "head.weight")
    names += ("last.weight", "tail.weight")
    module.parameters = {name: Parameter(grad=None if name in missing else 1) for name in names}
    assert StepRecord(trainer(module)).facts().unused_at == line


class Towers(Module):
    def __init__(self, missing: str) -> None:
        names = ("tower.weight", "pair.weight", "head.weight")
        super().__init__()
        self.parameters = {name: Parameter(grad=None if name == missing else 1) for name in names}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.encoded(batch))  # type: ignore[attr-defined]

    def encoded(self, x: Any) -> Any:
        if x.any():  # <- condition
            x = x + self.tower(x)  # type: ignore[attr-defined]  # <- tower
            for part in x:
                x = x + self.pair(part)  # type: ignore[attr-defined]  # <- each part
        return x


@pytest.mark.parametrize(
    ("missing", "line", "test"),
    [
        ("tower.weight", place("tower", "encoded"), f"if x.any():  (line {line_of('condition')})"),
        ("pair.weight", place("each part", "encoded"), ""),
    ],
)
def test_the_only_condition_around_an_unused_part_is_known(missing: str, line: str, test: str) -> None:
    facts = StepRecord(trainer(Towers(missing))).facts()
    assert facts.unused_at == line
    assert (facts.unused_under.test if facts.unused_under is not None else "") == test


class Stacked(Module):
    """Names its blocks where it counts them, and calls them in another method."""

    def __init__(self) -> None:
        super().__init__(head_weight=Parameter(grad=1), blocks_weight=Parameter())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chances = [1] * len(self.blocks)  # type: ignore[attr-defined]
        return self.encode(batch, chances)

    def encode(self, batch: Any, chances: list[int]) -> Any:
        for block, chance in zip(self.blocks, chances, strict=True):  # type: ignore[attr-defined]
            if not chance:
                continue  # <- block left out
            batch = block(batch)
        return batch


def test_an_unused_part_is_located_by_its_call_and_not_its_definition() -> None:
    facts = StepRecord(trainer(Stacked())).facts()
    assert facts.unused_at == place("block left out", "encode")
    assert facts.unused_under is not None and facts.unused_under.jump == "continue"
    assert facts.unused_under.test == f"if not chance:  (line {line_of('block left out') - 1})"


class Collected(Stacked):
    """The same, where comprehensions call them."""

    def names(self) -> Any:
        return {name: str(block) for name, block in self.blocks.items()}  # type: ignore[attr-defined]

    def encode(self, batch: Any, chances: list[int]) -> Any:
        return sum(
            [
                block(batch) * chance  # <- block in a comprehension
                for block, chance in zip(self.blocks, chances, strict=True)  # type: ignore[attr-defined]
            ]
        )


def test_an_unused_part_is_located_by_its_call_in_a_comprehension() -> None:
    """Not where a comprehension only names it."""
    assert StepRecord(trainer(Collected())).facts().unused_at == place("block in a comprehension", "encode")


class Spared(Stacked):
    """Uses them without gradients while a condition says so."""

    def encode(self, batch: Any, chances: list[int]) -> Any:
        with open(batch), torch.set_grad_enabled(not chances):  # <- gradients switched off
            for chance in chances:
                with suppress(KeyError):
                    return self.blocks(batch) * chance  # type: ignore[attr-defined]
        with torch.no_grad():
            return batch


def test_an_unused_part_is_located_where_gradients_are_switched_off_for_it() -> None:
    assert StepRecord(trainer(Spared())).facts().unused_at == place("gradients switched off", "encode")


class Asking(Stacked):
    """Calls one function for its blocks, unless it has returned before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = batch.mean()
        if len(batch) < 2:
            return loss  # <- blocks not asked
        return loss + self.of_blocks(batch)

    def of_blocks(self, batch: Any) -> Any:
        return self.encode(batch, [1])

    def encode(self, batch: Any, chances: list[int]) -> Any:
        return self.blocks(batch)  # type: ignore[attr-defined]  # <- blocks asked


class AskingIf(Asking):
    """Calls it under a condition: the line of the part says more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = batch.mean()
        if len(batch) > 1:
            loss = loss + self.of_blocks(batch)
        return loss


class AskingTwice(Asking):
    """Calls it twice, so that nobody knows which call was left out."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.encode(batch, [1])


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Asking, place("blocks not asked", "training_step")),
        (AskingIf, place("blocks asked", "encode")),
        (AskingTwice, place("blocks asked", "encode")),
    ],
)
def test_an_unused_part_is_located_where_a_jump_leads_around_its_function(module: type[Stacked], line: str) -> None:
    assert StepRecord(trainer(module())).facts().unused_at == line


class Detecting(Stacked):
    """Always asks its blocks, and uses what they return only if it needs that."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        boxes, loss = self.blocks(batch), batch.mean()  # type: ignore[attr-defined]  # <- boxes made
        scaled = boxes * 2
        if batch.any():
            loss = loss + scaled.sum()  # <- boxes used
        return loss


class DetectingUnless(Stacked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        boxes = self.blocks(batch)  # type: ignore[attr-defined]
        if not batch.any():
            return batch.mean()  # <- boxes not used
        return batch.mean() + boxes.sum()


class DetectingAlways(Stacked):
    """Uses what they return for certain, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        boxes = self.blocks(batch)  # type: ignore[attr-defined]  # <- boxes made for certain
        loss = batch.mean()
        if batch.any():
            loss = loss + boxes.sum()
        self.log("boxes", boxes.mean())  # type: ignore[attr-defined]
        return loss


class DetectingTwice(Stacked):
    """Uses it under two conditions, of which either may not have held."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        boxes = self.blocks(batch)  # type: ignore[attr-defined]  # <- boxes made for two
        loss = batch.mean()
        if batch.any():
            loss = loss + boxes.sum()
        if batch.all():
            loss = loss + boxes.mean()
        return loss


class DetectingForLater(Stacked):
    """Keeps what they return, so that others may use it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = self.blocks(batch)  # type: ignore[attr-defined]  # <- boxes kept
        loss = batch.mean()
        if batch.any():
            self.log("loss", loss)  # type: ignore[attr-defined]
        return loss


class DetectingInParts(Stacked):
    """Computes two things from what they return, and uses one of them for certain."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        boxes = self.blocks(batch)  # type: ignore[attr-defined]  # <- boxes made for parts
        sizes = boxes * 2
        loss = sizes.sum()
        places = boxes * 3
        if batch.any():
            loss = loss + places.sum()
        return loss


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Detecting, place("boxes used", "training_step")),
        (DetectingUnless, place("boxes not used", "training_step")),
        (DetectingAlways, place("boxes made for certain", "training_step")),
        (DetectingTwice, place("boxes made for two", "training_step")),
        (DetectingForLater, place("boxes kept", "training_step")),
        (DetectingInParts, place("boxes made for parts", "training_step")),
    ],
)
def test_a_part_whose_output_is_unused_is_located_where_that_is_left_out(module: type[Stacked], line: str) -> None:
    assert StepRecord(trainer(module())).facts().unused_at == line


class EarlyExit(Module):
    """Uses a part in a function that another class overrides, calls by ``super()`` and leaves out."""

    def __init__(self) -> None:
        super().__init__(exit_weight=Parameter(grad=1), blocks_weight=Parameter())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Any:
        return self.blocks(batch)  # type: ignore[attr-defined]


class Exiting(EarlyExit):
    def loss(self, batch: Any) -> Any:
        early = self.exit(batch)  # type: ignore[attr-defined]
        if early.is_sure():
            return early  # <- left before the rest
        return early + super().loss(batch)


def test_an_unused_part_is_located_where_the_overriding_function_leaves_it_out() -> None:
    assert StepRecord(trainer(Exiting())).facts().unused_at == place("left before the rest", "loss")


def test_parameter_indices_from_ddp_become_names() -> None:
    module = Deep(fixed=Parameter(requires_grad=False), tail=Parameter(grad=1), head_weight=Parameter(grad=1))
    _, record = begun(module)
    error = "… Parameter indices which did not receive grad for rank 3: 1 7\n In addition, you can …"
    facts = record.facts(error=error)
    assert (facts.without_gradient, facts.unused_at) == (("head.weight",), place("head left out", "helper"))


class Table:
    def __init__(self, rows: int) -> None:
        self.rows = [rows]  # <- rows


class Sized(Module):
    def __init__(self, **parameters: Parameter) -> None:
        super().__init__(**parameters)
        self.head = Parameter()  # <- parts
        self.table = Table(5)


@pytest.mark.parametrize(
    ("number", "name", "line"),
    [
        (0, "head.weight", place("parts", "__init__")),
        (1, "table.rows", place("rows", "__init__")),
        (2, "tail.weight", ""),
        (3, "", ""),
    ],
    ids=["of a library's part", "of a part of the user's", "not set by name", "beyond the last"],
)
def test_the_parameter_that_ddp_finds_of_another_size_has_the_line_that_makes_it(
    number: int, name: str, line: str
) -> None:
    fixed = Parameter(requires_grad=False)
    _, record = begun(Sized(fixed=fixed, head_weight=Parameter(), table_rows=Parameter(), tail_weight=Parameter()))
    error = f"[2]: params[{number}] in this process with sizes [5, 8] appears not to match sizes of the same param in 0"
    facts = record.facts(error=error)
    assert (facts.other_size, facts.other_size_at) == (name, line)
    assert record.facts(error="another error").other_size == ""


class Freezer:
    def __init__(self, module: Any) -> None:
        module.head.requires_grad_(False)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.tail.requires_grad_(True)
        module.head.requires_grad_(False)  # <- freezes


def test_parameters_frozen_during_training_are_found() -> None:
    head = Parameter(grad=1)
    of, record = begun(Module(head=head, tail=Parameter(grad=1)))
    of.callbacks = [Freezer(SimpleNamespace(head=SimpleNamespace(requires_grad_=bool)))]
    assert record.facts().frozen == record.facts().frozen_at == ()
    head.requires_grad = False
    facts = record.facts()
    assert (facts.frozen, facts.frozen_at) == (("head",), (place("freezes", "on_train_epoch_end"),))


class PutTogether(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(f"loss/{batch_idx}", 1)  # type: ignore[attr-defined]
        self.log_dict({"a": 1, **batch})  # type: ignore[attr-defined]  # <- others in it
        self.log("b", batch)  # type: ignore[attr-defined]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict(batch)  # type: ignore[attr-defined]
        self.log(batch, 1)  # type: ignore[attr-defined]


class Monitor:
    monitor = "score"

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("score", 1, rank_zero_only=True)  # <- score


def test_a_composed_key_belongs_to_the_only_matching_log_call() -> None:
    keys = {
        "1": metric("c"),
        "2": metric("d", hook="validation_step"),
        "3": metric("e", hook="on_train_epoch_end"),
        # Both the f-string and the dictionary may make it.
        "4": metric("loss/3"),
    }
    logged = StepRecord(trainer(PutTogether(), **keys)).facts().logged
    assert [key.place for key in logged] == [place("others in it"), "", "", ""]


class Unreached:
    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", 1, sync_dist=True)  # type: ignore[attr-defined]
        self.log("local", 1)  # type: ignore[attr-defined]
        if batch:
            self.log_dict({"hard": 1}, sync_dist=True)  # type: ignore[attr-defined]  # <- hard

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("tested", 1, sync_dist=True)  # type: ignore[attr-defined]


def test_a_reduced_key_this_rank_never_logged_is_found() -> None:
    of = trainer(Unreached(), one=metric("seen", hook="validation_step"))  # type: ignore[arg-type]
    (key,) = StepRecord(of).facts().unlogged
    assert (key.name, key.hook, key.place) == ("hard", "validation_step", place("hard", "validation_step"))
    of.state = SimpleNamespace(fn="test")
    assert [key.name for key in StepRecord(of).facts().unlogged] == ["hard", "tested"]


def test_a_monitored_key_is_listed_with_its_place() -> None:
    of = trainer(Module(), one=metric("score", hook="on_train_epoch_end", synced=False, zero=True), two=metric("loss"))
    of.callbacks = [Monitor()]
    (key,) = StepRecord(of).facts().monitored
    assert (key.name, key.hook, key.place) == ("score", "on_train_epoch_end", place("score", "on_train_epoch_end"))


def test_a_monitored_key_this_rank_never_logged_is_found() -> None:
    of = trainer(Module())
    of.callbacks = [Monitor(), SimpleNamespace(monitor="nowhere"), SimpleNamespace(monitor=None)]
    (key,) = StepRecord(of).facts().unmonitored
    assert (key.name, key.place) == ("score", place("score", "on_train_epoch_end"))
    # A scheduler may go by it, too.
    callback = Monitor()
    callback.monitor = ""
    of.callbacks, of.lr_scheduler_configs = [callback], [SimpleNamespace(monitor="score")]
    assert StepRecord(of).facts().unmonitored == (key,)
    of.fit_loop.epoch_loop._results = {"one": metric("score")}
    assert not StepRecord(of).facts().unmonitored


def test_a_logged_metric_has_its_states() -> None:
    odd = metric("odd", tensor=False)
    odd.value = SimpleNamespace(metric_state={"total": 0, "count": 0})
    record = StepRecord(trainer(Module(), odd=odd, loss=metric("loss")))
    assert [(key.name, key.states) for key in record.facts().logged] == [("odd", ("total", "count")), ("loss", ())]


def test_the_last_batch_of_an_epoch_belongs_to_that_epoch() -> None:
    of, record = begun()
    begin(of, batch=5)
    begin(of, epoch=1, batch=0)
    assert skipped(record) == (0, 1, 0, -1)
    record.backward()
    assert skipped(record) == (1, 1, 0, -1)


def test_the_current_batch_counts_when_it_ends() -> None:
    of, record = begun()
    begin(of, batch=3)
    assert skipped(record) == (0, 0, -1, -1)
    assert skipped(record, "another error") == (0, 0, -1, -1)
    assert skipped(record, "Skipping the `training_step` by returning None in distributed training") == (0, 1, 0, 3)
    end(of)
    assert skipped(record) == (0, 1, 0, 3)
    begin(of, batch=4)
    assert skipped(record) == (0, 1, 0, 3)
    record.backward()
    end(of)
    assert skipped(record) == (1, 1, 0, 3)


def test_a_custom_loop_without_counters_is_handled() -> None:
    record = StepRecord(SimpleNamespace(fit_loop=SimpleNamespace()))
    record.begin()
    record.backward()
    assert skipped(record) == (0, 0, -1, -1)


def test_nothing_is_counted_before_training_is_set_up() -> None:
    record = StepRecord(trainer())
    record.backward()
    assert skipped(record) == (0, 0, -1, -1)


def test_missing_gradients_count_only_beside_existing_ones() -> None:
    some = Module(branch_weight=Parameter(), head_weight=Parameter(grad=1), frozen=Parameter(requires_grad=False))
    facts = StepRecord(trainer(some)).facts()
    assert (facts.without_gradient, facts.without_gradient_count) == (("branch.weight",), 1)
    assert facts.unused_at == f"{HERE}:{line_of('branch')} in forward"
    assert StepRecord(trainer(Module(branch_weight=Parameter()))).facts().without_gradient == ()


def test_long_lists_of_names_are_truncated_and_counted() -> None:
    many = Module(has=Parameter(grad=1), **{f"p{n}": Parameter() for n in range(20)})
    facts = StepRecord(trainer(many)).facts()
    assert (len(facts.without_gradient), facts.without_gradient_count) == (8, 20)


def test_reduced_keys_have_their_lines() -> None:
    keys = {
        "1": metric("loss"),
        "2": metric("b"),
        "3": metric("local", synced=False),
        "4": metric("first", zero=True),
        "6": metric("faces"),
        "5": metric("accuracy", synced=False, tensor=False, hook="validation_step"),
    }
    logged = StepRecord(trainer(Module(), **keys)).facts().logged
    assert [(key.name, key.hook) for key in logged] == [
        ("loss", "training_step"),
        ("b", "training_step"),
        ("faces", "training_step"),
        ("accuracy", "validation_step"),
    ]
    assert [key.place for key in logged] == [
        f"{HERE}:{line_of('loss')} in training_step",
        f"{HERE}:{line_of('dict')} in training_step",
        f"{HERE}:{line_of('faces')} in more",
        "",
    ]
    assert "if self.global_rank == 0:" in logged[1].rank_condition


def test_an_empty_trainer_has_no_facts() -> None:
    assert StepRecord(SimpleNamespace()).facts() == StepFacts()


def test_a_caught_save_failure_is_kept() -> None:
    record, tracker = StepRecord(trainer()), ActionTracker()
    tracker.on_failed = lambda name, error: record.save_failed(error)
    with pytest.raises(OSError, match="No space"), _TrackedAction(tracker, "save_checkpoint"):
        raise OSError("No space")  # <- raise
    failed = record.failed_save
    assert failed is not None
    assert (failed.type, failed.message, failed.is_consequence) == ("OSError", "No space", False)
    assert (failed.stack[-1].function, failed.stack[-1].line) == (
        "test_a_caught_save_failure_is_kept",
        line_of("raise"),
    )
    assert sum(frame.function == "test_a_caught_save_failure_is_kept" for frame in failed.stack) == 1
    record.saved()
    assert record.failed_save is None


def test_a_lost_connection_during_a_save_is_a_consequence() -> None:
    record = StepRecord(trainer())
    record.save_failed(RuntimeError("Connection closed by peer"))
    assert record.failed_save is not None
    assert record.failed_save.is_consequence


def in_main(file: str, function: str, arguments: dict[str, Any]) -> Callable[[Callable[[], Any]], Any]:
    """Calls something from another thread while the main thread is in a function of that name, in that file."""
    names: dict[str, Any] = {}
    code = f"def {function}({', '.join([*arguments, 'look'])}):\n    return look()\n"
    exec(compile(code, file, "exec"), names)

    def look_from_aside(look: Callable[[], Any]) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(look()))

        def run() -> None:
            thread.start()
            thread.join()

        names[function](**arguments, look=run)
        return found[0]

    return look_from_aside


def test_the_key_being_reduced_is_read() -> None:
    owner = SimpleNamespace(meta=SimpleNamespace(name="val_loss"))
    inside = in_main(
        "/venv/lightning/pytorch/trainer/connectors/logger_connector/result.py", "compute", {"self": owner}
    )
    assert inside(lambda: StepRecord(trainer()).facts().reducing) == "val_loss"
    assert StepRecord(trainer()).facts().reducing == ""


@pytest.mark.parametrize(
    ("function", "arguments", "peer"),
    [
        ("recv", {"tensor": 0, "src": 3}, 3),
        ("send", {"tensor": 0, "dst": 1}, 1),
        ("recv", {"tensor": 0, "src": None}, -1),
    ],
)
def test_the_destination_rank_of_a_send_is_read(function: str, arguments: dict[str, Any], peer: int) -> None:
    inside = in_main("/venv/torch/distributed/distributed_c10d.py", function, arguments)
    assert inside(lambda: StepRecord(trainer()).facts().peer) == peer


@pytest.mark.parametrize(
    ("function", "arguments", "root"),
    [
        ("broadcast", {"tensor": 0, "src": 5, "group_src": 1}, 1),
        ("gather", {"tensor": 0, "dst": None, "group_dst": 0}, 0),
        ("all_reduce", {"tensor": 0, "group_src": 1}, -1),
    ],
)
def test_the_root_of_a_collective_is_its_group_rank(function: str, arguments: dict[str, Any], root: int) -> None:
    inside = in_main("/venv/torch/distributed/distributed_c10d.py", function, arguments)
    assert inside(lambda: StepRecord(trainer()).facts().root) == root


def test_groups_created_under_a_condition_are_located(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def setup(look):\n    if rank < 0:\n        new_group([0])\n    new_group([1])\n    look()\n")
    names: dict[str, Any] = {"rank": 0, "new_group": lambda ranks: None}
    exec(compile(path.read_text(), str(path), "exec"), names)
    inside = in_main("/venv/torch/distributed/distributed_c10d.py", "new_group", {})

    def look() -> tuple[str, ...]:
        found: list[tuple[str, ...]] = []
        names["setup"](lambda: found.append(inside(lambda: StepRecord(trainer()).facts().groups_at)))
        return found[0]

    assert look() == (f"{path}:3 in setup",)
    assert StepRecord(trainer()).facts().groups_at == ()


class Scheduling:
    """As a callback that accumulates by each rank's own batches, and makes a group on some ranks."""

    def setup(self, trainer: Any) -> None:
        if trainer.global_rank == 0:
            new_group([0])  # type: ignore[name-defined]  # noqa: F821

    def on_train_batch_start(self, trainer: Any) -> None:
        trainer.accumulate_grad_batches = 2
        with trainer.strategy.block_backward_sync():
            pass


def test_the_accumulation_setting_is_located_if_no_pass_reduced() -> None:
    of, record = begun()
    of.callbacks = [Scheduling()]
    line = Scheduling.on_train_batch_start.__code__.co_firstlineno + 1
    total = of.fit_loop.epoch_loop.batch_progress.total
    for is_reduced in (True, True, False):
        assert record.facts().accumulates_at == ()
        total.ready += 1
        record.backward(is_reduced=is_reduced)
    total.ready += 1
    places = tuple(f"{__file__}:{number} in on_train_batch_start" for number in (line, line + 1))
    assert record.facts().accumulates_at == places


def test_a_group_created_conditionally_in_another_hook_is_located() -> None:
    inside = in_main("/venv/torch/distributed/distributed_c10d.py", "new_group", {})
    of = trainer()
    of.callbacks = [Scheduling()]
    line = Scheduling.setup.__code__.co_firstlineno + 2
    assert inside(lambda: StepRecord(of).facts().groups_at) == (f"{__file__}:{line} in setup",)


class Pairs:
    """As a module that makes its groups when they are needed."""

    @property
    def pair(self) -> Any:
        return new_group([0, 1])  # type: ignore[name-defined]  # noqa: F821  # <- pair

    @functools.cached_property
    def spare(self) -> Any:
        return new_group([0], use_local_synchronization=False)  # type: ignore[name-defined]  # noqa: F821  # <- spare

    def own(self) -> Any:
        return new_group([0], use_local_synchronization=True)  # type: ignore[name-defined]  # noqa: F821

    def given(self, **options: Any) -> Any:
        return new_group([0], **options)  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("made", [1, 2])
def test_calls_that_make_groups_on_all_ranks_are_located_once_there_are_groups(
    made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = trainer()
    of.callbacks = [Pairs()]
    monkeypatch.setattr(process_groups, "groups_made", lambda: made)
    expected = (place("pair", "pair"), place("spare", "spare")) if made > 1 else ()
    assert StepRecord(of).new_groups_at() == expected


def test_thousands_of_batches_are_counted() -> None:
    of, record = begun()
    total = of.fit_loop.epoch_loop.batch_progress.total
    for _ in range(10_000):
        total.ready += 1
        record.backward()
    assert record.facts().with_backward == 10_000


class BoxCount(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx=None)

    def update(self) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.tensor(len(self.boxes))  # type: ignore[arg-type]


def test_metrics_held_by_the_model_are_listed_with_their_states() -> None:
    module = Module()
    held = SimpleNamespace(metric_state={"total": 0, "count": 0})
    boxes = BoxCount()
    parts = [("", module), ("scores", SimpleNamespace(metric_state={})), ("scores.mean", held), ("boxes", boxes)]
    module.named_modules = lambda: parts  # type: ignore[attr-defined]
    assert begun(module)[1].facts().metrics == (
        MetricFacts(name="scores.mean", type="SimpleNamespace", states=("total", "count")),
        MetricFacts(name="boxes", type="BoxCount", states=("boxes", "scores", "count"), by_entry=("boxes",)),
    )
