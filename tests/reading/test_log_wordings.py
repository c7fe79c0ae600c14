"""The wordings of PyTorch, Ray and collectors of logs, whole and cut, in the forms that their sources print."""

import json
from collections.abc import Callable

import pytest
from made_logs import TRACEBACK, judged, prefixed, read, timeout

from lightning_ncclsafe.facts.findings import Confidence, Finding

LIKELY, POSSIBLE = Confidence.LIKELY, Confidence.POSSIBLE
CALL = (
    "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes=Float, TensorDeviceTypes="
    "TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default)))"
)
REDUCE, SEND = CALL.format(7, "ALLREDUCE", 10), CALL.format(7, "BROADCAST", 1)
BARRIER = "CollectiveFingerPrint(SequenceNumber=7OpType=BARRIER)"
MISMATCH = "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: {}"
DIFFER = ".Collectives differ in the following aspects: \t  Op type: ALLREDUCEvs  BROADCAST\n"


def first(text: str) -> Finding:
    return judged(text).findings[0]


def said(text: str) -> tuple[str, tuple[int, ...], Confidence]:
    found = first(text)
    assert found.summary.endswith(".") and "  " not in found.summary and found.remedy
    return found.rule, found.ranks, found.confidence


def running(ranks: tuple[int, ...], call: str) -> str:
    return "".join(f"[I ProcessGroupWrapper.cpp:586] [Rank {rank}] Running collective: {call}\n" for rank in ranks)


def mismatch(rank: int, call: str, other: int, others: str) -> str:
    return MISMATCH.format(rank, call) + f", but Rank {other} is running collective: {others}{DIFFER}"


@pytest.mark.parametrize("other", [SEND, BARRIER], ids=["broadcast", "barrier"])
def test_the_odd_one_of_a_mismatch_is_the_one_that_differs_from_all(other: str) -> None:
    """Every rank that differs from another one reports the first such rank, and the odd one reports a good one."""
    two = mismatch(1, REDUCE, 0, other)
    assert said(two) == ("diverged-collectives", (0, 1), LIKELY)
    assert said(two + mismatch(2, REDUCE, 0, other) + mismatch(0, other, 1, REDUCE))[1] == (0,)
    assert said(running((1, 2), REDUCE) + two)[1] == (0,)
    assert said(running((0, 2), other) + two)[1] == (1,)
    assert said(running((2,), other) + running((3,), REDUCE) + two)[1] == (0, 1), "two and two"
    assert said(running((2,), CALL.format(6, "ALLREDUCE", 10)) + two)[1] == (0, 1), "another number"


def test_calls_that_are_announced_are_no_error() -> None:
    assert read(running((0, 1, 2), REDUCE) + running((0, 1), SEND)) is None


def test_a_mismatch_that_is_cut_names_the_rank_that_differs_only_if_it_is_there() -> None:
    whole, others = MISMATCH.format(1, REDUCE) + ", but Rank 0 is running", running((2, 3), REDUCE)
    assert said(whole) == ("diverged-collectives", (0, 1), LIKELY)
    assert said(others + whole) == ("diverged-collectives", (0,), LIKELY)
    assert said(others + whole[:-15]) == ("diverged-collectives", (), POSSIBLE), "cut before the other rank"
    assert said(whole[:-15]) == ("diverged-collectives", (1,), POSSIBLE)
    assert said(f"{others}{whole}\n" + timeout(9, op="GATHER"))[1] == (0,), "another line follows"


@pytest.mark.parametrize("width", [72, 80, 96])
def test_a_mismatch_that_a_terminal_has_folded_is_read(width: int) -> None:
    text = mismatch(1, REDUCE, 0, SEND)
    folded = "\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert "rank 0 runs broadcast of shape [1]" in first(folded).summary


def test_models_whose_parameters_have_other_sizes_differ() -> None:
    text = "[rank2]: RuntimeError: [2]: params[0] in this process with sizes [10, 5] appears not to match sizes of the "
    found = first(text + "same param in process 0.\n")
    assert (found.rule, found.ranks) == ("mismatched-collective", (0, 2)) and "sizes [10, 5]" in found.summary


LAGGING = "\t     [0] finished collective #611, but didn't join collective #612 (count from 1)\n"
NEVER = (
    "\t - To our best knowledge, ranks [{}] are the lagging ranks that caused this timeout. They never joined any "
    "collectives\n"
)
TAIL = (
    "\t   #611 finished ranks:\n\t     [0] finished ALLREDUCE\n"
    "\t   #612 started ranks:\n\t     [1, 2, 3] started ALLREDUCE\n"
)


@pytest.mark.parametrize(
    ("text", "ranks", "confidence"),
    [
        (LAGGING, (0,), LIKELY),
        (NEVER.format(0), (0,), LIKELY),
        (NEVER.format("2, 3"), (2, 3), LIKELY),
        (TAIL, (0,), POSSIBLE),
        ("\t - Snapshot of ranks' latest states:\n" + TAIL, (0,), POSSIBLE),
        (TAIL.partition("\n")[2], (0,), POSSIBLE),
        (prefixed("3: ", TAIL), (0,), POSSIBLE),
        ("\t     [4, 5] finished ALLGATHER\n" + TAIL.partition("\n")[2], (0, 4, 5), POSSIBLE),
    ],
    ids=["the line", "never", "never, of several", "tail", "snapshot", "no number", "labelled", "two operations"],
)
def test_the_end_of_a_desync_report_shows_who_has_not_arrived(
    text: str, ranks: tuple[int, ...], confidence: Confidence
) -> None:
    found = first(text)
    assert found.rule in ("silent-rank", "host-stuck") and (found.ranks, found.confidence) == (ranks, confidence)


@pytest.mark.parametrize(
    "text",
    [
        "\t     [2] started ALLREDUCE\n" + TAIL,
        TAIL.replace("#612", "#609"),
        TAIL.partition("\t   #612")[0],
        TAIL.partition("\t   #612")[2],
        "\t   #611 started ranks:\n\t     [2] started ALLREDUCE\n" + TAIL.partition("\t   #612")[0],
    ],
    ids=[
        "others are lower",
        "lower afterwards",
        "nobody has started more",
        "nobody has finished",
        "one number",
    ],
)
def test_the_end_of_a_desync_report_may_not_show_it(text: str) -> None:
    assert read(text) is None


WAITING = (
    "(SynchronizationActor pid=9) `{0}` has not been called by all 12 workers in the group.\n(SynchronizationActor "
    "pid=9) The workers have been waiting for 60.10 s for the following ranks{1}to join the `{0}` call: [{2}].\n"
)
EXPIRED = (
    "ray.train.v2._internal.exceptions.BroadcastCollectiveTimeoutError: The broadcast operation timed out after "
    "1800.01 seconds. Please make sure all worker ranks call `ray.train.report`. \n"
    "The following ranks have not called it: [0, 3]\n"
)


@pytest.mark.parametrize("call", ["report", "ray.train.report", "ray.train.collective.barrier"])
@pytest.mark.parametrize("between", [" ", "\n(SynchronizationActor pid=9) "], ids=["one line", "two lines"])
def test_ray_warns_of_workers_that_have_not_called_what_others_wait_in(call: str, between: str) -> None:
    diagnosis = judged(WAITING.format(call, between, "2, 11"))
    found = diagnosis.findings[0]
    assert (found.rule, found.ranks, found.confidence) == ("silent-rank", (2, 11), POSSIBLE)
    assert diagnosis.job.world_size == 12 and call in found.summary


def test_ray_gives_up_on_workers_that_have_not_called() -> None:
    assert said(EXPIRED) == ("silent-rank", (0, 3), LIKELY)
    failed = prefixed("(RayTrainWorker pid=5, ip=10.0.0.1) [rank2]: ", TRACEBACK)
    assert said(WAITING.format("report", " ", "2") + failed)[0] == "failed-rank"


def test_a_loaders_worker_that_aborts_has_failed_by_itself() -> None:
    """Nothing aborts a worker from outside; that its process raises is no wait for others."""
    died = "RuntimeError: DataLoader worker (pid 774120) is killed by signal: Aborted. \n"
    cut = died + "\nThe above exception was the direct cause of the following exception:\n\n"
    frame = '  File "/usr/lib/python3.12/threading.py", line 359, in wait\n    gotit = waiter.acquire(True, timeout)\n'
    head = "Traceback (most recent call last):\n"
    for text in (frame + cut + head + frame, head + frame + died):
        assert said(prefixed("1: ", text))[:2] == ("worker-died", (1,))
    after = timeout(1) + timeout(2) + prefixed("[rank1]: ", head + frame + died)
    assert first("world_size=3\n" + after).rule == "silent-rank", "after its watchdog has given up"


ASCEND = (
    "[rank{0}]:[E324 13:00:25.4 compiler_depend.ts:574] [Rank {0}] Watchdog caught collective operation timeout: "
    "Work{1}(SeqNum=196, OpType=ALLREDUCE, {2}Timeout(ms)=3600000) ran for 3600185 milliseconds before timing out.\n"
)


@pytest.mark.parametrize("sizes", ["", "NumelIn=8, NumelOut=8, "])
@pytest.mark.parametrize("library", ["HCCL", "XCCL", "NCCL"])
def test_watchdogs_of_other_libraries_are_read(library: str, sizes: str) -> None:
    text = "world_size=4\n" + "".join(ASCEND.format(rank, library, sizes) for rank in (0, 1, 3))
    assert said(text + "ended\n" * 2) == ("silent-rank", (2,), LIKELY)


def as_json(key: str, **others: str) -> Callable[[str], str]:
    def wrapped(line: str) -> str:
        return json.dumps({**others, key: line})

    return wrapped


def after(prefix: str) -> Callable[[str], str]:
    def labelled(line: str) -> str:
        return prefix + line

    return labelled


# How collectors and launchers write a line.
WRITERS = {
    "docker": as_json("log", stream="stderr", time="2026-01-01T10:00:00.1Z"),
    "Datadog": as_json("message", status="error", host="node-a"),
    "Google Cloud": as_json("textPayload", severity="ERROR"),
    "Fluent Bit": as_json("log", stream="stderr", pod_name="train-worker-3"),
    "containerd": after("2026-01-01T10:00:00.123456789Z stderr F "),
    "journald": after("Jan 01 10:00:00 node-a torchrun[4711]: "),
    "journald, ISO": after("2026-01-01T10:00:00+0000 node-a python3.12[4711]: "),
    "pdsh, by address": after("10.0.0.3: "),
    "kubectl, coloured": after("\x1b[34m[pod/train-worker-2/pytorch]\x1b[0m 2026-01-01T10:00:00.1Z "),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_lines_are_read_as_collectors_and_launchers_write_them(writer: str) -> None:
    write = WRITERS[writer]
    for label, ranks in (("", ()), ("[rank5]: ", (5,))):
        lines = [write(label + line) for line in TRACEBACK.splitlines()]
        found = first("\r\n".join(lines) + "\r\n")
        assert (found.rule, found.ranks, found.location) == (
            "failed-rank",
            ranks,
            "/home/me/train.py:42 in training_step",
        )


def test_a_record_may_hold_a_whole_traceback() -> None:
    assert said(as_json("message")(prefixed("[rank5]: ", TRACEBACK)) + "\n")[:2] == ("failed-rank", (5,))
    assert said(as_json("log")("[rank5]: KeyError: 'a'\n") + "\n")[:2] == ("failed-rank", (5,))


def test_records_of_two_hosts_are_two_streams() -> None:
    one, other = (
        [as_json("message", host=f"node-{host}")(line) for line in TRACEBACK.replace("42", host).splitlines()]
        for host in "67"
    )
    text = "\n".join(line for pair in zip(one, other, strict=True) for line in pair) + "\n"
    assert {found.location.partition(" ")[0] for found in judged(text).findings} == {
        "/home/me/train.py:6",
        "/home/me/train.py:7",
    }


@pytest.mark.parametrize("host", ["gpu12", "7"])
def test_the_number_of_a_host_in_a_record_is_no_rank(host: str) -> None:
    def written(text: str) -> str:
        return "".join(as_json("message", host=host)(line) + "\n" for line in text.splitlines())

    assert said(written(TRACEBACK))[:2] == ("failed-rank", ())
    assert said(written(f"[rank3]: ranks\n{ENDED.format(-9)}"))[:2] == ("dead-rank", (2,)), "nor one of several"


@pytest.mark.parametrize("line", ['{"log": 3}', '{"message"', "{" * 9000, '{"a": ' + "[" * 9000, '{"log": "epoch 3"}'])
def test_other_json_is_no_record(line: str) -> None:
    assert read(line + "\n") is None
    assert said(line + "\n" + prefixed("[rank5]: ", TRACEBACK))[:2] == ("failed-rank", (5,))


@pytest.mark.parametrize("tag", ["[1,5]<stderr>:", "[prterun-node-a-77@1,5]<stderr>: ", "[1,5][node-a:77]<stderr>: "])
def test_the_tags_of_mpirun_and_prterun_give_the_rank(tag: str) -> None:
    assert said(prefixed(tag, TRACEBACK))[:2] == ("failed-rank", (5,))


ENDED = (
    "E1126 10:00:00.0 11 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: {}) local_rank: 2 "
    "(pid: 88) of binary: /usr/bin/python\n"
)
# What shows that a launcher is one of several, so that the number of a process on its host is not its rank.
HOSTS = {
    "torchrun's options": "+ torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
    "an elastic range": "+ torchrun --nnodes 1:4 train.py\n",
    "another host": "+ torchrun --node_rank 1 train.py\n",
    "torchrun's settings": "Starting elastic_operator with launch configs:\n  min_nodes        : 2\n",
    "Accelerate's": "num_machines: 2\n",
    "DeepSpeed's": "[INFO] [launch.py:146:main] nnodes=2, num_local_procs=4, node_rank=0\n",
    "Lightning's": "Trainer(num_nodes=4)\n",
    "labels": "[default0]:[rank4]: hello WorkNCCL\n",
    "srun's": "1: W1126 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable\n",
    "higher ranks": timeout(4) + timeout(5) + timeout(7),
}


@pytest.mark.parametrize("which", HOSTS)
def test_the_number_of_a_process_on_one_of_several_hosts_is_not_its_rank(which: str) -> None:
    assert said(HOSTS[which] + ENDED.format(-9)) == ("dead-rank", (), LIKELY)


GRAPH = "Data(x=[2708, 1433], edge_index=[2, 10556], num_nodes=2708)"


@pytest.mark.parametrize(
    "told", ["--nnodes=1", "--nnodes 1 --node_rank 0", "num_machines: 1", "[default3]:[rank3]: x", GRAPH]
)
def test_the_number_of_a_process_on_the_only_host_is_its_rank(told: str) -> None:
    assert said(f"{told}\n{ENDED.format(-9)}") == ("dead-rank", (2,), LIKELY)


@pytest.mark.parametrize("label", ["1: ", "[pod/w-1/main] ", "node-b: "])
def test_a_label_of_several_ranks_is_that_of_their_host(label: str) -> None:
    text = prefixed(label, "".join(timeout(rank) for rank in range(9, 16)) + TRACEBACK)
    assert said("world_size=16\n" + text) == ("failed-rank", (), POSSIBLE)


def test_a_label_of_srun_is_no_rank_if_torchrun_has_started_the_ranks() -> None:
    assert said(prefixed("1: ", HOSTS["srun's"].partition(": ")[2] + TRACEBACK))[:2] == ("failed-rank", ())


DEVICE = (
    "[rank{0}]:[E1126 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group watchdog "
    "thread terminated with exception: CUDA error: {1}\n"
)


def test_devices_that_fail_in_different_ways_are_told_apart() -> None:
    illegal, launch = "an illegal memory access was encountered", "unspecified launch failure"
    alike = judged("".join(DEVICE.format(rank, illegal) for rank in range(3))).findings
    assert [(found.rule, found.ranks) for found in alike] == [("failed-rank", (0, 1, 2))]
    found = judged(DEVICE.format(1, illegal) + DEVICE.format(2, launch)).findings
    assert [(one.ranks, launch in one.summary) for one in found] == [((1,), False), ((2,), True)]


def test_a_driver_that_shuts_down_follows_from_the_end_of_its_process() -> None:
    gone = DEVICE.format(3, "driver shutting down")
    assert said(DEVICE.format(2, "device-side assert triggered") + gone)[:2] == ("failed-rank", (2,))
    assert first("".join(map(timeout, range(3))) + gone).rule == "silent-rank"


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed", LIKELY),
        ("The node with node id: ab1 and address: 10.0.0.2 and node name: a has been marked dead because", POSSIBLE),
        ("ray.exceptions.ActorDiedError: The actor died because its node has died. Node Id: ab1", POSSIBLE),
    ],
    ids=["memory", "host", "host of an actor"],
)
def test_ray_reports_the_end_of_processes_and_hosts(text: str, confidence: Confidence) -> None:
    assert said(f"{text}\n") == ("dead-rank", (), confidence)
    assert read("(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed\n") is None


def test_lines_that_say_different_things_are_told_apart() -> None:
    lines = "[rank1]: RuntimeError: CUDA error: an illegal memory access\n[rank0]: RuntimeError: bad label {}\n"
    found = judged(lines.format(4) + "[rank2]: RuntimeError: bad label 5\n").findings
    assert [one.ranks for one in found] == [(0, 2), (1,)]


@pytest.mark.parametrize("code", [-9, -11])
def test_a_rank_that_had_given_up_is_not_dead_for_another_reason(code: int) -> None:
    gave_up = "world_size=4\n" + "".join(map(timeout, range(4)))
    assert first(gave_up + ENDED.format(code)).rule == "all-joined"
    assert said(gave_up.replace(timeout(2), "") + ENDED.format(code)) == ("dead-rank", (2,), LIKELY)
    nameless = f"[launch.py:325:sigkill_handler] ['python', '--local_rank=3'] exits with return code = {code}\n"
    assert first(gave_up + nameless).rule == "all-joined"
    assert first(gave_up.replace(timeout(2), "") + nameless).rule == "dead-rank"
    assert first(gave_up + "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n").rule == "dead-rank"


LAUNCHERS = (
    "python -m torch.distributed.run train.py",
    "/opt/python3/bin/torchrun train.py",
    "mpirun -np 4 python train.py",
    "accelerate launch train.py",
    "make",
)
SHELL = "/var/spool/slurmd/job61/slurm_script: line 16: 723537 {}                  {}\n"


def test_a_shell_reports_the_end_of_a_program() -> None:
    for how in ("Killed", "Segmentation fault (core dumped)", "Bus error"):
        assert said(SHELL.format(how, "python3 train.py")) == ("dead-rank", (), LIKELY)
        for launcher in LAUNCHERS:
            assert read(SHELL.format(how, launcher)) is None
