"""The recommended callbacks: which they are, what takes the place of one, and what is left out."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_ncclsafe import (
    CollectiveTimer,
    DatasetAgreement,
    HostPreflight,
    LoaderTuner,
    LoggerOffload,
    safe_callbacks,
)
from lightning_ncclsafe.settings import AgreementSettings

RECOMMENDED = [HostPreflight, DatasetAgreement, LoaderTuner, LoggerOffload, CollectiveTimer]


class OwnTimer(CollectiveTimer):
    pass


def kinds(callbacks: list[Callback]) -> list[type[Callback]]:
    return [type(callback) for callback in callbacks]


def test_each_call_returns_new_instances_of_all_recommended() -> None:
    once, again = safe_callbacks(), safe_callbacks()
    assert kinds(once) == kinds(again) == RECOMMENDED
    assert not {*map(id, once)} & {*map(id, again)}


def test_each_callback_has_its_defaults() -> None:
    found = {type(callback): callback.settings for callback in safe_callbacks()}  # type: ignore[attr-defined]
    lenient = AgreementSettings(on_mismatch="raise_on_hang")
    assert found == {kind: kind().settings for kind in RECOMMENDED} | {DatasetAgreement: lenient}


def test_an_explicit_dataset_agreement_keeps_its_strict_default() -> None:
    (given,) = (one for one in safe_callbacks(DatasetAgreement()) if isinstance(one, DatasetAgreement))
    assert given.settings.on_mismatch == "raise"


@pytest.mark.parametrize("own", [CollectiveTimer(trace=False), OwnTimer()])
def test_an_own_callback_replaces_the_recommended_one_of_its_class(own: CollectiveTimer) -> None:
    callbacks = safe_callbacks(own)
    assert callbacks[-1] is own
    assert kinds(callbacks[:-1]) == RECOMMENDED[:-1]


def test_a_replaced_callback_keeps_its_position() -> None:
    own = DatasetAgreement(on_uneven="repeat")
    callbacks = safe_callbacks(own)
    assert kinds(callbacks) == RECOMMENDED
    assert callbacks[1] is own


def test_other_callbacks_follow_in_their_order() -> None:
    others = [ModelCheckpoint(), EarlyStopping("loss"), ModelCheckpoint(monitor="loss")]
    callbacks = safe_callbacks(others[0], LoaderTuner(apply=False), *others[1:])
    assert kinds(callbacks[:5]) == RECOMMENDED
    assert [*map(id, callbacks[5:])] == [*map(id, others)]


@pytest.mark.parametrize("without", [(LoaderTuner,), [LoaderTuner], {LoaderTuner}])
def test_one_callback_can_be_left_out(without: Any) -> None:
    assert kinds(safe_callbacks(without=without)) == [kind for kind in RECOMMENDED if kind is not LoaderTuner]


def test_all_callbacks_can_be_left_out() -> None:
    own = ModelCheckpoint()
    assert safe_callbacks(own, without=RECOMMENDED) == [own]


@pytest.mark.parametrize(
    ("own", "without", "said"),
    [
        ((OwnTimer(), CollectiveTimer()), (), "was given 2 callbacks of class CollectiveTimer; pass only one"),
        ((OwnTimer(),), (CollectiveTimer,), "was given a CollectiveTimer, which without= leaves out"),
        ((), (ModelCheckpoint,), "which is not recommended; only HostPreflight, DatasetAgreement, LoaderTuner"),
        ((), ("LoaderTuner",), "has 'LoaderTuner', which is not recommended; only"),
    ],
)
def test_contradictory_arguments_are_refused(own: Any, without: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        safe_callbacks(*own, without=without)


@pytest.mark.parametrize(
    ("own", "without", "said"),
    [
        ((LoaderTuner,), (), r"was given the class LoaderTuner; pass an instance: LoaderTuner\(\)\."),
        (([ModelCheckpoint()],), (), r"was given a list; unpack it with \*, as in safe_callbacks\(\*callbacks\)"),
        ((3,), (), "was given 3, which is not a Callback of lightning.pytorch"),
        ((), LoaderTuner, "must be a list with classes from HostPreflight, "),
        ((), "LoaderTuner", "without='LoaderTuner' must be a list with classes from HostPreflight, "),
        ((), None, "without=None must be a list with classes"),
    ],
)
def test_a_non_callback_is_refused(own: Any, without: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        safe_callbacks(*own, without=without)
