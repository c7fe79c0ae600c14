"""What of a checkpoint could not be pickled, and where it was kept."""

import pickle
import threading
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
