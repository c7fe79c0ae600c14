"""What the user is told of loader workers: one line for each choice."""

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.report.times import share_words, time_words
from lightning_ncclsafe.rules.wording import size_words

# A batch that is ready takes about this part of a step of 50 ms to be taken.
_NO_WAIT = 0.02


def setting_words(workers: int, prefetch: int) -> str:
    """``"num_workers=3, prefetch_factor=2"``; without workers there is no prefetch factor."""
    return f"num_workers={workers}, prefetch_factor={prefetch}" if workers else "num_workers=0"


def chosen(name: str, choice: Choice, measures: Measures, budget: Budget, *, asked: str, is_tried: bool = False) -> str:
    """The first setting that was found.

    Args:
        name: Name of the loader.
        choice: What was chosen.
        measures: What it was chosen by.
        budget: What the loader may use.
        asked: What the user has set, in words.
        is_tried: Whether the data ended while it was being tried.
    """
    tried = "; this was being tried when the data ended" if is_tried else ""
    return (
        f"{name}: {setting_words(choice.workers, choice.prefetch)} (set: {asked}), {bound_words(choice, budget)};"
        f" {_found(measures)}; {_expected(choice, measures)}{tried}"
    )


def advised(name: str, choice: Choice, measures: Measures, budget: Budget, *, asked: str) -> str:
    """The same where it is only advised."""
    return (
        f"{name}: {setting_words(choice.workers, choice.prefetch)} would do (set: {asked}), "
        f"{bound_words(choice, budget)}; {_found(measures)}; {_expected(choice, measures)}"
    )


def changed(name: str, before: Choice, choice: Choice, reason: str) -> str:
    """A setting that was found later."""
    now, was = setting_words(choice.workers, choice.prefetch), setting_words(before.workers, before.prefetch)
    return f"{name}: {now} instead of {was}{f': {reason}' if reason else ''}"


def left_alone(name: str, setting: str, reason: str) -> str:
    """A loader that more workers would do harm to.

    Args:
        name: Name of the loader.
        setting: What it has, in words.
        reason: What stands against it: ``"its dataset holds an open file (Rows.file)"``.
    """
    return f"{name}: {setting} is left as it is: {reason}; other workers could lose or mix up samples"


def over_budget(name: str, workers: int, budget: Budget) -> str:
    """A user's setting that breaks the budget, before anything is measured."""
    most = "no worker" if budget.workers == 0 else f"{budget.workers} worker{'s' * (budget.workers > 1)}"
    return (
        f"{name}: num_workers={workers} on every rank is more than there are cores for ({budget.cores_from}): a rank's"
        f" loaders get {most} together"
    )


def bound_words(choice: Choice, budget: Budget) -> str:
    """What keeps a choice from being larger."""
    if choice.bound == "cores":
        return f"bound by cores ({budget.cores_from})"
    if choice.bound == "memory":
        return f"bound by memory ({budget.memory_from})"
    if choice.bound == "shm":
        free = f" ({size_words(budget.shm_bytes)} for this loader)" if budget.shm_bytes is not None else ""
        return f"bound by /dev/shm{free}"
    if choice.bound == "files":
        return f"bound by open files (ulimit -n; {budget.open_files} for this loader)"
    return "all that is needed"


def _found(measures: Measures) -> str:
    large = f" of {size_words(measures.batch_bytes)}" if measures.batch_bytes else ""
    return f"a batch{large} takes a worker {time_words(measures.service_s)}, a step {time_words(measures.gap_s)}"


def _expected(choice: Choice, measures: Measures) -> str:
    """What was measured with this very setting says more than what was expected of it."""
    is_measured = (measures.workers, measures.prefetch) == (choice.workers, choice.prefetch)
    wait_s = measures.wait_s if is_measured else choice.wait_s
    if wait_s <= _NO_WAIT * measures.gap_s:
        return "expects no waiting for data"
    share = wait_s / (wait_s + measures.gap_s)
    return f"expects to wait {time_words(wait_s)} for each batch, {share_words(share)} of the time"
