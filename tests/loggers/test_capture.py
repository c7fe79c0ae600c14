"""Arguments are kept as they were at the moment of the call."""

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ncclsafe.loggers.capture import ArgumentCopier

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: Pair(x, 1)],
    ids=["itself", "list", "tuple", "dict", "namedtuple"],
)
def test_nested_tensors_and_arrays_are_copied(wrap: Any) -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    copied = ArgumentCopier().copy([wrap(tensor), wrap(array)])
    tensor += 1
    array += 1
    assert "1" not in str(copied).replace("right=1", "")


def test_collections_keep_their_classes() -> None:
    given = [OrderedDict(a=1), defaultdict(list, a=[1]), Pair(1, 2), {1, 2}]
    copied = ArgumentCopier().copy(given)
    assert [type(item) for item in copied] == [type(item) for item in given]
    assert copied == given
    given[1]["a"].append(2)  # type: ignore[index]
    assert copied[1]["a"] == [1] and copied[1]["new"] == []


def test_copied_bytes_are_counted() -> None:
    copied = ArgumentCopier()
    copied.copy((torch.zeros(10), np.zeros(10), "text", b"bytes"))
    assert copied.data_bytes >= 40 + 80 + 4 + 5


def test_a_self_referencing_list_terminates() -> None:
    endless: list[Any] = []
    endless.append(endless)
    ArgumentCopier().copy(endless)


def test_a_full_device_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    given = torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    assert ArgumentCopier().copy(given).tolist() == [1.0, 1.0]
