"""Incidents of jobs of 8 to 64 ranks (``event_recorder``), written without sight of the rules, each truth first.

Sharded and tensor parallel on one mesh, ZeRO, experts, fill-and-drain pipelines, context parallel, and trainers beside
samplers. ``python late_incidents.py`` prints what is said now.
"""

import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from typing import Any

from event_recorder import Dumps, Fault, Group, Job, Kernel, Program, Rank, stuck
from running_incidents import Mesh, endless, everyone, interleaved, split, taken, taken_apart
from written_incidents import (
    ALL,
    CROSSED,
    DEVICE,
    DIFFERENT,
    GONE,
    HOST,
    INCIDENTS,
    NOBODY,
    PAIRS,
    incident,
    show,
)

BEFORE = set(INCIDENTS)
Faults = dict[tuple[int, str, Any], Fault]


class Cut(Job):
    """A job in which some calls end on nobody, although all members have come to them.

    Args:
        calls: Groups, and the how-many-eth of their calls.
        sends: Groups, and ends of which no send ends from some number on.
    """

    def __init__(self, *args: Any, calls: Iterable[tuple[str, int]] = (),
                 sends: dict[tuple[str, int, int], int] | None = None, **more: Any) -> None:  # fmt: skip
        self.cut_calls, self.cut_sends = set(calls), sends or {}
        self.sent: dict[Any, int] = defaultdict(int)
        super().__init__(*args, **more)

    def given(self, op: str, size: int, count: int) -> int:
        if op == "all_to_all" and size < 100:
            return size
        if op == "all_gather_into_tensor_coalesced":
            return size * count
        return super().given(op, size, count)

    def meet(self, group: Group, place: int, kernel: Kernel, told: tuple[Any, ...], root: int | None) -> None:
        if (group.name, place) not in self.cut_calls:
            super().meet(group, place, kernel, told, root)

    def exchange(self, group: Group, kernel: Kernel, parts: list[tuple[str, int, int]], comm: Any) -> None:
        kept = []
        for kind, peer, size in parts:
            ends = (kernel.rank, peer) if kind == "send" else (peer, kernel.rank)
            self.sent[group.name, ends, kind] += 1
            if self.sent[group.name, ends, kind] < self.cut_sends.get((group.name, *ends), 1 << 30):
                kept.append((kind, peer, size))
        super().exchange(group, kernel, kept, comm)


def instead(*calls: Any) -> Fault:
    """Calls, made by the rank, that take the place of what follows."""

    def made(rank: Rank) -> Generator[Any, Any, bool]:
        for call in calls:
            yield call(rank)
        return True

    return made


def nothing(rank: Rank) -> Generator[Any, Any, bool]:
    yield rank.compute(0.0005)
    return True


def ends(rank: Rank) -> Program:
    yield ("exit",)


# Replicated twice, sharded four ways, tensor parallel four ways; rank = 16 x replica + 4 x shard + tensor


def mesh32() -> list[Group]:
    tensor = [range(start, start + 4) for start in range(0, 32, 4)]
    shard = [range(16 * one + t, 16 * one + 16, 4) for one in range(2) for t in range(4)]
    replicas = [(place, place + 16) for place in range(16)]
    return [
        everyone(32),
        *split("mesh_tp", 1, tensor),
        *split("mesh_dp_shard", 9, shard),
        *split("mesh_dp_replicate", 17, replicas),
    ]


def names32(rank: int) -> tuple[str, str, str]:
    return str(1 + rank // 4), str(9 + 4 * (rank // 16) + rank % 4), str(17 + rank % 16)


def sharded_tensors(rank: Rank, layers: int = 4, steps: int = 5) -> Program:
    tensor, shard, replicas = names32(rank.number)
    for step in range(steps):
        yield from rank.fault("loader", step)
        yield rank.sleep(0.003)
        gathered = yield rank.call(shard, "all_gather", 30_000, lazy=True)
        for layer in range(layers):
            yield rank.wait(gathered)
            if layer + 1 < layers:
                gathered = yield rank.call(shard, "all_gather", 30_000 + 500 * (layer + 1), lazy=True)
            yield rank.call(tensor, "all_gather", 4096)
            yield from rank.fault(f"forward{layer}", step)
            yield rank.compute(0.003)
            yield rank.call(tensor, "reduce_scatter", 16_384)
        if not (yield from rank.fault("loss", step)):
            yield rank.call(tensor, "all_reduce", 2, dtype="Float")
        reduced = []
        for layer in reversed(range(layers)):
            again = yield rank.call(shard, "all_gather", 30_000 + 500 * layer, lazy=True)
            yield rank.wait(again)
            yield from rank.fault(f"backward{layer}", step)
            yield rank.call(tensor, "all_gather", 4096)
            yield rank.compute(0.006)
            yield rank.call(tensor, "reduce_scatter", 16_384)
            work = yield rank.call(shard, "reduce_scatter", 120_000 + 2000 * layer, dtype="Float", lazy=True)
            yield rank.wait(work)
            reduced.append((yield rank.call(replicas, "all_reduce", 30_000 + 500 * layer, dtype="Float", lazy=True)))
        for work in reduced:
            yield rank.wait(work)
        yield from rank.fault("norm", step)
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()
        if step % 2:
            yield from sharded_state(rank, shard, layers, step)
        yield from rank.fault("end", step)


def sharded_state(rank: Rank, shard: str, layers: int, step: int) -> Program:
    """A checkpoint whose tensors are gathered one by one."""
    yield from rank.fault("save", step)
    for layer in range(layers):
        if not (yield from rank.fault(f"state{layer}", step)):
            yield rank.call(shard, "all_gather", 30_000 + 500 * layer, dtype="Float")
            yield rank.sync()
    yield from rank.fault("write", step)
    yield rank.call("0", "all_reduce_barrier", 1, dtype="Byte")
    yield rank.sync()


def mesh_job(faults: Faults | None = None, **more: Any) -> Job:
    return Cut(mesh32(), sharded_tensors, faults=faults or {}, **more)


@incident(HOST, 16)
def mesh32_a_writer_is_stuck() -> Dumps:
    """Rank 16 writes its part of a checkpoint and does not come back; all others are at the barrier behind it."""
    return taken(mesh_job({(16, "write", 3): stuck}))


@incident(HOST, 8, 10)
def mesh32_two_of_one_tensor_group_stuck() -> Dumps:
    """Ranks 8 and 10 both wait for a batch; ranks 9 and 11, of their tensor group, wait for them in it."""
    return taken(mesh_job({(8, "loader", 3): stuck, (10, "loader", 3): stuck}), version="2.9", without=(1, 30))


@incident(ALL, 5, 21)
def mesh32_a_rail_is_dead() -> Dumps:
    """Ranks 5 and 21 have both started a reduction between replicas, which ends on neither; nothing else is wrong."""
    return taken(Cut(mesh32(), sharded_tensors, calls=[("22", 11)], timing=True))


@incident(DEVICE, 26)
def mesh32_endless_kernel_timed() -> Dumps:
    """Rank 26's device runs a kernel without end; ranks 24, 25 and 27 have started what it has only queued."""
    return taken(mesh_job({(26, "backward2", 2): endless}, timing=True), version="2.9")


@incident(DIFFERENT, 13)
def mesh32_another_key_in_its_state() -> Dumps:
    """Rank 13 gathers a tensor of another size for its checkpoint than ranks 1, 5 and 9."""
    other = instead(lambda r: r.call(names32(13)[1], "all_gather", 30_064, dtype="Float"), lambda r: r.sync())
    return taken(mesh_job({(13, "state2", 1): other}))


@incident(NOBODY)
def mesh32_moves() -> Dumps:
    """Healthy; only what is open, the second host's 0.11 s and each rank's 1 ms later."""
    moments = {rank: 0.32 + 0.11 * (rank > 15) + 0.001 * rank for rank in range(32)}
    return taken_apart(mesh_job(), moments, only_active=True, version="2.9")


@incident(CROSSED, 4, 5, among=(6, 7))
def mesh32_two_groups_in_the_other_order() -> Dumps:
    """Ranks 4 and 5 reduce the loss of all ranks before that of their tensor group, in which 6 and 7 wait.

    All others wait in that of all ranks, having done with their tensor groups.
    """

    def program(rank: Rank) -> Program:
        tensor = names32(rank.number)[0]
        for step in range(6):
            yield rank.call(tensor, "all_gather", 4096)
            yield rank.compute(0.004)
            yield rank.call(tensor, "reduce_scatter", 16_384)
            order = (tensor, "0")
            if step == 4 and rank.number in (4, 5):
                order = ("0", tensor)
            for group in order:
                yield rank.call(group, "all_reduce", 2, dtype="Float")
                yield rank.sync()

    return taken(Cut(mesh32(), program))


@incident(HOST, 20)
def mesh32_a_group_is_used_for_the_first_time() -> Dumps:
    """Evaluation has a group of its own; its first call blocks hosts until all have come, and rank 20 does not."""

    def program(rank: Rank) -> Program:
        yield from sharded_tensors(rank, steps=2)
        yield from rank.fault("evaluate")
        yield rank.call("40", "all_reduce", 3, dtype="Float")
        yield rank.sync()

    groups = [*mesh32(), Group("40", "evaluation", tuple(range(32)))]
    return taken(Cut(groups, program, faults={(20, "evaluate", None): stuck}, connects=True))


# ZeRO: parameters are partitioned among all, gradients reduced to whoever holds their part


def zero(rank: Rank, steps: int = 6, layers: int = 5) -> Program:
    yield rank.call("0", "broadcast", 70_000, root=0)
    yield rank.sync()
    for step in range(steps):
        if not (yield from rank.fault("loader", step)):
            yield rank.sleep(0.005)
            for layer in range(layers):
                yield rank.call("0", "all_gather_into_tensor_coalesced", 900 + layer, 64, dtype="Half")
                yield rank.compute(0.002)
            for layer in reversed(range(layers)):
                yield rank.call("0", "all_gather_into_tensor_coalesced", 900 + layer, 64, dtype="Half")
                yield rank.compute(0.004)
                yield from rank.fault(f"backward{layer}", step)
                yield rank.call("0", "reduce", 21_600 + 24 * layer, dtype="Half", lazy=True)
            if not (yield from rank.fault("overflow", step)):
                yield rank.call("0", "all_reduce", 1, dtype="Byte")
                yield rank.sync()
        yield from rank.fault("end", step)
    yield rank.call("0", "all_reduce_barrier", 1, dtype="Byte")
    yield rank.sync()


def zero_job(count: int = 24, faults: Faults | None = None, **more: Any) -> Job:
    return Cut([everyone(count)], zero, faults=faults or {}, **more)


@incident(DIFFERENT, 19)
def zero24_overflow_is_not_checked() -> Dumps:
    """Rank 19 leaves the check for overflow out and gathers for its next step."""
    return taken(zero_job(faults={(19, "overflow", 3): nothing}))


@incident(ALL, *range(24), is_sure=False)
def zero24_another_owner() -> Dumps:
    """Rank 7 reduces a gradient to another root, which the recorder does not keep: all have called the same."""
    return taken(zero_job(calls=[("0", 40)]))


@incident(HOST, 22, as_json=True)
def zero24_five_entries_as_json() -> Dumps:
    """JSON, and room for five entries; rank 22 has no next batch."""
    return taken(zero_job(faults={(22, "loader", 4): stuck}, ring=5))


@incident(NOBODY)
def zero24_a_straggler() -> Dumps:
    """Rank 3 is three seconds late in each step, for which the others wait; dumps are of 14 seconds, and it moves."""

    def late(rank: Rank) -> Generator[Any, Any, None]:
        yield rank.sleep(3.0)

    faults: Faults = {(3, "loader", step): late for step in range(6)}
    return taken_apart(zero_job(faults=faults), {rank: 2.0 + 0.6 * rank for rank in range(24)})


@incident(HOST, 5)
def zero12_after_a_smaller_restart() -> Dumps:
    """Twelve ranks go on where sixteen were an hour ago, of which 12 to 15 have left dumps; rank 5 is stuck."""
    dumps = taken(zero_job(12, faults={(5, "backward3", 4): stuck}))
    old = taken(zero_job(16, faults={(2, "loader", 3): stuck}, seed=9), without=range(12), clock_s=-3600.0)
    return {**dumps, **old}


@incident(DIFFERENT, 10)
def zero24_out_of_data() -> Dumps:
    """Rank 10 has no batch left and validates: its gathers are those of the others' forward pass, its loss is not."""
    validate = [lambda r, n=n: r.call("0", "all_gather_into_tensor_coalesced", 900 + n, 64, dtype="Half")
                for n in range(5)]  # fmt: skip
    loss = [lambda r: r.call("0", "all_reduce", 2, dtype="Float"), lambda r: r.sync()]
    return taken(zero_job(faults={(10, "loader", 4): instead(*validate, *loss)}), version="2.8")


@incident(NOBODY)
def zero24_all_read_from_a_dead_disk() -> Dumps:
    """No host comes back from its loader; all have ended the same, and nobody waits in anything that was called."""
    return taken(zero_job(faults={(rank, "loader", 4): stuck for rank in range(24)}))


@incident(NOBODY)
def zero24_three_dumps_of_a_dead_network() -> Dumps:
    """All have come to a reduction that never ends, but 21 dumps are missing: that another is late is as likely."""
    return taken(zero_job(calls=[("0", 49)]), without=[rank for rank in range(24) if rank not in (2, 9, 16)])


# Experts, eight ways, each held by four; rank = 8 x copy + way


def experts32() -> list[Group]:
    ways = [range(start, start + 8) for start in range(0, 32, 8)]
    copies = [range(place, 32, 8) for place in range(8)]
    return [everyone(32), *split("ep", 1, ways), *split("edp", 5, copies)]


def tokens(rank: Rank, steps: int = 4, layers: int = 3) -> Program:
    ways, copies = str(1 + rank.number // 8), str(5 + rank.number % 8)
    for step in range(steps):
        yield from rank.fault("loader", step)
        yield rank.sleep(0.002)
        for layer in range(layers):
            yield rank.compute(0.001)
            if not (yield from rank.fault(f"counts{layer}", step)):
                yield rank.call(ways, "all_to_all", 8, dtype="Long")
                yield rank.sync()
            yield rank.call(ways, "all_to_all", 12_000)
            yield rank.compute(0.004)
            yield from rank.fault(f"experts{layer}", step)
            yield rank.call(ways, "all_to_all", 12_000)
        for _ in range(layers):
            yield rank.compute(0.004)
            yield rank.call(copies, "all_reduce", 40_000, lazy=True)
        yield rank.call("0", "all_reduce", 8000)
        yield rank.sync()
        yield from rank.fault("end", step)


def experts_job(faults: Faults | None = None, **more: Any) -> Job:
    return Cut(experts32(), tokens, faults=faults or {}, **more)


@incident(DIFFERENT, 21)
def experts32_counts_of_another_type() -> Dumps:
    """Rank 21 exchanges its counts as 32-bit numbers."""
    other = instead(lambda r: r.call("3", "all_to_all", 8, dtype="Int"), lambda r: r.sync())
    return taken(experts_job({(21, "counts1", 2): other}), version="2.9")


@incident(DEVICE, 14)
def experts32_a_device_dies() -> Dumps:
    """Rank 14's device dies in an exchange that has ended on its peers; seven dumps of other groups are missing."""
    return taken(experts_job(frozen={14: 33}), without=(0, 2, 3, 17, 19, 25, 31))


@incident(GONE, 27, among=(4, 10), is_sure=False)
def experts32_a_process_was_killed() -> Dumps:
    """Rank 27's process was killed between two steps; dumps of ranks 4 and 10 were not copied."""
    return taken(experts_job({(27, "end", 2): ends}), without=(4, 10))


@incident(ALL, *range(8, 16))
def experts32_an_exchange_never_ends() -> Dumps:
    """Ranks 8 to 15 have all started the second exchange of a layer; the switch between them drops what it is sent."""
    return taken(experts_job(calls=[("2", 24)], timing=True), version="2.9", only_active=True)


@incident(HOST, 30)
def experts32_an_early_format() -> Dumps:
    """Neither stacks nor counters nor groups; rank 30 stops between an exchange and the way back."""
    job = experts_job({(30, "experts1", 2): stuck})
    return taken(job, version="2.4", status=False, config=False, frames=False)


# Fill and drain: eight stages, two pipelines; rank = 2 x stage + pipeline


def stages16() -> list[Group]:
    pipes = [range(one, 16, 2) for one in range(2)]
    pairs = [(2 * stage, 2 * stage + 1) for stage in range(8)]
    return [everyone(16), *split("pp", 1, pipes), *split("dp", 3, pairs)]


def drained(rank: Rank, batches: int = 4, steps: int = 4) -> Program:
    own = rank.number
    pair, stage = str(3 + own // 2), own // 2
    before = own - 2 if stage else None
    after = own + 2 if stage < 7 else None
    for step in range(steps):
        if (yield from rank.fault("loader", step)):
            return
        for batch in range(batches):
            took_s = 0.002 + 0.001 * (stage == 7)
            yield from passed_on(rank, f"forward{batch}", step, before, after, took_s=took_s)
        yield from rank.fault("turn", step)
        for batch in range(batches):
            yield from passed_on(rank, f"backward{batch}", step, after, before, took_s=0.004)
        yield rank.call(pair, "all_reduce", 50_000, dtype="Float")
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()
        yield from rank.fault("end", step)


def passed_on(rank: Rank, name: str, step: int, source: int | None, to: int | None, *, took_s: float) -> Program:
    """One micro batch, received, computed, and sent on."""
    pipe = str(1 + rank.number % 2)
    if source is not None:
        yield rank.recv(pipe, source, 6000)
    yield rank.compute(took_s)
    yield from rank.fault(name, step)
    if to is not None:
        yield rank.send(pipe, to, 6000)


def drained_job(faults: Faults | None = None, **more: Any) -> Job:
    return Cut(stages16(), drained, faults=faults or {}, **more)


@incident(PAIRS, 7, among=(1, 3, 5, 9))
def drained16_one_micro_batch_more() -> Dumps:
    """Rank 7 receives a fifth micro-batch of rank 5, which has sent four and waits for what comes back."""

    def more(rank: Rank) -> Program:
        yield rank.recv("2", 5, 6000)

    return taken(drained_job({(7, "turn", 2): more}))


@incident(HOST, 14)
def drained16_the_last_stage_evaluates() -> Dumps:
    """Rank 14 evaluates after a step by itself."""
    return taken(drained_job({(14, "end", 2): stuck}), version="2.5")


@incident((*DIFFERENT, *CROSSED, *PAIRS), 0, among=(2,))
def drained16_the_first_stage_is_out_of_data() -> Dumps:
    """Rank 0 has no batch and is at the barrier of its epoch's end, while its pipeline waits for its activations.

    All ranks of the other pipeline reduce under the number under which rank 0 has its barrier.
    """
    last = instead(lambda r: r.call("0", "all_reduce_barrier", 1, dtype="Byte"), lambda r: r.sync())
    return taken(drained_job({(0, "loader", 3): last}), version="2.9")


@incident(ALL, 6, 8)
def drained16_a_link_between_stages() -> Dumps:
    """Rank 6's send and rank 8's receive have both started, and neither ends."""
    return taken(Cut(stages16(), drained, sends={("1", 6, 8): 7}, timing=True), version="2.9")


@incident(NOBODY)
def drained16_moves() -> Dumps:
    """Healthy; short sends do not wait, and each dump is 7 ms after the one before."""
    return taken_apart(drained_job(eager=10_000), {rank: 0.1 + 0.007 * rank for rank in range(16)})


@incident(HOST, 17)
def interleaved24_stuck_in_the_last_of_three_stages() -> Dumps:
    """Rank 17, in its second chunk; only what is open, without the dumps of three that wait."""
    mesh = Mesh(24, stages=3)
    faults: Faults = {(17, "backward1.1", 1): stuck}
    job = Job(mesh.groups, lambda rank: interleaved(rank, mesh), faults=faults, eager=10_000)
    return taken(job, version="2.9", only_active=True, without=(2, 9, 20))


# Tensor parallel two ways, context four, data eight; rank = 8 x data + 2 x context + tensor


def contexts64() -> list[Group]:
    tensor = [(one, one + 1) for one in range(0, 64, 2)]
    context = [range(8 * data + t, 8 * data + 8, 2) for data in range(8) for t in range(2)]
    sharded = [range(t, 64, 2) for t in range(2)]
    return [everyone(64), *split("tp", 1, tensor), *split("cp", 33, context), *split("dp_cp", 49, sharded)]


def contexts(rank: Rank, steps: int = 3, layers: int = 3) -> Program:
    own = rank.number
    tensor, context, sharded = str(1 + own // 2), str(33 + 2 * (own // 8) + own % 2), str(49 + own % 2)
    for step in range(steps):
        yield from rank.fault("loader", step)
        yield rank.sleep(0.002)
        for layer in range(layers):
            weights = yield rank.call(sharded, "all_gather", 9000 + layer, lazy=True)
            yield rank.wait(weights)
            yield rank.call(tensor, "all_gather", 2048)
            if not (yield from rank.fault(f"keys{layer}", step)):
                yield rank.call(context, "all_gather", 5120)
            yield rank.compute(0.003)
            yield rank.call(tensor, "reduce_scatter", 4096)
        for layer in reversed(range(layers)):
            yield rank.call(context, "reduce_scatter", 20_480)
            yield rank.compute(0.005)
            yield from rank.fault(f"backward{layer}", step)
            yield rank.call(tensor, "all_reduce", 4096)
            yield rank.call(sharded, "reduce_scatter", 32 * (9000 + layer), lazy=True)
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()


def contexts_job(faults: Faults | None = None, **more: Any) -> Job:
    return Cut(contexts64(), contexts, faults=faults or {}, **more)


@incident(HOST, 37)
def contexts64_given_up() -> Dumps:
    """Rank 37 has no batch; tensor and context groups have given up after two minutes, the others not yet."""
    timeouts_s = {"tp": 120.0, "cp": 120.0}
    job = contexts_job({(37, "loader", 2): stuck}, timeouts_s=timeouts_s)
    return taken(job, gives_up=True, waited_s=150.0, version="2.8")


@incident(NOBODY)
def contexts64_hosts_apart() -> Dumps:
    """Healthy; dumps of eight hosts, 9 ms after one another."""
    return taken_apart(contexts_job(), {rank: 0.05 + 0.009 * (rank // 8) + 0.0003 * (rank % 8) for rank in range(64)})


@incident(DIFFERENT, 50)
def contexts64_a_shorter_sequence() -> Dumps:
    """Rank 50 has not padded its part of a sequence, and gathers fewer keys than ranks 48, 52 and 54."""
    short = instead(lambda r: r.call("45", "all_gather", 4864))
    return taken(contexts_job({(50, "keys1", 1): short}), without=(3, 63))


# Eight ranks train, eight sample in pairs; weights are broadcast from rank 0, and what was sampled is gathered


def samplers16() -> list[Group]:
    pairs = [(one, one + 1) for one in range(8, 16, 2)]
    return [everyone(16), Group("1", "trainer", tuple(range(8))), *split("sampler_tp", 2, pairs)]


def samples(rank: Rank, rounds: int = 4) -> Program:
    own = rank.number
    for number in range(rounds):
        if own < 8:
            yield from rank.fault("train", number)
            for size in (7000, 8000, 9000):
                yield rank.compute(0.01)
                yield rank.call("1", "all_reduce", size)
        else:
            for token in range(12):
                yield rank.compute(0.002)
                yield from rank.fault(f"token{token}", number)
                yield rank.call(str(2 + (own - 8) // 2), "all_reduce", 512, dtype="Half")
        yield rank.sync()
        yield from rank.fault("gather", number)
        yield rank.call("0", "all_gather", 300, dtype="Long")
        yield rank.sync()
        for size in (7000, 8000, 9000):
            yield rank.call("0", "broadcast", size, root=0)
        yield rank.sync()
        yield from rank.fault("end", number)


def samplers_job(faults: Faults | None = None, **more: Any) -> Job:
    return Cut(samplers16(), samples, faults=faults or {}, **more)


@incident(HOST, 12)
def samplers16_one_samples_for_ever() -> Dumps:
    """Rank 12 is stuck between two tokens; rank 13 waits in their pair, and all others in the gather."""
    return taken(samplers_job({(12, "token7", 2): stuck}), version="2.10")


@incident(HOST, 0, 1, 2, 3)
def samplers16_a_group_that_only_some_make() -> Dumps:
    """Ranks 0 to 3 make a new group, which waits for all outside NCCL; nobody else does, and they wait in a gather."""
    return taken(samplers_job({(rank, "gather", 2): stuck for rank in range(4)}), version="2.9")


@incident(CROSSED, 2, among=(0, 1, 3, 4, 5, 6, 7))
def samplers16_a_barrier_of_the_wrong_group() -> Dumps:
    """Rank 2 calls a barrier of the trainers, who with the samplers are in the gather of all."""
    wrong = instead(lambda r: r.call("1", "all_reduce_barrier", 1, dtype="Byte"), lambda r: r.sync())
    return taken(samplers_job({(2, "gather", 2): wrong}))


# Eight ranks that reduce several tensors in one call


def coalesced(rank: Rank, steps: int = 8) -> Program:
    for step in range(steps):
        yield rank.compute(0.005)
        if not (yield from rank.fault("reduce", step)):
            yield rank.call("0", "allreduce_coalesced", 512, 1024, 2048, dtype="Float")
        yield rank.sync()


@incident(DIFFERENT, 5, as_json=True)
def coalesced8_in_another_order() -> Dumps:
    """Rank 5 reduces the same three tensors in another order; JSON."""
    other = instead(lambda r: r.call("0", "allreduce_coalesced", 1024, 512, 2048, dtype="Float"))
    return taken(Cut([everyone(8)], coalesced, faults={(5, "reduce", 6): other}), version="2.7")


LATE = tuple(name for name in INCIDENTS if name not in BEFORE)

if __name__ == "__main__":
    show(sys.argv[1:] or LATE)
