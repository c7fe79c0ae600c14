"""Everything that is known of torch, Lightning and others by name exists in what is installed, in these versions."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from parsed import statements_of

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import Code, CodePlace, Package, glob

TABLE = {name: code for name, code in vars(libraries).items() if isinstance(code, Code)}
PLACES = list(dict.fromkeys(place for code in TABLE.values() for place in code.places))
# Whose code must be there, under one of its names.
NEEDED = ("torch", "lightning")


def folder_of(name: str) -> Path | None:
    """Where a package is installed; Python's own library has no name."""
    if not name:
        return Path(sysconfig.get_path("stdlib"))
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # of what it is a part of
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def version_of(name: str) -> str:
    distribution = {"lightning_fabric": "lightning-fabric", "pytorch_lightning": "pytorch-lightning"}
    try:
        return version(distribution.get(name, name.partition(".")[0]))
    except PackageNotFoundError:  # a part of another distribution
        return version("pytorch-lightning")


@cache
def files_of(folder: Path) -> tuple[str, ...]:
    return tuple(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


@cache
def functions_of(file: Path) -> frozenset[str]:
    nodes = statements_of(ast.parse(file.read_bytes()))
    return frozenset(node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def missing(place: CodePlace, folder: Path) -> list[str]:
    """What of a place is not there: its file, or names of functions that no such file has."""
    is_place = re.compile(glob(place.file)).fullmatch
    files = [folder / file for file in files_of(folder) if is_place(file)]
    if not files:
        return [place.file]
    found = {name for file in files for name in functions_of(file)} if place.functions or place.but else set()
    names = (*place.functions, *place.but)
    return [name for name in names if not any(map(re.compile(glob(name)).fullmatch, found))]


def resolved() -> Iterator[tuple[CodePlace, str]]:
    for place in PLACES:
        yield from ((place, name) for name in place.package.names or ("",))


def words(place: CodePlace, name: str) -> str:
    return " ".join([name or "python", place.file, *place.functions, *(f"but {other}" for other in place.but)])


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(*one, id=" ".join([one[1] or "python", one[0].file, *one[0].functions, *one[0].but]))
        for one in resolved()
    ],
)
def test_known_code_exists(place: CodePlace, name: str) -> None:
    folder = folder_of(name)
    if folder is None:
        pytest.skip(f"{name} is not installed")
    absent = missing(place, folder)
    if not place.versions or SpecifierSet(place.versions, prereleases=True).contains(version_of(name)):
        assert absent == []
    else:
        assert absent, f"{name} {version_of(name)} has it, too: {place.versions} is wrong"


@pytest.mark.parametrize("name", NEEDED)
def test_torch_and_lightning_are_checked(name: str) -> None:
    names = [known for place in PLACES for known in place.package.names if name in known]
    assert any(folder_of(known) is not None for known in names)


def test_missing_code_is_found() -> None:
    torch = libraries.COLLECTIVES.places[0].package
    folder = folder_of("torch")
    assert folder is not None
    c10d = "distributed/distributed_c10d.py"
    assert missing(CodePlace(package=torch, file="distributed/no_such.py"), folder) == ["distributed/no_such.py"]
    assert missing(CodePlace(package=torch, file=c10d, functions=("new_*", "no_such_*")), folder) == ["no_such_*"]
    assert missing(CodePlace(package=torch, file=c10d, functions=("new_group",), but=("nowhere",)), folder) == [
        "nowhere"
    ]


SITE = "/venv/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("code", "file", "function", "is_in"),
    [
        (libraries.TRAINER_RUN, f"{SITE}/lightning/pytorch/trainer/trainer.py", "_run", True),
        (libraries.TRAINER_RUN, f"{SITE}/pytorch_lightning/trainer/trainer.py", "_run", True),
        (libraries.TRAINER_RUN, "C:\\venv\\Lib\\pytorch_lightning\\trainer\\trainer.py", "_run", True),
        (libraries.TRAINER_RUN, f"{SITE}/pytorch_lightning/trainer/trainer.py", "_run_stage", False),
        (libraries.TRAINER_RUN, f"{SITE}/my_pytorch_lightning/trainer/trainer.py", "_run", False),
        (libraries.SAVING_SHARDED, "torch/distributed/checkpoint/state_dict_saver.py", "save", True),
        (libraries.SAVING_SHARDED, "torch/distributed/checkpoint/state_dict_loader.py", "load", False),
        (libraries.SAVING_SHARDED, "torch/distributed/checkpoint/planner.py", "_load_state_dict", False),
        (libraries.GROUP_CREATION, "/opt/torch/distributed/distributed_c10d.py", "_new_group_with_tag", True),
        (libraries.GROUP_CREATION, "/opt/torch/distributed/distributed_c10d.py", "broadcast", False),
        (libraries.LOG_WRITERS, f"{SITE}/wandb/sdk/lib/mailbox.py", "wait", True),
        (libraries.LOG_WRITERS, "/home/me/wandb/agents.py", "wait", False),
        (libraries.WAITS_FOR_PROCESSES, "/usr/lib/python3.12/queue.py", "get", True),
        (libraries.WAITS_FOR_PROCESSES, "/usr/lib/python3.12/my_queue.py", "get", False),
        (libraries.DEBUGGERS, "/opt/pycharm/helpers/pydev/pydevd_file_utils.py", "f", True),
        (libraries.DEBUGGERS, f"{SITE}/IPython/core/debugger.py", "cmdloop", True),
        (libraries.DEBUGGERS, "/usr/lib/python3.12/code.py", "raw_input", True),
        (libraries.DEBUGGERS, "/home/me/code.py", "train", False),
        (libraries.DEBUGGERS, f"{SITE}/IPython/terminal/embed.py", "mainloop", True),
    ],
)
def test_a_frame_is_recognised_by_the_end_of_its_path(code: Code, file: str, function: str, is_in: bool) -> None:
    assert code.has(file, function) is is_in


def test_a_star_is_the_only_wildcard() -> None:
    package = Package(names=("one",), folder="/one/")
    place = CodePlace(package=package, file="a.b+c.py", functions=("f*",))
    assert place.has("/one/a.b+c.py", "f1")
    assert not place.has("/one/aXb+c.py", "f1")
    assert not place.has("/one/a.b+c.py", "g")
