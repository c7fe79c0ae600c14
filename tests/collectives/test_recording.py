"""Each entry of the recorder comes into a window once, with its duration where there is one."""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from recorder_entries import BEGAN_NS, MS, Recorder, entry, nccl
from warm import Warm

from lightning_ncclsafe._torch import build, process_groups, recorders
from lightning_ncclsafe.collectives import recording as recording_module
from lightning_ncclsafe.collectives.recording import PhaseHistory, Recording, size_bytes
from lightning_ncclsafe.facts import VOTE_AHEAD_GROUP, VOTE_GROUP
from lightning_ncclsafe.timing.summary import STEP_PHASES, StepPhase
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Clock, Window

# torch's functions that dump its recorders: NCCL's own, and that of all others.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

CLOCK = Clock(offset_ns=5, uncertainty_ns=1)


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [
        process_groups.OwnGroup("0", "default_pg", (0, 1)),
        process_groups.OwnGroup("7", "mine", (1, 3)),
    ]
    monkeypatch.setattr(process_groups, "own_groups", lambda: members)
    monkeypatch.setattr(process_groups, "time_collectives_on_device", lambda: 0)


class Read:
    """A recording of a fake recorder."""

    def __init__(self, *entries: dict[str, Any], size: int = 1000, rank: int = 0, since_ns: int = 0) -> None:
        self.recorder = Recorder(size)
        self.recorder.add(*entries)
        self.phase_history = PhaseHistory()
        self.recording = Recording(rank, self.phase_history, since_ns=since_ns, entries=self.recorder.entries)

    def __call__(self, *entries: dict[str, Any], last: bool = False) -> Window:
        self.recorder.add(*entries)
        return self.recording.read(CLOCK, last=last)


def seqs(window: Window) -> list[int]:
    found: list[int] = window.calls["seq"].tolist()
    return found


def test_each_entry_is_read_once() -> None:
    read = Read()
    assert seqs(read(*(entry(number) for number in range(3)))) == [1, 2, 3]
    assert read.recording.new == 3
    assert seqs(read()) == [] and read.recording.new == 0
    assert seqs(read(entry(3), entry(4))) == [4, 5]


def test_a_call_is_read_with_all_its_details() -> None:
    window = Read(rank=3)(entry(0, 9, group=("7", "mine"), name="gloo:_allgather_base", at_ms=2, sizes=[(10,), (2, 5)]))
    (row,) = window.calls
    assert (row["rank"], row["seq"], row["size_bytes"], row["created_ns"]) == (3, 9, 80, BEGAN_NS + 2 * MS)
    assert row["duration_ns"] == UNKNOWN_NS
    assert window.ops[row["op"]] == "_allgather_base"
    group = window.groups[row["group"]]
    assert (group.name, group.description, group.ranks, group.backend) == ("7", "mine", (1, 3), "gloo")
    assert window.clocks == {3: CLOCK}
    (total,) = window.totals[3]
    assert (total.group, total.op, total.count, total.size_bytes, total.timed) == ("7", "_allgather_base", 1, 80, 0)


def test_own_work_is_read_once_and_only_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    read, own = Read(rank=3, since_ns=BEGAN_NS), [(BEGAN_NS - 5, BEGAN_NS - 1), (BEGAN_NS, BEGAN_NS + MS)]
    monkeypatch.setattr(recording_module, "take_own_work", lambda: [own.pop(0) for _ in [*own]])
    assert read().own.tolist() == [(3, BEGAN_NS, BEGAN_NS + MS)]
    assert len(read().own) == 0


def test_a_name_without_a_back_end_is_the_operation() -> None:
    window = Read()(entry(0, name="all_reduce"))
    assert (window.ops, window.groups[0].backend) == (("all_reduce",), "")


def test_overwritten_entries_are_counted_as_lost() -> None:
    read = Read(size=10)
    read(*(entry(number) for number in range(10)))
    window = read(*(entry(number) for number in range(10, 35)))
    assert (window.lost, seqs(window)) == ({0: 15}, [*range(26, 36)])
    assert read.recording.new == 10, "the recorder was full of new entries"
    assert read(entry(35)).lost == {}


def test_entries_from_before_the_first_read_are_not_lost() -> None:
    assert Read(*(entry(number) for number in range(500, 510)), size=10)().lost == {}


def test_a_running_call_is_read_once_with_its_duration() -> None:
    read = Read()
    assert seqs(read(nccl(0), nccl(1))) == []
    assert read.recording.new == 2
    read.recorder.finish(0, 2.5)
    window = read()
    assert (seqs(window), window.calls["duration_ns"].tolist()) == ([1], [2_500_000])
    assert window.totals[0][0].timed == 1 and window.totals[0][0].duration_ns == 2_500_000
    assert read.recording.new == 0
    read.recorder.finish(1, 1.0)
    assert seqs(read()) == [2]
    assert seqs(read()) == []


def test_a_running_call_is_read_without_a_duration_at_the_end() -> None:
    read = Read()
    read(nccl(0))
    window = read(last=True)
    assert (seqs(window), window.calls["duration_ns"].tolist()) == ([1], [UNKNOWN_NS])
    assert window.last == frozenset([0])
    assert seqs(read(last=True)) == []


def test_a_running_call_survives_being_overwritten() -> None:
    read = Read(size=5)
    read(nccl(0))
    window = read(*(nccl(number, duration_ms=1) for number in range(1, 6)))
    assert sorted(seqs(window)) == [1, 2, 3, 4, 5, 6]
    assert window.lost == {}
    assert seqs(read()) == []


def test_waiting_for_a_duration_is_bounded() -> None:
    read = Read()
    assert seqs(read(nccl(0, at_ms=0))) == []
    assert seqs(read(nccl(1, at_ms=31_000))) == [1]
    assert seqs(read()) == []


def test_gloo_calls_do_not_wait_for_a_duration() -> None:
    assert seqs(Read()(entry(0, state="scheduled", retired=False))) == [1]


def test_a_call_retired_by_the_watchdog_does_not_wait() -> None:
    assert seqs(Read()(nccl(0, state="scheduled", retired=True))) == [1]


def test_two_recorders_are_read_independently() -> None:
    first, second = Recorder(), Recorder()
    first.add(entry(0), entry(1))
    second.add(nccl(0, duration_ms=1, group=("7", "mine")))
    recording = Recording(0, PhaseHistory(), entries=lambda: [*first.entries(), *second.entries()])
    window = recording.read(CLOCK)
    assert [window.groups[number].name for number in window.calls["group"]] == ["0", "0", "7"]
    second.add(nccl(1, duration_ms=1, group=("7", "mine")))
    assert seqs(recording.read(CLOCK)) == [2]


def test_point_to_point_calls_are_counted_and_not_compared() -> None:
    window = Read()(entry(0), entry(1, 1, name="gloo:send 0->1", is_p2p=True))
    assert seqs(window) == [1]
    assert {(total.op, total.count) for total in window.totals[0]} == {("all_reduce", 1), ("send 0->1", 1)}


def test_votes_in_the_background_are_not_training_collectives() -> None:
    window = Read()(entry(0, group=("5", VOTE_AHEAD_GROUP)))
    assert (seqs(window), window.groups, window.totals, window.missing) == ([], (), {0: ()}, ())


def test_a_blocking_vote_is_recorded() -> None:
    window = Read()(entry(7, group=("5", VOTE_GROUP)))
    assert [group.description for group in window.groups] == [VOTE_GROUP]
    assert len(window.calls) == 1


def test_a_large_number_of_entries_is_read_completely() -> None:
    window = Read(size=30_000)(*(entry(number) for number in range(25_000)))
    assert (len(window.calls), window.left_out, window.totals[0][0].count) == (25_000, {}, 25_000)


def test_a_window_lists_only_the_groups_it_uses() -> None:
    read = Read()
    read(entry(0), entry(1, group=("7", "mine")))
    window = read(entry(2, group=("7", "mine")))
    assert [group.name for group in window.groups] == ["7"]
    assert window.calls["group"].tolist() == [0]
    assert read().groups == ()
    only_sent = read(entry(3, 1, name="gloo:send 0->1", is_p2p=True))
    assert [group.name for group in only_sent.groups] == ["0"], "totals belong to a group as well"


def test_the_size_of_an_entry_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(of: dict[str, Any]) -> int:
        asked.append(of["record_id"])
        return size_bytes(of)

    monkeypatch.setattr(recording_module, "size_bytes", counted)
    read = Read()
    read(entry(0), nccl(1), entry(2, group=("5", VOTE_AHEAD_GROUP)))
    read()
    read.recorder.finish(1, 1.0)
    window = read()
    assert asked == [0, 1], "once it is reported"
    assert window.calls["size_bytes"].tolist() == [40] and window.totals[0][0].size_bytes == 40


def test_a_destroyed_group_is_reported_once() -> None:
    read = Read()
    window = read(entry(0, group=("9", "short-lived")))
    assert window.groups[0].ranks == ()
    (sentence,) = window.missing
    assert "Rank 0" in sentence and "'9'" in sentence
    assert read(entry(1, group=("9", "short-lived"))).missing == ()


def test_device_timing_is_enabled_for_each_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    monkeypatch.setattr(process_groups, "time_collectives_on_device", lambda: times.append(1))
    read = Read()
    read(entry(0)), read(entry(1))
    assert len(times) == 1
    read(entry(2, group=("7", "mine")))
    assert len(times) == 2


@pytest.mark.parametrize("error", [AttributeError("_enable_collectives_timing"), RuntimeError("no")])
def test_missing_device_timing_is_reported_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(process_groups, "time_collectives_on_device", fail)
    read = Read()
    (sentence,) = read(entry(0)).missing
    assert "does not time collectives on the device" in sentence and str(error) in sentence
    assert read(entry(1, group=("7", "mine"))).missing == ()


def test_a_disabled_recorder_gives_empty_windows() -> None:
    for entries in ([], [[]]):
        recording = Recording(0, PhaseHistory(), entries=lambda entries=entries: iter(entries))  # type: ignore[misc]
        window = recording.read(CLOCK)
        assert len(window.calls) == 0 and window.lost == {} and recording.new == 0


def test_each_message_is_in_one_window() -> None:
    read = Read()
    read.recording.say("it is raining.")
    assert read().missing == ("Rank 0: it is raining.",)
    assert read().missing == ()


def test_calls_belong_to_the_step_of_the_last_fetched_batch() -> None:
    read = Read()
    read.phase_history.starts.extend(BEGAN_NS + at * MS for at in (10, 20, 30))
    window = read(*(entry(number, at_ms=at) for number, at in enumerate((5, 15, 25, 29, 35))))
    assert window.calls["step"].tolist() == [0, 1, 2, 2, 3]
    assert read.recording.steps == 3
    read.phase_history.starts.append(BEGAN_NS + 40 * MS)
    assert read(entry(5, at_ms=38), entry(6, at_ms=45)).calls["step"].tolist() == [3, 4]


def test_step_counting_continues_over_thousands_of_steps() -> None:
    read = Read()
    for number in range(10_000):
        read.phase_history.starts.append(BEGAN_NS + number * MS)
        if number % 100 == 0:
            read()
    window = read(entry(0, at_ms=20_000), entry(1, at_ms=9_998.5))
    assert window.calls["step"].tolist() == [10_000, 9_999]
    assert len(read.recording._starts) <= 4096, "bounded"


def test_phases_are_read_once_with_the_rank() -> None:
    read, (data, compute) = Read(rank=2), (STEP_PHASES.index(StepPhase.DATA), STEP_PHASES.index(StepPhase.COMPUTE))
    read.phase_history.marks.extend([(BEGAN_NS, compute), (BEGAN_NS + MS, data)])
    read.phase_history.current = (BEGAN_NS + 2 * MS, compute)
    assert read().spans.tolist() == [(2, compute, BEGAN_NS), (2, data, BEGAN_NS + MS), (2, compute, BEGAN_NS + 2 * MS)]
    assert len(read().spans) == 0
    # What went on has ended, and is among the marks now.
    read.phase_history.marks.append(read.phase_history.current)
    read.phase_history.current = (BEGAN_NS + 3 * MS, data)
    assert read().spans.tolist() == [(2, data, BEGAN_NS + 3 * MS)]


def test_a_span_is_read_once_even_if_the_clock_is_set_back() -> None:
    read, (data, compute) = Read(), (STEP_PHASES.index(StepPhase.DATA), STEP_PHASES.index(StepPhase.COMPUTE))
    read.phase_history.current = (BEGAN_NS + 1000 * MS, data)
    assert read().spans.tolist() == [(0, data, BEGAN_NS + 1000 * MS)]
    read.phase_history.marks.extend([read.phase_history.current, (BEGAN_NS, compute)])
    read.phase_history.current = (BEGAN_NS + MS, data)
    assert read().spans.tolist() == [(0, compute, BEGAN_NS), (0, data, BEGAN_NS + MS)]
    assert len(read().spans) == 0


class MovesOn(PhaseHistory):
    """Its rank is in the next phase each time somebody looks where it is."""

    def __init__(self) -> None:
        self._seen = 0
        super().__init__()

    @property
    def current(self) -> tuple[int, int]:
        self.marks.append((BEGAN_NS + self._seen * MS, self._seen % 2))
        self._seen += 1
        return BEGAN_NS + self._seen * MS, self._seen % 2

    @current.setter
    def current(self, _: tuple[int, int]) -> None:
        """It begins when it is looked at."""


def test_a_phase_that_ends_during_a_read_is_read_once_in_order() -> None:
    recording = Recording(0, MovesOn(), entries=lambda: iter(()))  # type: ignore[arg-type]
    began_ns = [int(began_ns) for _ in range(5) for began_ns in recording.read(CLOCK).spans["begin_ns"]]
    assert began_ns == [BEGAN_NS + number * MS for number in range(6)]


def test_entries_of_an_earlier_trainer_call_are_not_read_again() -> None:
    """The recorder belongs to the process: ``fit`` and a later ``test`` share it."""
    recorder = Recorder(size=1000)
    recorder.add(*(entry(number) for number in range(10)))
    recording = Recording(0, PhaseHistory(), since_ns=BEGAN_NS + 10 * MS, entries=recorder.entries)
    assert seqs(recording.read(CLOCK)) == [] and recording.new == 0
    recorder.add(entry(10, at_ms=11))
    window = recording.read(CLOCK)
    assert (seqs(window), window.lost, window.totals[0][0].count) == ([11], {}, 1)


REAL = """
import torch, torch.distributed as dist
from lightning_ncclsafe._torch import build, process_groups, recorders
from lightning_ncclsafe.collectives.recording import Recording
from lightning_ncclsafe.collectives.recording import PhaseHistory
from lightning_ncclsafe.timing.windows import Clock
recording = Recording(0, PhaseHistory())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(10))
dist.broadcast(torch.ones(3), 0)
dist.all_gather([torch.ones(2)], torch.ones(2))
dist.all_reduce(torch.ones(1), group=dist.new_group([0], group_desc="mine"))
window = recording.read(Clock())
print([(window.groups[row["group"]].description, window.ops[row["op"]], int(row["seq"]), int(row["size_bytes"]))
       for row in window.calls])
print([(group.name, group.ranks, group.backend) for group in window.groups], window.missing)
# Gloo's threads now and then abort a process that ends with its groups.
dist.destroy_process_group()
"""


def test_a_real_group_is_recorded(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(REAL)
    envs = [{"TORCH_FR_BUFFER_SIZE": "1000"}]
    codes, output = warm.run([str(tmp_path / "program.py")], tmp_path, timeout_s=50, envs=envs)
    assert codes == [0], output
    # Before them stands what torch 2.8 says of gloo's connections.
    calls, told = output.splitlines()[-2:]
    assert calls == str(
        [
            ("default_pg", "all_reduce", 1, 40),
            ("default_pg", "broadcast", 2, 12),
            ("default_pg", "all_gather", 3, 8),
            ("mine", "all_reduce", 1, 4),
        ]
    )
    assert told == "[('0', (0,), 'gloo'), ('1', (0,), 'gloo')] ()"


TWO_BACK_ENDS = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.collectives.recording import PhaseHistory, Recording
from lightning_ncclsafe.timing.windows import Clock
recording = Recording(0, PhaseHistory())
dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(10))
dist.all_reduce(torch.ones(10), group=dist.new_group(backend="gloo"))
window = recording.read(Clock())
print([(group.name, group.description, group.ranks, group.backend) for group in window.groups], window.missing)
print([tuple(call) for call in process_groups.group_calls()], process_groups.counts(), process_groups.calls_besides(()))
dist.destroy_process_group()
"""


def test_a_real_group_with_two_back_ends_counts_each(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TWO_BACK_ENDS)
    envs = [{"TORCH_FR_BUFFER_SIZE": "1000"}]
    codes, output = warm.run([str(tmp_path / "program.py")], tmp_path, timeout_s=50, envs=envs)
    assert codes == [0], output
    # Torch warns while the fake back end ends.
    assert [line for line in output.splitlines() if line.startswith("[(")] == [
        "[('0:gloo', 'default_pg:gloo', (0,), 'gloo'), ('1', 'undefined', (0,), 'gloo')] ()",
        "[('0', 'fake', None), ('0:gloo', 'gloo', 1), ('1', 'gloo', 1)] (None, 1, 1) 2",
    ]


class Evil:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


@pytest.fixture
def dump(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the recorder of this process dumps; each name of it once."""
    dumped: list[Any] = [{}]
    for name in RECORDERS:
        monkeypatch.setattr(build.c10d, name.removesuffix("_json"), None, raising=False)
    name = RECORDERS[0].removesuffix("_json")
    monkeypatch.setattr(build.c10d, name, lambda *_: pickle.dumps(dumped[0], protocol=2), raising=False)
    yield dumped


def test_the_dump_is_read_as_plain_data(dump: list[Any]) -> None:
    dump[0] = {"entries": [entry(0)], "version": "2.10"}
    assert [*recorders.entries()] == [[entry(0)]]


def test_a_recorder_too_large_to_read_is_left_alone(dump: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dump[0] = {"entries": [entry(0)], "version": "2.10"}
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20001")
    assert [*recorders.entries()] == []


@pytest.mark.parametrize("value", [Evil(), {"entries": [Evil()]}, io.BytesIO, os.system])
def test_a_dump_other_than_plain_data_is_refused(dump: list[Any], value: Any) -> None:
    dump[0] = value
    with pytest.raises(pickle.UnpicklingError, match="it should be plain data"):
        list(recorders.entries())


def test_a_batch_of_sends_and_receives_is_not_a_collective() -> None:
    """The batch as a whole has the number of the previous collective, and no mark of point-to-point."""
    parts = [
        entry(number, 9, name=name, retired=False, is_p2p=True)
        for number, name in ((1, "nccl:send 0->1"), (2, "nccl:recv 0<-1"))
    ]
    whole = nccl(3, duration_ms=1.0) | {"profiling_name": "nccl:coalesced", "collective_seq_id": 1, "p2p_seq_id": 9}
    assert seqs(Read()(nccl(0, duration_ms=1.0), *parts, whole, last=True)) == [1]


def test_only_recent_groups_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "_MOST_GROUPS", 5)
    read = Read()
    for number in range(100):
        (group,) = read(entry(number, group=(f"group {number}", ""))).groups
        assert group.name == f"group {number}"
    assert len(read.recording._groups) <= 6
    assert read(entry(100, group=("group 3", ""))).groups[0].name == "group 3"


STACKS = """
import sys, torch, torch.distributed as dist
from lightning_ncclsafe._torch import build, process_groups, recorders
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def call():
    dist.all_reduce(torch.ones(10))
call()
((entry,),) = [found for found in recorders.entries(stacks=True) if found]
print([frame["name"] for frame in entry["frames"]][-2:], "torch._inductor" in sys.modules)
dist.destroy_process_group()
"""


def test_stacks_are_read_without_importing_inductor() -> None:
    """The import would take a second, and the main thread may be blocked in it."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "1000"}
    done = subprocess.run([sys.executable, "-c", STACKS], capture_output=True, text=True, timeout=50, env=environment)
    assert done.stdout.splitlines()[-1:] == ["['call', '<module>'] False"], done.stderr


def test_the_inductor_stub_falls_back_to_the_real_module(monkeypatch: pytest.MonkeyPatch) -> None:
    real, cache = ModuleType("torch._inductor"), ModuleType("torch._inductor.codecache")
    cache.PyCodeCache = SimpleNamespace(load="the real one")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, real.__name__, real)
    monkeypatch.setitem(sys.modules, cache.__name__, ModuleType(cache.__name__))
    monkeypatch.setitem(vars(torch), "_inductor", real)
    with recorders._inductor_not_imported():
        # Another thread may look there meanwhile.
        assert torch._inductor.codecache.PyCodeCache.stack_frames_for_code("x.py", 1) is None
    assert vars(torch)["_inductor"] is real
    monkeypatch.setitem(sys.modules, cache.__name__, cache)
    with recorders._inductor_not_imported():
        assert vars(torch)["_inductor"].codecache.PyCodeCache.load == "the real one"
    real.codecache = cache  # type: ignore[attr-defined]
    with recorders._inductor_not_imported():
        assert vars(torch)["_inductor"] is real, "the real module is there: no stub is needed"
