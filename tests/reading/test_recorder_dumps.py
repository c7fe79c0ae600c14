"""Dumps of all versions, in any form and under any name, become facts and then the right verdict."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from made_dumps import FRAMES, as_json, dump, entry, idle, waiting, write

from lightning_ncclsafe.facts import Collective, Group
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.reading.dumps import from_pickle, rank_of, read_dump
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.values import ReadingError
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

HERE = Path(__file__).parent


def read(*paths: Path) -> Artifacts:
    evidence = Artifacts()
    for path in paths:
        evidence.read(str(path))
    return evidence


def first_of(*paths: Path) -> Finding:
    evidence = read(*paths)
    assert evidence.errors == []
    job = evidence.job()
    assert job is not None
    diagnosis = judge(job, RECORDED_RULES)
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    return diagnosis.findings[0]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("comm_lib_trace_rank_0", 0),
        ("/tmp/nccl_trace_rank_17", 17),
        ("trace_12.json", 12),
        ("fr3.pickle", 3),
        ("prefix5", 5),
        ("node7_nccl_trace_rank_31.pkl.gz", 31),
        ("rank-4-1795279081.json", 4),
        ("dump", None),
        ("trace_99999999", None),
    ],
)
def test_the_file_name_gives_the_rank(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def parsed(dump: dict[str, Any]) -> tuple[tuple[Group, ...], tuple[Collective, ...]]:
    facts = read_dump(dump, 0).facts
    return facts.groups, facts.collectives


def test_an_entry_becomes_a_collective() -> None:
    groups, calls = parsed(waiting())
    everybody = (0, 1, 2, 3)
    assert groups == (
        Group(
            name="0", description="default_pg", ranks=everybody, last_enqueued=61, last_started=61, last_completed=60
        ),
    )
    assert (calls[0].completed, calls[1].completed, calls[1].started) == (True, False, True)
    assert (calls[1].op, calls[1].backend, calls[1].input_sizes) == ("all_reduce", "nccl", ((128, 10),))
    # Innermost last, as everywhere here; the user's own code is told by its path.
    assert [frame.function for frame in calls[1].stack] == ["<module>", "training_step", "all_reduce"]
    assert [frame.user for frame in calls[1].stack] == [True, True, False]


def test_json_and_pickle_are_equivalent() -> None:
    made = waiting()
    groups, calls = parsed(made)
    same_groups, same_calls = parsed(as_json(made))
    assert same_groups == groups
    assert [call.seq for call in same_calls] == [call.seq for call in calls]
    assert same_calls[1].stack == ()


VERSIONS: dict[str, dict[str, Any]] = {
    "2.1, of torch 2.4: one number for all, and a group's name alone": {
        "drop": (
            "collective_seq_id",
            "p2p_seq_id",
            "is_p2p",
            "record_id",
            "timeout_ms",
            "output_dtypes",
            "thread_name",
        ),
        "set": {"seq_id": 61, "process_group": "0"},
    },
    "2.3, of torch 2.5": {"drop": ("thread_id", "thread_name"), "set": {}},
    "2.10, of torch 2.13": {"drop": (), "set": {}},
    "nccl2": {"drop": (), "set": {"profiling_name": "nccl2:all_reduce"}},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_keys_of_all_versions_are_read(version: str) -> None:
    change = VERSIONS[version]
    one = {key: value for key, value in entry(61, state="started").items() if key not in change["drop"]} | change["set"]
    _, (call,) = parsed(dump(one, enqueued=61, completed=60))
    assert (call.group, call.seq, call.op, call.completed, call.is_p2p) == ("0", 61, "all_reduce", False, False)


def test_a_retired_call_has_ended_on_gloo_and_not_on_nccl() -> None:
    def ended(op: str) -> bool:
        _, (call,) = parsed(dump(entry(61, state="scheduled", op=op, retired=True), enqueued=61, completed=60))
        return call.completed

    assert (ended("gloo:all_reduce"), ended("nccl:all_reduce")) == (True, False)


def test_uninitialised_counters_are_ignored() -> None:
    groups, (call,) = parsed(dump(entry(1, state="started"), enqueued=1, completed=93_459_313_471_793))
    assert (groups[0].last_completed, call.completed) == (0, False)


def test_the_default_group_has_a_position_without_entries() -> None:
    """A dump of active entries only, from the one rank without any."""
    (group,), calls = parsed(dump(enqueued=60, completed=60))
    assert (group.name, group.description, group.last_enqueued, calls) == ("0", "default_pg", 60, ())


def position(enqueued: int, completed: int) -> dict[str, int]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


def with_groups(*names: str, status: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A dump with entries of the default group alone."""
    made = waiting()
    made["pg_config"] |= {name: {"name": name, "desc": name, "ranks": "[0, 1]"} for name in names}
    made["pg_status"] |= status
    return made


def test_a_group_without_a_position_has_no_calls() -> None:
    groups, _ = parsed(with_groups("tp", status={}))
    assert [(group.name, group.last_enqueued) for group in groups] == [("0", 61), ("tp", 0)]


def test_a_position_without_entries_belongs_to_the_remaining_group() -> None:
    groups, _ = parsed(with_groups("tp", status={"1": position(50, 49)}))
    assert [(group.name, group.last_enqueued, group.last_completed) for group in groups] == [
        ("0", 61, 60),
        ("tp", 50, 49),
    ]


def test_two_positions_without_entries_are_not_assigned() -> None:
    groups, _ = parsed(with_groups("tp", "dp", status={"1": position(50, 49), "2": position(3, 3)}))
    assert [group.name for group in groups] == ["0"]


def test_a_long_queue_keeps_its_oldest_outstanding_and_newest_calls() -> None:
    queue = [entry(seq, state="scheduled") for seq in range(100, 500)]
    done = [entry(seq) for seq in range(1, 100)]
    _, calls = parsed(dump(*done, *queue, enqueued=499, completed=99))
    assert (calls[0].seq, calls[-1].seq, len(calls)) == (68, 499, 32 + 32 + 64)


def test_endless_parts_do_not_hide_a_groups_position() -> None:
    part = entry(0, op="nccl:send 0->1", state="scheduled", is_p2p=True, p2p_seq_id=1)
    queue = [entry(seq, state="scheduled") for seq in range(100, 300)]
    _, calls = parsed(dump(part, *(entry(seq) for seq in range(1, 100)), *queue, enqueued=299, completed=99))
    assert 100 in {call.seq for call in calls}


def test_coalesced_calls_count_as_one() -> None:
    parts = [entry(5, op="nccl:broadcast", state="scheduled") for _ in range(3)]
    _, calls = parsed(dump(*parts, entry(5, op="nccl:coalesced"), enqueued=5, completed=5))
    assert [call.op for call in calls] == ["coalesced"]


def test_point_to_point_has_its_own_numbering() -> None:
    _, (sent,) = parsed(
        dump(entry(0, op="nccl:send 0->1", state="started", is_p2p=True, p2p_seq_id=9), enqueued=0, completed=0)
    )
    assert (sent.is_p2p, sent.seq, sent.op) == (True, 9, "send 0->1")


FORMS = ("nccl_trace_rank_{}", "comm_lib_trace_rank_{}", "fr{}.pickle", "trace_{}.json")


@pytest.mark.parametrize("name", FORMS)
def test_the_others_wait_for_a_rank_with_nothing_outstanding(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {0: waiting(), 1: waiting(), 2: idle(), 3: waiting()}, name)
    first = first_of(folder)
    assert (first.rule, first.ranks, first.confidence) == ("host-stuck", (2,), Confidence.LIKELY)
    assert "never called number 61" in first.summary


def test_a_stuck_host_is_found_in_dumps_of_active_entries(tmp_path: Path) -> None:
    active = {rank: dump(entry(61, state="started"), enqueued=61, completed=60) for rank in (0, 1, 3)}
    first = first_of(write(tmp_path, active | {2: dump(enqueued=60, completed=60)}))
    assert (first.rule, first.ranks) == ("host-stuck", (2,))


def test_the_line_of_the_last_call_is_shown(tmp_path: Path) -> None:
    first = first_of(write(tmp_path, {0: waiting(), 1: idle()}))
    assert "its last call was at train.py:40 in training_step" in first.summary
    # Where it stands now, nobody knows.
    assert first.location == ""


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    first = first_of(write(tmp_path, {0: waiting(), 1: waiting(), 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("no-dump", (2,), Confidence.LIKELY)


def test_several_ranks_without_a_dump_are_only_possible(tmp_path: Path) -> None:
    first = first_of(write(tmp_path, {0: waiting(), 1: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("no-dump", (2, 3), Confidence.POSSIBLE)


def test_a_rank_without_a_dump_is_not_blamed_beside_a_culprit(tmp_path: Path) -> None:
    folder = write(tmp_path, {0: waiting(), 1: waiting(), 3: idle()})
    evidence = read(folder)
    diagnosis = judge(evidence.job() or pytest.fail(), RECORDED_RULES)
    assert [finding.rule for finding in diagnosis.findings] == ["host-stuck"]
    assert "Nothing was read of rank 2: what it did is unknown." in diagnosis.unanswered


def test_the_first_difference_is_named_with_its_lines(tmp_path: Path) -> None:
    other = [{**FRAMES[1], "name": "validation_step", "line": 77}]
    odd = waiting(op="nccl:broadcast", input_sizes=[[1]], frames=other)
    first = first_of(write(tmp_path, {0: waiting(), 1: waiting(), 2: odd, 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (2,), Confidence.CERTAIN)
    assert "broadcast (1 element of Float) at train.py:77 in validation_step" in first.summary
    assert first.location == "/home/me/train.py:77 in validation_step"
    assert any("SIGTERM broadcast" in item.text for item in first.evidence)


def test_a_different_size_has_its_own_rule(tmp_path: Path) -> None:
    odd = waiting(input_sizes=[[127, 10]])
    first = first_of(write(tmp_path, {0: waiting(), 1: odd, 2: waiting(), 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("mismatched-collective", (1,), Confidence.CERTAIN)


def test_all_ranks_in_the_same_collective_have_joined(tmp_path: Path) -> None:
    first = first_of(write(tmp_path, {rank: waiting() for rank in range(4)}))
    assert (first.rule, first.ranks, first.confidence) == ("all-joined", (0, 1, 2, 3), Confidence.LIKELY)
    assert any(item.text == "Started on every device." for item in first.evidence)


def test_a_joined_all_to_all_may_differ_in_unrecorded_sizes(tmp_path: Path) -> None:
    made = {rank: waiting(op="nccl:all_to_all", input_sizes=[[64 + rank]]) for rank in range(4)}
    first = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks, first.confidence) == ("all-joined", (0, 1, 2, 3), Confidence.POSSIBLE)
    assert "differs in size, which is not recorded" in first.summary


def test_a_different_type_in_an_all_to_all_mismatches(tmp_path: Path) -> None:
    made = {rank: waiting(op="nccl:all_to_all", input_sizes=[[64 + rank]]) for rank in range(4)}
    made[2]["entries"][-1]["input_dtypes"] = ["Double"]
    first = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks, first.confidence) == ("mismatched-collective", (2,), Confidence.CERTAIN)


def test_a_gpu_that_does_not_finish_is_stuck(tmp_path: Path) -> None:
    done = idle(61)
    first = first_of(write(tmp_path, {0: done, 1: done, 2: waiting(61), 3: done}))
    assert (first.rule, first.ranks) == ("gpu-stuck", (2,))


def test_groups_entered_in_another_order_are_crossed(tmp_path: Path) -> None:
    def member(waits_in: str) -> dict[str, Any]:
        calls = [
            entry(8, pg_id=number, process_group=(name, name), state="started" if name == waits_in else "completed")
            for number, name in enumerate(("dp", "tp"), 1)
            if name == waits_in
        ]
        position = {"last_started_collective": 7, "last_completed_collective": 7}
        status = {str(number): position for number in (1, 2)}
        made = dump(
            entry(7, pg_id=1, process_group=("dp", "dp")),
            entry(7, pg_id=2, process_group=("tp", "tp")),
            *calls,
            enqueued=0,
            completed=0,
        )
        made["pg_status"] = {
            number: one | {"last_enqueued_collective": 8 if ("dp", "tp")[int(number) - 1] == waits_in else 7}
            for number, one in status.items()
        }
        made["pg_config"] = {name: {"name": name, "desc": name, "ranks": "[0, 1]"} for name in ("dp", "tp")}
        return made

    first = first_of(write(tmp_path, {0: member("dp"), 1: member("tp")}))
    assert first.rule == "crossed-groups"


def test_groups_with_one_name_and_different_members_are_kept_apart(tmp_path: Path) -> None:
    """Each pair has its own group "1": rank 2 is behind in the group of ranks 2 and 3, and rank 1 in none."""

    def pair(rank: int, seq: int, state: str) -> dict[str, Any]:
        low = rank // 2 * 2
        made = dump(entry(seq, state=state, pg_id=1, process_group=("1", "tp")), enqueued=0, completed=0)
        made["pg_status"] = {
            "1": {"last_enqueued_collective": seq, "last_completed_collective": seq - (state == "started")}
        }
        made["pg_config"] = {"1": {"name": "1", "desc": "tp", "ranks": f"[{low}, {low + 1}]"}}
        return made

    made = {
        0: pair(0, 5, "completed"),
        1: pair(1, 5, "completed"),
        2: pair(2, 8, "completed"),
        3: pair(3, 9, "started"),
    }
    first = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks) == ("host-stuck", (2,))
    assert "group '1 of ranks 2-3'" in first.summary


def test_two_recorders_of_a_rank_are_joined(tmp_path: Path) -> None:
    """NCCL's recorder and the general one are dumped separately: this is not a conflict."""
    gloo = dump(entry(3, op="gloo:barrier", pg_id=1, process_group=("9", "side")), enqueued=0, completed=0)
    gloo["pg_status"], gloo["pg_config"] = {}, {}
    write(tmp_path, {rank: waiting() for rank in (0, 1, 3)} | {2: idle()})
    write(tmp_path, {rank: gloo for rank in range(4)}, "fr_trace_{}.json")
    evidence = read(tmp_path)
    job = evidence.job() or pytest.fail()
    assert job.missing == ()
    assert judge(job, RECORDED_RULES).findings[0].ranks == (2,)


def test_the_later_of_two_dumps_of_a_rank_is_used_and_reported(tmp_path: Path) -> None:
    write(tmp_path / "a", {0: waiting(), 1: waiting(), 2: waiting(), 3: idle(50)})
    write(tmp_path / "b", {3: idle(60)})
    job = read(tmp_path).job() or pytest.fail()
    (line,) = job.missing
    assert line.startswith("There are two dumps of rank 3") and line.endswith("the later one is used.")
    assert "called 60 collectives" in judge(job, RECORDED_RULES).findings[0].summary


def test_the_later_of_two_dumps_decides_whether_a_rank_is_idle(tmp_path: Path) -> None:
    write(tmp_path / "a", {0: waiting(), 1: waiting(), 2: waiting(), 3: waiting(50)})
    write(tmp_path / "b", {3: dump(enqueued=60, completed=60)})
    job = read(tmp_path).job() or pytest.fail()
    record = next(facts.record for facts in job.ranks if facts.rank == 3)
    assert record is not None and record.is_idle


def test_a_root_that_left_its_broadcast_does_not_hide_the_late_rank(tmp_path: Path) -> None:
    root = dump(entry(61, op="nccl:broadcast"), entry(62, state="started"), enqueued=62, completed=61)
    late = waiting(op="nccl:broadcast")
    evidence = read(write(tmp_path, {0: root, 1: late, 2: idle(), 3: late}))
    findings = judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings
    assert [(finding.rule, finding.ranks) for finding in findings] == [("host-stuck", (2,))]


def p2p(op: str, *, state: str = "started") -> dict[str, Any]:
    return dump(entry(0, op=f"nccl:{op}", state=state, is_p2p=True, p2p_seq_id=9), enqueued=0, completed=0)


def test_a_receive_leads_to_the_rank_that_never_sent(tmp_path: Path) -> None:
    """Stages of a pipeline: 3 waits for 2, 2 for 1, and 1 has sent all that it had."""
    made = {3: p2p("recv 3<-2"), 2: p2p("recv 2<-1"), 1: p2p("send 1->2", state="completed"), 0: idle()}
    first = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks, first.confidence) == ("host-stuck", (1,), Confidence.LIKELY)
    assert "not called the other side, while rank 2 waits in recv 2<-1" in first.summary


def test_sends_in_a_circle_are_found(tmp_path: Path) -> None:
    first = first_of(write(tmp_path, {0: p2p("send 0->1"), 1: p2p("send 1->0"), 2: idle(), 3: idle()}))
    assert (first.rule, first.ranks) == ("unmatched-p2p", (0, 1))
    assert "in a circle" in first.summary


def test_a_ring_in_which_all_send_first_is_found(tmp_path: Path) -> None:
    ring = {rank: p2p(f"send {rank}->{(rank + 1) % 4}") for rank in range(4)}
    first = first_of(write(tmp_path, ring))
    assert (first.rule, first.ranks) == ("unmatched-p2p", (0, 1, 2, 3))
    assert first.summary.startswith("Rank 0 waits in send 0->1 for rank 1")
    assert "they wait for each other in a circle" in first.summary and "batch_isend_irecv" in first.remedy


def test_parts_end_with_their_coalesced_call(tmp_path: Path) -> None:
    """The recorder does not record the end of the parts; the coalesced call has ended."""
    parts = [
        entry(0, op=f"nccl:{op}", state="scheduled", is_p2p=True, p2p_seq_id=9) for op in ("send 0->1", "recv 0<-1")
    ]
    whole = entry(0, op="nccl:coalesced", is_p2p=True, p2p_seq_id=9)
    evidence = read(write(tmp_path, {rank: dump(*parts, whole, enqueued=0, completed=0) for rank in range(2)}))
    assert judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings == ()


def test_a_rank_that_waits_for_its_neighbour_is_not_idle(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for rank 2, which waits for the idle rank 3."""
    receiving = waiting()
    receiving["pg_status"]["0"] |= {"last_enqueued_collective": 60}
    receiving["entries"] = [entry(60), entry(60, op="nccl:recv 2<-3", state="started", is_p2p=True, p2p_seq_id=4)]
    evidence = read(write(tmp_path, {0: waiting(), 1: waiting(), 2: receiving, 3: idle()}))
    found = {finding.rule: finding.ranks for finding in judge(evidence.job() or pytest.fail(), RECORDED_RULES).findings}
    assert found == {"host-stuck": (3,)}


def test_real_gloo_dumps_are_diagnosed() -> None:
    """Torch 2.13, 2 ranks: rank 1 sleeps before its fourth all_reduce. Gloo does not name its groups' members."""
    first = first_of(HERE / "gloo")
    assert (first.rule, first.ranks, first.confidence) == ("host-stuck", (1,), Confidence.LIKELY)


def test_another_pickle_is_not_a_dump() -> None:
    with pytest.raises(ReadingError, match="not a dump of PyTorch's Flight Recorder"):
        from_pickle(pickle.dumps({"weights": [1.0]}, protocol=2))


def test_a_dump_without_a_rank_in_its_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(pickle.dumps(waiting(), protocol=2))
    (error,) = read(tmp_path / "dump").errors
    assert "its name does not say which rank wrote it" in error


def test_sends_and_receives_are_counted_per_pair_from_the_first_on() -> None:
    def sent(number: int, op: str, **more: Any) -> dict[str, Any]:
        return entry(1, op=op, is_p2p=True, p2p_seq_id=number, record_id=number, **more)

    ops = ("nccl:send 0->1", "nccl:recv 0<-1", "nccl:send 0->1", "nccl:send 0->2", "nccl:send 0->1")
    made = [sent(place, op) for place, op in enumerate(ops, start=1)]
    began = [entry(1, record_id=0), *made]
    assert [call.pair_number for call in parsed({"entries": began})[1] if call.is_p2p] == [1, 1, 2, 1, 3]
    lost = parsed({"entries": made[1:]})[1]
    assert [call.pair_number for call in lost] == [None] * 4
    # Of open entries alone, those that have ended are left out.
    still = parsed({"entries": [one | {"state": "scheduled", "retired": False} for one in began]})[1]
    assert {call.pair_number for call in still} == {None}
