"""What is logged on all ranks, and where: keys, the model's metrics, and keys that callbacks monitor."""

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

from lightning_ncclsafe.code.libraries import LOGGED_VALUES
from lightning_ncclsafe.facts import LoggedKey, MetricFacts
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of, scopes_in
from lightning_ncclsafe.probes.source.syntax import is_constant

_MOST_KEYS = 64
_OTHER_STAGES = ("test", "predict")
# The loops in which Lightning keeps what was logged.
_LOOPS = ("fit_loop.epoch_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop")


def logged(trainer: Any) -> Iterator[LoggedKey]:
    """Keys that all ranks reduce together, with the line that logs each."""
    for metric in itertools.islice(filter(_is_reduced, _results(trainer)), _MOST_KEYS):
        meta = metric.meta
        name, hook = str(meta.name), str(meta.fx)
        scope, line = _call_that_logs(name, trainer, hook)
        condition = scope.rank_condition(line) if line else ""
        states = tuple(map(str, getattr(getattr(metric, "value", None), "metric_state", ())))
        yield LoggedKey(name=name, hook=hook, place=scope.place(line), rank_condition=condition, states=states)


def unlogged(trainer: Any) -> Iterator[LoggedKey]:
    """Keys that the user's functions log with ``sync_dist=True``, but have not logged so far on this rank.

    Those of a test or a prediction count only while there is one.
    """
    logged = {str(metric.meta.name) for metric in _results(trainer)}
    stage = str(getattr(getattr(trainer, "state", None), "fn", ""))
    for scope in scopes_in(users_of(trainer)):
        if any(other in scope.name and other not in stage for other in _OTHER_STAGES):
            continue
        for key, line in _reduced_keys(scope):
            if key not in logged:
                condition = scope.rank_condition(line)
                yield LoggedKey(name=key, hook=scope.name, place=scope.place(line), rank_condition=condition)


def metrics(module: Any) -> Iterator[MetricFacts]:
    """The metrics of the model; a collection of metrics is not a metric, and has no states."""
    for name, part in getattr(module, "named_modules", tuple)():
        states = getattr(part, "metric_state", None)
        if isinstance(states, dict) and states:
            yield MetricFacts(
                name=str(name),
                type=type(part).__name__,
                states=tuple(map(str, states)),
                by_entry=tuple(str(state) for state in states if _is_gathered_by_entry(part, state)),
            )


def _is_gathered_by_entry(metric: Any, state: Any) -> bool:
    """Whether a state is a list with ``dist_reduce_fx=None``."""
    defaults, reductions = getattr(metric, "_defaults", {}), getattr(metric, "_reductions", {})
    return isinstance(defaults.get(state), list) and reductions.get(state, "") is None


def _call_that_logs(name: str, trainer: Any, hook: str) -> tuple[Scope, int]:
    """First the hook itself, of the module and of callbacks, then other methods, which it may have called.

    If none has the key as a literal, the only call in these hooks, or else in these methods, with a computed key.
    """
    users = users_of(trainer)
    hooks = [scope_of(getattr(type(owner), hook, None)) for owner in users]
    methods = [*scopes_in(users[:1])]
    for scope in (*hooks, *methods):
        if line := _line_that_logs(scope, name):
            return scope, line
    others = [scope for scope in methods if not scope.name.startswith("on_") and not scope.name.endswith("_step")]
    for scopes in (hooks, others):
        found = [(scope, line) for scope in scopes for line in _lines_that_may_log(scope, name)]
        if found:
            return found[0] if len(found) == 1 else (found[0][0], 0)
    return hooks[0], 0


def _logging_calls(scope: Scope) -> Iterator[ast.Call]:
    """The calls of a method ``log`` or ``log_dict``."""
    return (call for call in scope.calls(["log", "log_dict"]) if isinstance(call.func, ast.Attribute))


def _line_that_logs(scope: Scope, key: str) -> int:
    """The line of the call of ``log`` or ``log_dict`` with a key as a literal; 0 if there is none."""
    literals = ((node, call.lineno) for call in _logging_calls(scope) for node in ast.walk(call))
    return next((line for node, line in literals if isinstance(node, ast.Constant) and node.value == key), 0)


def _lines_that_may_log(scope: Scope, key: str) -> list[int]:
    """The lines of such calls with a computed key that may be this one."""
    calls = _logging_calls(scope)
    return [call.lineno for call in calls if any(_may_be(name, key) for name in _names_given(call))]


def _reduced_keys(scope: Scope) -> Iterator[tuple[str, int]]:
    """Literal keys in calls of ``log`` or ``log_dict`` with ``sync_dist=True``, and their lines."""
    for call in _logging_calls(scope):
        if any(keyword.arg == "sync_dist" and is_constant(keyword.value, True) for keyword in call.keywords):
            literals = (name for name in _names_given(call) if isinstance(name, ast.Constant))
            yield from ((str(name.value), call.lineno) for name in literals)


def _names_given(call: ast.Call) -> Iterator[ast.expr | None]:
    """The keys in a call of ``log`` or ``log_dict``; None for an argument with other keys."""
    assert isinstance(call.func, ast.Attribute)
    wanted = "name" if call.func.attr == "log" else "dictionary"
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == wanted)]
    for value in given[:1]:
        if wanted == "name":
            yield value
        else:
            yield from value.keys if isinstance(value, ast.Dict) else [None]


def _may_be(name: ast.expr | None, key: str) -> bool:
    """Whether an expression may evaluate to a key: its literal parts are part of the key."""
    if isinstance(name, ast.JoinedStr):
        known = (str(part.value) if isinstance(part, ast.Constant) else None for part in name.values)
        return re.fullmatch("".join(".*" if part is None else re.escape(part) for part in known), key) is not None
    return not isinstance(name, ast.Constant)


def monitored(trainer: Any) -> Iterator[LoggedKey]:
    """Keys that callbacks monitor; a key that is logged per step and per epoch has two more names."""
    monitors = {getattr(callback, "monitor", None) for callback in users_of(trainer)[1:]} - {None}
    for metric in _results(trainer) if monitors else ():
        name = str(metric.meta.name)
        if not monitors.isdisjoint((name, f"{name}_step", f"{name}_epoch")):
            scope, line = _call_that_logs(name, trainer, str(metric.meta.fx))
            yield LoggedKey(name=name, hook=str(metric.meta.fx), place=scope.place(line))


def unmonitored(trainer: Any) -> Iterator[LoggedKey]:
    """Keys that callbacks or schedulers monitor and that the user's source logs, but not so far on this rank."""
    known = {f"{metric.meta.name}{when}" for metric in _results(trainer) for when in ("", "_step", "_epoch")}
    # A scheduler that waits for a plateau goes by a key, too.
    monitoring = (*users_of(trainer)[1:], *getattr(trainer, "lr_scheduler_configs", ()))
    monitors = dict.fromkeys(getattr(one, "monitor", None) for one in monitoring)
    scopes = [*scopes_in(users_of(trainer))]
    for name in monitors:
        found = ((scope, line) for scope in scopes if (line := _line_that_logs(scope, str(name))))
        scope, line = next(found, (None, 0))
        if scope is not None and name not in known:
            yield LoggedKey(name=str(name), place=scope.place(line), rank_condition=scope.rank_condition(line))


def _results(trainer: Any) -> Iterator[Any]:
    """Everything that was logged, as Lightning keeps it."""
    for path in _LOOPS:
        owner = trainer
        for name in path.split("."):
            owner = getattr(owner, name, None)
        yield from list((getattr(owner, "_results", None) or {}).values())


def _is_reduced(result: Any) -> bool:
    """Whether ranks reduce a key together."""
    sync = result.meta.sync
    return not result.is_tensor or (sync.should and not sync.rank_zero_only)


def reduced_key() -> str:
    """The key in Lightning's frame on the main thread; reads only that frame's own variables."""
    metas = (getattr(frame.f_locals.get("self"), "meta", None) for frame in main_thread_frames(LOGGED_VALUES))
    return next((str(meta.name) for meta in metas if meta is not None), "")


def users_of(trainer: Any) -> list[Any]:
    """The module of a Trainer and all its callbacks; the Trainer may not be initialised yet."""
    return [getattr(trainer, "lightning_module", None), *getattr(trainer, "callbacks", ())]
