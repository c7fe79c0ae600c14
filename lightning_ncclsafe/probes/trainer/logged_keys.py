"""What is logged on all ranks, and where: keys, the model's metrics, and keys that callbacks monitor."""

import itertools
from collections.abc import Iterator
from typing import Any

from lightning_ncclsafe.code.libraries import LOGGED_VALUES
from lightning_ncclsafe.facts import LoggedKey, MetricFacts
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.control_flow import rank_condition
from lightning_ncclsafe.probes.trainer.source_lines import HookSource, source_of, sources_in

_MOST_KEYS = 64
_OTHER_STAGES = ("test", "predict")
# The loops in which Lightning keeps what was logged.
_LOOPS = ("fit_loop.epoch_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop")


def logged(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    """Keys that all ranks reduce together, with the line that logs each."""
    for metric in itertools.islice(filter(_is_reduced, _results(trainer)), _MOST_KEYS):
        meta = metric.meta
        name, hook = str(meta.name), str(meta.fx)
        source, line = _call_that_logs(name, trainer, module, hook)
        condition = rank_condition(source.file, line) if line else ""
        states = tuple(map(str, getattr(getattr(metric, "value", None), "metric_state", ())))
        yield LoggedKey(name=name, hook=hook, place=source.place(line), rank_condition=condition, states=states)


def unlogged(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    """Keys that the user's functions log with ``sync_dist=True``, but have not logged so far on this rank.

    Those of a test or a prediction count only while there is one.
    """
    logged = {str(metric.meta.name) for metric in _results(trainer)}
    stage = str(getattr(getattr(trainer, "state", None), "fn", ""))
    for source in sources_in([module, *trainer_callbacks(trainer)]):
        if any(other in source.name and other not in stage for other in _OTHER_STAGES):
            continue
        for key, line in source.reduced_keys():
            if key not in logged:
                condition = rank_condition(source.file, line)
                yield LoggedKey(name=key, hook=source.name, place=source.place(line), rank_condition=condition)


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


def _call_that_logs(name: str, trainer: Any, module: Any, hook: str) -> tuple[HookSource, int]:
    """First the hook itself, of the module and of callbacks, then other methods, which it may have called.

    If none has the key as a literal, the only call in these hooks, or else in these methods, with a computed key.
    """
    hooks = [source_of(owner, hook) for owner in (module, *trainer_callbacks(trainer))]
    methods = [*sources_in([module])]
    for source in (*hooks, *methods):
        if line := source.logs(name):
            return source, line
    others = [source for source in methods if not source.name.startswith("on_") and not source.name.endswith("_step")]
    for sources in (hooks, others):
        found = [(source, line) for source in sources for line in source.may_log(name)]
        if found:
            return found[0] if len(found) == 1 else (found[0][0], 0)
    return hooks[0], 0


def monitored(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    """Keys that callbacks monitor; a key that is logged per step and per epoch has two more names."""
    monitors = {getattr(callback, "monitor", None) for callback in trainer_callbacks(trainer)} - {None}
    for metric in _results(trainer) if monitors else ():
        name = str(metric.meta.name)
        if not monitors.isdisjoint((name, f"{name}_step", f"{name}_epoch")):
            source, line = _call_that_logs(name, trainer, module, str(metric.meta.fx))
            yield LoggedKey(name=name, hook=str(metric.meta.fx), place=source.place(line))


def unmonitored(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    """Keys that callbacks monitor and that the user's source logs, but has not logged so far on this rank."""
    known = {f"{metric.meta.name}{when}" for metric in _results(trainer) for when in ("", "_step", "_epoch")}
    monitors = dict.fromkeys(getattr(callback, "monitor", None) for callback in trainer_callbacks(trainer))
    sources = [*sources_in([module, *trainer_callbacks(trainer)])]
    for name in monitors:
        found = ((source, line) for source in sources if (line := source.logs(str(name))))
        source, line = next(found, (None, 0))
        if source is not None and name not in known:
            condition = rank_condition(source.file, line)
            yield LoggedKey(name=str(name), place=source.place(line), rank_condition=condition)


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


def trainer_callbacks(trainer: Any) -> list[Any]:
    """All callbacks of a Trainer, which may not be initialised yet."""
    return [*getattr(trainer, "callbacks", ())]
