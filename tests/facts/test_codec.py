"""Facts that cross from rank to rank: what is written is read back, and what does not fit is refused by its place."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_ncclsafe.facts import (
    Action,
    Branch,
    Capacity,
    CaughtException,
    ChildProcess,
    Collective,
    DataFacts,
    Decides,
    DirectoryFacts,
    EndedProcess,
    ExceptionFacts,
    FileLockFacts,
    Frame,
    GarbageFacts,
    GpuFacts,
    GpuStateFacts,
    Group,
    HostFacts,
    Incident,
    IncidentKind,
    InspectionFacts,
    InterfaceFacts,
    JobFacts,
    LoaderFacts,
    LoadFacts,
    LockHolder,
    LogFacts,
    LoggedKey,
    LoggerFacts,
    LoopEnd,
    MachineFacts,
    MainThreadFacts,
    MetricFacts,
    ModelUnit,
    NetworkFacts,
    NotRecorded,
    Phase,
    PreflightFacts,
    PressureFacts,
    ProcessFacts,
    Progress,
    RandomState,
    RankFacts,
    RecordFacts,
    SampledActivity,
    SamplerFacts,
    SilentHost,
    Statement,
    StatementKind,
    StepFacts,
    StorageFacts,
    Straggler,
    SwapFacts,
    ThreadLockFacts,
    ThreadPlace,
    TrainerFacts,
    TriedAddress,
    UnitKind,
    UnrecordedGroup,
    codec,
)
from lightning_ncclsafe.facts.codec import DecodeError, decode, encode

FRAME = Frame(
    file="/home/me/train.py",
    line=42,
    function="step",
    code="go()",
    user=True,
    rank_condition="if rank == 0",
    mark="own",
    handler="except ValueError:",
    branches=(Branch(line=40, test="if not batch:  (line 39)", on=Decides.VALUE, jump="return", until=41),),
)
WORKER = ProcessFacts(
    pid=7,
    rank=3,
    state="sleeping",
    wait_channel="futex_wait",
    cpu_s=1.5,
    rss_bytes=1 << 40,
    swap_bytes=4096,
    memory_growth_bytes_per_s=3_000_000,
    swap_growth_bytes_per_s=1_000_000,
    stack=(FRAME,),
    thread_stack=(FRAME,),
    gil_held=True,
    ended_by="SIGABRT",
    said="what(): too much",
    exit_code=2,
    raised=ExceptionFacts(type="KeyError", message="'lr'", stack=(FRAME,), is_consequence=True),
    ran_share=0.25,
    queued_share=0.5,
)
GPU = GpuFacts(
    index=1,
    name="H100",
    uuid="GPU-1",
    total_bytes=80,
    free_bytes=79,
    foreign_processes=("pid 7",),
    ecc_errors=1,
    pending_repair=True,
    throttled_by=("thermal slowdown",),
    recovery_action="reset",
    xids=("79",),
    driver="570",
    cuda="12.8",
)
LOADER = LoaderFacts(
    name="train_dataloader[1]",
    loader="DataLoader",
    dataset="Subset",
    datasets=("Subset", "Digits"),
    iterable=True,
    num_workers=2,
    made_by_workers=True,
    prefetch_factor=4,
    length=10,
    batches=9,
    samples=80,
    batch_size=8,
    drop_last=True,
    sampler=SamplerFacts(
        name="Mine", replicas=4, rank=3, seed=1, epoch=2, shuffle=True, drop_last=True, order="sequential"
    ),
    shards=16,
    fingerprints={"indices": "0011223344556677"},
    all_alike=True,
    problems=("len(dataset) raised ValueError.",),
    read=7,
    ended=True,
)
DATA = DataFacts(
    stage="train_dataloader",
    loaders=(LOADER,),
    mode="max_size_cycle",
    settings={"limit_train_batches": "0.5"},
    val_check_batch=5,
    data_rank=3,
    data_ranks=4,
    forward_communicates=True,
    random=(RandomState(name="torch", digest="8899aabbccddeeff", drawn=True),),
    on_mismatch="warn",
    content="full",
    on_uneven="repeat",
)
PREFLIGHT = PreflightFacts(
    capacity=Capacity(
        machine="boot-id",
        cpus=(0, 1, 64),
        quota_cores=2.5,
        quota_group="/a",
        quotas={"/a": 2.5},
        memory_limit_bytes=1 << 40,
        memory_used_bytes=7,
        memory_group="/b",
        memory_left_bytes={"/b": 7},
        memory_total_bytes=1 << 41,
        memory_available_bytes=8,
        process_limit_bytes=9,
        shm_total_bytes=1 << 26,
        shm_free_bytes=1,
        open_files_left=900,
        slurm_cpus_per_task=8,
    ),
    swap=SwapFacts(
        total_bytes=1,
        used_bytes=2,
        swapped_out_bytes=3,
        swapped_in_bytes=4,
        devices=("/swapfile on nfs4",),
        on_network=("/swapfile on nfs4",),
        memory_stalled=0.1,
        io_stalled=0.2,
        cpu_waited=0.3,
    ),
    gpu=GPU,
    network=NetworkFacts(
        interfaces=("eth0 10000 Mbit/s 10.0.0.7",),
        default_interface="eth0",
        chosen_by="NCCL_SOCKET_IFNAME",
        misnamed=("GLOO_SOCKET_IFNAME=eth9",),
        infiniband=("mlx5_0:1 ACTIVE 400 Gb/sec",),
        infiniband_active=1,
        infiniband_off="NCCL_IB_DISABLE=1",
    ),
    directories=(
        DirectoryFacts(
            role="logs",
            path="/logs",
            filesystem="nfs4",
            append_s=0.1,
            append_worst_s=0.2,
            fsync_s=0.3,
            read_s=0.4,
            free_bytes=5,
            free_inodes=6,
            problem="Permission denied",
        ),
    ),
    load=LoadFacts(
        loader_workers=4,
        batches_in_flight=8,
        batch_bytes=9,
        omp_threads=2,
        parameter_bytes=1,
        gradient_bytes=2,
        replica_bytes=3,
    ),
    open_files_limit=1024,
    open_files=40,
    clock_offset_s=-0.5,
    clock_error_s=0.01,
    versions={"torch": "2.13.0"},
    settings={"NCCL_DEBUG": "INFO"},
    is_cuda=True,
    took_s=0.6,
    missing=("no /proc/pressure",),
)
RANK = RankFacts(
    rank=3,
    local_rank=1,
    local_world_size=2,
    host="node-1",
    pid=4711,
    taken_ns=1_790_000_000_123_456_789,
    progress=Progress(
        phase=Phase.TRAIN,
        actions=(Action(name="[LightningModule]Net.training_step", for_s=0.25),),
        last_action="[Strategy]SafeDDP.batch_to_device",
        epoch=2,
        batch_idx=118,
        is_last_batch=True,
        global_step=1118,
        idle_s=23.5,
    ),
    stack=(FRAME, dataclasses.replace(FRAME, line=43)),
    thread_stack=(dataclasses.replace(FRAME, line=44),),
    groups=(
        Group(
            name="1",
            description="tp",
            ranks=(0, 3),
            last_enqueued=61,
            last_started=60,
            last_completed=59,
            is_mixed=True,
        ),
        Group(name="2", description="dp", ranks=(1,), last_enqueued=1, last_started=0, last_completed=1, is_mixed=True),
    ),
    unrecorded=(
        UnrecordedGroup(name="3", why=NotRecorded.NO_DUMP, description="pp", backend="gloo", calls=12),
        UnrecordedGroup(name="4", why=NotRecorded.LOST, description="cp", backend="nccl", calls=3),
    ),
    collectives=(
        Collective(
            group="1",
            seq=61,
            op="all_reduce",
            backend="nccl",
            completed=True,
            started=True,
            input_sizes=((2, 3), ()),
            output_sizes=((6,),),
            dtypes=("Float", "Half"),
            created_ns=1_790_000_000_000_000_001,
            duration_ms=1.25,
            timeout_ms=600_000,
            launching=True,
            gave_up=True,
            is_p2p=True,
            pair_number=3,
            stack=(FRAME,),
            site="5b1e0c3a9d27",
        ),
    ),
    machine=MachineFacts(
        main_thread=MainThreadFacts(
            over_s=20.0,
            state="disk-sleep",
            wait_channel="nfs_wait_bit_killable",
            looks=21,
            blocked_looks=19,
            running_looks=2,
            ran_s=0.5,
            queued_s=0.25,
            preempted=7,
            major_faults=31,
        ),
        pressure=PressureFacts(
            over_s=20.0,
            throttled_s=1.5,
            periods=200,
            throttled_periods=15,
            cpu_waited=0.5,
            memory_stalled=0.25,
            io_stalled=0.125,
        ),
        garbage=GarbageFacts(running_s=1.5, longest_s=2.5, ended_ago_s=30.0, total_s=4.0, count=2, blocks=7_000_000),
        ended=(EndedProcess(pid=77, signal="SIGKILL", exit_code=1, ago_s=3.5, is_replaced=True),),
        shm_total_bytes=64_000_000,
        shm_free_bytes=4096,
        gpu=GpuStateFacts(gpu=GPU, utilization=0.99, power_w=71.5, no_answer_s=0.5),
        interface=InterfaceFacts(
            backend="nccl",
            name="eth0",
            address="10.0.0.7",
            network="10.0.0.0/24",
            chosen_by="first that is up",
            is_loopback=True,
            others=("docker0 172.17.0.1",),
        ),
        name_servers=("10.0.0.53",),
        settings={"NCCL_DEBUG": "INFO"},
    ),
    host_facts=HostFacts(**{field.name: 2 + n for n, field in enumerate(dataclasses.fields(HostFacts))}),
    peers=(WORKER,),
    awaited_processes=(
        ChildProcess(pid=712, parent=7, command="sh -c", state="sleeping", wait_channel="do_wait", age_s=61.5),
    ),
    file_lock=FileLockFacts(
        path="/cache/x.lock",
        holders=(LockHolder(pid=708, command="python other.py", parents=(7, 1)),),
        is_certain=False,
        by_existence=True,
        age_s=7200.5,
    ),
    thread_lock=ThreadLockFacts(
        lock="self.lock",
        thread="writer",
        is_own=True,
        taken_at=FRAME,
        stack=(FRAME,),
    ),
    held_locks=("/cache/y.lock",),
    workers=(WORKER, WORKER),
    loaders=(LOADER,),
    data=DATA,
    preflight=PREFLIGHT,
    storage=(StorageFacts(owner="TensorBoardLogger", path="/mnt/logs", filesystem="nfs4"),),
    units=(
        ModelUnit(
            kind=UnitKind.FSDP_UNIT,
            name="layers.0",
            parameters=("layers.0.weight", "layers.0.bias"),
            parameter_count=2,
            elements=2048,
            shard_elements=512,
            size_bytes=8192,
            groups=("0", "fsdp"),
            is_root=True,
            type="MulticlassAccuracy",
            alike=32,
            last="layers.31",
        ),
    ),
    stragglers=(
        Straggler(
            rank=1,
            phase="data loading",
            share=0.34,
            of_steps=200,
            mean_s=0.038,
            op="all_reduce",
            since_ns=1_800_000_000_000_000_000,
            until_ns=1_800_000_012_000_000_000,
            is_over=True,
        ),
    ),
    loggers=(
        LoggerFacts(
            logger="TensorBoardLogger",
            path="/mnt/logs",
            points=7,
            records=2,
            thinned=3,
            dropped=1,
            memory_bytes=512,
            staged_bytes=256,
            writing_s=1.5,
            longest_write_s=0.4,
            waited_s=0.1,
            longest_wait_s=0.05,
            finalize_s=0.2,
            faults=1,
            last_fault="OSError(28, 'No space left on device')",
            staging="/tmp/staging",
        ),
    ),
    exception=ExceptionFacts(type="ValueError", message="bad\nbatch “ü”", stack=(FRAME,), is_consequence=True),
    caught=(
        CaughtException(
            type="KeyError",
            message="'lr'",
            stack=(FRAME,),
            caught_at=FRAME,
            passed="all_reduce",
            thread="feeder",
            ago_s=2.5,
            count=3,
            is_held=True,
            is_consequence=True,
        ),
    ),
    failed_save=ExceptionFacts(type="OSError", message="disk full", stack=(FRAME,), is_consequence=True),
    steps=StepFacts(
        with_backward=12,
        validated=8,
        skipped=1,
        skipped_epoch=2,
        skipped_batch=3,
        passes=((0, 0, 2), (0, 3, 1)),
        passes_epoch=0,
        passes_batch=7,
        under_way=(0, 8, 1),
        passes_from=(("train.py:60 in training_step",), ("train.py:60 in training_step", "train.py:64 in again")),
        led_around={"train.py:64 in again": ("train.py:62 in training_step",)},
        conditions_around=("train.py:62 in training_step",),
        passes_at=("train.py:60 in training_step",),
        returns_nothing=("train.py:88 in training_step",),
        without_graph=1,
        leaves_at=("train.py:49 in training_step",),
        without_gradient=("branch.weight",),
        without_gradient_count=1,
        unused_at="train.py:51 in forward",
        frozen=("trunk.weight",),
        frozen_at=("train.py:80 in on_train_epoch_end",),
        logged=(
            LoggedKey(
                name="loss", hook="training_step", place="train.py:9", rank_condition="if rank == 0:", states=("total",)
            ),
        ),
        unlogged=(
            LoggedKey(
                name="hard", hook="validation_step", place="train.py:9", rank_condition="if y:", states=("total",)
            ),
        ),
        monitored=(
            LoggedKey(
                name="score", hook="on_train_epoch_end", place="train.py:9", rank_condition="if x:", states=("total",)
            ),
        ),
        unmonitored=(
            LoggedKey(name="dice", hook="on_fit_end", place="train.py:9", rank_condition="if z:", states=("total",)),
        ),
        metrics=(MetricFacts(name="score", type="Mean", states=("total", "count"), by_entry=("boxes",)),),
        reducing="loss",
        peer=3,
        root=1,
        groups_made=4,
        groups_at=("train.py:12 in setup",),
        accumulates_at=("train.py:30 in on_train_batch_start",),
    ),
    trainer=TrainerFacts(
        settings={"max_steps": "20"},
        changed={"max_steps": "10"},
        callbacks=("EarlyStopping",),
        validates_by_clock=True,
        end=LoopEnd.SHOULD_STOP,
        ended_at=("train.py:70 in training_step",),
        validates_at=("train.py:71 in on_train_epoch_start",),
        batches_begun=4,
        validated=3,
        batches=40,
    ),
    record=RecordFacts(
        has_dump=True,
        is_blank=True,
        is_moving=True,
        has_lost=True,
        is_doubtful=True,
        is_idle=True,
        is_empty=True,
        has_log=True,
        group_known=False,
        waited_ms=600_061,
        awaited=(0,),
        awaited_in="monitored_barrier",
        exit_code=-9,
        ended_first=True,
        survived="ValueError: bad label",
        stuck_s=480,
        lines=("[Rank 3] Watchdog caught",),
    ),
    inspection=InspectionFacts(
        looks=5,
        over_s=2.5,
        moved=True,
        slept_s=614.2,
        whereabouts=(SampledActivity(doing="user code", place="train.py:41 in evaluate", looks=5),),
        native=("cudaStreamSynchronize (libcudart.so.12)",),
        threads=(ThreadPlace(name="Thread-1 (upload)", frame=FRAME),),
        group=Group(
            name="2",
            description="dp",
            ranks=(0, 1),
            last_enqueued=1,
            last_started=1,
            last_completed=1,
            is_mixed=True,
        ),
    ),
    versions={"torch": "2.13.0"},
    missing=("gpu: no driver",),
)
JOB = JobFacts(
    incident=Incident(
        number=2,
        kind=IncidentKind.EXCEPTION,
        opened_by=3,
        opened_ns=1_790_000_000_000_000_000,
        idle_s=20.5,
        suspect_after_s=20.0,
        timeout_s=1800.0,
    ),
    world_size=4,
    ranks=(RANK,),
    witnessed=(WORKER,),
    absent=(3,),
    missing=("rank 0: the store is gone",),
    tried=(TriedAddress(host="node-2", address="10.1.0.2", answers=True, seen_from="node-1", tried="it accepted it"),),
    silent_hosts=(
        SilentHost(
            host="node-2", ranks=(3,), address="10.0.0.2", answers=False, seen_from="node-1", tried="no route to host"
        ),
    ),
    launch="SLURM job 4711",
    unnamed=(ExceptionFacts(type="ValueError", message="bad", stack=(FRAME,), is_consequence=True),),
    is_sized=False,
    outdated=(2,),
    left_out=(3,),
    log=LogFacts(
        statements=(
            Statement(
                kind=StatementKind.ENDED,
                ranks=(1,),
                by=2,
                detail="torchrun",
                exit_code=-9,
                local_rank=1,
                count=1,
                of=2,
                line="failed (exitcode: -9)",
            ),
        ),
        works_on="9%| 1/2 [29:55<",
        is_cut=True,
        spoke=(3,),
    ),
    elsewhere=(1,),
)


def unset(value: Any, place: str = "JobFacts") -> Iterator[str]:
    """Fields that were left at their default, and so would not be missed."""
    if isinstance(value, tuple):
        for item in value:
            yield from unset(item, place)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner in (field.default, None, (), {}):
                yield f"{place}.{field.name}"
            yield from unset(inner, f"{place}.{field.name}")


def test_the_facts_of_these_tests_are_full() -> None:
    assert list(unset(JOB)) == []


def test_what_is_written_is_read_back() -> None:
    assert decode(JobFacts, encode(JOB)) == JOB


def test_whole_numbers_are_read_where_seconds_are_expected_and_stay_floats() -> None:
    action = decode(Action, b'{"name": "fit", "for_s": 3}')
    assert (action.for_s, type(action.for_s)) == (3.0, float)


def test_what_a_newer_writer_adds_is_ignored_at_every_depth() -> None:
    plain = json.loads(encode(JOB))
    plain["colour"] = plain["incident"]["colour"] = plain["ranks"][0]["stack"][0]["colour"] = ["blue"]
    assert decode(JobFacts, json.dumps(plain).encode()) == JOB


def test_what_an_older_writer_does_not_know_takes_its_default() -> None:
    facts = decode(RankFacts, b'{"rank": 1, "progress": {"phase": "init"}}')
    assert facts == RankFacts(rank=1, progress=Progress(phase=Phase.INIT))


def test_null_is_read_where_it_is_allowed() -> None:
    assert decode(HostFacts, b'{"rss_bytes": null, "cores": 2}') == HostFacts(cores=2)


def at_rank(**changes: Any) -> bytes:
    return json.dumps({"rank": 0, "progress": {"phase": "train"}, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "RankFacts: expected JSON, found b''"),
        (encode(RANK)[:-9], 'RankFacts: expected JSON, found b\'{"rank":3'),
        (b"\xff\xfe{}", "RankFacts: expected JSON"),
        (b"[" * 200_000, "RankFacts: expected JSON"),
        (b"1" * 5_000, "RankFacts: expected JSON"),
        (b"[]", "RankFacts: found [], expected dict."),
        (b"null", "RankFacts: found None, expected dict."),
        (b"{}", "RankFacts: "),
        (b'{"rank": 0}', "missing 1 required keyword-only argument: 'progress'"),
        (at_rank(rank="0"), "RankFacts.rank: found '0', expected int."),
        (at_rank(rank=None), "RankFacts.rank: found None, expected int."),
        (at_rank(rank=True), "RankFacts.rank: found True, expected int."),
        (at_rank(rank=1.0), "RankFacts.rank: found 1.0, expected int."),
        (at_rank(rank=float("nan")), "RankFacts.rank: found nan, expected int."),
        (at_rank(host=["a"]), "RankFacts.host: found ['a'], expected str."),
        (at_rank(progress={}), "RankFacts.progress: "),
        (at_rank(progress={"phase": "lunch"}), "RankFacts.progress.phase: found 'lunch', expected one of 'init', "),
        (at_rank(progress={"phase": {}}), "RankFacts.progress.phase: found {}, expected one of"),
        (
            at_rank(progress={"phase": "train", "idle_s": True}),
            "RankFacts.progress.idle_s: found True, expected float.",
        ),
        (at_rank(progress={"phase": "train", "is_last_batch": 1}), "is_last_batch: found 1, expected bool."),
        (at_rank(groups=[{"name": "0"}, 5]), "RankFacts.groups[1]: found 5, expected dict."),
        (at_rank(groups=[{"name": "0", "ranks": [0, "1"]}]), "RankFacts.groups[0].ranks[1]: found '1', expected int."),
        (at_rank(groups={"0": 1}), "RankFacts.groups: found {'0': 1}, expected list."),
        (at_rank(versions={"torch": 2}), "RankFacts.versions['torch']: found 2, expected str."),
        (at_rank(versions=[]), "RankFacts.versions: found [], expected dict."),
        (at_rank(exception="ValueError"), "RankFacts.exception: found 'ValueError', expected dict."),
        (at_rank(host_facts={"load_1min": "high"}), "RankFacts.host_facts.load_1min: found 'high', expected float."),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(data: bytes, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankFacts, data)
    assert said in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_duration_must_be_finite(number: str) -> None:
    with pytest.raises(DecodeError, match=r"Action\.for_s: found .+, expected a finite float"):
        decode(Action, f'{{"name": "fit", "for_s": {number}}}'.encode())


def test_no_depth_of_nesting_overflows_the_stack() -> None:
    """Where JSON can just be read, the error that shows it must not fail in its turn."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 300, limit + 1):
        with pytest.raises(DecodeError):
            decode(Action, b'{"for_s": 0, "name": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize(
    "data",
    [at_rank(host=[0] * 100_000), at_rank(rank="x" * 100_000), at_rank(progress={"phase": "x" * 100_000})],
)
def test_an_error_is_short_whatever_was_found(data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankFacts, data)
    assert len(str(caught.value)) < 300


def test_a_message_that_is_no_text_does_not_prevent_the_sending() -> None:
    # Of a file name whose bytes are not UTF-8, Python makes a string with lone surrogates.
    undecodable = b"/data/\xff\xfe.py".decode("utf-8", "surrogateescape")
    facts = ExceptionFacts(type="OSError", message=undecodable + " \ud800 \x00 \U0001f600 \x1b[31m")
    sent = encode(facts)
    assert sent.decode("utf-8")
    assert decode(ExceptionFacts, sent).message == "/data/??.py ? \x00 \U0001f600 \x1b[31m"


def test_a_surrogate_that_is_read_can_be_written_again() -> None:
    facts = decode(ExceptionFacts, b'{"type": "E", "message": "\\ud800"}')
    assert decode(ExceptionFacts, encode(facts)).message == "?"


def test_types_written_in_either_way_are_read() -> None:
    from typing import Optional

    @dataclass(frozen=True, kw_only=True)
    class Both:
        old: Optional[int] = 0  # noqa: UP045 - as typing writes it
        new: int | None = 0

    assert decode(Both, b'{"old": null, "new": null}') == Both(old=None, new=None)


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        (tuple(range(1024)), {"range": [0, 1024, 1]}),
        (tuple(range(3, 1024, 8)), {"range": [3, 1020, 8]}),
        (tuple(range(100, 0, -1)), {"range": [100, 0, -1]}),
        (tuple(range(63)), [*range(63)]),
        ((*range(63), 99), [*range(63), 99]),
        ((7,) * 64, [7] * 64),
        ((*range(64), 2**62), [*range(64), 2**62]),
    ],
    ids=["all", "every eighth", "downwards", "few", "uneven", "equal", "an odd last one"],
)
def test_the_members_of_a_large_group_are_written_as_a_range(ranks: tuple[int, ...], written: object) -> None:
    group = Group(name="0", ranks=ranks)
    assert json.loads(encode(group))["ranks"] == written
    assert decode(Group, encode(group)) == group


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"range": [0, 5]},
        {"range": [0, 5, 0]},
        {"range": [0, 1 << 40, 1]},
        {"range": [0, 10**30, 1]},
        {"range": [0, -(10**30), -1]},
        {"range": ["0", 5, 1]},
        {"range": 5},
    ],
    ids=["empty", "no step", "step of 0", "too long", "longer", "downwards", "no number", "no list"],
)
def test_a_range_that_is_none_is_refused(ranks: object) -> None:
    with pytest.raises(DecodeError, match=r"^Group\.ranks: found .*, expected list\.$"):
        decode(Group, json.dumps({"name": "0", "ranks": ranks}).encode())


def test_ranges_may_not_have_any_number_of_members_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 20 bytes stand for a hundred thousand numbers, and a file may have millions of them."""
    monkeypatch.setattr(codec, "_MOST_MEMBERS", 1000)
    plain = json.loads(encode(RANK))

    def read(first: int, count: int) -> RankFacts:
        groups = [{"name": "dp", "ranks": {"range": [n, n + 100, 1]}} for n in range(first, first + count)]
        return decode(RankFacts, json.dumps(plain | {"groups": groups}).encode())

    assert len(read(7_000_000, 10).groups) == 10
    with pytest.raises(DecodeError, match=r"ranks: found ranges of more than 1,000 members in all"):
        read(8_000_000, 11)


def test_only_members_of_groups_may_be_a_range() -> None:
    with pytest.raises(DecodeError, match="expected list"):
        decode(JobFacts, encode(JOB).replace(b'"input_sizes":[[2,3],[]]', b'"input_sizes":[{"range":[0,9,1]}]'))


def test_what_many_ranks_say_alike_is_one_object_in_memory() -> None:
    wide = Group(name="dp", ranks=tuple(range(4096)))
    first, second = (decode(RankFacts, encode(dataclasses.replace(RANK, groups=(wide,)))) for _ in range(2))
    assert first == second
    assert first.groups[0].ranks is second.groups[0].ranks
    assert first.host is second.host
    assert first.collectives[0].input_sizes is second.collectives[0].input_sizes


def test_equal_values_of_other_types_are_not_mixed_up() -> None:
    numbers = decode(Group, b'{"name": "0", "ranks": [0, 1]}').ranks
    assert [type(number) for number in numbers] == [int, int]
    assert decode(Collective, b'{"group": "0", "seq": 1, "op": "x", "completed": true}').completed is True
