"""Programs of tests, which run while one another waits: started when the first of their outcomes is asked for."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

# Of one file, if it says nothing else. Each takes a core or two until it has started, and then it mostly waits.
AT_ONCE = 4
# Whose ``sitecustomize.py`` the interpreters run that tests start.
FRESH = Path(__file__).with_name("fresh")

# A thread of torch that has done its part spins until all others have, which on a busy machine takes ten times what
# they compute: here it sleeps. Read where torch is loaded, which is after this, also by the programs of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FRESH), os.environ.get("PYTHONPATH")]))
    # They would compile this package each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.addinivalue_line("markers", "program(*arguments): the program whose outcome the test is given")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before torch 2.11 the first test that looks at a recorder would make it, off, for all others and their forks."""
    if (recorders := sys.modules.get("lightning_ncclsafe._torch.recorders")) is not None:
        recorders.make(recorders.DEFAULT_SIZE)


# What all processes of the suite fork their programs from. It ends when the last of them has ended.
shared: list[Warm] = []


@pytest.hookimpl(optionalhook=True)
def pytest_item_before_forks(item: pytest.Function) -> None:
    """Beside the collection, which would leave a core idle."""
    if not shared and "warm" in item.fixturenames:
        shared.append(Warm())


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    if shared:
        yield shared[0]
        return
    warm = Warm()
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def marks(request: pytest.FixtureRequest) -> list[pytest.Mark]:
    """Those of the programs of all selected tests of a file."""
    items = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
    return [mark for item in items for mark in item.iter_markers("program")]


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, marks: list[pytest.Mark], warm: Warm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, ...], "Future[Any]"]]:
    """The outcomes of all programs that the selected tests of a file are marked with, by their arguments.

    The file says with ``run_program(warm, folder, *arguments)`` how they are run, each once, and with ``FIRST``
    the arguments of those that take longest; ``AT_ONCE`` is how many may run, and ``NEEDS`` names fixtures that
    ``run_program`` is given, too.
    """
    wanted = dict.fromkeys(mark.args for mark in marks)
    first = [arguments for arguments in request.module.FIRST if arguments in wanted]
    needs = {name: request.getfixturevalue(name) for name in getattr(request.module, "NEEDS", ())}
    run = partial(request.module.run_program, **needs)
    pool = ThreadPoolExecutor(getattr(request.module, "AT_ONCE", AT_ONCE))
    try:
        yield {
            arguments: pool.submit(run, warm, tmp_path_factory.mktemp("program"), *arguments)
            for arguments in dict.fromkeys([*first, *wanted])
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, programs: dict[tuple[str, ...], "Future[Any]"]) -> Any:
    """What became of the program of the test's mark."""
    (mark,) = request.node.iter_markers("program")
    return programs[mark.args].result()
