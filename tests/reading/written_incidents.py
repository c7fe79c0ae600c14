"""Incidents on NCCL played step by step (``written_recorder``), each with its truth.

They were written without sight of the rules, and each truth before the first run. What was said then is in
``docs/cost/accuracy.md``. ``python tests/reading/written_incidents.py`` prints what is said now.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from written_recorder import (
    FOREVER,
    Batch,
    Collective,
    Host,
    Kernel,
    Played,
    Receive,
    Send,
    Step,
    Synchronize,
    write,
)

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

HOST = ("host-stuck", "silent-rank", "rank-behind")
DEVICE = ("gpu-stuck",)
DIFFERENT = ("mismatched-collective", "diverged-collectives", "out-of-step")
CROSSED = ("crossed-groups",)
PAIRS = ("unmatched-p2p",)
START = ("late-at-init", *HOST)
GONE = ("no-dump", "dead-rank", "silent-rank", "host-stuck")
ALL = ("all-joined",)
NOBODY: tuple[str, ...] = ()
Dumps = dict[int, dict[str, Any]]


@dataclass
class Incident:
    """A job's dumps and the truth about it.

    Attributes:
        kinds: Rules that may be told as its cause; none where nothing may be told as likely.
        ranks: Whose fault it is.
        among: Ranks that may be named beside these.
        made: Makes the dumps.
        as_json: Whether they are JSON.
        is_sure: Whether dumps tell it; where they do not, a possible answer is enough.
    """

    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    made: Callable[[], Dumps]
    among: tuple[int, ...] = ()
    as_json: bool = False
    is_sure: bool = True
    words: str = field(default="")


INCIDENTS: dict[str, Incident] = {}


def incident(kinds: tuple[str, ...], *ranks: int, **more: Any) -> Callable[[Callable[[], Dumps]], Callable[[], Dumps]]:
    def add(made: Callable[[], Dumps]) -> Callable[[], Dumps]:
        INCIDENTS[made.__name__] = Incident(kinds, ranks, made, words=made.__doc__ or "", **more)
        return made

    return add


def freezing(groups: dict[str, list[int]], programs: dict[int, list[Step]], rank: int, place: int) -> Played:
    """A job in which a rank's device freezes just before it could see that its work at a place has ended."""
    ended_s = Played(groups, programs).ranks[rank].tasks[place].ended_s
    assert ended_s is not None
    return Played(groups, programs, frozen={rank: ended_s - 0.0001})


def all_of(played: Played, **how: Any) -> Dumps:
    return {rank: played.dump(rank, **how) for rank in played.programs}


# Data parallel


def step_of_ddp(*, sync: bool = True, last: int = 512, dtype: str = "Float") -> list[Step]:
    """Three buckets that overlap with the backward pass."""
    steps: list[Step] = [Host(0.01), Kernel(0.02)]
    for size in (4096, 2048, last):
        steps += [Kernel(0.01), Collective("dp", sizes=(size,), is_async=True, dtype=dtype)]
    return [*steps, *([Synchronize()] if sync else [])]


def ddp(world: int, count: int, *, sync: bool = True, **changed: list[Step]) -> dict[int, list[Step]]:
    """Programs of a job; those of some ranks may go on differently."""
    same = [step for _ in range(count) for step in step_of_ddp(sync=sync)]
    rest = [step for _ in range(3) for step in step_of_ddp(sync=sync)]
    return {rank: [*same, *changed.get(f"r{rank}", rest)] for rank in range(world)}


def world(count: int) -> dict[str, list[int]]:
    return {"dp": list(range(count))}


@incident(HOST, 5)
def ddp_loader_stuck() -> Dumps:
    """Rank 5's host never comes back from its data loader."""
    return all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])))


@incident(HOST, 2)
def ddp_host_ahead_then_stuck() -> Dumps:
    """Hosts run ahead of their devices; rank 2's stops three steps before the others block."""
    programs = ddp(8, 3, sync=False, r2=[Host(FOREVER)])
    return all_of(Played(world(8), {rank: [*steps, Synchronize()] for rank, steps in programs.items()}))


@incident(HOST, 0)
def rank_0_writes_a_checkpoint() -> Dumps:
    """The others wait in a barrier."""
    barrier: list[Step] = [Collective("dp", "all_reduce_barrier", (1,)), Synchronize()]
    programs = ddp(4, 5, r0=[Host(FOREVER)], r1=barrier, r2=barrier, r3=barrier)
    return all_of(Played(world(4), programs), version="2.9")


@incident(DIFFERENT, 3)
def an_extra_metric_on_rank_3() -> Dumps:
    """Rank 3 reduces a metric that nobody else does, and is one call ahead from then on."""
    extra: list[Step] = [Collective("dp", sizes=(1,)), *step_of_ddp()]
    return all_of(Played(world(8), ddp(8, 4, r3=extra)))


@incident(DIFFERENT, 1)
def another_dtype_on_rank_1() -> Dumps:
    """Rank 1 has cast its gradients."""
    return all_of(Played(world(4), ddp(4, 4, r1=step_of_ddp(dtype="BFloat16"))))


@incident(DIFFERENT, 6)
def another_bucket_on_rank_6() -> Dumps:
    """A parameter was unused on rank 6, so its last bucket is smaller."""
    return all_of(Played(world(8), ddp(8, 4, r6=step_of_ddp(last=384))))


@incident(DIFFERENT, 3)
def one_batch_fewer_on_rank_3() -> Dumps:
    """Rank 3 is at the barrier after the epoch while the others reduce gradients."""
    end: list[Step] = [Collective("dp", "all_reduce_barrier", (1,)), Synchronize()]
    return all_of(Played(world(8), ddp(8, 4, r3=end)))


def endless_kernel(timing: bool) -> Dumps:
    stuck: list[Step] = [Kernel(FOREVER), *step_of_ddp()]
    return all_of(Played(world(8), ddp(8, 4, r2=stuck)), timing=timing)


@incident(DEVICE, 2)
def endless_kernel_timed() -> Dumps:
    """Rank 2's device has not come to what all others have started."""
    return endless_kernel(True)


@incident(ALL, *range(8))
def endless_kernel_untimed() -> Dumps:
    """The same without start events: all have launched the same, and none has ended."""
    return endless_kernel(False)


@incident(DEVICE, 4)
def a_device_freezes() -> Dumps:
    """What rank 4 holds open has ended on its peers."""
    return all_of(freezing(world(8), ddp(8, 4, sync=False), 4, 19), version="2.9")


@incident(GONE, 7, is_sure=False)
def rank_7_left_nothing() -> Dumps:
    """Its process is gone, and with it its dump."""
    dumps = all_of(Played(world(8), ddp(8, 4, r7=[Host(FOREVER)])))
    return {rank: dump for rank, dump in dumps.items() if rank != 7}


@incident(GONE, 3, 5, is_sure=False)
def two_dumps_are_missing() -> Dumps:
    """One of them was never copied, the other's rank is the one that all wait for."""
    dumps = all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])))
    return {rank: dump for rank, dump in dumps.items() if rank not in (3, 5)}


@incident(HOST, 5)
def a_dump_of_a_bystander_is_missing() -> Dumps:
    """Rank 3's was never copied; rank 5's says that it has nothing to wait for."""
    dumps = all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])))
    return {rank: dump for rank, dump in dumps.items() if rank != 3}


@incident(NOBODY)
def moving_within_milliseconds() -> Dumps:
    """A healthy job; dumps of 20 ms."""
    played = Played(world(8), ddp(8, 20))
    return {rank: played.dump(rank, 0.61 + 0.003 * rank) for rank in range(8)}


@incident(NOBODY)
def moving_within_seconds() -> Dumps:
    """A healthy job; rank 0's dump is from half a minute before the others."""
    programs = {rank: [step for _ in range(60) for step in (*step_of_ddp(), Host(1.0))] for rank in range(4)}
    played = Played(world(4), programs)
    calls = [task for task in played.ranks[1].tasks if task.entries]
    return {rank: played.dump(rank, calls[27 if rank == 0 else 111].enqueued_s + rank / 1000) for rank in range(4)}


@incident(NOBODY)
def all_has_ended() -> Dumps:
    """The job is done."""
    return all_of(Played(world(4), ddp(4, 6)), timing=True)


@incident(HOST, 6)
def clocks_differ() -> Dumps:
    """The second host's clock is 90 s ahead."""
    played = Played(world(8), ddp(8, 4, r6=[Host(FOREVER)]))
    return {rank: played.dump(rank, clock_s=90.0 if rank > 3 else 0.0) for rank in range(8)}


@incident(HOST, 5)
def no_status_and_no_groups() -> Dumps:
    """An early format."""
    played = Played(world(8), ddp(8, 4, r5=[Host(FOREVER)]))
    return all_of(played, version="2.3", has_status=False, has_config=False, threads=False, names={"dp": "0"})


@incident(HOST, 5, as_json=True)
def as_json() -> Dumps:
    """JSON, where times that are not known are 0."""
    return all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])))


@incident(HOST, 5, as_json=True)
def as_json_of_open_ones() -> Dumps:
    """JSON of what is open: rank 5's has no entries at all."""
    return all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])), only_active=True, timing=True)


@incident(HOST, 2)
def watchdogs_have_given_up() -> Dumps:
    """The others' works were retired without having ended, and count as completed."""
    return all_of(Played(world(8), ddp(8, 4, r2=[Host(FOREVER)])), timed_out_after_s=600.0, version="2.8")


@incident(DIFFERENT, 2)
def coalesced_sizes_differ() -> Dumps:
    """One entry with several sizes, of which rank 2's last is another."""

    def program(rank: int) -> list[Step]:
        sizes = (512, 1024, 4096)
        step = Collective("dp", "allgather_into_tensor_coalesced", sizes)
        odd = Collective("dp", "allgather_into_tensor_coalesced", (512, 1024, 2048))
        return [*[step, Synchronize()] * 5, odd if rank == 2 else step, Synchronize()]

    return all_of(Played(world(4), {rank: program(rank) for rank in range(4)}))


@incident(HOST, 2)
def the_root_of_a_broadcast_is_ahead() -> Dumps:
    """Rank 0 has pushed its data and waits in the next call; rank 2 never came to the broadcast."""

    def program(rank: int) -> list[Step]:
        rest: list[Step] = [Collective("dp", "broadcast", (64,), root=0), Collective("dp", sizes=(8,)), Synchronize()]
        return [*[*rest] * 4, *([Host(FOREVER)] if rank == 2 else rest)]

    return all_of(Played(world(4), {rank: program(rank) for rank in range(4)}))


@incident(START, 3)
def the_first_call_connects() -> Dumps:
    """Rank 3 never makes the first call; the others' hosts are blocked inside it, and it looks completed."""
    programs = {rank: step_of_ddp() if rank != 3 else [Host(FOREVER)] for rank in range(4)}
    return all_of(Played(world(4), programs, connects=True))


@incident(HOST, 1)
def a_first_call_late_in_training() -> Dumps:
    """A group is used for the first time after ten steps; rank 1 never comes to it."""
    groups = {**world(4), "metrics": [0, 1, 2, 3]}
    first: list[Step] = [Collective("metrics", sizes=(3,)), Synchronize()]
    same = [step for _ in range(10) for step in step_of_ddp()]
    programs = {rank: [*same, *([Host(FOREVER)] if rank == 1 else first)] for rank in range(4)}
    return all_of(Played(groups, programs, connects=True))


@incident(HOST, 5)
def a_dump_of_an_earlier_run() -> Dumps:
    """Rank 2's dump is an hour old; what the others have ended since with rank 2 shows it."""
    dumps = all_of(Played(world(8), ddp(8, 12, r5=[Host(FOREVER)])))
    dumps[2] = Played(world(8), ddp(8, 2)).dump(2, 0.19, clock_s=-3600.0)
    return dumps


@incident(HOST, 3)
def an_asynchronous_gather_is_left() -> Dumps:
    """Nobody waits for it on the host; rank 3 has not launched it."""
    groups = {**world(4), "gather": [0, 1, 2, 3]}

    def program(rank: int) -> list[Step]:
        gather: list[Step] = [Collective("gather", "all_gather", (256,), is_async=True)]
        return [*[*gather, *step_of_ddp()] * 4, *([Host(FOREVER)] if rank == 3 else [*gather, Host(1.0)])]

    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}))


# Tensor and data parallel


def tensor_and_data(tensor: int, data: int) -> dict[str, list[int]]:
    """Ranks of one tensor-parallel group follow each other."""
    groups = {f"tp{one}": list(range(one * tensor, (one + 1) * tensor)) for one in range(data)}
    return {**groups, **{f"dp{one}": list(range(one, tensor * data, tensor)) for one in range(tensor)}}


def layers(rank: int, tensor: int, count: int = 4, size: int = 2048) -> list[Step]:
    steps: list[Step] = []
    for _ in range(count):
        steps += [Kernel(0.004), Collective(f"tp{rank // tensor}", sizes=(size,))]
    return steps


def tp_step(rank: int, tensor: int) -> list[Step]:
    gradients = Collective(f"dp{rank % tensor}", sizes=(8192,))
    return [Host(0.002), *layers(rank, tensor), gradients, Synchronize()]


def tp_dp(tensor: int, data: int, stuck: dict[int, list[Step]], count: int = 4) -> dict[int, list[Step]]:
    programs = {}
    for rank in range(tensor * data):
        same = [step for _ in range(count) for step in tp_step(rank, tensor)]
        programs[rank] = [*same, *stuck.get(rank, [*tp_step(rank, tensor)] * 2)]
    return programs


@incident(HOST, 5)
def tp_dp_host_stuck() -> Dumps:
    """Its tensor-parallel peer waits for rank 5, and all others for one of the two."""
    programs = tp_dp(2, 4, {5: [*layers(5, 2, 2), Host(FOREVER)]})
    return all_of(Played(tensor_and_data(2, 4), programs), version="2.9")


@incident(HOST, 1, 6)
def tp_dp_two_hosts_stuck() -> Dumps:
    """Ranks 1 and 6, in different groups."""
    programs = tp_dp(2, 4, {1: [Host(FOREVER)], 6: [*layers(6, 2, 1), Host(FOREVER)]})
    return all_of(Played(tensor_and_data(2, 4), programs))


@incident(DIFFERENT, 2, 3)
def tp_sizes_differ() -> Dumps:
    """Ranks 2 and 3 reduce different sizes with each other; which is wrong cannot be said."""
    odd = [*layers(3, 2, 2), *layers(3, 2, 1, 1024), *tp_step(3, 2)]
    return all_of(Played(tensor_and_data(2, 4), tp_dp(2, 4, {3: odd})))


@incident(DEVICE, 2)
def tp_dp_device_freezes() -> Dumps:
    """Rank 2's; the others wait for it through both of its groups."""
    played = freezing(tensor_and_data(2, 2), tp_dp(2, 2, {}, 8), 2, 31)
    return all_of(played, version="2.9", only_active=True)


@incident(HOST, 3)
def disjoint_groups_share_a_name() -> Dumps:
    """Both tensor-parallel groups are called 1, as names are counted by each process."""
    programs = tp_dp(2, 2, {3: [*layers(3, 2, 1), Host(FOREVER)]})
    names = {"tp0": "1", "tp1": "1", "dp0": "2", "dp1": "2"}
    return all_of(Played(tensor_and_data(2, 2), programs), names=names)


@incident(HOST, 3)
def the_ring_has_lost_it() -> Dumps:
    """What ranks 0 and 1 wait for in their data-parallel groups is no longer among their ten entries."""
    groups = tensor_and_data(2, 2)

    def program(rank: int) -> list[Step]:
        start = Collective(f"dp{rank % 2}", sizes=(8192,), is_async=True)
        step: list[Step] = [start, *layers(rank, 2, 8)]
        end: list[Step] = [Host(FOREVER)] if rank == 3 else [*step, *layers(rank, 2, 12), Synchronize()]
        return [*[*step, Synchronize()] * 3, *end]

    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}), ring=10)


@incident(HOST + DEVICE, 1, 6)
def a_host_and_a_device() -> Dumps:
    """Rank 1's host stops, and rank 6's device freezes in another pair of groups."""
    programs = tp_dp(2, 4, {1: [*layers(1, 2, 1), Host(FOREVER)]}, 4)
    return all_of(freezing(tensor_and_data(2, 4), programs, 6, 39))


@incident(CROSSED, 0, 1)
def two_groups_crossed() -> Dumps:
    """Rank 0 calls a then b, rank 1 b then a."""
    groups = {"a": [0, 1], "b": [0, 1]}
    a: list[Step] = [Collective("a", sizes=(64,))]
    b: list[Step] = [Collective("b", sizes=(32,))]
    same = [*a, *b, Synchronize()] * 4
    return all_of(Played(groups, {0: [*same, *a, *b, Synchronize()], 1: [*same, *b, *a, Synchronize()]}))


@incident(CROSSED, 2, among=(0, 1, 3))
def one_rank_crosses_world_and_data() -> Dumps:
    """Rank 2 calls the world's group before its data-parallel one, unlike all others."""
    groups = {**world(4), "metrics": [0, 1, 2, 3]}

    def program(rank: int) -> list[Step]:
        pair: list[Step] = [Collective("dp", sizes=(1024,)), Collective("metrics", sizes=(4,))]
        return [*[*pair, Synchronize()] * 5, *(reversed(pair) if rank == 2 else pair), Synchronize()]

    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}))


# Experts


@incident(HOST, 6)
def experts_with_uneven_tokens() -> Dumps:
    """All-to-alls of different sizes are as they should be; rank 6's host is stuck."""
    groups = {**world(8), "ep": list(range(8))}

    def program(rank: int) -> list[Step]:
        steps: list[Step] = []
        for layer in range(4):
            sizes = (1000 + 37 * rank + 11 * layer,)
            steps += [
                Kernel(0.003),
                Collective("ep", "all_to_all", sizes),
                Collective("ep", "all_to_all", (sizes[0] + 5,)),
            ]
        whole: list[Step] = [*steps, *step_of_ddp()]
        return [*[*whole] * 3, *([*steps[:4], Host(FOREVER)] if rank == 6 else whole)]

    return all_of(Played(groups, {rank: program(rank) for rank in range(8)}), version="2.9")


# Pipelines


def one_forward_one_backward(stage: int, stages: int, batches: int, group: str, ranks: list[int]) -> list[list[Step]]:
    """A schedule, as a list of what a stage does per micro batch.

    Sends are asynchronous, receives are waited for. What two stages have to do with each other at one time is launched
    in one order by both: activations first.
    """
    before = ranks[stage - 1] if stage else None
    after = ranks[stage + 1] if stage + 1 < stages else None

    def receive(peer: int | None) -> list[Step]:
        return [Receive(group, peer, is_async=False)] if peer is not None else []

    def send(peer: int | None) -> list[Step]:
        return [Send(group, peer)] if peer is not None else []

    warm = min(stages - stage - 1, batches)
    left = batches - warm
    steps = [[*receive(before), Kernel(0.01), *send(after)] for _ in range(warm)]
    steps += [receive(before)] if left else []
    for number in range(left):
        steps.append([Kernel(0.01), *send(after), *receive(after)])
        steps.append([Kernel(0.02), *(receive(before) if number + 1 < left else []), *send(before)])
    return [*steps, *[[*receive(after), Kernel(0.02), *send(before)] for _ in range(warm)], [Synchronize()]]


def batched(stage: int, stages: int, batches: int, group: str, ranks: list[int]) -> list[list[Step]]:
    """The same with ``batch_isend_irecv``: in the steady state a send and a receive of one neighbour are one launch."""

    def both(*parts: Send | Receive) -> list[Step]:
        return [Batch(parts, is_async=False), Synchronize()] if parts else []

    before = ranks[stage - 1] if stage else None
    after = ranks[stage + 1] if stage + 1 < stages else None
    warm = min(stages - stage - 1, batches)
    steps: list[list[Step]] = []
    for _ in range(warm):
        got = both(Receive(group, before)) if before is not None else []
        steps.append([*got, Kernel(0.01), *(both(Send(group, after)) if after is not None else [])])
    left = batches - warm
    if left and before is not None:
        steps.append(both(Receive(group, before)))
    for number in range(left):
        there = both(Send(group, after), Receive(group, after)) if after is not None else []
        parts = [Send(group, before)] if before is not None else []
        parts += [Receive(group, before)] if before is not None and number + 1 < left else []
        steps.append([Kernel(0.01), *there, Kernel(0.02), *both(*parts)])
    for _ in range(warm):
        got = both(Receive(group, after)) if after is not None else []
        steps.append([*got, Kernel(0.02), *(both(Send(group, before)) if before is not None else [])])
    return [*steps, [Synchronize()]]


Schedule = Callable[[int, int, int, str, list[int]], list[list[Step]]]


def pipeline(schedule: Schedule, stages: int, batches: int = 8, times: int = 2) -> dict[int, list[list[Step]]]:
    ranks = list(range(stages))
    return {stage: schedule(stage, stages, batches, "pp", ranks) * times for stage in ranks}


def flat(programs: dict[int, list[list[Step]]], **stuck: int) -> dict[int, list[Step]]:
    """Of ranks that are stuck, what they do up to a place of their schedule."""
    steps = {}
    for rank, parts in programs.items():
        upto = stuck.get(f"r{rank}")
        kept = parts if upto is None else parts[:upto]
        steps[rank] = [step for part in kept for step in part] + ([] if upto is None else [Host(FOREVER)])
    return steps


def stages(count: int) -> dict[str, list[int]]:
    return {"pp": list(range(count))}


@incident(HOST, 2)
def pipeline_host_stuck() -> Dumps:
    """Stage 2's host stops in the second round."""
    return all_of(Played(stages(4), flat(pipeline(one_forward_one_backward, 4), r2=24)), version="2.9")


@incident(HOST, 1)
def batched_pipeline_host_stuck() -> Dumps:
    """Sends and receives of one neighbour are launched together; stage 1's host stops."""
    return all_of(Played(stages(4), flat(pipeline(batched, 4), r1=18)), version="2.9")


@incident(HOST, 3)
def batched_pipeline_of_old_torch() -> Dumps:
    """Batches count as collectives of their rank; stage 3's host stops."""
    played = Played(stages(4), flat(pipeline(batched, 4), r3=14), batches_count=True)
    return all_of(played, version="2.4", threads=False)


@incident(HOST, 2)
def batched_pipeline_of_new_torch() -> Dumps:
    """Whole batches say that they are point to point; stage 2's host stops."""
    return all_of(Played(stages(4), flat(pipeline(batched, 4), r2=17), coalesced_is_p2p=True))


@incident(HOST, 0)
def two_stages_host_stuck() -> Dumps:
    """Stage 0's host stops after its warm-up."""
    return all_of(Played(stages(2), flat(pipeline(one_forward_one_backward, 2), r0=22)))


@incident(PAIRS, 2, 3, among=(0, 1))
def a_send_is_left_out() -> Dumps:
    """Stage 2 leaves a send to stage 3 out, and both wait in a receive of the other."""
    programs = pipeline(one_forward_one_backward, 4)
    place = next(n for n in range(18, 30) if any(isinstance(s, Send) and s.peer == 3 for s in programs[2][n]))
    programs[2][place] = [step for step in programs[2][place] if not isinstance(step, Send)]
    return all_of(Played(stages(4), flat(programs)))


@incident(PAIRS, 0, 1)
def both_receive_first() -> Dumps:
    """Ranks 0 and 1 exchange, and each receives before it sends."""

    def program(rank: int) -> list[Step]:
        good: list[Step] = [Batch((Send("x", 1 - rank), Receive("x", 1 - rank)), is_async=False), Synchronize()]
        return [*good * 4, Receive("x", 1 - rank, is_async=False), Send("x", 1 - rank), Synchronize()]

    return all_of(Played({"x": [0, 1]}, {rank: program(rank) for rank in range(2)}))


@incident(PAIRS + DIFFERENT, 1, 2, among=(0, 3))
def sizes_of_a_pair_differ() -> Dumps:
    """Rank 1 sends 4,096 elements, rank 2 receives 8,192."""
    programs = pipeline(one_forward_one_backward, 4)
    place = next(n for n in range(18, 30) if any(isinstance(s, Receive) and s.peer == 1 for s in programs[2][n]))
    programs[2][place] = [
        Receive("pp", 1, 8192, is_async=False) if isinstance(step, Receive) and step.peer == 1 else step
        for step in programs[2][place]
    ]
    return all_of(Played(stages(4), flat(programs)))


@incident(NOBODY)
def a_pipeline_moves() -> Dumps:
    """Healthy; dumps of different moments."""
    played = Played(stages(4), flat(pipeline(batched, 4, times=6)))
    return {rank: played.dump(rank, 0.9 + 0.013 * rank) for rank in range(4)}


@incident(NOBODY)
def a_pipeline_has_ended() -> Dumps:
    """The parts of its batches stay scheduled for ever."""
    return all_of(Played(stages(4), flat(pipeline(batched, 4))), version="2.9")


def pipelines_and_data() -> tuple[dict[str, list[int]], dict[int, list[list[Step]]]]:
    """Two pipelines of four stages; rank = 2 x stage + pipeline."""
    groups = {f"pp{one}": [2 * stage + one for stage in range(4)] for one in range(2)}
    groups |= {f"dp{stage}": [2 * stage, 2 * stage + 1] for stage in range(4)}
    programs: dict[int, list[list[Step]]] = {}
    for rank in range(8):
        name = f"pp{rank % 2}"
        parts = one_forward_one_backward(rank // 2, 4, 8, name, groups[name])
        end: list[Step] = [Collective(f"dp{rank // 2}", sizes=(8192,)), Synchronize()]
        programs[rank] = [*parts, end] * 2
    return groups, programs


@incident(HOST, 3)
def pipelines_and_data_host_stuck() -> Dumps:
    """Stage 1 of the second pipeline; the first one comes to its gradients and waits there."""
    groups, programs = pipelines_and_data()
    return all_of(Played(groups, flat(programs, r3=25)), version="2.9")


@incident(DEVICE, 4)
def pipelines_and_data_device_freezes() -> Dumps:
    """Stage 2 of the first pipeline."""
    groups, programs = pipelines_and_data()
    return all_of(freezing(groups, flat(programs), 4, 60), version="2.9", only_active=True)


@incident(HOST, 1, 6)
def two_pipelines_two_hosts() -> Dumps:
    """One stage of each."""
    groups, programs = pipelines_and_data()
    return all_of(Played(groups, flat(programs, r1=22, r6=24)))


# Written when the first fifty had been judged


def ring_of(rank: int, ranks: int, count: int) -> list[Step]:
    """Ring attention: what a rank has goes to the next one, and what the one before it has comes."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    step: list[Step] = [Kernel(0.003), Batch((Send("cp", after), Receive("cp", before)), is_async=False)]
    return [one for _ in range(count) for one in step]


@incident(HOST, 2)
def ring_attention_host_stuck() -> Dumps:
    """Rank 2 stops in the middle of a ring; its neighbours wait for it, and theirs for them."""
    programs = {rank: [*ring_of(rank, 4, 10), Synchronize()] for rank in range(4)}
    programs[2] = [*ring_of(2, 4, 6), Host(FOREVER)]
    return all_of(Played({"cp": [0, 1, 2, 3]}, programs), version="2.9")


@incident(PAIRS, 1, among=(0, 2, 3))
def ring_attention_one_step_more() -> Dumps:
    """Rank 1 takes one step more than the others, which are done."""
    programs = {rank: [*ring_of(rank, 4, 10 + (rank == 1)), Synchronize()] for rank in range(4)}
    return all_of(Played({"cp": [0, 1, 2, 3]}, programs), version="2.9")


@incident(HOST, 2)
def a_reduce_to_rank_0() -> Dumps:
    """Rank 2 never comes to the reduction; the others wait in it or behind it."""

    def program(rank: int) -> list[Step]:
        rest: list[Step] = [Collective("dp", "reduce", (64,)), Collective("dp", sizes=(8,)), Synchronize()]
        return [*[*rest] * 4, *([Host(FOREVER)] if rank == 2 else rest)]

    return all_of(Played(world(4), {rank: program(rank) for rank in range(4)}))


def sharded(rank: int, shards: int, count: int) -> list[Step]:
    """Hybrid sharding: parameters are gathered ahead, gradients scattered and then reduced between replicas."""
    shard, replica = f"shard{rank // shards}", f"replica{rank % shards}"
    steps: list[Step] = []
    for _ in range(count):
        steps += [Collective(shard, "all_gather", (512,), is_async=True) for _ in range(3)]
        steps += [Kernel(0.02), *[Collective(shard, "reduce_scatter", (2048,), is_async=True) for _ in range(3)]]
        steps += [Collective(replica, sizes=(512,)), Synchronize()]
    return steps


def hybrid() -> dict[str, list[int]]:
    groups = {f"shard{one}": list(range(4 * one, 4 * one + 4)) for one in range(2)}
    return {**groups, **{f"replica{one}": [one, one + 4] for one in range(4)}}


@incident(HOST, 6)
def hybrid_sharding_host_stuck() -> Dumps:
    """Rank 6 stops after its first gather of a step."""
    programs = {rank: sharded(rank, 4, 5) for rank in range(8)}
    programs[6] = [*sharded(6, 4, 4), Collective("shard1", "all_gather", (512,), is_async=True), Host(FOREVER)]
    return all_of(Played(hybrid(), programs))


@incident(DEVICE, 1)
def hybrid_sharding_device_freezes() -> Dumps:
    """Rank 1's."""
    programs = {rank: sharded(rank, 4, 5) for rank in range(8)}
    return all_of(freezing(hybrid(), programs, 1, 27), version="2.10")


@incident(DIFFERENT, 0, 1, 2, 3, among=(4, 5, 6, 7))
def one_shard_gathers_another_layer() -> Dumps:
    """Ranks 2 and 3 of a shard gather another layer than ranks 0 and 1."""
    programs = {rank: sharded(rank, 4, 5) for rank in range(8)}
    for rank in (2, 3):
        programs[rank] = [*sharded(rank, 4, 4), Collective("shard0", "all_gather", (768,)), *sharded(rank, 4, 1)]
    return all_of(Played(hybrid(), programs))


@incident(HOST, 5)
def a_watchdog_is_stuck_beside() -> Dumps:
    """Rank 1's watchdog has retired nothing for a while; it is rank 5 that all wait for."""
    dumps = all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)])))
    for entry in dumps[1]["entries"][-6:]:
        entry["retired"] = False
    return dumps


@incident(HOST, 5, 6)
def two_hosts_stuck_in_one_group() -> Dumps:
    """Both have stopped, at different places."""
    return all_of(Played(world(8), ddp(8, 4, r5=[Host(FOREVER)], r6=[*step_of_ddp()[:6], Host(FOREVER)])))


@incident(HOST, 3)
def one_dump_of_another_size() -> Dumps:
    """A dump of a run with four ranks lies beside those of eight."""
    dumps = all_of(Played(world(8), ddp(8, 4, r3=[Host(FOREVER)])))
    dumps[1] = Played(world(4), ddp(4, 2)).dump(1, clock_s=-90_000.0)
    return dumps


@incident(HOST, 2)
def timed_out_and_only_open() -> Dumps:
    """Only open entries were written, which the watchdogs have given up."""
    return all_of(Played(world(4), ddp(4, 4, r2=[Host(FOREVER)])), only_active=True, timed_out_after_s=600.0)


@incident(HOST, 2, as_json=True)
def timed_as_json() -> Dumps:
    """JSON with start events, a clock that is behind, and a short ring."""
    played = Played(world(4), ddp(4, 9, r2=[Host(FOREVER)]))
    return {rank: played.dump(rank, timing=True, ring=6, clock_s=-30.0 if rank else 0.0) for rank in range(4)}


@incident(NOBODY)
def a_pipeline_and_data_move() -> Dumps:
    """Healthy; each dump some 40 ms after the one before."""
    groups, programs = pipelines_and_data()
    played = Played(groups, flat(programs))
    return {rank: played.dump(rank, 0.3 + 0.04 * rank) for rank in range(8)}


@incident(NOBODY)
def training_begins() -> Dumps:
    """Healthy; some ranks have called nothing yet."""
    programs = {rank: [Host(0.2 * rank), *step_of_ddp()] for rank in range(4)}
    played = Played(world(4), programs)
    return {rank: played.dump(rank, 0.35) for rank in range(4)}


@incident(HOST, 0)
def the_first_rank_leaves_early() -> Dumps:
    """Rank 0 has ended its loop, and destroys its groups; the others make another step."""
    return all_of(Played(world(4), ddp(4, 6, r0=[])))


# What is said of them


def diagnosed(one: Incident) -> Diagnosis | None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), one.made(), as_json=one.as_json)
        evidence = Artifacts()
        evidence.read(folder)
        job = evidence.job()
    return judge(job, RECORDED_RULES) if job is not None else None


def wrong(one: Incident, diagnosis: Diagnosis | None) -> str:
    """What is wrong with an answer; empty where it is right."""
    findings = diagnosis.findings if diagnosis is not None else ()
    sure = [finding for finding in findings if finding.confidence is not Confidence.POSSIBLE]
    said = "; ".join(f"{finding.confidence.value} {finding.rule} {finding.ranks}" for finding in findings) or "nothing"
    may_be_named = {*one.ranks, *one.among}
    if not one.kinds:
        return f"FALSE {said}" if sure else ""
    if any(not set(finding.ranks) <= may_be_named or finding.rule not in one.kinds for finding in sure):
        return f"FALSE {said}"
    told = sure if one.is_sure else findings[:1]
    if not told or told[0].rule not in one.kinds:
        return f"missed {said}"
    named = {rank for finding in told for rank in finding.ranks}
    return "" if set(one.ranks) <= named <= may_be_named else f"ranks {said}"


def show(names: Iterable[str]) -> None:
    """Prints what is wrong with the answers, and how many are right."""
    answers = {name: wrong(INCIDENTS[name], diagnosed(INCIDENTS[name])) for name in names}
    for name, answer in answers.items():
        if answer:
            print(f"{name:42} {INCIDENTS[name].kinds[:1]} {INCIDENTS[name].ranks}: {answer}")
    print(f"{sum(not answer for answer in answers.values())} of {len(answers)}")


if __name__ == "__main__":
    show(sys.argv[1:] or INCIDENTS)
