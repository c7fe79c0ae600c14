"""What loggers are given: plain numbers under plain names."""

import re
from typing import Any

import numpy as np
import pytest

from lightning_ncclsafe.collectives import results as scalars_module
from lightning_ncclsafe.collectives.results import TimingScalars
from lightning_ncclsafe.timing.lateness import lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.windows import GroupMembers

MS = 1_000_000


def block(arrival_ms: Any, duration_ms: Any = None, *, op: str = "all_reduce", name: str = "0") -> MatchedCalls:
    """Calls of 4 MB each, every one a step."""
    arrival = (np.array(arrival_ms) * MS).astype(np.int64)
    ranks, count = arrival.shape
    return MatchedCalls(
        group=GroupMembers(name=name, ranks=tuple(range(ranks))),
        ops=(op,),
        op=np.zeros(count, dtype=np.int64),
        seq=np.arange(count),
        step=np.arange(count),
        size_bytes=np.full(count, 4_000_000),
        arrival_ns=arrival,
        duration_ns=np.full(arrival.shape, -1) if duration_ms is None else (np.array(duration_ms) * MS).astype(int),
        uncertainty_ns=np.zeros(ranks, dtype=np.int64),
        before_ns=arrival[:, 0],
        follows=np.zeros(count, dtype=bool),
    )


def taken(*blocks: MatchedCalls) -> dict[str, float]:
    scalars = TimingScalars(4)
    for calls in blocks:
        scalars.add(calls, lateness(calls, {}))
    return scalars.take()


def test_values_are_means_since_the_last_take() -> None:
    found = taken(block([[0, 0, 0], [10, 0, 2]]), block([[0], [8]]))
    assert found == {
        "collectives/all_reduce/skew_ms": pytest.approx(20 / 4),
        "collectives/all_reduce/wait_ms": pytest.approx(20 / 4 / 2),
        "collectives/all_reduce/size_bytes": pytest.approx(4_000_000),
        "straggler/rank": 1.0,
        "straggler/late_ms_per_step": pytest.approx(20 / 3),
    }


def test_durations_give_a_bandwidth() -> None:
    found = taken(block([[0], [0], [0], [0]], [[2.0], [6.0], [2.0], [2.0]]))
    assert found["collectives/all_reduce/transfer_ms"] == pytest.approx(2.0)
    # 4 MB in 2 ms, times 2 * 3/4.
    assert found["collectives/all_reduce/busbw_gb_per_s"] == pytest.approx(3.0)


def test_an_operation_without_a_definition_has_no_bandwidth() -> None:
    found = taken(block([[0], [0]], [[2.0], [2.0]], op="barrier"))
    assert "collectives/barrier/transfer_ms" in found
    assert "collectives/barrier/busbw_gb_per_s" not in found


def test_taking_scalars_resets_them() -> None:
    scalars, calls = TimingScalars(2), block([[0], [10]])
    assert scalars.take() == {}
    scalars.add(calls, lateness(calls, {}))
    assert scalars.take()
    assert scalars.take() == {}
    later = block([[5], [0]])
    scalars.add(later, lateness(later, {}))
    found = scalars.take()
    assert found["collectives/all_reduce/skew_ms"] == pytest.approx(5.0)
    assert (found["straggler/rank"], found["straggler/late_ms_per_step"]) == (0.0, pytest.approx(5.0))


def test_each_group_and_operation_has_its_own_names() -> None:
    names = taken(block([[0], [1]]), block([[0], [1]], op="broadcast"), block([[0], [1]], name="mesh_tp")).keys()
    skews = {name for name in names if name.endswith("/skew_ms")}
    assert len(skews) == 3
    assert {"collectives/all_reduce/skew_ms", "collectives/broadcast/skew_ms"} < skews
    assert any("mesh_tp" in name for name in skews)


@pytest.mark.parametrize("name", ["0", "1", "mesh_tp", "7f3a", "default:cpu", "a [group] of (mine)", "größer"])
@pytest.mark.parametrize("op", ["all_reduce", "_allgather_base", "send 0->1"])
def test_every_name_is_valid_for_all_loggers(name: str, op: str) -> None:
    """MLflow refuses metric names with other than letters, digits, and a few signs, and that ends training."""
    for metric in taken(block([[0], [1]], op=op, name=name)):
        assert re.fullmatch(r"[\w./\-: ]+", metric), metric


def test_values_are_plain_floats() -> None:
    assert {type(value) for value in taken(block([[0], [1]], [[1.0], [2.0]])).values()} == {float}


def test_later_groups_share_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars_module, "_MOST_NAMES", 3)
    blocks = [block([[0], [number]], name=str(number)) for number in range(30)]
    names = {name.removesuffix("/skew_ms") for name in taken(*blocks) if name.endswith("/skew_ms")}
    assert names == {f"collectives/all_reduce{name}" for name in ("", ".1", ".2", ".later")}
    assert taken(*blocks)["collectives/all_reduce.later/skew_ms"] == pytest.approx(sum(range(3, 30)) / 27)
