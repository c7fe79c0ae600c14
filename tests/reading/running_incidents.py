"""Incidents of jobs that run (``event_recorder``): 16 and 32 ranks, each with its truth, which was written first.

Data parallel, sharded, and Megatron-like jobs with tensor, pipeline, expert and context parallel groups; the fault
takes the place of a call of the training program. ``python tests/reading/running_incidents.py`` prints what is said
now.
"""

import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

from event_recorder import Dumps, Fault, Group, Job, Program, Rank, stuck
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
    START,
    incident,
    show,
)

BEFORE = set(INCIDENTS)
BEHIND = ("rank-behind", "out-of-step", "host-stuck")
Faults = dict[tuple[int, str, Any], Fault]


def everyone(count: int) -> Group:
    return Group("0", "default_pg", tuple(range(count)))


def split(about: str, first: int, parts: Iterable[Iterable[int]]) -> list[Group]:
    return [Group(str(first + place), about, tuple(part)) for place, part in enumerate(parts)]


def taken(job: Job, *, without: Iterable[int] = (), waited_s: float = 300.0, **how: Any) -> Dumps:
    """Dumps of all ranks, when nothing has moved for some time."""
    job.run().now_s += waited_s
    for rank in job.ranks:
        if rank not in without:
            job.take(rank, **how)
    return job.taken


def taken_apart(job: Job, moments: dict[int, float], **how: Any) -> Dumps:
    for rank, at_s in sorted(moments.items(), key=lambda one: one[1]):
        job.run(at_s)
        job.take(rank, **how)
    return job.taken


# Data parallel


def ddp(rank: Rank, steps: int = 12, dtype: str = "Float") -> Program:
    yield rank.call("0", "broadcast", 5000, root=0)
    for step in range(steps):
        yield from rank.fault("loader", step)
        yield rank.sleep(0.004)
        yield rank.compute(0.01)
        works = []
        for size in (25_000, 50_000, 12_000):
            yield rank.compute(0.006)
            replaced = yield from rank.fault(f"bucket{size}", step)
            if not replaced:
                works.append((yield rank.call("0", "all_reduce", size, dtype=dtype, lazy=True)))
        for work in works:
            yield rank.wait(work)
        yield rank.compute(0.002)
        if step % 4 == 3:
            replaced = yield from rank.fault("metric", step)
            if not replaced:
                yield rank.call("0", "all_reduce", 1, dtype="Float")
                yield rank.sync()
        yield from rank.fault("end", step)
    yield rank.call("0", "all_reduce_barrier", 1, dtype="Byte")
    yield rank.sync()


def ddp_job(count: int = 16, faults: Faults | None = None, **more: Any) -> Job:
    return Job([everyone(count)], ddp, faults=faults or {}, **more)


def exits(rank: Rank) -> Program:
    yield ("exit",)


@incident(HOST, 11)
def ddp16_loader_stuck() -> Dumps:
    """Rank 11's loader gives no sixth batch."""
    return taken(ddp_job(faults={(11, "loader", 6): stuck}))


@incident(HOST, 3, 9)
def ddp16_two_loaders_stuck() -> Dumps:
    """Ranks 3 and 9 read the same broken file at once."""
    return taken(ddp_job(faults={(3, "loader", 6): stuck, (9, "loader", 6): stuck}), version="2.9")


@incident(HOST, 0)
def ddp16_rank_0_evaluates() -> Dumps:
    """Rank 0 is busy after a step."""
    return taken(ddp_job(faults={(0, "end", 7): stuck}), only_active=True, version="2.9")


@incident(GONE, 13, is_sure=False)
def ddp16_a_rank_has_exited() -> Dumps:
    """Rank 13's process ended after its eighth step, without a dump."""
    return taken(ddp_job(faults={(13, "end", 8): exits}))


@incident(HOST, 13)
def ddp16_a_rank_waits_at_its_end() -> Dumps:
    """Rank 13 is done with its data and sits in something that is no collective."""
    return taken(ddp_job(faults={(13, "end", 8): stuck}))


@incident(DIFFERENT, 6, 7)
def ddp16_two_ranks_have_another_bucket() -> Dumps:
    """Ranks 6 and 7 froze a layer."""
    odd = lambda rank: _changed(rank, rank.call("0", "all_reduce", 9000, dtype="Float"))  # noqa: E731
    return taken(ddp_job(faults={(6, "bucket12000", 5): odd, (7, "bucket12000", 5): odd}))


def _changed(rank: Rank, *calls: tuple[Any, ...]) -> Generator[Any, Any, bool]:
    yield from (call for call in calls)
    return True


@incident(DIFFERENT, 8)
def ddp16_another_dtype() -> Dumps:
    """Rank 8's autocast is off."""
    return taken(
        ddp_job(faults={(8, "metric", 7): lambda r: _changed(r, r.call("0", "all_reduce", 1, dtype="Double"))})
    )


@incident(DIFFERENT, 2)
def ddp16_another_operation() -> Dumps:
    """Rank 2 broadcasts its metric where the others reduce it."""
    return taken(ddp_job(faults={(2, "metric", 7): lambda r: _changed(r, r.call("0", "broadcast", 1, dtype="Float"))}))


@incident(NOBODY)
def ddp16_moves() -> Dumps:
    """Healthy; dumps within 45 ms."""
    return taken_apart(ddp_job(), {rank: 0.21 + 0.003 * rank for rank in range(16)})


@incident(NOBODY)
def ddp16_moves_hosts_apart() -> Dumps:
    """Healthy; the second host's dumps are 0.2 s later."""
    return taken_apart(ddp_job(), {rank: 0.12 + 0.2 * (rank > 7) + 0.001 * rank for rank in range(16)}, version="2.9")


@incident(NOBODY)
def ddp16_has_finished() -> Dumps:
    """All is done."""
    return taken(ddp_job(timing=True))


@incident(START, 6, is_sure=False)
def ddp16_never_makes_the_first_call() -> Dumps:
    """Rank 6 is stuck before its first collective; the others' hosts block inside theirs."""

    def main(rank: Rank) -> Program:
        yield from rank.fault("start")
        yield from ddp(rank)

    return taken(Job([everyone(16)], main, faults={(6, "start", None): stuck}, connects=True))


@incident(HOST, 15)
def ddp16_timed_out() -> Dumps:
    """Watchdogs have given the first late work up."""
    return taken(ddp_job(faults={(15, "loader", 9): stuck}), gives_up=True, waited_s=660.0, version="2.8")


@incident(HOST, 1, as_json=True)
def ddp16_json_of_open_ones() -> Dumps:
    """JSON; rank 1's has no entries."""
    return taken(ddp_job(faults={(1, "loader", 6): stuck}), only_active=True)


@incident(HOST, 11)
def ddp16_five_dumps_are_missing() -> Dumps:
    """Of ranks that merely wait."""
    return taken(ddp_job(faults={(11, "loader", 6): stuck}), without=(0, 2, 5, 9, 15))


@incident(GONE, 11, among=(4,), is_sure=False)
def ddp16_the_culprits_dump_is_missing() -> Dumps:
    """And that of rank 4, which waits."""
    return taken(ddp_job(faults={(11, "loader", 6): stuck}), without=(4, 11))


@incident(HOST, 10)
def ddp16_short_ring() -> Dumps:
    """The buffer has room for six entries."""
    return taken(ddp_job(faults={(10, "loader", 10): stuck}, ring=6))


def endless(rank: Rank) -> Program:
    yield rank.compute(float("inf"))


@incident(DEVICE, 7)
def ddp16_endless_kernel_timed() -> Dumps:
    """Rank 7's device runs a kernel that does not end; start events show it."""
    return taken(ddp_job(faults={(7, "loader", 6): endless}, timing=True))


@incident(ALL, *range(16), is_sure=False)
def ddp16_endless_kernel() -> Dumps:
    """The same without start events: nothing tells the ranks apart."""
    return taken(ddp_job(faults={(7, "loader", 6): endless}))


@incident(DEVICE, 10)
def ddp16_device_dies() -> Dumps:
    """Rank 10's device dies at its twentieth kernel, which has ended on all others."""
    return taken(ddp_job(frozen={10: 20}))


@incident(DIFFERENT, 3)
def ddp16_accumulates_once_more() -> Dumps:
    """Rank 3 leaves a step's reductions out, and comes to the next ones."""

    def no_sync(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.compute(0.001)
        return True

    faults = {(3, f"bucket{size}", 7): no_sync for size in (25_000, 50_000, 12_000)}
    return taken(ddp_job(faults=faults))


@incident(DIFFERENT, among=tuple(range(16)))
def ddp16_halves_disagree() -> Dumps:
    """Ranks 0 to 7 validate, which reduces one number, and 8 to 15 train."""
    faults: Faults = {
        (rank, "loader", 6): lambda r: _changed(r, r.call("0", "all_reduce", 1, dtype="Float"), r.sync())
        for rank in range(8)
    }
    return taken(ddp_job(faults=faults))


@incident(HOST, 5)
def ddp16_an_old_dump() -> Dumps:
    """Rank 2's dump is from an hour ago, of another start."""
    dumps = taken(ddp_job(faults={(5, "loader", 9): stuck}))
    dumps[2] = taken_apart(ddp_job(seed=7), {2: 0.1}, clock_s=-3600.0)[2]
    return dumps


@incident(HOST, 12)
def ddp16_clocks_differ() -> Dumps:
    """Hosts' clocks are seconds apart."""
    job = ddp_job(faults={(12, "loader", 9): stuck}).run()
    job.now_s += 300.0
    for rank in job.ranks:
        job.take(rank, clock_s=-40.0 if rank > 7 else 7.0)
    return job.taken


@incident(HOST, 14)
def ddp16_no_status() -> Dumps:
    """An early format, without counters and groups."""
    return taken(ddp_job(faults={(14, "metric", 7): stuck}), status=False, config=False, version="2.3")


# Fully sharded


def fsdp(rank: Rank, shard: str, replicas: str = "", layers: int = 6, steps: int = 4) -> Program:
    """Gathers are one layer ahead; reductions are waited for at the end."""
    for step in range(steps):
        yield from rank.fault("loader", step)
        yield from _forward(rank, shard, layers, step)
        reductions = []
        for layer in reversed(range(layers)):
            yield from rank.fault(f"backward{layer}", step)
            again = yield rank.call(shard, "all_gather", 8000 + 64 * layer, lazy=True)
            yield rank.wait(again)
            yield rank.compute(0.006)
            reductions.append((yield rank.call(shard, "reduce_scatter", 128_000 + 1024 * layer, lazy=True)))
            if replicas:
                yield rank.wait(reductions[-1])
                reductions.append((yield rank.call(replicas, "all_reduce", 8000 + 64 * layer, lazy=True)))
        for one in reductions:
            yield rank.wait(one)
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()
        yield from rank.fault("end", step)


def _forward(rank: Rank, shard: str, layers: int, step: int) -> Program:
    gathered = yield rank.call(shard, "all_gather", 8000, lazy=True)
    for layer in range(layers):
        following = None
        replaced = layer + 1 < layers and (yield from rank.fault(f"gather{layer + 1}", step))
        if layer + 1 < layers and not replaced:
            following = yield rank.call(shard, "all_gather", 8000 + 64 * (layer + 1), lazy=True)
        if gathered is not None:
            yield rank.wait(gathered)
        yield rank.compute(0.003)
        gathered = following


def fsdp_job(faults: Faults | None = None, count: int = 16, **more: Any) -> Job:
    groups = [everyone(count), Group("1", "fsdp", tuple(range(count)))]
    return Job(groups, lambda rank: fsdp(rank, "1"), faults=faults or {}, **more)


def hsdp_job(faults: Faults | None = None, count: int = 32, **more: Any) -> Job:
    shards = [range(start, start + 8) for start in range(0, count, 8)]
    replicas = [range(place, count, 8) for place in range(8)]
    groups = [everyone(count), *split("shard", 1, shards), *split("replicate", 1 + len(shards), replicas)]

    def main(rank: Rank) -> Program:
        yield from fsdp(rank, str(1 + rank.number // 8), str(1 + len(shards) + rank.number % 8))

    return Job(groups, main, faults=faults or {}, **more)


@incident(HOST, 6)
def fsdp16_stuck_in_backward() -> Dumps:
    """Rank 6's host stops in the middle of a backward pass."""
    return taken(fsdp_job({(6, "backward3", 2): stuck}))


@incident(DIFFERENT, 9)
def fsdp16_a_layer_is_skipped() -> Dumps:
    """Rank 9 does not gather layer 3."""

    def skipped(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.compute(0.001)
        return True

    return taken(fsdp_job({(9, "gather3", 2): skipped}), version="2.9")


@incident(DIFFERENT, 0)
def fsdp16_rank_0_alone_gathers_its_state() -> Dumps:
    """Rank 0 gathers the whole state, and nobody else does."""

    def saves(rank: Rank) -> Program:
        for layer in reversed(range(6)):
            yield rank.call("1", "all_gather", 8000 + 64 * layer, dtype="Float")
            yield rank.sync()

    return taken(fsdp_job({(0, "end", 1): saves}))


@incident(HOST, 21)
def hsdp32_loader_stuck() -> Dumps:
    """Rank 21, of the third shard group."""
    return taken(hsdp_job({(21, "loader", 2): stuck}))


@incident(HOST, 30)
def hsdp32_stuck_in_backward() -> Dumps:
    """Rank 30; its shard group waits for it, and the replicas for that."""
    return taken(hsdp_job({(30, "backward2", 2): stuck}), version="2.9", only_active=True)


@incident(DEVICE, 12)
def hsdp32_device_dies() -> Dumps:
    """Rank 12's device dies at its 60th kernel."""
    return taken(hsdp_job(frozen={12: 60}))


@incident(HOST, 3, 27)
def hsdp32_two_hosts() -> Dumps:
    """Ranks 3 and 27, of two shard groups."""
    return taken(hsdp_job({(3, "loader", 2): stuck, (27, "loader", 2): stuck}))


@incident(GONE, 21, among=tuple(range(16, 32)), is_sure=False)
def hsdp32_a_node_is_gone() -> Dumps:
    """All dumps of the culprit's half are missing."""
    return taken(hsdp_job({(21, "loader", 2): stuck}), without=range(16, 32))


@incident(NOBODY)
def hsdp32_moves_timed() -> Dumps:
    """Healthy; dumps within 60 ms, with start events."""
    return taken_apart(hsdp_job(timing=True), {rank: 0.15 + 0.002 * rank for rank in range(32)})


# Tensor, data, pipeline, expert and context parallel; rank = tensor + 2 x data + 2 x ways x stage


class Mesh:
    def __init__(self, count: int, stages: int = 4, tensor: int = 2) -> None:
        self.count, self.stages, self.tensor = count, stages, tensor
        self.ways = count // stages // tensor
        per = self.ways * tensor
        ranks = range(count)
        self.tp = [[r for r in ranks if r // tensor == n] for n in range(count // tensor)]
        self.dp = [
            [r for r in ranks if r // per == stage and r % tensor == t]
            for stage in range(stages)
            for t in range(tensor)
        ]
        self.pp = [[place + per * stage for stage in range(stages)] for place in range(per)]
        self.ends = [[one[0], one[-1]] for one in self.pp]
        self.groups = [everyone(count)]
        self.named: dict[tuple[str, int], str] = {}
        for about, short, parts in (
            ("TENSOR_MODEL_PARALLEL_GROUP", "tp", self.tp),
            ("DATA_PARALLEL_GROUP", "dp", self.dp),
            ("PIPELINE_MODEL_PARALLEL_GROUP", "pp", self.pp),
            ("EMBEDDING_GROUP", "embedding", self.ends),
            ("EXPERT_MODEL_PARALLEL_GROUP", "ep", self.dp),
        ):
            made = split(about, len(self.groups), parts)
            self.groups += made
            for group in made:
                for rank in group.ranks:
                    self.named[short, rank] = group.name

    def stage(self, rank: int) -> int:
        return rank // (self.count // self.stages)

    def pipe(self, rank: int) -> list[int]:
        return next(one for one in self.pp if rank in one)


@dataclass
class Megatron:
    """One forward, one backward; activations go as single sends, or in batches with what comes back."""

    rank: Rank
    mesh: Mesh
    style: str
    moe: bool = False
    batches: int = 6

    def __post_init__(self) -> None:
        own, self.pipe = self.rank.number, self.mesh.pipe(self.rank.number)
        self.stage = self.mesh.stage(own)
        self.before = self.pipe[self.stage - 1] if self.stage else None
        self.after = self.pipe[self.stage + 1] if self.stage + 1 < self.mesh.stages else None

    def group(self, short: str) -> str:
        return self.mesh.named[short, self.rank.number]

    def run(self, steps: int = 3) -> Program:
        for step in range(steps):
            yield from self.pipeline(step)
            yield from self.update(step)

    def layers(self, tag: str, step: int) -> Program:
        rank = self.rank
        for layer in range(2):
            yield rank.call(self.group("tp"), "all_gather", 4096)
            yield rank.compute(0.002)
            yield rank.call(self.group("tp"), "reduce_scatter", 8192)
            if self.moe and not (yield from rank.fault(f"{tag}-experts{layer}", step)):
                yield rank.call(self.group("ep"), "all_to_all", 4096)
                yield rank.compute(0.002)
                yield rank.call(self.group("ep"), "all_to_all", 4096)
        yield from rank.fault(tag, step)

    def talk(self, tag: str, step: int, *parts: tuple[str, int | None]) -> Program:
        rank, group = self.rank, self.group("pp")
        real = tuple((kind, peer, 5120) for kind, peer in parts if peer is not None)
        replaced = yield from rank.fault(tag, step)
        if not real or replaced:
            return
        if self.style == "batch":
            work = yield rank.batch(group, *real, lazy=True)
            yield rank.wait(work)
            yield rank.sync()
            return
        for kind, peer, size in sorted(real, key=lambda one: (one[0] == "recv") == (self.stage % 2 == 0)):
            yield rank.send(group, peer, size) if kind == "send" else rank.recv(group, peer, size)

    def pipeline(self, step: int) -> Program:
        batches, warm = self.batches, min(self.mesh.stages - self.stage - 1, self.batches)
        for batch in range(warm):
            yield from self.rank.fault("loader", step)
            yield from self.talk(f"recv-forward{batch}", step, ("recv", self.before))
            yield from self.layers(f"forward{batch}", step)
            yield from self.talk(f"send-forward{batch}", step, ("send", self.after))
        if warm < batches:
            yield from self.talk(f"recv-forward{warm}", step, ("recv", self.before))
        for batch in range(batches - warm):
            yield from self.layers(f"forward{warm + batch}", step)
            yield from self.talk(f"steady{batch}", step, ("send", self.after), ("recv", self.after))
            yield from self.layers(f"backward{batch}", step)
            if batch + 1 < batches - warm:
                yield from self.talk(f"cool{batch}", step, ("send", self.before), ("recv", self.before))
            else:
                yield from self.talk(f"last{batch}", step, ("send", self.before))
        for batch in range(batches - warm, batches):
            yield from self.talk(f"recv-backward{batch}", step, ("recv", self.after))
            yield from self.layers(f"backward{batch}", step)
            yield from self.talk(f"send-backward{batch}", step, ("send", self.before))

    def update(self, step: int) -> Program:
        rank = self.rank
        yield from rank.fault("grads", step)
        reduced = yield rank.call(self.group("dp"), "reduce_scatter", 65_536, lazy=True)
        if rank.number in (self.pipe[0], self.pipe[-1]):
            yield rank.call(self.group("embedding"), "all_reduce", 32_000)
        yield rank.wait(reduced)
        if not (yield from rank.fault("norm", step)):
            yield rank.call("0", "all_reduce", 1, dtype="Float")
            yield rank.sync()
        yield from rank.fault("optimizer", step)
        yield rank.call(self.group("dp"), "all_gather", 32_768)


def megatron_job(count: int = 16, style: str = "batch", faults: Faults | None = None, stages: int = 4,
                 moe: bool = False, **more: Any) -> Job:  # fmt: skip
    mesh = Mesh(count, stages)
    return Job(mesh.groups, lambda rank: Megatron(rank, mesh, style, moe).run(), faults=faults or {}, **more)


@incident(HOST, 9)
def megatron16_single_sends_host_stuck() -> Dumps:
    """Rank 9, of the third stage, in a forward pass."""
    return taken(megatron_job(style="single", faults={(9, "forward3", 1): stuck}))


@incident(HOST, 6)
def megatron16_batches_host_stuck() -> Dumps:
    """Rank 6, of the second stage, in a backward pass."""
    return taken(megatron_job(faults={(6, "backward2", 1): stuck}))


@incident(HOST, 26)
def megatron32_stuck_in_the_optimizer() -> Dumps:
    """Rank 26, of the last stage, after the norm of gradients."""
    return taken(megatron_job(32, faults={(26, "optimizer", 1): stuck}), version="2.9")


@incident(HOST, 2, 12)
def megatron16_two_hosts() -> Dumps:
    """Rank 2 of the first stage's second pipeline, and rank 12 of the last stage's first one, in the same step."""
    return taken(megatron_job(faults={(2, "forward4", 1): stuck, (12, "forward4", 1): stuck}))


@incident(DEVICE, 5)
def megatron16_device_dies() -> Dumps:
    """Rank 5's device dies at its 70th kernel."""
    return taken(megatron_job(frozen={5: 70}), version="2.9")


@incident(DEVICE, 18)
def megatron32_single_sends_device_dies() -> Dumps:
    """Rank 18's device dies at its 90th kernel; only what is open is left."""
    return taken(megatron_job(32, style="single", frozen={18: 90}), version="2.9", only_active=True)


@incident(HOST, 15)
def megatron16_only_open() -> Dumps:
    """Rank 15, of the last stage; dumps of open entries, as after the signal of a watchdog."""
    return taken(megatron_job(faults={(15, "backward1", 2): stuck}), version="2.9", only_active=True)


@incident(PAIRS, 4, 8, among=(0, 12))
def megatron16_one_send_too_many() -> Dumps:
    """Rank 4 sends an activation twice; rank 8's receives are shifted from then on, and one send is left."""

    pp = Mesh(16).named["pp", 4]

    def again(rank: Rank) -> Program:
        yield rank.send(pp, 8, 5120)

    return taken(megatron_job(style="single", faults={(4, "forward3", 1): again}))


@incident(PAIRS, 5, 9, among=(1, 13))
def megatron16_a_receive_is_left_out() -> Dumps:
    """Rank 9 takes its input from a cache in one round, and does not receive what rank 5 sends."""

    def cached(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.compute(0.001)
        return True

    return taken(megatron_job(faults={(9, "recv-forward0", 1): cached}))


@incident(PAIRS + DIFFERENT, 0, 4, among=(8, 12))
def megatron16_a_shorter_sequence() -> Dumps:
    """Rank 0 sends fewer tokens than rank 4 receives."""
    pp = Mesh(16).named["pp", 0]

    def shorter(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.batch(pp, ("send", 4, 4000))
        yield rank.sync()
        return True

    return taken(megatron_job(faults={(0, "send-forward1", 1): shorter}))


@incident(PAIRS, 1, among=(5, 9, 13))
def megatron16_sends_to_the_wrong_stage() -> Dumps:
    """Rank 1 sends to rank 9 in place of rank 5, which waits for it."""
    pp = Mesh(16).named["pp", 1]

    def astray(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.send(pp, 9, 5120)
        return True

    return taken(megatron_job(style="single", faults={(1, "send-forward1", 1): astray}))


@incident(CROSSED + DIFFERENT + BEHIND, 5, is_sure=False)
def megatron16_norm_before_gradients() -> Dumps:
    """Rank 5 calls the norm of all ranks before it reduces its gradients in its data-parallel group."""

    def early(rank: Rank) -> Program:
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()

    return taken(megatron_job(faults={(5, "grads", 1): early}))


@incident(HOST, 10)
def moe16_host_stuck() -> Dumps:
    """Rank 10's host stops between two layers of experts."""
    return taken(megatron_job(moe=True, faults={(10, "forward2-experts1", 1): stuck}))


@incident((*DIFFERENT, *CROSSED, *BEHIND), 7, is_sure=False)
def moe16_no_tokens() -> Dumps:
    """Rank 7 has no tokens for its experts in one layer, and leaves both exchanges out."""

    def none(rank: Rank) -> Generator[Any, Any, bool]:
        yield rank.compute(0.001)
        return True

    return taken(megatron_job(moe=True, faults={(7, "forward5-experts1", 1): none}))


@incident(DEVICE, 3)
def moe32_device_dies() -> Dumps:
    """Rank 3's device, in four stages of four ways."""
    return taken(megatron_job(32, moe=True, frozen={3: 80}), version="2.9", only_active=True)


@incident(DEVICE + HOST, 4, 11)
def moe16_a_device_and_a_host() -> Dumps:
    """Rank 4's device dies in the second stage; rank 11's host stops in the third, in another pipeline."""
    return taken(megatron_job(moe=True, faults={(11, "forward0", 1): stuck}, frozen={4: 130}))


@incident(NOBODY)
def moe16_moves() -> Dumps:
    """Healthy, with uneven tokens; dumps within 30 ms."""
    return taken_apart(megatron_job(moe=True), {rank: 0.25 + 0.002 * rank for rank in range(16)})


@incident(NOBODY)
def megatron16_moves_apart() -> Dumps:
    """Healthy; dumps of two hosts 0.15 s apart."""
    moments = {rank: 0.14 + 0.15 * (rank > 7) for rank in range(16)}
    return taken_apart(megatron_job(), moments, version="2.9", only_active=True)


@incident(NOBODY)
def megatron16_has_finished() -> Dumps:
    """Healthy, and done."""
    return taken(megatron_job(), version="2.9")


@incident(GONE, 9, is_sure=False)
def megatron16_the_culprits_dump_is_missing() -> Dumps:
    """Rank 9's host stops, and its dump is not there."""
    return taken(megatron_job(faults={(9, "forward3", 1): stuck}), without=(9,))


@incident(HOST, 9)
def megatron16_dumps_of_victims_are_missing() -> Dumps:
    """Six of them."""
    return taken(megatron_job(faults={(9, "forward3", 1): stuck}), without=(0, 3, 4, 7, 12, 14))


@incident(HOST, 14)
def megatron16_timed_out() -> Dumps:
    """Pipelines time out after three minutes and have given up; the rest would after ten."""
    job = megatron_job(faults={(14, "forward3", 1): stuck}, timeouts_s={"PIPELINE_MODEL_PARALLEL_GROUP": 180.0})
    return taken(job, gives_up=True, waited_s=200.0, version="2.9")


@incident(HOST, 8)
def megatron16_short_ring() -> Dumps:
    """The buffer has room for 24 entries."""
    return taken(megatron_job(faults={(8, "backward3", 1): stuck}, ring=24))


@incident(HOST, 4)
def megatron16_first_receive_of_a_stage() -> Dumps:
    """Rank 4's host stops before its first step; communicators are made by the first call."""
    return taken(megatron_job(faults={(4, "recv-forward0", 1): stuck}, eager=0), version="2.10")


@incident(HOST, 13)
def megatron16_timed() -> Dumps:
    """With start events, and counters of them."""
    return taken(megatron_job(style="single", faults={(13, "grads", 1): stuck}, timing=True))


# Virtual stages, breadth first


def interleaved(rank: Rank, mesh: Mesh, chunks: int = 2, batches: int = 4, steps: int = 3) -> Program:
    own = rank.number
    dp, pp, tp = (mesh.named[short, own] for short in ("dp", "pp", "tp"))
    stage, pipe = mesh.stage(own), mesh.pipe(own)
    before, after = pipe[stage - 1], pipe[(stage + 1) % mesh.stages]
    last = mesh.stages - 1
    for step in range(steps):
        for forward in (True, False):
            for chunk in range(chunks):
                first_of_all = chunk == 0 and (stage == 0 if forward else stage == last)
                last_of_all = chunk == chunks - 1 and (stage == last if forward else stage == 0)
                for batch in range(batches):
                    tag = f"{'forward' if forward else 'backward'}{chunk}.{batch}"
                    if not first_of_all:
                        work = yield rank.batch(pp, ("recv", before if forward else after, 5120), lazy=True)
                        yield rank.wait(work)
                    yield rank.call(tp, "all_reduce", 4096)
                    yield rank.compute(0.002)
                    yield from rank.fault(tag, step)
                    if not last_of_all:
                        yield rank.batch(pp, ("send", after if forward else before, 5120), lazy=True)
        yield rank.call(dp, "all_reduce", 65_536)
        yield rank.call("0", "all_reduce", 1, dtype="Float")
        yield rank.sync()


def interleaved_job(faults: Faults | None = None, **more: Any) -> Job:
    mesh = Mesh(16)
    return Job(mesh.groups, lambda rank: interleaved(rank, mesh), faults=faults or {}, **more)


@incident(HOST, 7)
def interleaved16_host_stuck() -> Dumps:
    """Rank 7, in the second of its two chunks."""
    return taken(interleaved_job({(7, "forward1.2", 1): stuck}, eager=10_000))


@incident(HOST, 1)
def interleaved16_first_stage_stuck() -> Dumps:
    """Rank 1, of the first stage, in a backward pass."""
    return taken(interleaved_job({(1, "backward0.1", 1): stuck}, eager=10_000), version="2.9")


# Ring attention


def ring(rank: Rank, ranks: int = 8, steps: int = 6) -> Program:
    own = rank.number
    group = str(1 + own // ranks)
    first = own // ranks * ranks
    following, before = first + (own + 1) % ranks, first + (own - 1) % ranks
    for step in range(steps):
        for turn in range(ranks - 1):
            yield from rank.fault(f"turn{turn}", step)
            yield rank.batch(group, ("send", following, 2048), ("recv", before, 2048))
            yield rank.compute(0.001)
        yield from rank.fault("grads", step)
        yield rank.call("0", "all_reduce", 10_000)
        yield rank.sync()


def ring_job(faults: Faults | None = None, **more: Any) -> Job:
    groups = [everyone(16), *split("cp", 1, (range(8), range(8, 16)))]
    return Job(groups, ring, faults=faults or {}, **more)


@incident(HOST, 11)
def ring16_host_stuck() -> Dumps:
    """Rank 11 stops between two turns."""
    return taken(ring_job({(11, "turn3", 2): stuck}))


@incident(PAIRS, 5, among=(4, 6))
def ring16_one_turn_more() -> Dumps:
    """Rank 5 turns once more than the others, which have come to the reduction."""

    def more(rank: Rank) -> Program:
        yield rank.batch("1", ("send", 6, 2048), ("recv", 4, 2048))

    return taken(ring_job({(5, "grads", 2): more}))


@incident(NOBODY)
def ring16_moves() -> Dumps:
    """Healthy; dumps within 15 ms."""
    return taken_apart(ring_job(), {rank: 0.06 + 0.001 * rank for rank in range(16)})


# Devices that die while they send or receive, of which nothing but the number of the send or receive tells


@incident(DEVICE, 12)
def ring16_device_dies() -> Dumps:
    """Rank 12's device dies in its 39th kernel, a turn."""
    return taken(ring_job(frozen={12: 39}, seed=63), version="2.9")


@incident(DEVICE, 9)
def megatron16_device_dies_in_a_send() -> Dumps:
    """Rank 9's device dies in its 130th kernel."""
    return taken(megatron_job(style="single", frozen={9: 130}, timing=True, seed=163), version="2.9")


@incident(DEVICE, 10)
def interleaved16_device_dies() -> Dumps:
    """Rank 10's device dies in its 131st kernel."""
    return taken(interleaved_job(frozen={10: 131}, eager=10_000, seed=128))


@incident(DEVICE, 1)
def interleaved16_device_of_the_first_stage_dies() -> Dumps:
    """Rank 1's device dies in its 96th kernel."""
    return taken(interleaved_job(frozen={1: 96}, eager=10_000, seed=177), version="2.9")


# Objects and checkpoints


def objects(rank: Rank, steps: int = 5) -> Program:
    """What rank 0 decides is broadcast, its size first; the state is gathered at the end of each round."""
    for step in range(steps):
        yield from rank.fault("decide", step)
        yield rank.call("0", "broadcast", 1, dtype="Long", root=0)
        yield rank.sync()
        yield rank.call("0", "broadcast", 400 + step, dtype="Byte", root=0)
        yield rank.sync()
        yield from rank.fault("work", step)
        yield rank.call("0", "all_gather", 64, dtype="Long")
        yield rank.sync()


def objects_job(faults: Faults | None = None, **more: Any) -> Job:
    return Job([everyone(16)], objects, faults=faults or {}, eager=1000, **more)


@incident(HOST, 0)
def objects16_the_root_is_stuck() -> Dumps:
    """All wait for rank 0's decision."""
    return taken(objects_job({(0, "decide", 3): stuck}))


@incident(HOST, 6)
def objects16_a_receiver_is_stuck() -> Dumps:
    """The root has sent its decision and waits with the others in the gather."""
    return taken(objects_job({(6, "work", 3): stuck}), version="2.9")


@incident(HOST, 6)
def objects16_a_receiver_is_stuck_before() -> Dumps:
    """Rank 6 has not come to the broadcast, which has ended on its root."""
    return taken(objects_job({(6, "decide", 3): stuck}))


RUNNING = tuple(name for name in INCIDENTS if name not in BEFORE)

if __name__ == "__main__":
    show(sys.argv[1:] or RUNNING)
