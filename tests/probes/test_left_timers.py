"""Where a function returns while a timer runs that it has set, although it cancels the timer on a later line."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_ncclsafe.probes.source import scopes
from lightning_ncclsafe.probes.source.exit_calls import exit_calls

LIMITS = """
import signal

class Limit:
    def start(self):
        signal.alarm(5)

    def stop(self):
        signal.alarm(0)

def arm():
    signal.setitimer(signal.ITIMER_REAL, 5)

def disarm():
    signal.setitimer(signal.ITIMER_REAL, 0)
"""
DIRECT = """
import signal

def parse(text):
    signal.alarm(5)
    {}
    signal.alarm(0)
    return text
"""
OF_OBJECT = """
from limits import Limit

def parse(text):
    limit = Limit()
    limit.start()
    {}
    {}.stop()
    return text
"""
OF_FUNCTIONS = """
import limits

def parse(text):
    limits.arm()
    {}
    limits.disarm()
    return text
"""
FINALLY = """
import signal

def parse(text):
    signal.alarm(5)
    try:
        if not text:
            return None  # <- here
    finally:
        signal.alarm(0)
"""
EARLIER = """
import signal

def parse(text):
    if not text:
        return None
    signal.alarm(5)
    text = text.split()
    signal.alarm(0)
    return text
"""
LEFT = "if not text: return None  # <- here"
TRIED = f"try:\n        {LEFT}\n    except ValueError:\n        text = ''"
CLOSED = "\ndef run(text):\n    try:\n        parse(text)\n    finally:\n        signal.alarm(0)\n"
DONE = "\ndef done():\n    signal.alarm(0)\n"
SET, TIMER = "    signal.alarm(5)", "signal.setitimer(signal.ITIMER_PROF, 0)"
CANCELLED = "if not text:\n        signal.alarm(0)\n        return None"


def left_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, program: str) -> list[str]:
    """Where the timers of two files are left set, one for each timer that is known."""
    for name, text in (("__main__", program), ("limits", limits)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(scopes, "is_user_code", lambda file: file.startswith(str(tmp_path)))
    return [call.left_at for call in exit_calls()]


def of_class(limits: str) -> str:
    return limits.partition("def arm")[0]


def of_functions(limits: str) -> str:
    return "import signal\n\ndef arm" + limits.partition("def arm")[2]


@pytest.mark.parametrize(
    ("limits", "program"),
    [
        ("", DIRECT.format(LEFT)),
        (of_class(LIMITS), OF_OBJECT.format(LEFT, "limit")),
        (
            of_class(LIMITS),
            OF_OBJECT.format(f"try:\n        {LEFT}\n    except ValueError:\n        text = ''", "limit"),
        ),
        (of_functions(LIMITS), OF_FUNCTIONS.format(LEFT)),
    ],
)
def test_a_way_out_that_leaves_a_timer_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, program: str
) -> None:
    line = next(number for number, text in enumerate(program.splitlines(), 1) if text.endswith("# <- here"))
    assert left_at(tmp_path, monkeypatch, limits, program) == [f"{tmp_path}/__main__.py:{line} in parse"]


@pytest.mark.parametrize(
    ("limits", "program"),
    [
        ("", FINALLY),
        ("", EARLIER),
        ("", DIRECT.format("text = text.strip()")),
        ("", DIRECT.format("if not text: signal.alarm(0); return None")),
        ("", DIRECT.format("try:\n        text = text.split()\n    except TimeoutError:\n        return None")),
        ("", DIRECT.format(LEFT.replace("return None", "raise ValueError(text)"))),
        ("", DIRECT.format(LEFT).replace(SET, "    if len(text) > 9: signal.alarm(5)")),
        ("", DIRECT.format(LEFT).replace("signal.alarm(0)", TIMER)),
        (
            "",
            DIRECT.format(LEFT).replace(
                "    signal.alarm(5)", "    stack.callback(signal.alarm, 0)\n    signal.alarm(5)"
            ),
        ),
        (
            "",
            DIRECT.format(LEFT)
            + "\ndef run(text):\n    try:\n        parse(text)\n    finally:\n        signal.alarm(0)\n",
        ),
        (of_class(LIMITS), OF_OBJECT.format(LEFT, "limit").replace("limit = Limit()", "limit = Profiler(Limit)")),
        ("", DIRECT.format(f"while text:\n        signal.alarm(0)\n        break\n    {LEFT}")),
        ("", DIRECT.format(LEFT).replace(SET, "    text and signal.alarm(5)")),
        ("", DIRECT.format("if not text:\n        done()\n        return None") + DONE),
        ("", DIRECT.format(LEFT) + "\ndef run(text):\n    parse(text)\n    signal.alarm(0)\n"),
        (of_class(LIMITS) + "    def __exit__(self, *error):\n        self.stop()\n", OF_OBJECT.format(LEFT, "limit")),
        (of_class(LIMITS), OF_OBJECT.format(LEFT, "limit").replace("from limits", "from threading")),
        (of_functions(LIMITS), "import profiling\n" + OF_FUNCTIONS.format(LEFT).replace("limits.", "profiling.")),
        (of_class(LIMITS), OF_OBJECT.format(f"stack.callback(limit.stop)\n    {LEFT}", "limit")),
        ("", DIRECT.format(CANCELLED)),
        ("", DIRECT.format(f"{LEFT}\n    if len(text) > 9: return text")),
        ("", DIRECT.format(f"def inner():\n        {LEFT}")),
        (of_class(LIMITS), OF_OBJECT.format(LEFT, "other")),
        (of_class(LIMITS), OF_OBJECT.format(LEFT, "limit").replace("Limit", "Clock")),
        (of_functions(LIMITS), OF_FUNCTIONS.format(LEFT).replace("limits.disarm", "disarm")),
    ],
)
def test_a_timer_that_is_cancelled_or_that_another_function_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, program: str
) -> None:
    assert left_at(tmp_path, monkeypatch, limits, program) == [""]


def test_of_several_timers_none_is_left_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_at(tmp_path, monkeypatch, LIMITS, DIRECT.format(LEFT)) == ["", "", ""]
