"""A trace of a job that is small enough to know every event of, and of one that is too large to keep them all."""

import gzip
import itertools
import json
import os
import stat
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.report.trace import collectives, selection
from lightning_ncclsafe.report.trace.collectives import write_trace
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import RankSummary, TimingSummary
from lightning_ncclsafe.timing.windows import GAP, SPAN, UNKNOWN_NS, Clock, GroupMembers, Spans

MS = 1_000_000
T0 = 1_700_000_000_123_456_789
NO_SPANS = np.zeros(0, SPAN)

Event = dict[str, Any]


def block(
    arrival_ms: list[list[float]],
    *,
    duration_ms: list[list[float]] | None = None,
    first: int = 0,
    ranks: tuple[int, ...] = (),
    name: str = "0",
    ops: tuple[str, ...] = ("all_reduce",),
) -> MatchedCalls:
    """Arrivals in milliseconds, a row for each rank."""
    arrival_ns = T0 + np.rint(np.array(arrival_ms) * MS).astype(np.int64)
    rows, columns = arrival_ns.shape
    duration_ns = np.full((rows, columns), UNKNOWN_NS)
    if duration_ms is not None:
        duration_ns = np.where(np.array(duration_ms) < 0, UNKNOWN_NS, np.rint(np.array(duration_ms) * MS)).astype(
            np.int64
        )
    return MatchedCalls(
        group=GroupMembers(name=name, description=f"group of {name}", ranks=ranks or tuple(range(rows))),
        ops=ops,
        op=np.arange(columns) % len(ops),
        seq=np.arange(first, first + columns),
        step=np.arange(columns),
        size_bytes=np.full(columns, 4096),
        arrival_ns=arrival_ns,
        duration_ns=duration_ns,
        uncertainty_ns=np.zeros(rows, dtype=np.int64),
        before_ns=arrival_ns[:, 0],
        follows=np.arange(columns) > 0,
    )


def spans_of(*rows: tuple[int, int, float]) -> Spans:
    """Rank, phase and begin in milliseconds."""
    return np.array([(rank, phase, T0 + round(begin * MS)) for rank, phase, begin in rows], SPAN)


def written(path: Path, **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"calls": [], "spans": NO_SPANS, "summary": TimingSummary()}
    count = write_trace(path, **known | more)
    with gzip.open(path, "rt") as file:
        read: dict[str, Any] = json.load(file)
    assert count == len(read["traceEvents"])
    return read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json.gz"


def threads(read: dict[str, Any]) -> dict[tuple[int, str], list[Event]]:
    """Events by rank and name of thread, in the order in which they stand."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in read["traceEvents"]
        if event["name"] == "thread_name"
    }
    found: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in read["traceEvents"]:
        if event["ph"] == "X" or event.get("s") == "t":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def drawn(events: list[Event]) -> list[tuple[str, float, float]]:
    return [(event["name"], event["ts"], event["ts"] + event.get("dur", 0)) for event in events]


def process_names(read: dict[str, Any]) -> list[str]:
    return [event["args"]["name"] for event in read["traceEvents"] if event["name"] == "process_name"]


def test_every_rank_waits_from_its_arrival_to_the_last(path: Path) -> None:
    found = threads(written(path, calls=[block([[0, 100], [30.000_001, 101], [10, 130]])]))
    waits = [found[rank, "waits (group of 0)"] for rank in range(3)]
    assert drawn(waits[0]) == [("waits for rank 1", 0, 30_000.001), ("waits for rank 2", 100_000, 130_000)]
    assert drawn(waits[1]) == [("last", 30_000.001, 30_000.001), ("waits for rank 2", 101_000, 130_000)]
    assert drawn(waits[2]) == [("waits for rank 1", 10_000, 30_000.001), ("last", 130_000, 130_000)]
    args = {"seq": 0, "op": "all_reduce", "bytes": 4096, "last_rank": 1}
    assert waits[2][0]["args"] == args | {"wait_ms": 20.000001, "lateness_ms": 10.0}
    assert waits[1][0]["args"] == args | {"wait_ms": 0.0, "lateness_ms": 30.000001}


def test_a_collective_lasts_for_its_device_duration(path: Path) -> None:
    found = threads(written(path, calls=[block([[0, 100], [30, 100]], duration_ms=[[32, 1.5], [2, 1.5]])]))
    assert drawn(found[0, "all_reduce (group of 0)"]) == [
        ("all_reduce", 0, 32_000),
        ("all_reduce", 100_000, 101_500),
    ]
    assert drawn(found[1, "all_reduce (group of 0)"])[0] == ("all_reduce", 30_000, 32_000)
    assert found[1, "all_reduce (group of 0)"][1]["args"] == {"seq": 1, "bytes": 4096}


def test_without_durations_only_waits_are_drawn(path: Path) -> None:
    read = written(path, calls=[block([[0], [30]])])
    assert {name for _, name in threads(read)} == {"waits (group of 0)"}
    assert "all_reduce (group of 0)" not in json.dumps(read)


def test_a_single_unknown_duration_is_not_drawn(path: Path) -> None:
    found = threads(written(path, calls=[block([[0, 50, 60], [1, 51, 61]], duration_ms=[[3, -1, 4], [2, 5, -1]])]))
    assert [event["args"]["seq"] for event in found[0, "all_reduce (group of 0)"]] == [0, 2]
    assert [event["args"]["seq"] for event in found[1, "all_reduce (group of 0)"]] == [0, 1]
    assert drawn(found[0, "all_reduce (group of 0)"])[1] == ("all_reduce", 60_000, 64_000)


def test_collectives_called_ahead_run_one_after_another(path: Path) -> None:
    # Rank 0 calls three at once, rank 1 comes to each of them later.
    calls = [block([[0, 1, 2], [10, 20, 30]], duration_ms=[[11, 10, 10], [1, 1, 1]])]
    found = threads(written(path, calls=calls))
    assert drawn(found[0, "all_reduce (group of 0)"]) == [
        ("all_reduce", 0, 11_000),
        ("all_reduce", 11_000, 21_000),
        ("all_reduce", 21_000, 31_000),
    ]
    assert [event[1:] for event in drawn(found[0, "waits (group of 0)"])] == [
        (0, 10_000),
        (10_000, 20_000),
        (20_000, 30_000),
    ]
    # What it truly waited is told.
    assert found[0, "waits (group of 0)"][2]["args"]["wait_ms"] == 28.0


@pytest.mark.parametrize("seed", range(5))
def test_events_of_a_thread_do_not_overlap(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1.0, (4, 200)), axis=1)
    calls = [block(arrival.tolist(), duration_ms=random.uniform(-0.5, 3.0, (4, 200)).tolist())]
    phases = spans_of(*((rank, 1, begin) for rank in range(4) for begin in range(200)))
    for events in threads(written(path, calls=calls, spans=phases)).values():
        at = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in events]
        assert len(at) > 50
        assert all(first[1] <= second[0] + 1e-6 for first, second in itertools.pairwise(at))


def test_a_phase_lasts_until_the_next_one_of_its_rank(path: Path) -> None:
    phases = spans_of((1, 2, 5), (0, 1, 0), (0, 2, 20), (1, 1, 0), (0, 200, 30))
    found = threads(written(path, calls=[block([[1], [40]])], spans=phases))
    assert drawn(found[0, "phases"]) == [
        ("data loading", 0, 20_000),
        ("forward/backward", 20_000, 30_000),
        ("phase 200", 30_000, 40_000),
    ]
    assert drawn(found[1, "phases"]) == [("data loading", 0, 5_000), ("forward/backward", 5_000, 40_000)]


def test_a_phase_ends_at_a_gap(path: Path) -> None:
    spans = spans_of((0, 1, 0.0), (0, GAP, 2.0), (0, 3, 5.0))
    read = written(path, calls=[block([[6.0], [6.0]])], spans=spans)
    phases = [(name, begin, end) for name, begin, end in drawn(threads(read)[0, "phases"])]
    assert [(begin, end) for _, begin, end in phases] == [(0.0, 2000.0), (5000.0, 6000.0)]


def test_forgotten_collectives_are_mentioned(path: Path) -> None:
    read = written(path, calls=[block([[1.0], [3.0]])], forgotten=12_345)
    said = "of the 12,345 oldest collectives, only some with the greatest skew were kept"
    assert read["otherData"]["left_out"] == said
    assert said in [event["name"] for event in read["traceEvents"] if event["ph"] == "i"]


def test_ranks_are_processes_in_their_order_with_their_clocks(path: Path) -> None:
    clocks = [Clock(offset_ns=0, uncertainty_ns=0), Clock(offset_ns=-31_000, uncertainty_ns=9_600), Clock()]
    summary = TimingSummary(ranks=tuple(RankSummary(rank=rank, clock=clock) for rank, clock in enumerate(clocks)))
    read = written(path, calls=[block([[0], [1], [2]])], summary=summary)
    assert process_names(read) == ["rank 0", "rank 1 (-0.03 ms ± 0.01 ms clock)", "rank 2 (clock unknown)"]
    order = {e["pid"]: e["args"]["sort_index"] for e in read["traceEvents"] if e["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}


def test_each_group_has_its_own_threads_on_its_members(path: Path) -> None:
    calls = [block([[0], [1]], ranks=(0, 2), name="a"), block([[0.5], [1]], ranks=(0, 1), name="b")]
    calls += [block([[5], [6]], ranks=(0, 2), name="a", first=1)]
    found = threads(written(path, calls=calls))
    assert {key: len(events) for key, events in found.items()} == {
        (0, "waits (group of a)"): 2,
        (2, "waits (group of a)"): 2,
        (0, "waits (group of b)"): 1,
        (1, "waits (group of b)"): 1,
    }


def test_blocks_number_their_operations_independently(path: Path) -> None:
    calls = [block([[0, 1], [0, 1]], ops=("x", "y")), block([[2, 3], [2, 3]], ops=("z", "x"), first=2)]
    found = threads(written(path, calls=calls))
    assert [event["args"]["op"] for event in found[0, "waits (group of 0)"]] == ["x", "y", "z", "x"]


def test_times_are_microseconds_from_the_first_event(path: Path) -> None:
    read = written(path, calls=[block([[7.000_005], [8]])], spans=spans_of((0, 1, 3)))
    assert min(event["ts"] for event in read["traceEvents"] if "ts" in event) == 0
    assert drawn(threads(read)[0, "waits (group of 0)"])[0][1] == 4_000.005
    assert read["otherData"]["start_ns"] == T0 + 3 * MS
    assert read["otherData"]["start"].startswith("2023-11-14T22:13:20.126")


def test_times_are_exact_to_the_nanosecond_for_a_month(path: Path) -> None:
    month_ms = 30 * 24 * 3600 * 1000.0
    calls = [block([[0], [1]]), block([[month_ms], [month_ms]], first=1)]
    calls[1].arrival_ns[0] += 7
    begin = drawn(threads(written(path, calls=calls))[0, "waits (group of 0)"])[1][1]
    assert round(begin * 1000) == round(month_ms * MS) + 7


def test_stragglers_are_marked_across_the_trace(path: Path) -> None:
    named = Straggler(rank=1, phase="data loading", share=0.9, of_steps=200, mean_s=0.03, since_ns=T0 + 20 * MS)
    early = replace(named, since_ns=5)
    read = written(path, calls=[block([[0], [30]])], summary=TimingSummary(stragglers=(named, early)))
    marks = [event for event in read["traceEvents"] if event.get("s") == "g"]
    assert [(mark["ph"], mark["pid"], mark["ts"]) for mark in marks] == [("i", 1, 20_000), ("i", 1, 0)]
    assert marks[0]["name"].startswith("rank 1 was last in 90 %")


def test_names_are_unchanged(path: Path) -> None:
    group = GroupMembers(name="0", description='a "group"\n\u202e\udc80', ranks=(0, 1))
    read = written(path, calls=[replace(block([[0], [1]], ops=('op"\\',)), group=group)])
    (events,) = {key: e for key, e in threads(read).items() if key[0] == 0}.values()
    assert events[0]["args"]["op"] == 'op"\\'


def test_an_empty_job_is_a_valid_trace(path: Path) -> None:
    assert written(path)["traceEvents"] == []


def big_job(collectives: int = 2000, ranks: int = 4) -> tuple[list[MatchedCalls], Spans]:
    """Every collective has a skew of 1 ms, but for two of them; and a phase before each."""
    arrival = np.arange(collectives) * 100.0 + np.zeros((ranks, 1))
    arrival[1] += 1.0
    arrival[2, 300:302] += 50
    half = collectives // 2
    calls = [block(arrival[:, :half].tolist()), block(arrival[:, half:].tolist(), first=half)]
    return calls, spans_of(*((rank, 1, n * 100.0 - 90) for rank in range(ranks) for n in range(collectives)))


def kept_seqs(read: dict[str, Any]) -> dict[int, int]:
    """How many ranks each kept collective has."""
    found: dict[int, int] = defaultdict(int)
    for event in read["traceEvents"]:
        if "seq" in event.get("args", {}):
            found[event["args"]["seq"]] += 1
    return found


def test_skewed_newest_and_sampled_collectives_are_kept(path: Path) -> None:
    calls, spans = big_job()
    read = written(path, calls=calls, spans=spans, most_events=1000)
    kept = kept_seqs(read)
    assert 800 <= len(read["traceEvents"]) <= 1000
    assert set(kept.values()) == {4}
    assert {300, 301, *range(1980, 2000)} <= set(kept)
    tenths = np.histogram([*kept], bins=10, range=(0, 2000))[0]
    assert tenths.min() >= 2


def test_only_phases_before_kept_collectives_are_kept(path: Path) -> None:
    calls, spans = big_job()
    read = written(path, calls=calls, spans=spans, most_events=4000)
    start_ns = read["otherData"]["start_ns"]
    began = {
        round((event["ts"] * 1000 + start_ns - T0) / MS)
        for key, e in threads(read).items()
        for event in e
        if key[1] == "phases"
    }
    kept = set(kept_seqs(read))
    assert {seq * 100 - 90 for seq in kept} <= began
    # Also what went before and reaches into it, and what came while others waited.
    assert began <= {seq * 100 - 90 + near for seq in kept for near in (-100, 0, 100)}


def test_a_sample_decides_how_many_phases_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_ENOUGH_SPANS", 500)
    calls, spans = big_job()
    read = written(path, calls=calls, spans=spans, most_events=3000)
    assert 2400 <= len(read["traceEvents"]) <= 3000
    began = {round((e["ts"] * 1000 + read["otherData"]["start_ns"] - T0) / MS) for e in threads(read)[3, "phases"]}
    kept = {seq * 100 - 90 for seq in kept_seqs(read)}
    assert len(kept & began) > 0.9 * len(kept)
    # Room for phases of all ranks, not of some alone.
    phases = [len(events) for key, events in threads(read).items() if key[1] == "phases"]
    assert len(phases) == 4 and max(phases) < 1.2 * min(phases)


def test_excess_phases_are_kept_longest_first_for_all_ranks(path: Path) -> None:
    calls, _ = big_job(500)
    rows = [(rank, 1 + n % 2, n * 5.0 - 90 - n % 2 * 2) for rank in range(4) for n in range(10_000)]
    found = threads(written(path, calls=calls, spans=spans_of(*rows), most_events=1000))
    phases = [found[rank, "phases"] for rank in range(4)]
    assert max(map(len, phases)) < 1.2 * min(map(len, phases))
    assert {event["name"] for events in phases for event in events} == {"forward/backward"}
    assert sum(len(events) for key, events in found.items() if key[1] != "phases") > 150


def test_omissions_are_noted_in_metadata_and_as_an_event(path: Path) -> None:
    calls, spans = big_job()
    read = written(path, calls=calls, spans=spans, most_events=1000)
    left = 2000 - len(kept_seqs(read))
    assert read["otherData"]["left_out"].startswith(f"{left:,} of 2,000 collectives and ")
    assert read["otherData"]["left_out"] in [e["name"] for e in read["traceEvents"] if e.get("s") == "g"]
    whole = written(path, calls=calls, spans=spans)
    assert whole["otherData"]["left_out"] == ""
    assert not [event for event in whole["traceEvents"] if event.get("s") == "g"]
    assert len(kept_seqs(whole)) == 2000


def test_names_of_many_groups_stay_within_the_limit(path: Path) -> None:
    calls = [block(np.arange(4000.0).reshape(4, 1000).tolist(), name=str(number)) for number in range(12)]
    read = written(path, calls=calls, most_events=2000)
    assert 1000 < len(read["traceEvents"]) <= 2000


@pytest.mark.parametrize("most_events", [0, 1, 45, 60])
def test_a_tiny_limit_is_not_an_error(path: Path, most_events: int) -> None:
    calls, spans = big_job(50)
    read = written(path, calls=calls, spans=spans, most_events=most_events)
    # Names are always written.
    assert len(read["traceEvents"]) <= max(most_events, 4 * 8 + 1)


def test_a_trace_is_private_and_replaces_an_earlier_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file cannot be renamed from another file system.
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent / "elsewhere"))
    path.write_text("earlier")
    written(path, calls=[block([[0], [1]])])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_missing_folder_is_an_oserror(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_trace(path.parent / "gone" / path.name, calls=[], spans=NO_SPANS, summary=TimingSummary())


def test_a_full_disk_leaves_only_the_earlier_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("earlier")

    class Full(gzip.GzipFile):
        def write(self, data: Any) -> int:
            if b"waits for" in data:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(collectives.gzip, "GzipFile", Full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(path, calls=[block([[0], [1]])], spans=NO_SPANS, summary=TimingSummary())
    assert (os.listdir(path.parent), path.read_text()) == ([path.name], "earlier")
