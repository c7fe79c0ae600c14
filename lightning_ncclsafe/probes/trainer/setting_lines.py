"""Lines of the user's source that give the Trainer a setting, where the setting may differ between ranks.

These are arguments of the Trainer, also by way of the user's own functions and dictionaries, and assignments to its
attributes. Nothing is executed. A value that a function only passes on is followed to the calls of this function, and a
variable to its one assignment; what is computed from a value that each process has for itself, a temporary folder or a
time, is followed to that.
"""

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from lightning_ncclsafe.code.libraries import TRAINER
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.assignments import Given, assignments_of, different_for_each_process, variable
from lightning_ncclsafe.probes.source.scopes import (
    MOST_PLACES,
    AttributeSet,
    Scope,
    attributes_set,
    scope_of,
    scopes_in,
    scopes_of,
)
from lightning_ncclsafe.probes.source.syntax import LOOPS, argument_of, is_constant, last_line, name_of, source_text
from lightning_ncclsafe.probes.trainer.logged_keys import users_of

# All ranks wait while one reads the source, which may be on storage that hangs.
_MOST_S = 2.0
_reading = SideThread("ncclsafe-source")
_MOST_FILES = 8
_MOST_CALLERS = 4
_CHECKPOINT = "ckpt_path"
_START = ("first epoch", "first step", _CHECKPOINT)
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
# Arguments of the Trainer, and of its callback, that set others as well.
_ALSO_SETS = {
    "fast_dev_run": (
        *("max_epochs", "max_steps", "num_sanity_val_steps", "val_check_interval", "check_val_every_n_epoch"),
        *_LIMITS,
    ),
    "overfit_batches": ("limit_train_batches", "limit_val_batches"),
    "max_time": ("max_epochs",),
}
_SCHEDULER, _SCHEDULED = "GradientAccumulationScheduler", "accumulate_grad_batches"

SET_BY = {"first epoch": ("processed",)}
"""Attributes that set a setting under another name: the counter that ``current_epoch`` follows."""


class _Entered(NamedTuple):
    """A function of the user's that the main thread is in.

    Attributes:
        scope: Its source.
        line: The line that it is at.
        called: Name of the function that it has called there.
    """

    scope: Scope
    line: int
    called: str


class _Set(NamedTuple):
    """One place where a setting is passed by name.

    Attributes:
        name: The argument or key.
        line: Its line.
        value: The value; None if there is none in the source.
        to: The function that is called with it; ``"**"`` for a dictionary.
    """

    name: str
    line: int
    value: ast.expr | None
    to: str = ""


def setting_lines(trainer: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Where each setting may have got its value: ``"file:line in function"``, the first few.

    The functions that have called the Trainer come first; the others of their files, and of those of the module and the
    callbacks, count only where those show nothing. For the checkpoint, and what follows from it, it is the argument of
    the call of the Trainer that is under way.

    Args:
        trainer: The Trainer.
        names: The settings. Those without such a line are left out.
    """
    search = _Search(trainer, names)
    near = [*search.near()]
    shown = {setting for setting, _ in near}
    far = ((setting, place) for setting, place in search.far() if setting not in shown)
    found: dict[str, dict[str, None]] = {}
    for setting, place in itertools.chain(near, far, search.assigned(), search.start()):
        found.setdefault(setting, {})[place] = None
    return {setting: tuple(itertools.islice(places, MOST_PLACES)) for setting, places in found.items()}


def setting_line(trainer: Any, names: Iterable[str]) -> str:
    """The line that may have given the Trainer all of these settings; empty if it is not one alone.

    Does not raise, and waits for no longer than 2 s.
    """

    def search() -> str:
        places = {place for each in setting_lines(trainer, names).values() for place in each}
        return places.pop() if len(places) == 1 else ""

    with suppress(Exception):  # not essential, whatever the user's files are
        return _reading.call(search, _MOST_S)
    return ""


class _Search:
    """The search in the source for the settings of one Trainer."""

    def __init__(self, trainer: Any, names: Iterable[str]) -> None:
        self._calls = _entered_outside(trainer)
        self._entered = [one.scope for one in self._calls]
        self._settings: dict[str, set[str]] = {}
        for name in names:
            if name not in _START:
                self._settings.setdefault(name, set()).add(name)
        for argument, others in _ALSO_SETS.items():
            self._settings.setdefault(argument, set()).update(one for one in others if one in self._settings)
        self._attributes = {attribute: name for name, others in SET_BY.items() for attribute in others}
        files = dict.fromkeys(scope.file for scope in self._entered)
        words = frozenset({*self._settings, *self._attributes, _SCHEDULER})
        users = users_of(trainer)
        theirs = dict.fromkeys(scope.file for scope in scopes_in(users))
        files |= dict.fromkeys(file for file in theirs if _mentions(file, words))
        self._scopes = [scope for file in itertools.islice(files, _MOST_FILES) for scope in scopes_of(file)]
        makers = (scope.name for scope in self._scopes if any(map(_makes_trainer, scope.nodes)))
        self._makers = {name for name in makers if not name.startswith("<")}
        self._under_way = {(one.scope.file, line): one.called for one in self._calls for line in _lines_of(one)}

    def near(self) -> Iterator[tuple[str, str]]:
        """What the functions that have called the Trainer give it: setting and place."""
        return self._given_in(self._entered)

    def far(self) -> Iterator[tuple[str, str]]:
        """What the other functions of the files give to a Trainer."""
        return self._given_in([scope for scope in self._scopes if scope not in self._entered])

    def assigned(self) -> Iterator[tuple[str, str]]:
        """Assignments to attributes of a Trainer and its loops."""
        for scope in self._scopes:
            for one in _assignments(scope, {*self._settings, *self._attributes}):
                yield self._attributes.get(one.name, one.name), scope.place(one.line)

    def start(self) -> Iterator[tuple[str, str]]:
        """The checkpoint, in the call that is under way."""
        for one in self._calls:
            lines = _lines_of(one)
            called = (call for call in one.scope.calls([one.called]) if call.lineno in lines)
            for keyword in itertools.chain.from_iterable(call.keywords for call in called):
                if (
                    keyword.arg == _CHECKPOINT
                    and not is_constant(keyword.value, None)
                    and not one.scope.passes_on(keyword.value)
                ):
                    places = [*self._origins(one.scope, keyword.value, keyword.lineno)]
                    yield from ((name, place) for name in _START for place in places)

    def _given_in(self, scopes: list[Scope]) -> Iterator[tuple[str, str]]:
        for scope in scopes:
            takes_dictionary = any(self._takes_dictionary(scope, node) for node in scope.nodes)
            for one in itertools.chain.from_iterable(map(_arguments, scope.nodes)):
                settings = self._settings.get(one.name, ())
                is_it = takes_dictionary if one.to == "**" else self._is_for_trainer(scope, one)
                if settings and is_it and one.value is not None and not _is_literal(one.value):
                    places = [*self._origins(scope, one.value, one.line)]
                    yield from ((setting, place) for setting in settings for place in places)

    def _is_for_trainer(self, scope: Scope, one: _Set) -> bool:
        """Whether a call makes a Trainer, or is of a function that does, or is the one that is under way."""
        if _is_trainer(one.to) or one.to in self._makers or one.to == _SCHEDULER:
            return True
        return self._under_way.get((scope.file, one.line)) == one.to

    def _takes_dictionary(self, scope: Scope, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or all(keyword.arg for keyword in node.keywords):
            return False
        return self._is_for_trainer(scope, _Set("", node.lineno, None, name_of(node.func)))

    def _origins(self, scope: Scope, value: ast.expr, line: int, depth: int = 0) -> Iterator[str]:
        """The place of a value, past names that only hold it.

        If the function only passes it on, it is the place of what this one is given; none if that is unknown.
        """
        parameter = scope.passes_on(value)
        if not parameter:
            made = _held(value, scope, line) if depth < _MOST_CALLERS else None
            found = [*self._origins(made.scope, made.value, made.line, depth + 1)] if made and made.value else []
            own = None if found else different_for_each_process(value, Given(value, scope, line))
            yield from found or [own.scope.place(own.line) if own else scope.place(line)]
            return
        for caller, call in self._calls_of(scope) if depth < _MOST_CALLERS else ():
            given = argument_of(call, parameter, position=scope.parameters.index(parameter) - _is_method(scope))
            if given is not None and not _is_literal(given):
                yield from self._origins(caller, given, given.lineno, depth + 1)

    def _calls_of(self, scope: Scope) -> Iterator[tuple[Scope, ast.Call]]:
        """The calls of a function: the one that is under way, or if it is over, those in its file."""
        if scope in self._entered:
            position = self._entered.index(scope) + 1
            outer = self._calls[position : position + 1]
            callers = [(one.scope, _lines_of(one)) for one in outer if one.called == scope.name]
        else:
            callers = [(one, range(sys.maxsize)) for one in self._scopes if one.file == scope.file]
        for caller, lines in callers:
            calls = (call for call in caller.calls([scope.name]) if call.lineno in lines)
            yield from ((caller, call) for call in calls if _is_call_of(call, scope))


def _held(value: ast.expr, scope: Scope, line: int) -> Given | None:
    """What a variable holds that is assigned once before a line; None for any other expression."""
    made = variable(value.id, Given(None, scope, line)) if isinstance(value, ast.Name) else None
    if made is None or not isinstance(value, ast.Name) or not _is_assigned_once(value.id, made.scope):
        return None
    return made


def _is_assigned_once(name: str, scope: Scope) -> bool:
    """Whether a function gives a variable one value, and not one after another in a loop."""
    loops = {one.lineno for one in scope.nodes if isinstance(one, LOOPS)}
    lines = [one.line for one in assignments_of(name, scope)]
    return len(lines) == 1 and loops.isdisjoint(lines)


def _entered_outside(trainer: Any) -> tuple[_Entered, ...]:
    """The user's functions that have called the Trainer, innermost first; empty if the main thread is not in it."""
    frames = [*main_thread_frames()]
    calls = [index for index, frame in enumerate(frames) if _is_of(trainer, frame)]
    outside = range(calls[-1] + 1 if calls else len(frames), len(frames))
    found = (
        _Entered(scope_of(frames[index].f_code), frames[index].f_lineno or 0, frames[index - 1].f_code.co_name)
        for index in outside
    )
    return tuple(one for one in found if one.scope.body)


def _is_of(trainer: Any, frame: Any) -> bool:
    code = frame.f_code
    return TRAINER.has(code.co_filename, code.co_name) and frame.f_locals.get("self") is trainer


def _mentions(file: str, words: frozenset[str]) -> bool:
    """Whether a file contains one of these words: most do not, and need not be parsed."""
    text = source_text(file)
    return any(word in text for word in words)


def _lines_of(one: _Entered) -> range:
    """The lines of the innermost simple statement or call at which a function is."""
    around = (node for node in one.scope.nodes if isinstance(node, (ast.Expr, ast.Assign, ast.Return, ast.AnnAssign)))
    lines = (range(node.lineno, last_line(node) + 1) for node in around)
    return next((some for some in lines if one.line in some), range(one.line, one.line + 1))


def _arguments(node: ast.AST) -> Iterator[_Set]:
    """What a node passes by name: arguments of a call, entries of a dictionary."""
    if isinstance(node, ast.Call):
        called = _called(node)
        if called == _SCHEDULER:
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield from (_Set(_SCHEDULED, node.lineno, value, called) for value in values[:1])
        to = "**" if called in ("dict", "update", "setdefault") else called
        yield from (_Set(one.arg, one.lineno, one.value, to) for one in node.keywords if one.arg)
    elif isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        named = ((key, value) for key, value in zip(keys, node.values, strict=True) if isinstance(key, str))
        yield from (_Set(key, value.lineno, value, "**") for key, value in named)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            key = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield _Set(key.value, node.lineno, node.value, "**")


def _assignments(scope: Scope, names: set[str]) -> Iterator[AttributeSet]:
    """Assignments to these attributes of something that is called a Trainer or a loop; constants under a condition."""
    for one in itertools.chain.from_iterable(map(attributes_set, scope.nodes)):
        is_setting = one.name in names and _is_of_trainer(one.owner)
        if is_setting and not (_is_literal(one.value) and not scope.branches_around(one.line)):
            yield one


def _is_of_trainer(owner: ast.expr) -> bool:
    text = ast.unparse(owner).lower()
    return "trainer" in text or "loop" in text or "epoch_progress" in text


def _is_call_of(call: ast.Call, scope: Scope) -> bool:
    """Whether a call by the name of a function may be one of it: a method is called on an object."""
    return isinstance(call.func, ast.Attribute) or not _is_method(scope)


def _is_method(scope: Scope) -> bool:
    return scope.parameters[:1] in (("self",), ("cls",))


def _called(call: ast.Call) -> str:
    """The name of the function that is called, or that will be with the arguments of a ``partial``."""
    name = name_of(call.func)
    return name_of(call.args[0]) if name == partial.__name__ and call.args else name


def _makes_trainer(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_trainer(_called(node))


def _is_trainer(name: str) -> bool:
    """Whether a function makes a Trainer, by its name: ``Trainer``, ``make_trainer``."""
    return name.lower().endswith("trainer")


def _is_literal(value: ast.expr) -> bool:
    """Whether a value is the same wherever it is evaluated."""
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
