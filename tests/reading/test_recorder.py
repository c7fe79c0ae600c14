"""The model of the recorder: what raw entries mean, in the form in which real jobs on NCCL have left them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.reading.dumps import read_dump
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.recorder.model import MOST_ENTRIES, Recorder, State, WorkKind

HERE = Path(__file__).parent / "nccl_dumps"
BEGAN_NS = 1_758_610_505_000_000_000
SECOND_NS = 1_000_000_000
Entry = dict[str, Any]


def call(record: int, seq: int, op: str = "all_reduce", *, pg: int = 5, **more: Any) -> Entry:
    """A collective that has ended, as torch 2.7 writes it (format 2.9)."""
    return {
        "record_id": record,
        "pg_id": pg,
        "process_group": ("35", "TENSOR_MODEL_PARALLEL_GROUP") if pg == 5 else ("43", "PIPELINE_MODEL_PARALLEL_GROUP"),
        "thread_id": "1",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": BEGAN_NS + record * 1_000_000,
        "input_sizes": [[4096]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 180_000,
        "is_p2p": False,
        **more,
    }


def waits(record: int, seq: int, op: str = "all_reduce", **more: Any) -> Entry:
    return call(record, seq, op, **{"state": "scheduled", "retired": False, **more})


def sent(record: int, number: int, op: str, **more: Any) -> Entry:
    """A send or receive, of the pipeline's group, whose last collective was number 26."""
    return waits(record, 26, op, pg=6, is_p2p=True, p2p_seq_id=number, op_id=26 + number, **more)


def whole(record: int, number: int, **more: Any) -> Entry:
    """What follows the parts of a batch: no send, and with the number of the collective before."""
    return call(record, 26, "coalesced", pg=6, p2p_seq_id=number, op_id=27 + number, input_sizes=[], **more)


def status(enqueued: int, completed: int) -> Entry:
    return {
        "last_enqueued_collective": enqueued,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }


def states(*entries: Entry, now_ns: int = 0, pg5: Entry | None = None) -> list[State]:
    return [work.state for work in Recorder(entries, {"5": pg5} if pg5 else {}, now_ns).works]


# NCCL.md 2: completed does not mean ended.


def test_a_completed_but_unretired_call_is_launching() -> None:
    blocked = call(9, 62, retired=False)
    late, soon = blocked["time_created_ns"] + 3 * SECOND_NS, blocked["time_created_ns"] + SECOND_NS // 2
    assert states(call(8, 61), blocked, now_ns=late) == [State.ENDED, State.LAUNCHING]
    assert states(call(8, 61), blocked, now_ns=soon) == [State.ENDED, State.ENDED]
    # A dump does not say when it was taken.
    assert states(call(8, 61), blocked) == [State.ENDED, State.UNKNOWN]


def test_counters_or_later_calls_show_that_a_call_has_ended() -> None:
    unretired = call(9, 62, retired=False)
    late = unretired["time_created_ns"] + 60 * SECOND_NS
    assert states(unretired, now_ns=late, pg5=status(62, 62)) == [State.ENDED]
    assert states(unretired, waits(10, 1, pg=6), now_ns=late) == [State.ENDED, State.WAITING]
    # What another thread has called since tells nothing.
    assert states(unretired, waits(10, 1, pg=6, thread_id="2"), now_ns=late)[0] is State.LAUNCHING


# NCCL.md 3: coalesced point-to-point.


def test_a_batch_is_one_work_and_not_a_collective() -> None:
    """The batch as a whole has the number of the previous collective, which ended long ago."""
    recorder = Recorder(
        [
            call(1, 26, pg=6),
            sent(2, 9, "send 1->2"),
            sent(3, 9, "recv 1<-2"),
            whole(4, 9, state="scheduled", retired=False),
        ],
        {"6": status(9, 26)},
    )
    one, batch = recorder.works
    assert (one.kind, one.state) == (WorkKind.COLLECTIVE, State.ENDED)
    assert (batch.kind, batch.seq, batch.state) == (WorkKind.BATCH, 9, State.WAITING)
    assert [part["profiling_name"] for part in batch.parts] == ["nccl:send 1->2", "nccl:recv 1<-2"]
    assert (recorder.positions["6"].called, recorder.positions["6"].completed) == (26, 26)


def test_parts_end_with_their_batch() -> None:
    found = read_dump(
        {"entries": [sent(2, 8, "send 1->2"), sent(3, 9, "recv 1<-2"), whole(4, 9)], "pg_status": {}}, 0
    ).facts
    assert [(one.op, one.is_p2p, one.completed) for one in found.collectives] == [
        ("send 1->2", True, True),
        ("recv 1<-2", True, True),
    ]


def test_parts_of_an_ended_batch_are_not_open() -> None:
    """In a dump of open entries, parts never end and batches do."""
    made = [sent(record, record, "send 0->3") for record in range(1, 6)]
    counters = {"6": status(5, 4)}
    assert [work.state for work in Recorder(made, counters).works] == [State.ENDED] * 4 + [State.WAITING]
    # Single sends end out of order, pair by pair; those that have ended are gone.
    single = [sent(1, 11_981, "send 0->3"), sent(2, 11_984, "recv 0<-3")]
    assert [work.state for work in Recorder(single, {"6": status(11_986, 11_983)}).works] == [State.WAITING] * 2


# NCCL.md 4, C, D: counters of the last work of either kind.


def test_counters_of_a_mixed_group_are_ignored() -> None:
    recorder = Recorder([sent(86_676, 11_981, "send 0->3")], {"6": status(11_986, 11_983)})
    position = recorder.positions["6"]
    assert (position.called, position.completed, position.is_mixed) == (26, 26, True)


# NCCL.md 5, H: what was given up.


def test_a_given_up_call_has_not_ended_despite_the_counters() -> None:
    recorder = Recorder([waits(9, 61, retired=True), waits(10, 62)], {"5": status(62, 61)})
    assert [(work.state, work.gave_up) for work in recorder.works] == [(State.WAITING, True), (State.WAITING, False)]
    assert recorder.positions["5"].completed == 60


# NCCL.md 10 and A: what started is only known with timing.


def test_a_started_call_is_running() -> None:
    assert states(waits(9, 61, state="started"), waits(10, 62)) == [State.RUNNING, State.WAITING]


# NCCL.md 11: new back ends.


def test_nccl2_is_read_as_nccl_and_unknown_back_ends_are_reported() -> None:
    assert states(waits(9, 61, profiling_name="nccl2:all_reduce", retired=True)) == [State.WAITING]
    assert states(waits(9, 61, profiling_name="gloo:all_reduce", retired=True)) == [State.ENDED]
    evidence = Artifacts()
    for rank in (0, 1):
        made = {"entries": [waits(9, 61, profiling_name="ucc:all_reduce")], "pg_status": {"5": status(61, 60)}}
        evidence.add_dump(f"rank_{rank}", made)
    job = evidence.job() or pytest.fail()
    assert any(line.startswith("How the back end ucc records") for line in job.missing)


# B: nothing outstanding.


def test_a_rank_with_nothing_outstanding_is_idle() -> None:
    assert Recorder([], {"5": status(31_442, 31_442), "6": status(13_966, 13_966)}).is_idle
    assert not Recorder([], {"5": status(31_443, 31_442)}).is_idle
    assert not Recorder([waits(9, 61)], {"5": status(61, 60)}).is_idle
    # A recorder that is off says nothing.
    assert not Recorder([], {}).is_idle


def test_a_rank_without_open_entries_is_idle_despite_its_counters() -> None:
    """The last to end need not be the last that was called: 13965 of 13966, with nothing open."""
    evidence = Artifacts()
    config = {"43": {"name": "43", "desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": "[0, 1]"}}
    evidence.add_dump("rank_0", {"pg_config": config, "pg_status": {"6": status(13_966, 13_965)}, "entries": []})
    other = {"pg_config": config, "pg_status": {"6": status(9, 8)}, "entries": [sent(9, 9, "recv 1<-0")]}
    evidence.add_dump("rank_1", other)
    job = evidence.job() or pytest.fail()
    assert [facts.record is not None and facts.record.is_idle for facts in job.ranks] == [True, False]


# E, 6: numbers are local, names may be shared or differ.


def test_positions_without_a_name_are_named_by_ranks_with_the_same_groups() -> None:
    """Rank 10 of a real job: no entry, and so no number with a name."""
    evidence = Artifacts()
    for rank in range(8, 12):
        evidence.add_dump(f"rank_{rank}", pickle.loads((HERE / "lock_gil_2nd" / f"_dump_{rank}").read_bytes()))
    job = evidence.job() or pytest.fail()
    ten = {group.description: group for group in next(facts for facts in job.ranks if facts.rank == 10).groups}
    assert (ten["TENSOR_MODEL_PARALLEL_GROUP"].name, ten["TENSOR_MODEL_PARALLEL_GROUP"].last_enqueued) == ("40", 31_442)
    assert ten["TENSOR_MODEL_PARALLEL_GROUP"].ranks == (10, 11)


def test_a_group_with_different_names_on_its_members_is_one() -> None:
    evidence = Artifacts()
    for rank, name in ((0, "a1"), (1, "b2")):
        made = {
            "pg_config": {name: {"name": name, "desc": "tp", "ranks": "[0, 1]"}},
            "pg_status": {"5": status(61, 60)},
            "entries": [waits(9, 61, process_group=(name, "tp"))],
        }
        evidence.add_dump(f"rank_{rank}", made)
    job = evidence.job() or pytest.fail()
    assert {group.name for facts in job.ranks for group in facts.groups} == {"a1"}
    assert {one.group for facts in job.ranks for one in facts.collectives} == {"a1"}


# G: an entry between two open ones may be gone.


def test_streams_may_end_out_of_order() -> None:
    made = json.loads(json.dumps(pickle.loads((HERE / "gpu_error_1st" / "_dump_15").read_bytes())))
    recorder = Recorder(made["entries"], made["pg_status"])
    assert [work.seq for work in recorder.works][:3] == [20_537, 20_538, 42_819]
    assert (recorder.positions["5"].called, recorder.positions["5"].completed) == (42_826, 42_818)


# H: JSON.


def test_json_numbers_may_be_text_and_entries_missing() -> None:
    found = read_dump(
        {"pg_status": {"0": {key: str(value) for key, value in status(60, 60).items()}}, "pg_config": {}}, 0
    ).facts
    assert (found.record.is_idle, found.groups[0].last_enqueued, found.collectives) == (True, 60, ())


def test_a_coalesced_entry_has_several_sizes() -> None:
    made = waits(9, 61, "allreduce_coalesced", input_sizes=[[8], [16, 2]])
    assert read_dump({"entries": [made]}, 0).facts.collectives[0].input_sizes == ((8,), (16, 2))


# 7: a ring.


def test_counters_reveal_overwritten_entries() -> None:
    """Number 62 is the first open entry, and 60 the last that has ended."""
    assert Recorder([waits(9, 62)], {"5": status(62, 60)}).has_lost
    assert not Recorder([waits(9, 61)], {"5": status(61, 60)}).has_lost
    sends = [sent(2, 9, "send 1->2"), sent(3, 9, "recv 1<-2"), whole(4, 9, state="scheduled", retired=False)]
    assert Recorder(sends, {"6": status(9, 7)}).has_lost
    assert not Recorder(sends, {"6": status(9, 8)}).has_lost
    # The last to end was collective number 26.
    assert not Recorder(sends, {"6": status(9, 26)}).has_lost


def test_a_batch_with_overwritten_parts_is_not_a_collective() -> None:
    recorder = Recorder([whole(4, 9, state="scheduled", retired=False), sent(5, 10, "send 1->2")], {"6": status(10, 8)})
    assert recorder.works[0].kind is WorkKind.BATCH
    assert recorder.has_lost


def test_missing_entries_in_between_are_damage() -> None:
    made = [call(1, 1), call(2, 2), call(4, 4), waits(5, 5)]
    assert read_dump({"entries": made}, 0).facts.record.has_lost
    assert not read_dump({"entries": [call(3, 3), *made[2:]]}, 0).facts.record.has_lost
    # Of open entries alone, those in between have ended.
    assert not read_dump({"entries": [waits(1, 1), waits(5, 5)]}, 0).facts.record.has_lost


def test_calls_keep_recorder_order_despite_clock_changes() -> None:
    made = [waits(1, 61), waits(2, 1, pg=6, time_created_ns=BEGAN_NS - SECOND_NS)]
    assert [one.group for one in read_dump({"entries": made}, 0).facts.collectives] == ["35", "43"]


def test_only_the_newest_part_of_a_large_ring_is_read_and_reported() -> None:
    entries = [waits(0, 1, pg=6), *(call(number, number) for number in range(1, MOST_ENTRIES + 3))]
    evidence = Artifacts()
    for rank in (0, 1):
        evidence.add_dump(f"rank_{rank}", {"entries": entries})
    job = evidence.job() or pytest.fail()
    assert [line for line in job.missing if "20,000" in line] == [
        "The recorders of ranks 0-1 kept more than 20,000 entries: the newest were read."
    ]
    assert job.ranks[0].collectives[-1].seq == MOST_ENTRIES + 2
    assert {one.group for one in job.ranks[0].collectives} == {"35"}
