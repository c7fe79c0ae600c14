"""Which lines of a program give the Trainer a setting, or a group its timeout: programs with a mark at these lines."""

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from lightning_ncclsafe.facts import Limited, TimeoutLine
from lightning_ncclsafe.probes.source import scopes
from lightning_ncclsafe.probes.trainer.setting_lines import setting_line, setting_lines
from lightning_ncclsafe.probes.trainer.timeout_lines import timeout_lines

SETTINGS = ("max_epochs", "max_steps", "limit_train_batches", "accumulate_grad_batches", "num_sanity_val_steps")
# Of the Trainer, in Lightning's own file: what it is asked with while it fits.
TRAINER = """
class Trainer:
    def __init__(self, callbacks=(), **settings):
        self.callbacks, self.lightning_module, self.seen = callbacks, None, None

    def fit(self, module=None, **arguments):
        self.lightning_module = module
        self.seen = look(self)
        return self
"""
FILE = "/usr/lib/python3/site-packages/lightning/pytorch/trainer/trainer.py"
Look = Callable[[Any], Any]


def of_settings(trainer: Any) -> dict[str, tuple[str, ...]]:
    return setting_lines(trainer, SETTINGS)


def of_timeouts(trainer: Any) -> tuple[TimeoutLine, ...]:
    return timeout_lines([trainer.lightning_module, *trainer.callbacks])


def run(source: str, folder: Path, look: Look) -> Any:
    """What is seen while the Trainer fits in ``main``."""
    path = folder / "train.py"
    path.write_text(dedent(source))
    names: dict[str, Any] = {"look": look, "count": lambda *_: 7, "__name__": "train"}
    exec(compile(TRAINER, FILE, "exec"), names)
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["main"](4).seen


def marked(source: str, folder: Path, mark: str = "here") -> list[str]:
    lines = dedent(source).splitlines()
    return [f"{folder / 'train.py'}:{n} in " for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]


def places(found: dict[str, tuple[str, ...]], setting: str) -> list[str]:
    return [place.rpartition(" ")[0] + " " for place in found.get(setting, ())]


BUILT_ELSEWHERE = """
def make_trainer():
    return Trainer(
        max_epochs=2,
        max_steps=count(),  # here
    )

def main(rank):
    return make_trainer().fit()
"""
THROUGH_A_HELPER = """
def fit(**more):
    return Trainer(**({"max_steps": -1} | more)).fit()

def main(rank):
    return fit(
        max_epochs=2,
        max_steps=count(rank),  # here
    )
"""
PASSED_ON = """
def train(rank, limit):
    return Trainer(max_steps=limit).fit()

def main(rank):
    steps = count(rank)
    return train(rank, steps - 1)  # here
"""
PASSED_ON_BY_A_METHOD = """
class Job:
    def train(self, limit):
        return Trainer(max_steps=limit).fit()

def main(rank):
    return Job().train(limit=count(rank))  # here
"""
PASSED_ON_FROM_ELSEWHERE = """
def main(steps):
    return Trainer(max_steps=steps).fit()
"""
PASSED_ON_BEFORE = """
def make(limit):
    return Trainer(max_steps=limit)

def main(rank):
    trainer = make(count(rank))  # here
    return trainer.fit()
"""
BY_A_HELPER_BEFORE = """
def build(**more):
    return Trainer(**more)

def main(rank):
    trainer = build(max_steps=count(rank))  # here
    return trainer.fit()
"""
PASSED_ON_BY_POSITION = """
class Job:
    def train(self, limit):
        return Trainer(max_steps=limit).fit()

def main(rank):
    return Job().train(count(rank))  # here
"""
PASSED_ON_BY_A_LIBRARY = """
import contextlib

@contextlib.contextmanager
def timed():
    yield

@timed()
def train(limit):
    return Trainer(max_steps=limit).fit()

def main(rank):
    return train(count(rank))
"""
CALLED_TWICE = """
def train(limit):
    return Trainer(max_steps=limit).fit()

def other():
    return train(count(3) + 1)

def main(rank):
    return train(count(rank))  # here
"""
BY_A_DICTIONARY = """
def main(rank):
    options = {
        "max_epochs": 2,
        "max_steps": count(rank),  # here
    }
    return Trainer(**options).fit()
"""
BY_A_KEY = """
def main(rank):
    options = dict(max_epochs=2)
    options["max_steps"] = count(rank)  # here
    return Trainer(**options).fit()
"""
A_DICTIONARY_OF_OTHERS = """
def main(rank):
    wrote = {"max_steps": count(rank)}
    return Trainer(max_epochs=2).fit()
"""
OF_THE_MODEL = """
class Net:
    def __init__(self, max_steps):
        self.max_steps = max_steps

def main(rank):
    return Trainer(max_epochs=2).fit(Net(max_steps=count(rank)))
"""
TWO_TRAINERS = """
def main(rank):
    first = Trainer(max_steps=count(rank))  # here
    return Trainer(max_steps=count(rank) + 1).fit()  # here
"""
BY_A_VARIABLE = """
def main(rank):
    found = count(rank)  # here
    steps = found
    return Trainer(max_steps=steps).fit()
"""
BY_A_VARIABLE_OF_A_CALLER = """
def train(limit):
    steps = limit
    return Trainer(max_steps=steps).fit()

def main(rank):
    steps = count(rank)  # here
    return train(steps)
"""
BY_A_VARIABLE_WITH_TWO_VALUES = """
def main(rank):
    steps = count(rank)
    if rank > 3:
        steps = 2
    return Trainer(max_steps=steps).fit()  # here
"""
BY_A_VARIABLE_THAT_CHANGES = """
def main(rank):
    steps = count(rank)
    steps += 1
    return Trainer(max_steps=steps).fit()  # here
"""
BY_THE_VARIABLE_OF_A_LOOP = """
def main(rank):
    for steps in (4, 5):
        trainer = Trainer(max_steps=steps)  # here
    return trainer.fit()
"""
BY_A_PART = """
def main(rank):
    epochs, steps = count(rank), count(rank)  # here
    return Trainer(max_steps=steps).fit()
"""
CONSTANT = """
def main(rank):
    return Trainer(max_steps=-1).fit()
"""
QUICK = """
def main(rank):
    return Trainer(fast_dev_run=rank > 3).fit()  # here
"""
ASSIGNED_UNDER_A_CONDITION = """
class Loop: pass

def main(rank):
    trainer = Trainer(max_steps=10)
    trainer.fit_loop = Loop()
    trainer.fit_loop.max_steps = 12
    if rank > 3:
        trainer.fit_loop.max_steps = 5  # here
    return trainer.fit()
"""
OF_A_CALLBACK = """
def TrainerCallback(max_steps): pass

def read(rank): return {}

def main(rank):
    TrainerCallback(max_steps=count(rank))
    return Trainer(**read(rank)).fit()
"""
OWN_ATTRIBUTE = """
class Net:
    def __init__(self, rank):
        self.max_steps = count(rank)

def main(rank):
    return Trainer(max_steps=10).fit(Net(rank))
"""


@pytest.mark.parametrize(
    "source",
    [
        *(
            BUILT_ELSEWHERE,
            THROUGH_A_HELPER,
            PASSED_ON,
            PASSED_ON_BY_A_METHOD,
            PASSED_ON_FROM_ELSEWHERE,
            PASSED_ON_BEFORE,
        ),
        *(BY_A_HELPER_BEFORE, PASSED_ON_BY_POSITION, PASSED_ON_BY_A_LIBRARY),
        *(CALLED_TWICE, BY_A_DICTIONARY, BY_A_KEY, A_DICTIONARY_OF_OTHERS, OF_THE_MODEL, TWO_TRAINERS, CONSTANT, QUICK),
        *(ASSIGNED_UNDER_A_CONDITION, OF_A_CALLBACK, OWN_ATTRIBUTE),
        *(BY_A_VARIABLE, BY_A_VARIABLE_OF_A_CALLER, BY_A_VARIABLE_WITH_TWO_VALUES, BY_THE_VARIABLE_OF_A_LOOP),
        *(BY_A_VARIABLE_THAT_CHANGES, BY_A_PART),
    ],
)
def test_lines_that_give_the_trainer_a_setting(source: str, tmp_path: Path) -> None:
    found = run(source, tmp_path, of_settings)
    assert places(found, "max_steps") == marked(source, tmp_path)
    assert source is QUICK or not places(found, "max_epochs")


BEFORE_THE_CALL = """
class Command:
    def before_fit(self):
        interval = max(10, count())
        self.trainer.val_check_interval = interval  # here
{}
def main(rank):
    return Trainer().fit()
"""


@pytest.mark.parametrize("more", ["", "        self.trainer.val_check_interval = count()\n"], ids=["one", "two"])
def test_a_line_is_told_alone_or_not_at_all(more: str, tmp_path: Path) -> None:
    """In a method that has ended when the Trainer is asked to fit, as with ``LightningCLI``."""
    source = BEFORE_THE_CALL.format(more)
    told = run(source, tmp_path, lambda trainer: setting_line(trainer, ["val_check_interval"]))
    assert told == ("" if more else f"{marked(source, tmp_path)[0]}before_fit")


def test_the_scheduler_of_accumulation_is_a_line_of_that_setting(tmp_path: Path) -> None:
    source = """
    def GradientAccumulationScheduler(scheduling):
        return scheduling

    def main(rank):
        return Trainer(callbacks=[GradientAccumulationScheduler({0: count(rank)})]).fit()  # here
    """
    assert places(run(source, tmp_path, of_settings), "accumulate_grad_batches") == marked(source, tmp_path)


RESUMED = """
def main(rank):
    earlier = Trainer().fit(ckpt_path="first.ckpt")
    return Trainer().fit(
        ckpt_path="last",  # here
    )
"""
RESUMED_BY_A_HELPER = """
def train(ckpt_path):
    return Trainer().fit(ckpt_path=ckpt_path)

def main(rank):
    return train(ckpt_path=count(rank))  # here
"""
RESUMED_FROM_WHAT_WAS_FOUND = """
def main(rank):
    latest = max(range(count(rank)), default=None)  # here
    return Trainer().fit(ckpt_path=latest)
"""
RESUMED_FROM_A_PATH_WITH_A_TIME = """
import time

def main(rank):
    started = str(time.time())  # here
    for _ in range(1):
        last = started + "last.ckpt"
        path = str(last) if count(rank) else "other"
        return Trainer().fit(ckpt_path=path)
"""
NOT_RESUMED = """
def main(rank):
    return Trainer().fit(ckpt_path=None)
"""


@pytest.mark.parametrize(
    "source",
    [
        RESUMED,
        RESUMED_BY_A_HELPER,
        RESUMED_FROM_WHAT_WAS_FOUND,
        RESUMED_FROM_A_PATH_WITH_A_TIME,
        NOT_RESUMED,
    ],
)
def test_the_checkpoint_is_that_of_the_call_under_way(source: str, tmp_path: Path) -> None:
    found = run(source, tmp_path, of_settings)
    for name in ("first epoch", "first step", "ckpt_path"):
        assert places(found, name) == marked(source, tmp_path)


TIMEOUTS = """
class Exported:
    def __init__(self, limit):
        self.limit = limit

    def on_fit_start(self):
        self.group = dist.new_group(timeout=timedelta(seconds=1.5))
        dist.new_group([0, 1], timedelta(0, 3))
        dist.new_group([0, 1])
        dist.new_group([0, 1], timeout=None)
        dist.new_group(timeout=self.limit)
        dist.monitored_barrier(self.group, timeout=timedelta(minutes=2 * 3))
        _set_pg_timeout(timedelta(hours=1), self.group)
        store.wait(["key"], timedelta(milliseconds=20))
        self.process.wait(timeout=self.limit)
        self.event.wait(timeout=5)

def main(rank):
    return Trainer(callbacks=[Exported(rank)]).fit()
"""


def test_timeouts_of_groups_the_store_and_barriers(tmp_path: Path) -> None:
    found = run(TIMEOUTS, tmp_path, of_timeouts)
    assert [(one.call, one.timeout_ms) for one in found] == [
        ("new_group", 1500),
        ("new_group", 3000),
        ("new_group", 0),
        ("monitored_barrier", 360_000),
        ("_set_pg_timeout", 3_600_000),
        ("wait", 20),
    ]
    assert [found[n].limits for n in (0, 3, 5)] == [
        (Limited.GROUP,),
        (Limited.BARRIER,),
        (Limited.GROUP, Limited.STORE),
    ]
    assert found[0].place == f"{tmp_path / 'train.py'}:7 in on_fit_start"


def test_elsewhere_in_the_file_only_timeouts_that_are_written_out_count(tmp_path: Path) -> None:
    source = """
    def make_group(limit):
        dist.new_group(timeout=limit)
        return dist.new_group(timeout=timedelta(seconds=4))

    class Exported:
        def on_fit_start(self):
            self.group = make_group(3)

    def main(rank):
        return Trainer(callbacks=[Exported()]).fit()
    """
    found = run(source, tmp_path, of_timeouts)
    place = f"{tmp_path / 'train.py'}:4 in make_group"
    assert found == (TimeoutLine(place=place, call="new_group", limits=(Limited.GROUP,), timeout_ms=4000),)


def test_a_timeout_that_another_module_of_the_user_sets_is_found_where_there_is_no_nearer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "control.py"
    other.write_text("def connect():\n    return dist.new_group(timeout=timedelta(seconds=10))\n")
    module = ModuleType("control")
    module.__file__ = str(other)
    monkeypatch.setitem(sys.modules, "control", module)
    monkeypatch.setattr(scopes, "is_user_code", lambda file: file.startswith(str(tmp_path)))
    source = """
    class Published:
        def on_fit_start(self):
            self.group = control.connect({})

    def main(rank):
        return Trainer(callbacks=[Published()]).fit()
    """
    found = run(source.format(""), tmp_path, of_timeouts)
    assert [one.place for one in found] == [f"{other}:2 in connect"]
    (folder := tmp_path / "nearer").mkdir()
    nearer = run(source.format("dist.new_group(timeout=timedelta(seconds=4))"), folder, of_timeouts)
    assert [one.timeout_ms for one in nearer] == [4000]
