"""What is made of entries in the format of NCCL's Flight Recorder, constructed from its documented fields.

The fields are those of torch 2.13 (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp): ``state`` is ``scheduled``,
``started`` once the start event has been seen (with timing switched on only), ``completed`` once the end event has;
``time_discovered_*`` are when the host saw that; ``retired`` turns true, and ``duration_ms`` is added, when the back
end's watchdog has dealt with it, up to 0.1 s later.
"""

from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replay import compared, default_group, delays, wrong_about_delays
from torch._C._distributed_c10d import Backend, HashStore

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.collectives.recording import PhaseHistory, Recording
from lightning_ncclsafe.facts import Phase, Progress, RankFacts
from lightning_ncclsafe.probes.process import flight_recorder
from lightning_ncclsafe.rules.kit.activity import outstanding_collective
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Clock

MS = 1_000_000
STEP_MS, TRANSFER_MS, DELAY_MS = 400.0, 2.0, 150.0
HEALTHY, DELAYED = 12, 6
LATE = 1
# The host's clock is read a little later than the call, and never at the same distance.
JITTER_MS = (0.02, 0.05, 0.03, 0.01)

Entry = dict[str, Any]


def entry(seq: int, created_ns: int, duration_ms: float | None = TRANSFER_MS, **more: Any) -> Entry:
    """A completed all_reduce of the default group, unless told otherwise."""
    ended_ns = created_ns + int((duration_ms or 0) * MS)
    timing = {} if duration_ms is None else {"duration_ms": duration_ms}
    return {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created_ns,
        "input_sizes": [[1 << 20]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1 << 20]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": created_ns + 60 * MS,
        "time_discovered_completed_ns": ended_ns + 60 * MS,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **timing,
        **more,
    }


def recorded(rank: int, ranks: int, *, on_host: bool) -> list[Entry]:
    """Healthy calls, and then some for which rank 1 is late, on the host or only on its device."""
    entries = []
    for number in range(HEALTHY + DELAYED):
        is_delayed = number >= HEALTHY
        late_ms = DELAY_MS if is_delayed and rank == LATE else 0.0
        jitter_ms = JITTER_MS[rank]
        # All are released when the last one has come, and what it has to do then takes TRANSFER_MS.
        waited_ms = (DELAY_MS if is_delayed else max(JITTER_MS[:ranks])) - (late_ms if is_delayed else jitter_ms)
        created_ms = number * STEP_MS + jitter_ms + (late_ms if on_host else 0.0)
        entries.append(entry(number + 1, int(created_ms * MS), TRANSFER_MS + waited_ms))
    return entries


def file_of(entries: list[list[Entry]]) -> dict[str, Any]:
    """A recording of these ranks, as far as times are read from it."""
    members = {"0": list(range(len(entries)))}
    dumps = [{"rank": rank, "entries": found, "groups": members} for rank, found in enumerate(entries)]
    expected = {"late_rank": LATE, "healthy": HEALTHY, "late_ms": {"delayed": [DELAY_MS] * DELAYED}}
    return {"ranks": len(entries), "expected": expected, "dumps": dumps}


@pytest.fixture(autouse=True)
def entries_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are no pickles."""
    monkeypatch.setattr("replay.unpickled", lambda dump: dump)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("on_host", [True, False], ids=["on the host", "on the device"])
def test_a_known_delay_is_lateness_of_its_rank_and_not_transfer(ranks: int, on_host: bool) -> None:
    file = file_of([recorded(rank, ranks, on_host=on_host) for rank in range(ranks)])
    assert wrong_about_delays(file) == []
    found = delays(file)["delayed"]
    assert found.rank == LATE
    assert found.late_ms == pytest.approx([DELAY_MS] * DELAYED, abs=1)
    assert found.transfer_ms == pytest.approx([TRANSFER_MS] * DELAYED)
    assert found.waits_ms == pytest.approx([DELAY_MS] * DELAYED, abs=1)


def test_without_a_delay_nobody_is_late_and_nothing_is_waiting() -> None:
    found = delays(file_of([recorded(rank, 2, on_host=True) for rank in range(2)]))["healthy"]
    assert median(found.late_ms) < 1
    assert found.transfer_ms == pytest.approx([TRANSFER_MS] * HEALTHY)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"late_rank": 0}, "rank 1 was late"),
        ({"late_ms": {"delayed": [2 * DELAY_MS] * DELAYED}}, "late by 150.0 ms, not 300.0 ms"),
    ],
)
def test_a_wrong_verdict_on_a_delay_is_seen(change: dict[str, Any], said: str) -> None:
    file = file_of([recorded(rank, 2, on_host=True) for rank in range(2)])
    file["expected"] |= change
    assert said in " ".join(wrong_about_delays(file))


def test_a_delay_that_is_taken_for_transfer_is_seen() -> None:
    entries = [recorded(rank, 2, on_host=True) for rank in range(2)]
    for waiting, late in zip(*entries, strict=True):
        late["duration_ms"] = waiting["duration_ms"]
    assert "transfer 152.0 ms, not 2.0 ms" in " ".join(wrong_about_delays(file_of(entries)))


def test_one_rank_without_durations_leaves_the_hosts_clocks() -> None:
    entries = [recorded(rank, 2, on_host=True) for rank in range(2)]
    entries[0] = [{name: value for name, value in found.items() if name != "duration_ms"} for found in entries[0]]
    found = delays(file_of(entries))["delayed"]
    assert (found.rank, found.transfer_ms) == (LATE, [])
    assert found.late_ms == pytest.approx([DELAY_MS] * DELAYED, abs=1)


def coalesced(whole: str) -> list[Entry]:
    """Two calls under one number, as the back end records them: the parts have no events, and so neither end nor time.

    They stay ``scheduled`` and are never retired. An all_gather of unequal sizes is made of such parts, too.
    """
    parts = [
        entry(1, 10 + number, None, op_id=number + 1, record_id=number, state="scheduled", retired=False)
        for number in range(2)
    ]
    return [*parts, entry(1, 20, TRANSFER_MS, op_id=3, record_id=2, profiling_name=whole)]


WHOLES = ["nccl:coalesced", "nccl:ALLGATHER_coalesced"]


def test_what_is_coalesced_is_one_call() -> None:
    [(calls, _)] = compared(file_of([coalesced(WHOLES[0])] * 2))
    assert calls.seq.tolist() == [1]


@pytest.mark.parametrize("whole", WHOLES)
def test_what_is_coalesced_takes_as_long_as_the_whole(whole: str) -> None:
    [(calls, _)] = compared(file_of([coalesced(whole)] * 2))
    assert calls.duration_ns.tolist() == [[int(TRANSFER_MS * MS)]] * 2


@pytest.mark.parametrize("whole", WHOLES)
def test_the_parts_of_what_was_coalesced_are_not_outstanding(whole: str) -> None:
    _, collectives = flight_recorder.parse({"entries": coalesced(whole)}, {})
    facts = RankFacts(rank=0, progress=Progress(phase=Phase.TRAIN), collectives=tuple(collectives))
    assert outstanding_collective(facts) is None


def test_point_to_point_is_left_out() -> None:
    sends = [entry(0, 5 * MS, is_p2p=True, p2p_seq_id=1, profiling_name="nccl:send 0->1", record_id=1)]
    calls, _ = default_group(file_of([[entry(1, 0), *sends], [entry(1, 0), *sends]]))
    assert calls.seq.tolist() == [1]


def read_twice(first: Entry, then: Entry) -> list[list[int]]:
    """Durations in the windows of two readings."""
    shown = [first]
    recording = Recording(0, PhaseHistory(), entries=lambda: [shown])
    windows = [recording.read(Clock())]
    shown[:] = [then]
    windows.append(recording.read(Clock()))
    return [window.calls["duration_ns"].tolist() for window in windows]


@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_a_call_that_has_not_ended_waits_for_its_duration(state: str) -> None:
    running = entry(1, 0, None, state=state, retired=False)
    assert read_twice(running, entry(1, 0)) == [[], [int(TRANSFER_MS * MS)]]


def test_a_call_that_has_ended_waits_for_the_watchdog_to_give_its_duration() -> None:
    """Reading the recorder looks at the events itself: what has just ended is completed, up to 0.1 s before it has a
    duration."""
    ended = entry(1, 0, None, state="completed", retired=False)
    assert read_twice(ended, entry(1, 0)) == [[], [int(TRANSFER_MS * MS)]]


def test_a_call_that_is_retired_without_a_duration_is_not_waited_for() -> None:
    untimed = entry(1, 0, None)
    assert read_twice(untimed, untimed) == [[UNKNOWN_NS], []]


def test_timing_is_switched_on_for_a_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_enable_collectives_timing`` is bound on ``ProcessGroup``; on back ends, too, from torch 2.14 on only."""
    assert hasattr(Backend, "_enable_collectives_timing") == (torch.__version__ >= "2.14")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        nccl = SimpleNamespace(name=lambda: "nccl")
        monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: nccl)
        assert process_groups.time_collectives_on_device() == 1
    finally:
        dist.destroy_process_group()
