"""What of a checkpoint could not be pickled, and where it was kept."""

import pickle
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.probes.source.scopes import scope_of
from lightning_ncclsafe.probes.trainer.unsaved import kept_at, unsaved


class Held:
    def __init__(self, what: Any) -> None:
        self.what = what


def raised(checkpoint: dict[str, Any], error: Exception | None = None) -> BaseException:
    """What a save of this raises; as Lightning's, it has a variable of this name."""
    try:
        if error is not None:
            raise error
        pickle.dumps(checkpoint)
    except Exception as error:
        return error
    raise AssertionError("it can be pickled")


@pytest.mark.parametrize(
    ("checkpoint", "key", "words"),
    [
        ({"older": threading.Lock()}, "older", "checkpoint['older'] (lock)"),
        ({"epoch": 3, "parse": lambda text: text}, "parse", "checkpoint['parse'] (<lambda>)"),
        ({"callbacks": {"Bar": {"bar": (1, threading.Lock())}}}, "bar", "checkpoint['callbacks']['Bar']['bar'] (lock)"),
        ({"epoch": 3, "held": Held(threading.Lock())}, "held", "checkpoint['held'] (lock)"),
    ],
    ids=["an object", "a function", "of a callback", "in an object"],
)
def test_the_entry_with_the_object_that_pickle_names_is_found(checkpoint: dict[str, Any], key: str, words: str) -> None:
    assert unsaved(raised(checkpoint)) == (key, words)


def test_what_is_not_there_or_another_error_has_no_entry() -> None:
    lock = {"lock": threading.Lock()}
    assert unsaved(raised(lock, OSError(28, "No space left on device: lock"))) is None
    assert unsaved(raised({"epoch": 3}, TypeError("cannot pickle 'lock' object"))) is None
    assert unsaved(TypeError("cannot pickle 'lock' object")) is None


def test_what_refers_to_itself_is_looked_through_once() -> None:
    itself: dict[str, Any] = {}
    itself["again"] = itself
    assert unsaved(raised(itself, TypeError("cannot pickle 'lock' object"))) is None


@pytest.mark.parametrize(
    "error",
    [
        TypeError("expected str to pickle, got int"),
        OSError(13, "Permission denied", "/data/pickled/lock.ckpt"),
    ],
    ids=["words of a message", "a name of a file"],
)
def test_what_can_be_pickled_is_not_named(error: Exception) -> None:
    assert unsaved(raised({"epoch": 3, "held": Held(threading.Lock())}, error)) is None


class Hostile(dict[str, Any]):
    """Every method of this raises, as does that of an error."""

    def _fails(self, *_: Any) -> Any:
        raise SystemError("user's method")

    __getattribute__ = __iter__ = items = values = __len__ = __str__ = __repr__ = _fails
    __class__ = property(_fails)  # type: ignore[assignment]


class Proxy:
    def __getattribute__(self, name: str) -> Any:
        raise SystemError("user's method")

    __str__ = __repr__ = __getattribute__  # type: ignore[assignment]


class Unprintable(TypeError):
    def __str__(self) -> str:
        raise SystemError("user's method")


def test_no_method_of_the_users_classes_is_called() -> None:
    error = TypeError("cannot pickle 'lock' object")
    checkpoint = {Proxy(): 1, "first": Proxy(), "held": Hostile(inner=threading.Lock())}
    found = unsaved(raised(checkpoint, error))  # type: ignore[arg-type]
    assert found == ("inner", "checkpoint['held']['inner'] (lock)")
    assert unsaved(raised({"epoch": 3}, Unprintable())) is None


def test_a_large_value_takes_no_memory_and_hides_no_other() -> None:
    error = TypeError("cannot pickle 'lock' object")
    many = {f"layer{number}.weight": 0 for number in range(100_000)}
    checkpoint = {"state_dict": many, "seen": [0] * 1_000_000, "callbacks": {"Bar": {"bar": threading.Lock()}}}
    failed = raised(checkpoint, error)
    tracemalloc.start()
    try:
        found = unsaved(failed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == ("bar", "checkpoint['callbacks']['Bar']['bar'] (lock)")
    assert most < 5e6


def kept(checkpoint: dict[str, Any], older: Any) -> dict[str, Any]:
    checkpoint["epoch"] = 3
    checkpoint["older"] = older  # <- assigned
    return {
        "step": 7,
        "older": older,  # <- in a dict
    }


def test_where_a_key_is_given_is_found() -> None:
    lines = Path(__file__).read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith(("# <- assigned", "# <- in a dict"))]
    places = sorted(kept_at("older", scope_of(kept)))
    assert places == [f"{__file__}:{number} in kept" for number in marked]
    assert [*kept_at("younger", scope_of(kept))] == []
