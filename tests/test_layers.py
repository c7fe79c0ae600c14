"""Imports point one way, and what is plain Python stays so: a contract that is read from the source."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from parsed import parsed, statements_of

import lightning_ncclsafe

PACKAGE = "lightning_ncclsafe"
FOLDER = Path(lightning_ncclsafe.__file__).parent

# From the bottom up. A module may import what is in lower layers and in its own package; packages of one layer do not
# import each other. A name is that of a module, or of a package with all that is in it, except for parts of it that
# have their own entry.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("code", "facts", "recorder"),
    ("_lightning", "_torch", "errors", "settings"),
    ("exchange", "rules.kit", "timing"),
    ("probes", "rules.agreement", "rules.hang", "rules.preflight"),
    ("rules.recorded",),
    ("rules",),
    ("report",),
    ("checkpoints", "collectives", "guard", "loaders", "loggers", "preflight", "reading", "sigterm"),
    ("inspecting", "strategies"),
    ("callbacks", "running"),
    ("cli",),
    ("lightning", "pytorch_lightning"),
    (PACKAGE,),
    ("__main__",),
)
# The only modules that import torch, on any line; all others get what they need from these.
IMPORTS_TORCH = {
    "_torch.build",
    "_torch.loading",
    "_torch.process_groups",
    "_torch.recorders",
    "_torch.sent_together",
    "_torch.sharded",
    "_torch.stores",
    "_torch.tensors",
    "checkpoints.position_file",
    "checkpoints.loader_position",
    "checkpoints.position",
    "collectives.results",
    "loggers.capture",
    "loggers.csv_backend",
    "loggers.events",
    "loggers.tensorboard_backend",
    "probes.data.loaders",
    "probes.data.plain_values",
    "probes.data.random_state",
    "probes.data.reading",
    "probes.data.rounded_values",
}
# Of Lightning, each imports the package of its name; others ask which package something is of.
IMPORTS_LIGHTNING = {"lightning": "lightning", "pytorch_lightning": "pytorch_lightning"}
ASKS_ABOUT_LIGHTNING = {
    "callbacks.collective_timer",
    "callbacks.declared",
    "callbacks.logger_offload",
    "callbacks.recommended",
    "checkpoints.boundary",
    "loggers.starting",
    "running.guarding",
    "strategies.guarded",
    "strategies.launchers",
    PACKAGE,
}

Sources = dict[str, str]


def sources(folder: Path = FOLDER) -> Sources:
    """The source of every module by its name within the package; the package itself has its own."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or PACKAGE] = path.read_text()
    return found


@cache  # every module is asked about again and again
def imported(source: str) -> frozenset[str]:
    """Everything that may be the name of a module, of imports on any line but those for type checkers only."""
    found = set[str]()
    for node in statements_of(parsed(source), is_for_type_checkers):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def own_imports(source: str, known: Sources) -> set[str]:
    """The package's own modules that a module imports: ``a.b.C`` is module ``a.b`` unless there is one of that name."""
    found = set()
    for name in imported(source):
        if name.split(".")[0] == PACKAGE:
            inner = name.removeprefix(PACKAGE).removeprefix(".")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            found.add(inner or PACKAGE)
    return found


def home(module: str) -> tuple[int, str]:
    """Layer and name in the table above of a module."""
    places = {name: level for level, names in enumerate(LAYERS) for name in names}
    name = module
    while name not in places:
        name = name.rpartition(".")[0]
        if not name:
            raise LookupError(f"{module} is in no layer: add it to LAYERS")
    return places[name], name


def upward(modules: Sources) -> list[str]:
    """Imports that point sideways or up."""
    wrong = []
    for module, source in modules.items():
        level, name = home(module)
        for other in own_imports(source, modules):
            other_level, other_name = home(other)
            if other_level >= level and other_name != name:
                wrong.append(f"{module} imports {other}")
    return sorted(wrong)


def importers(modules: Sources, *roots: str) -> set[str]:
    return {name for name, source in modules.items() if any(i.split(".")[0] in roots for i in imported(source))}


def cycle(modules: Sources) -> list[str]:
    # That a package's __init__ is run first is no import of what it gathers.
    graph = {name: own_imports(source, modules) - {name} for name, source in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def namesakes(modules: Sources) -> dict[str, list[str]]:
    """Names that several classes have, with the modules that these are in."""
    homes: dict[str, list[str]] = {}
    for name, source in modules.items():
        for node in statements_of(parsed(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


# Modules with nothing in them, for the tests of these tests.
HOLLOW = dict.fromkeys([*(name for names in LAYERS for name in names), "probes.rank", "report.text"], "")


def test_imports_point_in_one_direction() -> None:
    assert upward(sources()) == []


def test_no_import_cycle_exists() -> None:
    assert cycle(sources()) == []


def test_no_class_name_is_used_twice() -> None:
    """Except the public classes, which exist once for each Lightning package."""
    assert namesakes({name: source for name, source in sources().items() if name != "pytorch_lightning"}) == {}


def test_every_name_in_the_table_exists() -> None:
    assert {name for names in LAYERS for name in names} <= set(sources())


def test_torch_and_lightning_are_imported_only_where_listed() -> None:
    assert importers(sources(), "torch") == IMPORTS_TORCH
    found = sources()
    for module, package in IMPORTS_LIGHTNING.items():
        assert importers(found, package) == {module}
    assert importers(found, "lightning_fabric") == set()
    asking = {name for name, source in found.items() if "_lightning" in own_imports(source, found)}
    assert asking == ASKS_ABOUT_LIGHTNING


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("facts", "from lightning_ncclsafe.rules import judge", "facts imports rules"),
        ("rules.kit.new", "from lightning_ncclsafe.rules import hang", "rules.kit.new imports rules.hang"),
        (
            "rules.hang.new",
            "from lightning_ncclsafe.report.text import render_text",
            "rules.hang.new imports report.text",
        ),
        ("report.new", "import lightning_ncclsafe.guard.new", "report.new imports guard"),
        ("exchange.new", "from lightning_ncclsafe.probes import rank", "exchange.new imports probes.rank"),
        ("errors", "from lightning_ncclsafe import settings", "errors imports settings"),
        ("guard", "from lightning_ncclsafe import SafeDDP", f"guard imports {PACKAGE}"),
        ("probes.new", "def f():\n    from lightning_ncclsafe.guard.new import Guard", "probes.new imports guard"),
    ],
)
def test_an_upward_import_is_found(module: str, line: str, said: str) -> None:
    assert upward(HOLLOW | {module: line}) == [said]


def test_a_module_without_a_layer_is_found() -> None:
    with pytest.raises(LookupError, match="utils is in no layer"):
        upward(HOLLOW | {"utils": ""})


def test_a_cycle_is_found() -> None:
    modules = HOLLOW | {"rules.a": "import lightning_ncclsafe.rules.b", "rules.b": "import lightning_ncclsafe.rules.a"}
    assert set(cycle(modules)) == {"rules.a", "rules.b"}


def test_a_duplicate_class_name_is_found() -> None:
    assert namesakes({"a": "class Frame: ...", "b": "class Frame: ...", "c": "class Line: ..."}) == {
        "Frame": ["a", "b"]
    }


def test_an_import_of_torch_is_found() -> None:
    assert importers({"new": "def f():\n    import torch.cuda"}, "torch") == {"new"}
    assert importers({"new": "if TYPE_CHECKING:\n    import torch"}, "torch") == set()


def loaded_with(statement: str) -> list[str]:
    """Heavy packages that are there after a statement in a fresh interpreter."""
    heavy = (
        "torch",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "torchmetrics",
        "numpy",
        "psutil",
        "rich",
        "jinja2",
    )
    script = f"import sys\n{statement}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_rules_and_reports_need_neither_torch_nor_lightning() -> None:
    names = (
        ".facts.findings",
        ".facts.codec",
        ".errors",
        ".rules.judging",
        ".report.text",
        ".report.json",
        ".report.folder",
    )
    assert loaded_with("; ".join(f"import {PACKAGE}{name}" for name in names)) == []


def test_the_command_line_needs_neither_torch_nor_lightning() -> None:
    assert loaded_with(f"import {PACKAGE}.cli.logs") == []


def test_a_heavy_import_is_detected() -> None:
    assert loaded_with(f"import {PACKAGE}.probes.host.resources") == ["psutil"]


def test_public_names_are_available() -> None:
    from lightning_ncclsafe import strategies
    from lightning_ncclsafe.errors import CollectiveTimeoutError
    from lightning_ncclsafe.lightning import SafeDDP

    assert lightning_ncclsafe.SafeDDP is strategies.SafeDDP is SafeDDP
    assert lightning_ncclsafe.CollectiveTimeoutError is CollectiveTimeoutError
    assert set(lightning_ncclsafe.__all__) <= set(dir(lightning_ncclsafe))
    assert all(hasattr(lightning_ncclsafe, name) for name in lightning_ncclsafe.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_ncclsafe' has no attribute 'SafeDPP'"):
        lightning_ncclsafe.SafeDPP  # noqa: B018 - asking is the test
    with pytest.raises(ImportError, match="cannot import name 'SafeDPP'"):
        from lightning_ncclsafe import SafeDPP  # noqa: F401
