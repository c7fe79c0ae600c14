"""What decides whether a line is come to, by the source alone; the line that is asked about ends in ``# <-``."""

import ast
import threading
from textwrap import dedent

import pytest

from lightning_ncclsafe.facts import Decides
from lightning_ncclsafe.probes.source import control_flow
from lightning_ncclsafe.probes.source.control_flow import Around, ControlFlow
from lightning_ncclsafe.probes.source.syntax import without_comment


def around(source: str) -> Around:
    text = dedent(source).strip()
    (line,) = (number for number, code in enumerate(text.splitlines(), 1) if code.endswith("# <-"))
    return ControlFlow(text).around(line)


@pytest.mark.parametrize(
    ("manager", "line"),
    [
        pytest.param(
            """
            @contextlib.contextmanager
            def kept():
                try:
                    yield
                except OSError as error:  # <- handled
                    if error.errno:
                        raise
            """,
            "kept",
            id="a generator",
        ),
        pytest.param(
            """
            @contextmanager
            def kept():
                with suppress(OSError):  # <- handled
                    yield
            """,
            "kept",
            id="a generator that suppresses it",
        ),
        pytest.param(
            """
            class kept:
                def __exit__(self, kind, error, trace):
                    if kind is None:
                        return False
                    return True  # <- handled
            """,
            "__exit__",
            id="an exit that returns True",
        ),
        pytest.param(
            """
            class kept:
                def __exit__(self, kind, error, trace):
                    return bool(kind) and issubclass(kind, OSError)  # <- handled
            """,
            "__exit__",
            id="an exit that asks for the type",
        ),
        pytest.param(
            """
            @contextmanager
            def kept():
                try:
                    yield
                except OSError:
                    raise
            """,
            "",
            id="a generator that raises it again",
        ),
        pytest.param(
            """
            @contextmanager
            def kept():
                try:
                    begin()
                except OSError:
                    pass
                yield
            """,
            "",
            id="a handler before the yield",
        ),
        pytest.param(
            """
            def kept():
                try:
                    yield
                except OSError:
                    pass
            """,
            "",
            id="no context manager",
        ),
        pytest.param(
            """
            class kept:
                def __exit__(self, kind, error, trace):
                    self.close()
                    return None
            """,
            "",
            id="an exit that returns nothing",
        ),
        pytest.param(
            """
            class kept:
                def __exit__(self, kind, error, trace):
                    return kind is None
            """,
            "",
            id="an exit that says whether nothing was raised",
        ),
        pytest.param(
            """
            class kept:
                def __exit__(self, kind, error, trace):
                    if kind is None:
                        return True
                    return False
            """,
            "",
            id="an exit that returns True where nothing was raised",
        ),
        pytest.param(
            """
            @contextmanager
            def kept():
                try:
                    yield
                except OSError:
                    pass

            class Other:
                def kept(self):
                    pass
            """,
            "",
            id="two of this name",
        ),
        pytest.param(
            """
            class Other:
                def kept(self):
                    pass

            @contextmanager
            def kept():
                try:
                    yield
                except OSError:
                    pass
            """,
            "",
            id="two of this name, the other one first",
        ),
    ],
)
def test_a_context_manager_of_the_file_may_handle_what_its_block_raises(manager: str, line: str) -> None:
    step = """
    def step(self, batch):
        with open(batch), kept() as one:
            reduce(batch)  # <-
    """
    text = f"{dedent(manager).strip()}\n\n\n{dedent(step).strip()}\n"
    numbers = {code.partition("# ")[2]: number for number, code in enumerate(text.splitlines(), 1) if "# <-" in code}
    known = ControlFlow(text, "train.py").around(numbers["<-"])
    expected = [f"train.py:{numbers['<- handled']} in {line}"] if line else []
    assert [one.handled_at for one in known.branches] == expected
    assert [one.line for one in known.branches] == [numbers["<-"] - 1] * len(expected)
    assert known.handler.endswith(f"(line {numbers['<- handled']})" if line else "")
    assert bool(known.handler) is bool(line)


def test_a_context_manager_of_another_object_is_not_the_one_of_this_name() -> None:
    manager = "@contextmanager\ndef kept():\n    try:\n        yield\n    except OSError:\n        pass\n"
    for called, is_it in (("torch.kept()", False), ("self.kept()", True), ("kept", False)):
        flow = ControlFlow(f"{manager}\ndef step(self):\n    with {called}:\n        reduce()\n")
        assert bool(flow.around(10).branches) is is_it


def test_a_jump_in_the_block_of_a_context_manager_has_its_own_line() -> None:
    manager = "@contextmanager\ndef kept():\n    try:\n        yield\n    except OSError:\n        pass\n"
    step = "def step(self):\n    with kept():\n        check()\n        return\n    reduce()\n"
    (jump,) = ControlFlow(f"{manager}{step}").around(11).branches
    assert (jump.line, jump.jump, jump.handled_at) == (10, "return", "")


def branches(source: str) -> list[str]:
    """``"3 return value"`` of each."""
    return [" ".join(filter(None, (str(one.line), one.jump, one.on.value))) for one in around(source).branches]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            """
            def step(self, batch):
                if not batch.any():
                    return None
                reduce(batch)  # <-
            """,
            ["3 return value"],
            id="a return before it",
        ),
        pytest.param(
            """
            class Best:
                def __init__(self):
                    self.every = 2

                def keep(self):
                    self.best_epoch = self.trainer.current_epoch

                def load(self):
                    if self.trainer.current_epoch % self.every:
                        return
                    if self.trainer.current_epoch == self.best_epoch:
                        return
                    reduce(self.weights)  # <-
            """,
            ["10 return common", "12 return value"],
            id="a counter with a setting, and one with what a rank has kept",
        ),
        pytest.param(
            """
            class Every:
                def setup(self, trainer, pl_module, stage):
                    self.trainer = trainer

                def load(self):
                    if self.trainer.current_epoch % 2:
                        return
                    reduce(self.weights)  # <-
            """,
            ["7 return common"],
            id="a counter of a trainer that is kept",
        ),
        pytest.param(
            """
            def restart(self, unused):
                if not unused.any():
                    return
                if torch.distributed.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                    broadcast(unused)  # <-
            """,
            ["3 return value", "4 common"],
            id="whether there are several ranks",
        ),
        pytest.param(
            """
            def on_validation_end(self, trainer, pl_module):
                if trainer.sanity_checking or trainer.state.fn != "fit":
                    return
                if self.trainer.testing and not batch_idx:
                    return
                if self.state.fn != "fit":
                    return
                if trainer.state.fn == self.mode:
                    return
                if self.testing:
                    return
                gather(trainer)  # <-
            """,
            ["3 return common", "5 return common", "7 return value", "9 return value", "11 return value"],
            id="what the Trainer runs",
        ),
        pytest.param(
            """
            def gather(self, module):
                for name, p in module.named_parameters():
                    if "lora_" in name and not name.endswith("bias") and name != "head" and isinstance(p, DTensor):
                        if p.ndim > 1 or p.dim() == 0:
                            kept[name] = p.full_tensor()  # <-
            """,
            ["2 passes", "3 common", "4 common"],
            id="names, classes and dimensions of a model's parameters",
        ),
        pytest.param(
            """
            def gather(self, module):
                for name, p in module.state_dict().items():
                    kept[name] = p.full_tensor() if isinstance(p, DTensor) else p  # <-
            """,
            ["2 passes", "3 common"],
            id="classes of what is in a state dict",
        ),
        pytest.param(
            """
            def gather(self, module):
                for name, p in module.named_parameters():
                    if p.requires_grad:
                        if p > 0:
                            if name in self.wanted:
                                if name.startswith(self.prefix):
                                    if self.prefix.startswith("lora_"):
                                        if name == LAYER:
                                            kept[name] = p.full_tensor()  # <-
            """,
            ["2 passes", "3 value", "4 value", "5 value", "6 value", "7 value", "8 value"],
            id="what ranks may have set otherwise",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for one in model.modules():
                    if isinstance(one, self.active):
                        if isinstance(one, pick(batch)):
                            if isinstance(one, (nn.Linear, Conv)):
                                all_reduce(one)  # <-
            """,
            ["2 passes", "3 value", "4 value", "5 common"],
            id="a class that is chosen",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for key, one in self.loader.state_dict().items():
                    if key == "buffer":
                        all_reduce(one)  # <-
            """,
            ["2 passes", "3 value"],
            id="a state that is no model's",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for name, p in self.heads[batch["task"]].named_parameters():
                    if name == "aux.weight":
                        all_reduce(p)  # <-
            """,
            ["2 passes", "3 value"],
            id="a model that is chosen",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for name, p in model.named_parameters():
                    try:
                        send(p)
                    except ValueError as name:
                        pass
                    if name == "aux.weight":
                        all_reduce(p)  # <-
            """,
            ["2 passes", "7 value"],
            id="a name of an exception",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for p in model.parameters():
                    p = p.grad
                    if isinstance(p, torch.Tensor):
                        all_reduce(p)  # <-
            """,
            ["2 passes", "4 value"],
            id="a variable that is set anew",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for p in model.parameters():
                    for p in p.found:
                        if isinstance(p, torch.Tensor):
                            all_reduce(p)  # <-
            """,
            ["2 passes", "3 passes", "4 value"],
            id="a variable of two loops",
        ),
        pytest.param(
            """
            def reduce(self, model):
                for g in [p.grad for p in model.parameters()]:
                    if isinstance(g, torch.Tensor):
                        all_reduce(g)  # <-
            """,
            ["2 passes", "3 value"],
            id="what a comprehension makes of the parameters",
        ),
        pytest.param(
            """
            def reduce(self, model, loss):
                for g in torch.autograd.grad(loss, model.parameters(), allow_unused=True):
                    if isinstance(g, torch.Tensor):
                        all_reduce(g)  # <-
            """,
            ["2 passes", "3 value"],
            id="what a call makes of the parameters",
        ),
        pytest.param(
            """
            def reduce(self, model, batch):
                for key, p in zip(batch, model.parameters()):
                    if key == "aux":
                        all_reduce(p)  # <-
            """,
            ["2 passes", "3 value"],
            id="parameters beside a batch",
        ),
        pytest.param(
            """
            def gather(self, module, name):
                for name, p in module.named_parameters():
                    pass
                if "lora_" in name:
                    send(p.full_tensor())  # <-
            """,
            ["4 value"],
            id="a name outside of the loop",
        ),
        pytest.param(
            """
            def stop(self):
                for one in psutil.Process().children():
                    if isinstance(one, Worker):
                        all_reduce(one)  # <-
            """,
            ["2 passes", "3 value"],
            id="parts of anything else",
        ),
        pytest.param(
            """
            def restart(self, unused):
                if self.codes.is_initialized():
                    return
                if dist.get_world_size(self.group) > 1:
                    broadcast(unused)  # <-
            """,
            ["3 return value", "4 value"],
            id="what a model keeps, and the size of a group",
        ),
        pytest.param(
            """
            def step(self, batch):
                if batch.any():
                    reduce(batch)  # <-
                if batch.all():
                    return None
            """,
            ["2 value"],
            id="a condition around it, none after it",
        ),
        pytest.param(
            """
            def step(self, batch):
                if batch.any():
                    pass
                elif batch.all():
                    if self.ready: reduce(batch)  # <-
                else:
                    return
            """,
            ["2 value", "4 value", "5 value"],
            id="the other branch with a nested one",
        ),
        pytest.param(
            """
            def step(self, parts):
                for part in parts:
                    if part is None:
                        continue
                    reduce(part)  # <-
                    if part.is_last:
                        break
                    elif part.is_odd:
                        continue
            """,
            ["2 passes", "4 continue value", "7 break value"],
            id="a loop, a continue before and a break after",
        ),
        pytest.param(
            """
            def step(self, parts):
                for part in parts:
                    for one in part:
                        if one:
                            break
                    while part:
                        if not one:
                            return
                reduce(part)  # <-
            """,
            ["8 return value"],
            id="from earlier loops only what leaves the function",
        ),
        pytest.param(
            """
            def step(self):
                for number in range(1, 11):
                    while True:
                        for key in ("a", "b"):
                            reduce(key)  # <-
                            if self.settled:
                                return
            """,
            ["7 return value"],
            id="an unconditional loop decides nothing",
        ),
        pytest.param(
            """
            def step(self):
                while time.monotonic() < self.until:
                    reduce(self)  # <-
            """,
            ["2 passes"],
            id="a clock",
        ),
        pytest.param(
            """
            def step(self):
                while reduce(self).any():  # <-
                    if self.tired:
                        break
            """,
            ["2 passes", "4 break value"],
            id="the test of a loop",
        ),
        pytest.param(
            """
            def step(self, batch):
                try:
                    check(batch)
                    reduce(batch)  # <-
                except ValueError:
                    log()
            """,
            ["5 exception"],
            id="a handled exception",
        ),
        pytest.param(
            """
            def step(self, batch):
                try:
                    check(batch)
                except ValueError:
                    raise
                with suppress(KeyError):
                    reduce(batch)  # <-
            """,
            ["6 exception"],
            id="a reraised and a suppressed exception",
        ),
        pytest.param(
            """
            def step(self, batch):
                with suppressed_output():
                    reduce(batch)  # <-
            """,
            [],
            id="a context manager that suppresses something else",
        ),
        pytest.param(
            """
            def step(self, batch):
                try:
                    loss = check(batch)
                except RuntimeError as error:
                    if "memory" not in str(error):
                        raise
                    return None
                reduce(loss)  # <-
            """,
            ["7 return exception"],
            id="a return in a handler",
        ),
        pytest.param(
            """
            def step(self, batch):
                try:
                    check(batch)
                except ValueError:
                    reduce(batch)  # <-
            """,
            ["4 exception"],
            id="inside the handler",
        ),
        pytest.param(
            """
            def step(self, batch):
                mean = self.mean.compute() if self.labels else 0.0  # <-
            """,
            ["2 value"],
            id="a conditional expression",
        ),
        pytest.param(
            """
            def step(self, batch):
                return self.is_due and self.average(batch)  # <-
            """,
            ["2 value"],
            id="a short circuit",
        ),
        pytest.param(
            """
            def step(self, batch):
                if self.is_due or self.agree():  # <-
                    pass
            """,
            ["2 value"],
            id="a short circuit in a test",
        ),
        pytest.param(
            """
            def step(self, parts):
                return [reduce(part) for part in parts] + [part if part else 0 for part in parts]  # <-
            """,
            ["2 passes"],
            id="a list comprehension",
        ),
        pytest.param(
            """
            def step(self, kind):
                match kind:
                    case "mean":
                        reduce(kind)  # <-
            """,
            ["3 value"],
            id="a match case",
        ),
        pytest.param(
            """
            def step(self, batch, batch_idx):
                if batch_idx % 2 == 0 and not self.trainer.sanity_checking:
                    return
                if self.global_rank != 0 or batch_idx % 2:
                    return
                if DEBUG:
                    return
                reduce(batch)  # <-
            """,
            ["3 return common", "5 return rank", "7 return value"],
            id="a common count, the rank, and a value",
        ),
        pytest.param(
            """
            def step(self, batch):
                if batch is None:
                    raise ValueError("no batch")
                if rank != 0:
                    if self.quiet:
                        return
                def later():
                    return None
                reduce(batch)  # <-
            """,
            ["6 return value"],
            id="a return on other ranks, and a raise",
        ),
        pytest.param(
            """
            def fit(self):
                if self.skips:
                    return

                def hook():
                    reduce(self)  # <-

                return hook
            """,
            [],
            id="only the function itself",
        ),
        pytest.param(
            """
            def fit(self):
                @hook
                def late():
                    yield
                try:
                    self.run()
                finally:
                    reduce(self)  # <-
            """,
            [],
            id="unconditional code",
        ),
    ],
)
def test_branches_around_a_line_are_found(source: str, expected: list[str]) -> None:
    assert branches(source) == expected


@pytest.mark.parametrize(
    ("source", "condition"),
    [
        ("x = reduce(y) if rank == 0 else None  # <-", "if rank == 0  (line 1)"),
        ("x = None if dist.get_rank() else reduce(y)  # <-", "else of if dist.get_rank()  (line 1)"),
        ("rank == 0 and reduce(y)  # <-", "if rank == 0  (line 1)"),
        ("rank or reduce(y)  # <-", "else of if rank  (line 1)"),
        ("x = one(y) if rank == 0 else other(y)  # <-", ""),
        ("show(one(y) if rank == 0 else y)  # <-", ""),
    ],
)
def test_a_rank_in_an_expression_is_a_condition(source: str, condition: str) -> None:
    assert around(source).rank_condition == condition


def test_breaks_and_nested_rank_tests_are_not_rank_conditions() -> None:
    ends = around("for one in many:\n    reduce(one)  # <-\n    if rank == 0:\n        break")
    assert (ends.rank_condition, ends.branches[-1].on) == ("", Decides.RANK)
    nested = around("def f():\n    if rank:\n        if local_rank:\n            return\n    reduce()  # <-")
    assert (nested.rank_condition, [branch.on for branch in nested.branches]) == ("", [Decides.VALUE])


def test_a_condition_has_its_line_and_is_truncated() -> None:
    long = f"if batch.{'any' * 60}():"
    (branch,) = around(f"def step(batch):\n    {long}\n        return\n    reduce(batch)  # <-").branches
    assert branch.test == f"{long[:120]}  (line 2)"
    (branch,) = around("def step(b):\n    if b:\n        pass\n    else:\n        reduce(b)  # <-").branches
    assert (branch.test, branch.until) == ("else of if b:  (line 2)", 5)


def test_what_is_quoted_has_no_comment() -> None:
    source = """
        for part in parts:  # each "one"
            try:
                if part != "#":
                    send(part)  # <-
            except OSError:  # a "#" more
                pass
    """
    tests = [branch.test for branch in around(source).branches]
    assert [test.partition("  (line")[0] for test in tests] == [
        "for part in parts:",
        "except OSError:",
        'if part != "#":',
    ]


def test_only_the_innermost_of_many_branches_are_kept() -> None:
    ifs = "".join(f"{'    ' * depth}if a{depth}:\n" for depth in range(12))
    found = around(f"{ifs}{'    ' * 12}reduce()  # <-").branches
    assert [branch.line for branch in found] == [*range(5, 13)]


def test_page_breaks_are_ignored_and_overdeep_code_has_no_branches() -> None:
    (branch,) = ControlFlow("x = 1\n\x0c\nif due:\n    reduce()").around(4).branches
    assert branch.test == "if due:  (line 3)"
    call = ast.Call(func=ast.Name(id="reduce"), args=[], keywords=[])
    flow = ControlFlow("if due:\n    reduce()  # its tree is changed below")
    deep: ast.expr = call
    for _ in range(5000):
        deep = ast.UnaryOp(op=ast.Not(), operand=deep)
    flow._body[0].body[0].value = deep  # type: ignore[attr-defined]
    assert flow.around(2) == Around()


def test_invalid_source_has_no_branches() -> None:
    assert ControlFlow("if rank == 0\n    work()\n").around(2) == Around()
    assert ControlFlow("work()\n").around(7) == Around()


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("main = rank == 0\nif main:\n    save()  # <-", "if main:  (line 2)"),
        ("def first():\n    return get_rank() == 0\nif not first():\n    save()  # <-", "if not first():  (line 3)"),
        ("self.main = not rank and on\nif x or self.main:\n    save()  # <-", "if x or self.main:  (line 2)"),
        ("me = int(os.environ['RANK'])\nif me == 0:\n    save()  # <-", "if me == 0:  (line 2)"),
        ("me = os.environ.get('RANK', '0')\nif x and '0' == me:\n    save()  # <-", "if x and '0' == me:  (line 2)"),
        (
            "if mesh.get_local_rank('tensor') == 0:\n    save()  # <-",
            "if mesh.get_local_rank('tensor') == 0:  (line 1)",
        ),
        ("me = mesh.get_coordinate()\nif me == [0, 0]:\n    save()  # <-", "if me == [0, 0]:  (line 2)"),
        ("me = dist.get_global_rank(group, 0)\nif me == 0:\n    save()  # <-", ""),
        ("self.me = dist.get_rank()\nif self.me > 0:\n    save()  # <-", "if self.me > 0:  (line 2)"),
        ("me = trainer.global_rank\nif me in (0, 1):\n    save()  # <-", "if me in (0, 1):  (line 2)"),
        ("main = trainer.is_global_zero\nif main and x:\n    save()  # <-", "if main and x:  (line 2)"),
        ("main = is_main_process()\nif not main:\n    save()  # <-", "if not main:  (line 2)"),
        ("some = is_due() or rank == 1\nif some:\n    save()  # <-", ""),
        ("some = not (is_due() and rank == 1)\nif some:\n    save()  # <-", ""),
        ("some = not (is_due() or rank == 1)\nif some:\n    save()  # <-", "if some:  (line 2)"),
        ("some = rank == 0 or rank == 4\nif some:\n    save()  # <-", "if some:  (line 2)"),
        ("size = int(os.environ['WORLD_SIZE'])\nif size == 1:\n    save()  # <-", ""),
        ("me = seeds(rank)\nif me == 0:\n    save()  # <-", ""),
        ("me = rank\nme += 1\nme = names[0]\nif me == 0:\n    save()  # <-", ""),
        ("rows = load(rank)\nif rows:\n    save()  # <-", ""),
        ("main = rank == 0\nmain = files\nif main:\n    save()  # <-", ""),
    ],
)
def test_a_variable_holding_a_rank_test_is_resolved(source: str, test: str) -> None:
    assert around(source).rank_condition == test


GIVEN = "self.writer = None\nif rank == 0:\n    self.writer = Writer()\n"
JUMPED = "def begin():\n    writer = None\n    if rank:\n        return\n    writer = Writer()\n"


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (f"{GIVEN}if self.writer is not None:\n    save()  # <-", "if self.writer is not None:  (line 4)"),
        (f"{GIVEN}if self.writer and due:\n    save()  # <-", "if self.writer and due:  (line 4)"),
        (
            f"{GIVEN}def write():\n    if not self.writer:\n        return\n    save()  # <-",
            "if not self.writer:  (line 5)",
        ),
        (
            f"{GIVEN}def write():\n    if self.writer is None or over:\n        return\n    save()  # <-",
            "if self.writer is None or over:  (line 5)",
        ),
        (
            f"{GIVEN}def write():\n    if over or not self.writer:\n        return\n    save()  # <-",
            "if over or not self.writer:  (line 5)",
        ),
        (
            f"{GIVEN}if over or not self.writer:\n    pass\nelse:\n    save()  # <-",
            "else of if over or not self.writer:  (line 4)",
        ),
        (f"{JUMPED}    if writer:\n        save()  # <-", "if writer:  (line 6)"),
        ("writer = Writer() if main_rank == 0 else None\nif writer:\n    save()  # <-", ""),
        ("writer = Writer() if rank == 0 else None\nif writer:\n    save()  # <-", "if writer:  (line 2)"),
        (
            "class A:\n    w: Any = None\n    def b(self):\n        if rank == 0:\n            self.w = W()\n"
            "        if self.w:\n            save()  # <-",
            "if self.w:  (line 6)",
        ),
        (f"{GIVEN}self.writer = Writer()\nif self.writer:\n    save()  # <-", ""),
        (f"{GIVEN}if self.writer.due:\n    save()  # <-", ""),
        (f"{GIVEN}if self.writer == 3:\n    save()  # <-", ""),
        ("x = None\nif rank == 0:\n    x = 1\nfor x in rows:\n    pass\nif x:\n    save()  # <-", ""),
        ("def f(x):\n    x = None\n    if rank == 0:\n        x = 1\n    if x:\n        save()  # <-", ""),
        ("if rank == 0:\n    x = 1\nif x:\n    save()  # <-", ""),
        ("x = None\nif rank == 0:\n    x = 1\nelse:\n    x = 2\nif x:\n    save()  # <-", ""),
        ("x = None\nif rank == 0:\n    x = 1\nif rank:\n    x = 2\nif x:\n    save()  # <-", ""),
        ("x = None\nx = 1 if rank == 0 else 2\nif x:\n    save()  # <-", ""),
        (
            "class A:\n    def a(self):\n        self.x = None\n        if rank > 9:\n            raise ValueError\n"
            "        self.x = 1\n    def b(self):\n        if self.x:\n            save()  # <-",
            "",
        ),
        (f"{GIVEN}if self.writer or due:\n    save()  # <-", ""),
        (f"{GIVEN}if self.writer is not None or due:\n    save()  # <-", ""),
        (f"{GIVEN}if self.writer is None or due:\n    save()  # <-", ""),
        (f"{GIVEN}def write():\n    if self.writer is None or due:\n        save()  # <-\n        return", ""),
        (f"{GIVEN}def write():\n    if due or not self.writer:\n        save()  # <-\n        return", ""),
        (
            f"{GIVEN}def write():\n    if not self.writer or due:\n        pass\n    else:\n        return\n"
            "    save()  # <-",
            "",
        ),
        (f"{GIVEN}net.writer = Writer()\nif self.writer:\n    save()  # <-", ""),
        (f"{GIVEN}import fused\nfused = None\nif rank:\n    fused = 1\nif fused:\n    save()  # <-", ""),
        ("def f():\n    x = None\n    if rank:\n        x = 1\ndef g():\n    if x:\n        save()  # <-", ""),
    ],
)
def test_a_test_of_what_only_some_ranks_have_is_a_condition_on_the_rank(source: str, test: str) -> None:
    assert around(source).rank_condition.removeprefix("past return under ") == test


def test_a_jump_under_a_rank_condition_applies_to_some_ranks() -> None:
    (jump,) = around("""
        def on_train_epoch_end(self, trainer):
            if trainer.is_global_zero:
                board = self.board(trainer)
                if board is None:
                    return
            trainer.strategy.barrier()  # <-
    """).branches
    assert (jump.line, jump.on, jump.within) == (5, Decides.VALUE, "if trainer.is_global_zero:  (line 2)")
    (plain,) = around("""
        def on_train_epoch_end(self, trainer):
            if trainer.is_global_zero:
                return
            trainer.strategy.barrier()  # <-
    """).branches
    assert (plain.on, plain.within) == (Decides.RANK, "")


@pytest.mark.parametrize(("failures", "is_known"), [(1, True), (9, False)])
def test_a_parser_disturbed_by_another_thread_is_retried(
    failures: int, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser counts the recursion of all threads in one place (cpython#106905)."""
    parse, left = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * failures

    def disturbed(source: str) -> ast.Module:
        if left:
            raise left.pop()
        return parse(source)

    monkeypatch.setattr(ast, "parse", disturbed)
    flow = ControlFlow(f"if is_global_zero:\n    save()  # disturbed {failures} times\n")
    assert bool(flow.around(2).rank_condition) == is_known


def test_threads_that_ask_at_once_get_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What names mean in the file is found by the first, and is known to the second when it is complete."""
    source = """
    class Module:
        def __init__(self):
            self.writer = None
            if self.global_rank == 0:
                self.writer = open("log")

        def step(self):
            if self.writer is not None:
                self.log()
    """
    flow = ControlFlow(dedent(source))
    seen: list[Around] = []
    threads: list[threading.Thread] = []
    find = control_flow.given_beside_none

    def disturbed(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
        if not threads:
            threads.append(threading.Thread(target=lambda: seen.append(flow.around(10))))
            threads[0].start()
            threads[0].join()
        return find(body)

    monkeypatch.setattr(control_flow, "given_beside_none", disturbed)
    assert seen == [] and flow.around(10).rank_condition == "if self.writer is not None:  (line 9)"
    assert seen == [flow.around(10)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("    if ready:  # on all ranks", "if ready:"),
        ("if word == '# 1':", "if word == '# 1':"),
        ("it's # 1 of 2", "it's # 1 of 2"),
        ('words = """one # 1', 'words = """one # 1'),
        ("while look(  # for it", "while look("),
    ],
    ids=["a comment", "in a string", "within a string", "the beginning of a string", "an open bracket"],
)
def test_a_comment_is_no_part_of_a_line(line: str, code: str) -> None:
    assert without_comment(line) == code


@pytest.mark.parametrize(
    ("test", "jump", "differs"),
    [
        ("loss > limit", "return", True),
        ("loss>limit", "return", True),
        ("self.training and random() < rate", "continue", True),
        ("kind == 3", "return", False),
        ("kind == 3", "break", True),
        ("len(boxes) < limit", "return", False),
        ("mask.sum() < limit", "return", False),
        ("rows.shape[0] < limit", "return", False),
        ("count > 0", "return", False),
        ("1 > count", "return", False),
        ("rank > 1", "return", False),
        ("rank > 1", "break", False),
    ],
)
def test_ranks_differ_in_the_condition_of_a_jump_where_it_is_a_limit_or_leaves_a_loop(
    test: str, jump: str, differs: bool
) -> None:
    """Not where there is no data, and not in a condition on the rank."""
    source = f"""
    def step(rank, items):
        for item in items:
            if {test}:
                {jump}
            reduce(item)  # <-
    """
    (found,) = (one for one in around(source).branches if one.jump)
    assert (found.line, found.differs_at) == (4, 3 if differs else 0)


def test_under_a_condition_on_the_rank_a_limit_is_not_what_ranks_differ_in() -> None:
    source = """
    def step(rank, loss):
        if rank == 0:
            if loss > limit:
                return
        reduce(loss)  # <-
    """
    (found,) = around(source).branches
    assert (found.jump, found.within, found.differs_at) == ("return", "if rank == 0:  (line 2)", 0)
