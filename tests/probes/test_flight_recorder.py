"""The recorder's dumps, of gloo and of NCCL, become facts."""

import copy
import importlib
import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from own_threads import join_own_threads

from lightning_ncclsafe._torch import build, process_groups, recorders
from lightning_ncclsafe.code import side_thread
from lightning_ncclsafe.code.side_thread import UnansweredError
from lightning_ncclsafe.facts import (
    Collective,
    Group,
    Incident,
    IncidentKind,
    JobFacts,
    NotRecorded,
    Phase,
    Progress,
    RankFacts,
    UnrecordedGroup,
)
from lightning_ncclsafe.probes.process import flight_recorder
from lightning_ncclsafe.probes.process.stacks import call_site
from lightning_ncclsafe.rules.kit import shift, timeline

# torch's functions that dump its recorders: NCCL's own, and that of all others.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

# As torch 2.13 writes it (`_dump_fr_trace_json`), with 2 ranks, the second all_reduce outstanding.
GLOO: dict[str, Any] = {
    "comm_lib_version": "",
    "nccl_comm_state": {},
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}},
    "pg_status": {
        "0": {"last_completed_collective": "3", "last_enqueued_collective": "4", "last_started_collective": "-1"}
    },
    "version": "2.10",
    "entries": [
        {
            "collective_seq_id": seq,
            "input_dtypes": ["Float"],
            "input_sizes": [[10, 2]],
            "is_p2p": False,
            "op_id": seq,
            "output_dtypes": ["Float"],
            "output_sizes": [[10, 2]],
            "p2p_seq_id": 0,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "record_id": seq - 1,
            "retired": seq < 4,
            "state": "scheduled",
            "thread_id": "1",
            "thread_name": "python",
            "time_created_ns": 1_000 + seq,
            "time_discovered_completed_ns": 0,
            "time_discovered_started_ns": 0,
            "timeout_ms": 20_000,
        }
        for seq in (3, 4)
    ],
}


def test_retired_gloo_entries_are_completed() -> None:
    groups, collectives = flight_recorder.parse(GLOO, {})
    assert groups == [Group(name="0", description="default_pg", last_enqueued=4, last_started=-1, last_completed=3)]
    assert [collective.completed for collective in collectives] == [True, False]
    assert collectives[1] == Collective(
        group="0",
        seq=4,
        op="all_reduce",
        backend="gloo",
        input_sizes=((10, 2),),
        output_sizes=((10, 2),),
        dtypes=("Float",),
        created_ns=1_004,
        timeout_ms=20_000,
    )


def nccl(state: str, **more: Any) -> dict[str, Any]:
    """One NCCL entry, as torch's FlightRecorder.hpp writes it: it has a state, and a duration when timing is on."""
    dump = copy.deepcopy(GLOO)
    dump["entries"] = [{**dump["entries"][1], "profiling_name": "nccl:_all_gather_base", "state": state, **more}]
    return dump


def test_nccl_entries_have_a_state_and_a_duration() -> None:
    _, (scheduled,) = flight_recorder.parse(nccl("scheduled"), {})
    _, (started,) = flight_recorder.parse(nccl("started"), {})
    _, (completed,) = flight_recorder.parse(nccl("completed", duration_ms=1.5, retired=True), {})
    assert (scheduled.started, scheduled.completed) == (False, False)
    assert (started.started, started.completed) == (True, False)
    assert (completed.started, completed.completed, completed.duration_ms) == (True, True, 1.5)
    assert completed.backend == "nccl"


def test_retired_but_uncompleted_nccl_entries_have_timed_out() -> None:
    dump = nccl("started", retired=True)
    assert not flight_recorder.parse(dump, {})[1][0].completed
    # What was given up counts as completed in the counters, and has not.
    dump["pg_status"]["0"] |= {"last_completed_collective": 4}
    (group,), (given_up,) = flight_recorder.parse(dump, {})
    assert (given_up.completed, given_up.gave_up, group.last_completed) == (False, True, 3)


def test_newer_back_end_names_are_read() -> None:
    _, (collective,) = flight_recorder.parse(nccl("started", profiling_name="nccl2:broadcast"), {})
    assert (collective.backend, collective.op) == ("nccl2", "broadcast")


def test_point_to_point_has_its_own_numbering() -> None:
    _, (sent,) = flight_recorder.parse(nccl("started", profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=9), {})
    assert (sent.is_p2p, sent.seq) == (True, 9)


def test_a_group_without_entries_in_the_ring_keeps_its_name_and_position() -> None:
    names: flight_recorder.Names = {}
    flight_recorder.parse(GLOO, names)
    (group,), collectives = flight_recorder.parse({**GLOO, "entries": []}, names)
    assert (group.name, group.description, group.last_enqueued) == ("0", "default_pg", 4)
    assert not collectives


def test_a_position_without_a_name_is_not_assigned() -> None:
    """The number a process gives a group may mean another group on another rank."""
    assert flight_recorder.parse({**GLOO, "entries": []}, {}) == ([], [])


def test_a_disabled_recorder_is_empty() -> None:
    assert flight_recorder.parse({"version": "2.10"}, {}) == ([], [])


def test_without_a_process_group_there_is_nothing_to_read() -> None:
    assert flight_recorder.FlightRecorder().read() == ((), ())
    assert flight_recorder.position() == ()


def test_a_build_without_distributed_support_has_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "c10d", None)
    monkeypatch.setattr(process_groups.dist, "is_available", lambda: False)
    assert flight_recorder.FlightRecorder().read() == ((), ())
    assert flight_recorder.position() == ()


def test_larger_jobs_keep_fewer_entries_and_those_around_the_oldest_outstanding_one() -> None:
    assert [flight_recorder.kept_per_group(ranks) for ranks in (0, 32, 64, 1024, 4096, 16_384, 100_000)] == [
        256,
        256,
        128,
        48,
        12,
        8,
        8,
    ]
    ended = [Collective(group="0", seq=seq, op="x", completed=True, created_ns=seq) for seq in range(1, 60)]
    outstanding = [Collective(group="0", seq=seq, op="x", created_ns=seq) for seq in range(60, 80)]
    kept = flight_recorder._telling([*reversed(outstanding), *reversed(ended)], 8)
    assert [call.seq for call in kept] == [*range(52, 80)]
    # A host that is far ahead of its device.
    many = [Collective(group="0", seq=seq, op="x", created_ns=seq) for seq in range(60, 160)]
    far_ahead = [*range(52, 76), *range(152, 160)]
    assert [call.seq for call in flight_recorder._telling([*reversed(many), *ended], 8)] == far_ahead
    # Each group has as many.
    other = [replace(call, group="tp") for call in (*ended, *many)]
    kept = flight_recorder._telling([*ended, *many, *other], 8)
    assert [(call.seq, call.group) for call in kept] == [(seq, group) for seq in far_ahead for group in ("0", "tp")]


@pytest.mark.parametrize("completed", [(500, 500, 500), (500, 502, 502), (500, 503, 503)])
def test_calls_that_a_report_leaves_out_were_not_skipped(completed: tuple[int, ...]) -> None:
    """All ranks have called the same, and a device is behind: the gaps are at other places."""
    most, called = 8, 544
    ranks = []
    for rank, done in enumerate(completed):
        calls = [
            Collective(group="0", seq=seq, op="x", completed=seq <= done, created_ns=seq, site=f"{seq % 7}")
            for seq in range(1, called + 1)
        ]
        group = Group(name="0", ranks=(0, 1, 2), last_enqueued=called, last_completed=done)
        kept = tuple(flight_recorder._telling(calls, most))
        ranks.append(RankFacts(rank=rank, progress=Progress(phase=Phase.TRAIN), groups=(group,), collectives=kept))
    incident = Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0, idle_s=9.0, suspect_after_s=9.0, timeout_s=60)
    view = timeline(JobFacts(incident=incident, world_size=3, ranks=tuple(ranks)))
    assert shift(view, "0") is None
    newest = [max(call.seq for call in calls) for calls in view.sequences("0").values()]
    assert newest == [done + 2 * most for done in completed]


# What is read of a group that has been used, or not, by what there is to read.
READ = [
    ("gloo", 4, [GLOO], None),
    ("gloo", 0, [{"version": "2.9"}], None),
    ("gloo", 4, [{"version": "2.9"}], NotRecorded.NO_ENTRY),
    ("gloo", 4, [], NotRecorded.NO_DUMP),
    ("ucc", 4, [GLOO | {"entries": [], "pg_status": {}}], NotRecorded.UNKNOWN_BACKEND),
    ("ucc", None, [], NotRecorded.UNKNOWN_BACKEND),
]


@pytest.mark.parametrize(("backend", "called", "dumps", "why"), READ)
def test_unrecorded_groups_are_reported_with_a_reason(
    backend: str, called: int | None, dumps: list[Any], why: NotRecorded | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "own_groups", lambda: [process_groups.OwnGroup("0", "default_pg", (0, 1))])
    monkeypatch.setattr(process_groups, "group_calls", lambda: [process_groups.GroupCalls("0", backend, called)])
    monkeypatch.setattr(recorders, "dumps", lambda **_: iter(dumps))
    if not dumps:
        monkeypatch.delattr(build.c10d, RECORDERS[1])
    recorder = flight_recorder.FlightRecorder()
    groups, _ = recorder.read()
    assert [group.name for group in groups] == ([] if why else ["0"])
    told = UnrecordedGroup(
        name="0", why=why or NotRecorded.LOST, description="default_pg", backend=backend, calls=called or -1
    )
    assert recorder.unrecorded == ((told,) if why else ())


def test_a_group_without_entries_in_the_ring_is_lost_and_not_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [process_groups.OwnGroup("0", "default_pg", (0, 1)), process_groups.OwnGroup("1", "tp", (0, 1))]
    monkeypatch.setattr(process_groups, "own_groups", lambda: members)
    calls = [process_groups.GroupCalls("0", "gloo", 4), process_groups.GroupCalls("1", "gloo", 2)]
    monkeypatch.setattr(process_groups, "group_calls", lambda: calls)
    monkeypatch.setattr(recorders, "dumps", lambda **_: iter([GLOO]))
    recorder = flight_recorder.FlightRecorder()
    assert [group.name for group in recorder.read()[0]] == ["0"]
    assert [(group.name, group.why) for group in recorder.unrecorded] == [("1", NotRecorded.LOST)]


def hooked(seq: int, *, retired: bool = True) -> dict[str, Any]:
    """What a FlightRecorderHook records of an all-reduce (torch 2.14.1), which it retires when the call returns."""
    return GLOO["entries"][0] | {
        "profiling_name": "c10d:allreduce",
        "collective_seq_id": seq,
        "state": "scheduled",
        "retired": retired,
    }


def test_a_hooks_entry_beside_a_back_ends_is_one_call() -> None:
    twice = [both for entry in GLOO["entries"] for both in (hooked(entry["collective_seq_id"]), entry)]
    assert flight_recorder.parse(GLOO | {"entries": twice}, {}) == flight_recorder.parse(GLOO, {})


def test_the_last_hook_only_entry_may_be_outstanding() -> None:
    _, collectives = flight_recorder.parse({"entries": [hooked(1), hooked(2)], "pg_status": {}}, {})
    assert [(call.backend, call.seq, call.completed) for call in collectives] == [("c10d", 1, True), ("c10d", 2, False)]
    _, (first, second) = flight_recorder.parse({"entries": [hooked(1), hooked(2, retired=False)], "pg_status": {}}, {})
    assert first.completed and not second.completed


def test_a_hook_on_a_group_of_nccl_writes_to_the_other_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = [entry | {"profiling_name": "nccl:all_reduce", "state": "completed"} for entry in GLOO["entries"]]
    dumps = [GLOO | {"entries": nccl}, GLOO | {"entries": [hooked(1), hooked(2)]}]
    monkeypatch.setattr(recorders, "dumps", lambda **_: iter(dumps))
    (group,), collectives = flight_recorder.FlightRecorder().read()
    assert group.last_enqueued == 4
    assert {call.backend for call in collectives} == {"nccl"} and len(collectives) == len(nccl)


@pytest.fixture
def two_back_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A default group of gloo for the CPU and, for CUDA, a fake back end that is called NCCL."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    store = process_groups.dist.HashStore()
    process_groups.dist.init_process_group("cpu:gloo,cuda:fake", store=store, rank=0, world_size=1)
    try:
        configure(monkeypatch, "cpu:gloo,cuda:nccl")
        yield "0"
    finally:
        process_groups.dist.destroy_process_group()


def configure(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setattr(process_groups.dist, "get_backend_config", lambda group: config)


def test_a_group_that_is_just_created_or_destroyed_has_no_back_end_yet(
    two_back_ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch has the group in one of its tables, and not in another one.
    world = process_groups.dist.distributed_c10d._world
    monkeypatch.undo()
    monkeypatch.setattr(process_groups, "_backends_of", {})
    monkeypatch.setattr(type(world), "pg_backend_config", {})
    assert process_groups.counts() == (None,)
    assert [group.name for group in process_groups.own_groups()] == [two_back_ends]


def dumped(monkeypatch: pytest.MonkeyPatch, *dumps: dict[str, Any]) -> None:
    """What each of torch's recorders dumps."""
    for name, dump in zip(RECORDERS, dumps, strict=True):
        made = {key: dump[key] for key in dump if key == "entries"}
        monkeypatch.setattr(build.c10d, name, lambda *_, dump=dump: json.dumps(dump), raising=False)
        as_pickle = name.removesuffix("_json")
        monkeypatch.setattr(build.c10d, as_pickle, lambda *_, made=made: pickle.dumps(made), raising=False)


def on_nccl(*seqs: int) -> dict[str, Any]:
    """NCCL's own recorder: it has called and ended these in the default group."""
    ended = {"profiling_name": "nccl:all_reduce", "state": "completed", "retired": True}
    status = {f"last_{what}_collective": str(seqs[-1]) for what in ("enqueued", "started", "completed")}
    entries = [GLOO["entries"][0] | ended | {"collective_seq_id": seq, "time_created_ns": seq} for seq in seqs]
    return GLOO | {"entries": entries, "pg_status": {"0": status}}


def test_two_back_ends_of_a_group_have_positions_of_their_own(
    two_back_ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(monkeypatch, on_nccl(17, 18), GLOO)
    recorder = flight_recorder.FlightRecorder()
    groups, collectives = recorder.read()
    assert [(one.name, one.description, one.ranks, one.last_enqueued, one.last_completed) for one in groups] == [
        ("0", "default_pg", (0,), 18, 18),
        ("0:gloo", "default_pg:gloo", (0,), 4, 3),
    ]
    assert sorted((call.group, call.backend, call.seq) for call in collectives) == [
        ("0", "nccl", 17),
        ("0", "nccl", 18),
        ("0:gloo", "gloo", 3),
        ("0:gloo", "gloo", 4),
    ]
    assert recorder.unrecorded == ()
    assert [entry["process_group"][0] for entries in recorders.entries() for entry in entries] == ["0"] * 2 + [
        "0:gloo"
    ] * 2
    # The ring has overwritten gloo's.
    dumped(monkeypatch, on_nccl(18), GLOO | {"entries": []})
    assert [(group.name, group.last_enqueued) for group in recorder.read()[0]] == [("0", 18), ("0:gloo", 4)]


def test_a_back_end_that_was_not_called_is_unused(two_back_ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is there nevertheless: another rank may wait in it."""
    dumped(monkeypatch, on_nccl(18), {"version": "2.10"})
    recorder = flight_recorder.FlightRecorder()
    assert [(group.name, group.last_enqueued) for group in recorder.read()[0]] == [("0", 18), ("0:gloo", 0)]
    assert recorder.unrecorded == ()
    # NCCL's name is the group's own, even if only gloo was called.
    dumped(monkeypatch, {"version": "2.10"}, GLOO)
    assert [(group.name, group.last_enqueued) for group in recorder.read()[0]] == [("0:gloo", 4)]
    assert [(group.name, group.backend, group.why) for group in recorder.unrecorded] == [
        ("0", "nccl", NotRecorded.NO_ENTRY)
    ]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("cpu:gloo,cuda:nccl", {"0": "nccl", "0:gloo": "gloo"}),
        ("cuda:nccl,cpu:gloo", {"0": "nccl", "0:gloo": "gloo"}),
        ("cpu:gloo,mps:gloo,xpu:xccl", {"0": "xccl", "0:gloo": "gloo"}),
        ("cpu:gloo,cuda:gloo", {"0": "gloo"}),
        ("cuda:nccl", {"0": "nccl"}),
    ],
)
def test_names_follow_the_configuration_alone(
    config: str, names: dict[str, str], two_back_ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, config)
    assert {call.name: call.backend for call in process_groups.group_calls()} == names
    assert [(group.name, group.ranks) for group in process_groups.own_groups()] == [(name, (0,)) for name in names]
    assert [name for name, _ in process_groups.names_by_backend().values()] == [*names][1:]


def test_a_hook_on_two_back_ends_leaves_those_of_gloo(two_back_ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [hooked(seq) | {"pg_id": 1, "time_created_ns": 2_000 + seq} for seq in (1, 2)]
    dumped(monkeypatch, on_nccl(17, 18), GLOO | {"entries": [*hooks, *GLOO["entries"]]})
    groups, collectives = flight_recorder.FlightRecorder().read()
    assert [(group.name, group.last_enqueued) for group in groups] == [("0", 18), ("0:gloo", 4)]
    assert {(call.group, call.backend) for call in collectives} == {("0", "nccl"), ("0:gloo", "gloo")}


class Driver(threading.local):
    """Stands in for CUDA's: keeps the capture mode and the context of the calling thread, as the real one does.

    Of two devices the second is used. An event is asked about without a lock, unless somebody else holds it.
    """

    failure = 0
    mode = 0
    context = None
    free: threading.Event
    retained: list[int]

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if not self.failure:
            self.mode, mode._obj.value = mode._obj.value, self.mode
        return self.failure

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, is_used: Any) -> int:
        is_used._obj.value = device.value == 11
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1000 + device.value
        self.retained.append(device.value)
        return self.failure

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context and context.value
        return self.failure

    def cuEventCreate(self, event: Any, flags: int) -> int:
        assert (self.context, flags) == (1011, 2)
        event._obj.value = 5
        return self.failure

    def cuEventQuery(self, event: Any) -> int:
        assert (event.value, self.mode, self.context) == (5, 2, 1011)
        assert Driver.free.wait(60)
        return 600  # not ready

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained.remove(device.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """CUDA is used, and its driver answers."""
    driver = Driver()
    Driver.free, Driver.retained = threading.Event(), []
    Driver.free.set()
    monkeypatch.setattr(recorders, "_driver", lambda: driver)
    monkeypatch.setattr(recorders.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(recorders.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(recorders.torch.version, "cuda", "13.0")
    yield driver
    Driver.free.set()
    join_own_threads("cuda-driver")
    assert Driver.retained == []


@pytest.mark.parametrize(("failure", "mode"), [(0, 2), (3, 0)])
def test_reading_entries_does_not_break_graph_capture(
    failure: int, mode: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    driver.failure = failure

    def dump(*what: bool) -> bytes:
        seen.append(driver.mode)
        return pickle.dumps({}) if len(what) == 3 else b"{}"

    for name in RECORDERS:
        for each in (name, name.removesuffix("_json")):
            monkeypatch.setattr(build.c10d, each, dump, raising=False)
    assert [*recorders.dumps(collectives=True), *recorders.entries()] == [{}, {}, [], []]
    assert seen == [mode] * 4 and driver.mode == 0
    seen.clear()
    assert [*recorders.dumps(collectives=False)] == [{}, {}] and seen == [0, 0]
    seen.clear()
    monkeypatch.setattr(recorders.torch.version, "cuda", None)  # ROCm
    assert [*recorders.dumps(collectives=True)] == [{}, {}] and seen == [0, 0]


def test_entries_are_not_read_while_the_driver_is_unresponsive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading would wait for the driver while holding the GIL."""

    def dump(collectives: bool, *_: bool) -> str:
        assert not collectives
        return json.dumps({"pg_status": {}})

    for name in RECORDERS:
        for each in (name, name.removesuffix("_json")):
            monkeypatch.setattr(build.c10d, each, dump, raising=False)
    monkeypatch.setattr(process_groups, "group_calls", lambda: [process_groups.GroupCalls("0", "nccl", 4)])
    monkeypatch.setattr(recorders, "_DRIVER_ANSWERS_S", 0.01)
    threads = threading.active_count()
    Driver.free.clear()
    assert not recorders.driver_answers() and not recorders.driver_answers()
    assert threading.active_count() == threads + 1
    recorder = flight_recorder.FlightRecorder()
    assert recorder.read() == ((), ())
    (group,) = recorder.unrecorded
    assert (group.name, group.why, group.calls) == ("0", NotRecorded.DRIVER_SILENT, 4)
    assert [*recorders.entries()] == []
    flight_recorder.position()
    Driver.free.set()
    monkeypatch.setattr(recorders, "_DRIVER_ANSWERS_S", 60)
    assert recorders.driver_answers()


def test_an_open_question_to_the_driver_is_waited_for_only_in_its_first_second(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def answer(within_s: float) -> None:
        waited.append(within_s)
        raise UnansweredError

    def asked_at(now_s: float) -> None:
        for module in (recorders, side_thread):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
        assert not recorders.driver_answers()

    monkeypatch.setattr(recorders._question, "answer", answer)
    Driver.free.clear()
    for now_s in (100.0, 100.25, 101.0, 200.0):
        asked_at(now_s)
    assert waited == [1.0, 0.75, 0.0, -99.0]
    # The next question has a second of its own.
    Driver.free.set()
    join_own_threads("cuda-driver")
    asked_at(300.0)
    assert waited[4:] == [1.0]


def test_threads_that_ask_the_driver_at_the_same_moment_are_both_answered(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_wait, answer = threading.Barrier(3, timeout=30), recorders._question.answer

    def wait_for_answer(within_s: float) -> Any:
        both_wait.wait()
        return answer(within_s)

    monkeypatch.setattr(recorders, "_DRIVER_ANSWERS_S", 60.0)
    monkeypatch.setattr(recorders._question, "answer", wait_for_answer)
    Driver.free.clear()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(recorders.driver_answers) for _ in range(2)]
        both_wait.wait()
        Driver.free.set()
        assert [one.result(30) for one in asked] == [True, True]


def test_only_the_newest_entries_of_a_large_recorder_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dump(entries: bool, only_active: bool) -> str:
        asked.append((entries, only_active))
        return json.dumps({"entries": [*range(30_000)]})

    for name in RECORDERS:
        monkeypatch.setattr(build.c10d, name, dump, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "30000")
    assert [dump["entries"] for dump in recorders.dumps(collectives=True)] == [[*range(10_000, 30_000)]] * 2
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    assert all(len(dump["entries"]) == 30_000 for dump in recorders.dumps(collectives=True))
    assert asked == [(True, True)] * 2 + [(True, False)] * 2


def test_the_position_follows_call_counts_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "dumps", lambda **_: iter([{"version": "2.9"}]))
    monkeypatch.setattr(process_groups, "counts", lambda: (3, None))
    before = flight_recorder.position()
    assert flight_recorder.position() == before
    monkeypatch.setattr(process_groups, "counts", lambda: (4, None))
    assert flight_recorder.position() != before


def test_a_mixed_group_is_not_behind() -> None:
    """A batch records its parts and a whole, and counts in the counters: 9 here, beside 4 collectives."""
    dump = nccl("completed", retired=True)
    parts = [
        {**dump["entries"][0], "record_id": record, "profiling_name": name, "is_p2p": is_p2p, "p2p_seq_id": 9} | more
        for record, name, is_p2p, more in (
            (4, "nccl:send 0->1", True, {"state": "scheduled", "retired": False}),
            (5, "nccl:recv 0<-1", True, {"state": "scheduled", "retired": False}),
            (6, "nccl:coalesced", False, {"state": "started", "retired": False}),
        )
    ]
    dump["entries"] += parts
    dump["pg_status"]["0"] = {key: "9" for key in dump["pg_status"]["0"]}
    (group,), collectives = flight_recorder.parse(dump, {})
    assert (group.last_enqueued, group.last_completed, group.is_mixed) == (4, 4, True)
    assert [(one.op, one.seq, one.is_p2p, one.completed) for one in collectives[1:]] == [
        ("send 0->1", 9, True, False),
        ("recv 0<-1", 9, True, False),
    ]


def test_a_rank_blocked_in_its_first_nccl_call_is_launching() -> None:
    """Its events were never recorded and so look completed; the watchdog would have retired it long ago."""
    dump = nccl("completed", retired=False)
    (group,), (call,) = flight_recorder.parse(dump, {})
    assert (call.completed, call.launching, group.last_enqueued, group.last_completed) == (False, True, 4, 3)


def under_a_condition() -> None:
    if RANK == 0:
        pass


RANK = 0
LINE = under_a_condition.__code__.co_firstlineno + 2
TORCH = "/venv/lib/python3.12/site-packages/torch"
STACK = [
    {"filename": f"{TORCH}/distributed/distributed_c10d.py", "line": 10, "name": "all_reduce"},
    {"filename": f"{TORCH}/distributed/c10d_logger.py", "line": 83, "name": "wrapper"},
    {"filename": "/venv/lib/python3.12/site-packages/torchmetrics/metric.py", "line": 5, "name": "sync"},
    {"filename": "/home/me/metrics.py", "line": 7, "name": "compute"},
    {"filename": __file__, "line": LINE, "name": "under_a_condition"},
    {"filename": "/venv/lib/python3.12/site-packages/lightning/pytorch/trainer/trainer.py", "line": 9, "name": "_run"},
    {"filename": "/home/me/train.py", "line": 3, "name": "main"},
]


def test_collectives_get_their_call_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Collective(group="0", seq=seq, op="all_reduce", created_ns=1_000 + seq) for seq in range(4)]
    elsewhere = [STACK[0], {**STACK[3], "line": 8}, *STACK[4:]]
    frames = {1_000: STACK, 1_001: elsewhere, 1_002: STACK}
    entries = [{"time_created_ns": at, "frames": stack} for at, stack in frames.items()]
    monkeypatch.setattr(recorders, "entries", lambda *, stacks: [entries] if stacks else [])
    first, second, again, unknown = flight_recorder.with_source(flight_recorder.with_call_sites(calls))
    assert first.site == again.site != second.site
    # The user's line, that under a condition, and what has called torch: nothing beyond the Trainer.
    assert [(frame.function, frame.line) for frame in again.stack] == [
        ("under_a_condition", LINE),
        ("compute", 7),
        ("sync", 5),
    ]
    assert again.stack[0].rank_condition == f"if RANK == 0:  (line {LINE - 1})"
    # Once is enough.
    assert first.stack == ()
    assert (unknown.site, unknown.stack) == ("", ())


def test_calls_that_no_python_function_made_are_told_apart_by_operation_and_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As autograd's threads make them on a GPU."""
    made = (("all_reduce", 10), ("all_reduce", 10), ("all_reduce", 11), ("broadcast", 10))
    calls = [
        Collective(group="0", seq=seq, op=op, created_ns=1_000 + seq, input_sizes=((size,),))
        for seq, (op, size) in enumerate(made)
    ]
    from_python = Collective(group="0", seq=4, op="all_reduce", created_ns=1_004, input_sizes=((10,),))
    lost = Collective(group="0", seq=5, op="all_reduce", created_ns=1_005, input_sizes=((10,),))
    entries = [{"time_created_ns": call.created_ns, "frames": []} for call in calls]
    entries.append({"time_created_ns": 1_004, "frames": STACK})
    monkeypatch.setattr(recorders, "entries", lambda *, stacks: [entries] if stacks else [])
    *native, python, unknown = flight_recorder.with_call_sites([*calls, from_python, lost])
    first, again, larger, other = (call.site for call in native)
    assert first == again == "native:all_reduce:((10,),)"
    # How much a rank has for each of the others depends on its data.
    sent = [replace(calls[0], op="all_to_all_single", input_sizes=((size,),)) for size in (1, 2)]
    assert len({call.site for call in flight_recorder.with_call_sites(sent)}) == 1
    assert len({first, larger, other, python.site}) == 4 and not python.site.startswith(flight_recorder.NATIVE)
    assert [call.stack for call in native] == [()] * 4
    assert (unknown.site, unknown.stack) == ("", ())


def test_a_call_site_does_not_depend_on_the_install_location() -> None:
    places = [(str(frame["filename"]), int(str(frame["line"])), str(frame["name"])) for frame in STACK]
    site, _ = call_site(places)
    moved = [(file.replace("/venv", "/opt/env"), line, name) for file, line, name in places]
    assert call_site(moved)[0] == site
    assert call_site([*places[:3], ("/home/me/metrics.py", 8, "compute"), *places[4:]])[0] != site
    # How the Trainer itself was called says nothing.
    assert call_site(places[:-1])[0] == site
