"""The statements in the user's source that end a process, however they are written, and what only looks like one."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_ncclsafe.probes.source import exit_calls as searched
from lightning_ncclsafe.probes.source import scopes
from lightning_ncclsafe.probes.source.exit_calls import exit_calls, exit_calls_in

HEAD = "import os, resource, signal, sys\nfrom os import _exit as leave\nimport os as system\n"


def found_in(path: Path, source: str) -> list[tuple[int | None, str, bool]]:
    path.write_text(source)
    return [(call.status, call.signal, call.raises) for call in exit_calls_in(str(path)) or ()]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("os._exit(124)", (124, "", False)),
        ("os._exit(-1)", (255, "", False)),
        ("os._exit(status=3)", (3, "", False)),
        ("leave(3)", (3, "", False)),
        ("system._exit(3)", (3, "", False)),
        ("os._exit(code)", (None, "", False)),
        ("sys.exit()", (0, "", True)),
        ("sys.exit(2)", (2, "", True)),
        ("sys.exit('no display')", (1, "", True)),
        ("exit()", (0, "", True)),
        ("quit(4)", (4, "", True)),
        ("raise SystemExit", (0, "", True)),
        ("raise SystemExit(5)", (5, "", True)),
        ("os.abort()", (None, "SIGABRT", False)),
        ("os.kill(os.getpid(), signal.SIGKILL)", (None, "SIGKILL", False)),
        ("os.kill(os.getpid(), 9)", (None, "SIGKILL", False)),
        ("signal.raise_signal(signal.SIGTERM)", (None, "SIGTERM", False)),
        ("signal.alarm(seconds)", (None, "SIGALRM", False)),
        ("signal.setitimer(signal.ITIMER_REAL, 0.5)", (None, "SIGALRM", False)),
        ("signal.setitimer(signal.ITIMER_PROF, limit, 1)", (None, "SIGPROF", False)),
        ("run = lambda: os._exit(6)", (6, "", False)),
        ("resource.setrlimit(resource.RLIMIT_CPU, (5, 6))", (None, "SIGXCPU", False)),
        ("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", None),
        ("signal.alarm(0)", None),
        ("signal.setitimer(signal.ITIMER_REAL, 0)", None),
        ("signal.setitimer(which, 3)", None),
        ("os.kill(other, signal.SIGKILL)", None),
        ("os.kill(os.getpid(), number)", None),
        ("parser.exit(2)", None),
        ("self._exit(2)", None),
        ("loop.quit()", None),
        ("task.abort()", None),
        ("print('os._exit(1)')", None),
        ("raise ValueError(1)", None),
    ],
)
def test_statements_that_end_a_process(
    tmp_path: Path, statement: str, expected: tuple[int | None, str, bool] | None
) -> None:
    source = f"{HEAD}def watch(self, code):\n    {statement}\n"
    assert found_in(tmp_path / "train.py", source) == ([expected] if expected is not None else [])


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(main())\n",
        "import os\ndef work():\n    if os.fork() == 0:\n        os._exit(0)\n",
        "import os\ndef run():\n    def child():\n        os._exit(0)\n    if os.fork() == 0:\n        child()\n",
        "def exit(): ...\ndef leave():\n    exit()\n",
        "from app import exit\ndef leave():\n    exit()\n",
        "def leave(exit):\n    exit(1)\n",
        "import threading\nquit = threading.Event().set\ndef leave():\n    quit()\n",
        "import os\ndef broken(:\n    os._exit(1)\n",
    ],
)
def test_what_ends_no_process_that_trains(tmp_path: Path, source: str) -> None:
    assert found_in(tmp_path / "train.py", source) == []


def test_a_method_does_not_hide_the_function_of_its_name(tmp_path: Path) -> None:
    source = "class Tool:\n    def exit(self):\n        exit(3)\n"
    assert found_in(tmp_path / "train.py", source) == [(3, "", True)]


def test_a_part_of_a_package_is_imported_with_it(tmp_path: Path) -> None:
    source = "import os.path\ndef leave():\n    os._exit(3)\n"
    assert found_in(tmp_path / "train.py", source) == [(3, "", False)]


def test_the_place_is_that_of_the_statement(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\nclass Net:\n    def step(self):\n        def inner():\n            os._exit( 1 )\n")
    (call,) = exit_calls_in(str(path)) or ()
    assert (call.place, call.code) == (f"{path}:5 in inner", "os._exit(1)")


def load(monkeypatch: pytest.MonkeyPatch, *paths: Path, program: bool = True) -> None:
    """Only these files are loaded, and the first is the program."""
    for number, path in enumerate(paths):
        module = ModuleType("module")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__" if program and not number else f"of_user_{number}", module)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Two files of a program, of which each has one call, and all others are not the user's."""
    paths = [tmp_path / "train.py", tmp_path / "net.py"]
    for path in paths:
        path.write_text("import os\ndef watch():\n    os._exit(3)\n")
    monkeypatch.setattr(scopes, "is_user_code", lambda file: file.startswith(str(tmp_path)))
    return paths


def test_all_loaded_files_are_searched(monkeypatch: pytest.MonkeyPatch, own: list[Path]) -> None:
    load(monkeypatch, *own)
    assert sorted(call.place for call in exit_calls()) == sorted(f"{path}:3 in watch" for path in own)


def test_a_search_that_takes_too_long_finds_nothing(monkeypatch: pytest.MonkeyPatch, own: list[Path]) -> None:
    load(monkeypatch, *own)
    assert exit_calls(-1.0) == ()
    monkeypatch.setattr(searched, "_MOST_FILES", 1)
    assert exit_calls() == ()


@pytest.mark.parametrize("text", ["def watch(:\n    exit(4)\n", None])
def test_a_file_that_cannot_be_read_or_parsed_may_have_any_call(
    monkeypatch: pytest.MonkeyPatch, own: list[Path], tmp_path: Path, text: str | None
) -> None:
    other = tmp_path / "other.py"
    if text is not None:
        other.write_text(text)
    load(monkeypatch, *own, other)
    assert exit_calls() == ()


def test_an_empty_file_has_no_calls(monkeypatch: pytest.MonkeyPatch, own: list[Path], tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    load(monkeypatch, *own, tmp_path / "__init__.py")
    assert len(exit_calls()) == len(own)


def test_too_many_calls_are_none(monkeypatch: pytest.MonkeyPatch, own: list[Path]) -> None:
    load(monkeypatch, *own)
    monkeypatch.setattr(searched, "_MOST_CALLS", 1)
    assert exit_calls() == ()


def test_of_a_program_without_a_file_nothing_is_known(monkeypatch: pytest.MonkeyPatch, own: list[Path]) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    load(monkeypatch, *own, program=False)
    assert exit_calls() == ()


def test_a_module_that_is_loaded_lazily_is_not_loaded(monkeypatch: pytest.MonkeyPatch, own: list[Path]) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "of_user_lazy", Lazy("of_user_lazy"))
    load(monkeypatch, *own)
    assert len(exit_calls()) == len(own)
