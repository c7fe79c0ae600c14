"""How long a large job's facts take to be read, judged and told, and how much memory.

``python tests/programs/benchmarks/judging_scale.py --ranks 1024`` judges a synthetic job of each scene of
``tests/rules/scenes.py``, on either back end, in a process of its own each: the scene's culprits, and all other ranks
doing what the others do in the scene. Every rank has a stack of 40 frames, its peers and its host, and in four groups
as many collectives as the probe keeps for a job of this size: 48 for 1,024 ranks, 8 for 16,384. ``--growth`` asks
every rule alone, at two sizes. Seconds are those of the processor.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "rules"))

from builders import BACKWARD, ENGINE, GLOO, GRADIENTS, NCCL, SITE, Backend, process, raised, transport_error, user
from call_scenes import CALL_SCENES
from machine_scenes import MACHINE_SCENES
from scenes import SCENES as OTHER_SCENES

from lightning_ncclsafe.facts import Collective, Frame, Group, HostFacts, JobFacts, ProcessFacts, RankFacts, codec
from lightning_ncclsafe.probes.process.flight_recorder import kept_per_group
from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.report.text import render_short, render_text
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.rule import forget

SCENES = (*OTHER_SCENES, *CALL_SCENES, *MACHINE_SCENES)
PER_HOST = 8
DEPTH = 40
HOST = HostFacts(
    rss_bytes=61_000_000_000,
    process_swap_bytes=0,
    memory_growth_bytes_per_s=0,
    swap_growth_bytes_per_s=0,
    memory_total_bytes=2_000_000_000_000,
    memory_available_bytes=900_000_000_000,
    cores=192,
    load_1min=17.0,
)
VERSIONS = {"torch": "2.13.0", "lightning": "2.6.6", "python": "3.11.9", "nccl": "2.29.3"}


def large(facts: JobFacts, world: int, net: Backend) -> JobFacts:
    """The job of a scene with many more ranks, which do what one that is no culprit does there."""
    by_rank = {one.rank: one for one in facts.ranks}
    typical = by_rank[max(by_rank)]
    silent = {*range(facts.world_size)} - by_rank.keys()
    ranks = [by_rank.get(rank, typical) for rank in range(world) if rank not in silent]
    numbers = (rank for rank in range(world) if rank not in silent)
    seen = {peer.rank: peer for one in facts.ranks for peer in one.peers}
    hidden = silent - seen.keys()
    made = [placed(one, rank, world, net, seen, hidden) for one, rank in zip(ranks, numbers, strict=True)]
    return replace(facts, world_size=world, ranks=tuple(made))


def placed(
    facts: RankFacts, rank: int, world: int, net: Backend, seen: dict[int, ProcessFacts], hidden: set[int]
) -> RankFacts:
    """A rank's facts as a rank of a large job has them; ranks that nobody sees are on hosts of their own."""
    host, local = divmod(rank, PER_HOST)
    groups, collectives = in_mesh(facts, rank, world, net)
    beside = range(host * PER_HOST, min((host + 1) * PER_HOST, world))
    return replace(
        facts,
        rank=rank,
        local_rank=local,
        host=f"node-{host}",
        pid=1000 + rank,
        taken_ns=1_800_000_000_000_000_000,
        stack=(*outer(DEPTH - len(facts.stack)), *facts.stack) if facts.stack else (),
        groups=groups,
        collectives=collectives,
        host_facts=HOST if facts.host_facts == HostFacts() else facts.host_facts,
        peers=tuple(
            seen.get(peer, ProcessFacts(pid=1000 + peer, rank=peer, state="running", cpu_s=99.0, rss_bytes=61 << 30))
            for peer in beside
            if peer != rank and peer not in hidden
        ),
        versions=VERSIONS,
    )


@cache
def outer(count: int) -> tuple[Frame, ...]:
    """What lies around the Trainer's function: a launcher, a sweep, a command line."""
    return tuple(
        Frame(
            file=f"{SITE}/click/core.py", line=100 + depth, function=f"invoke_{depth}", code="return self.main(*args)"
        )
        for depth in range(count)
    )


def in_mesh(facts: RankFacts, rank: int, world: int, net: Backend) -> tuple[tuple[Group, ...], tuple[Collective, ...]]:
    """The default group as the scene has it with more of its past, and three groups of a mesh that stand still."""
    default = next((group for group in facts.groups if group.name == "0"), None)
    if default is None:
        return facts.groups, facts.collectives
    kept = kept_per_group(world)
    first = next((call.seq for call in facts.collectives if call.group == "0"), default.last_enqueued + 1)
    (last,) = net.recorded(1, sizes=GRADIENTS)
    before = [replace(last, seq=seq, created_ns=1_000_000 * seq) for seq in range(first, first + kept)]
    collectives = [replace(call, seq=call.seq + kept) if call.group == "0" else call for call in facts.collectives]
    moved = replace(
        default,
        ranks=everyone(world),
        last_enqueued=default.last_enqueued + kept,
        last_started=default.last_started + kept if default.last_started >= 0 else -1,
        last_completed=default.last_completed + kept,
    )
    groups = [moved if group is default else group for group in facts.groups]
    sides: list[Collective] = []
    for name, ranks in mesh(rank, world).items():
        groups.append(
            Group(
                name=name,
                description=f"mesh_{name}",
                ranks=ranks,
                last_enqueued=kept,
                last_completed=kept,
            )
        )
        sides += [one_of_past(name, seq, net) for seq in range(1, kept + 1)]
    return tuple(groups), (*before, *sides, *collectives)


@cache
def one_of_past(group: str, seq: int, net: Backend) -> Collective:
    return Collective(
        group=group,
        seq=seq,
        op="all_gather" if seq % 2 else "reduce_scatter",
        backend=net.name,
        completed=True,
        started=net.name == "nccl",
        input_sizes=((seq * 1024,),),
        output_sizes=((seq * 8192,),),
        dtypes=("BFloat16",),
        created_ns=1_799_999_999_000_000_000 + seq * 1_000_003,
        duration_ms=1.25 if net.name == "nccl" else None,
        timeout_ms=1_800_000,
    )


@cache
def everyone(world: int) -> tuple[int, ...]:
    return tuple(range(world))


def mesh(rank: int, world: int) -> dict[str, tuple[int, ...]]:
    """Tensor parallel on a host, pipeline over two neighbours in eight, data parallel over what is left."""
    host, local = divmod(rank, PER_HOST)
    stage, lane = divmod(host, 2)
    tensor = tuple(range(host * PER_HOST, min((host + 1) * PER_HOST, world)))
    pipe = tuple(one for one in (stage * 16 + local, stage * 16 + 8 + local) if one < world)
    data = tuple(range(lane * 8 + local, world, 16))
    return {f"tp{host}": tensor, f"pp{stage}x{local}": pipe, f"dp{lane}x{local}": data}


def each_elsewhere(rank: int, facts: RankFacts) -> RankFacts:
    """Every rank at a line, in a batch and in a collective of its own."""
    calls = tuple(call if call.completed else replace(call, input_sizes=((rank + 2,),)) for call in facts.collectives)
    stack = (*facts.stack, user("training_step", 10 + rank), ENGINE)
    progress = replace(facts.progress, batch_idx=rank, idle_s=float(rank))
    return replace(facts, stack=stack, collectives=calls, progress=progress, missing=(f"gpu: no answer of {rank}",))


def each_raised(rank: int, facts: RankFacts) -> RankFacts:
    return raised(facts, "ValueError", f"bad label {rank}", user("training_step", 42 + rank))


def each_broken(rank: int, facts: RankFacts) -> RankFacts:
    return transport_error(facts) if rank % 3 else facts


def each_behind(rank: int, facts: RankFacts) -> RankFacts:
    """Every second rank is somewhere else, in user code, and behind in the default group."""
    if rank % 2:
        return facts
    calls = tuple(replace(call, completed=True) for call in facts.collectives[:-8])
    groups = tuple(
        replace(one, last_enqueued=calls[-1].seq, last_completed=calls[-1].seq) if one.name == "0" else one
        for one in facts.groups
    )
    stack = (*facts.stack[:-1], user("on_train_epoch_end", 10 + rank, condition=f"if rank == {rank}:  (line 9)"))
    actions = tuple(one for one in facts.progress.actions if one.name != BACKWARD)
    return replace(
        facts, stack=stack, collectives=calls, groups=groups, progress=replace(facts.progress, actions=actions)
    )


def many(change: Callable[[int, RankFacts], RankFacts]) -> Callable[[JobFacts], JobFacts]:
    return lambda job: replace(job, ranks=tuple(change(one.rank, one) for one in job.ranks))


def silenced(state: str) -> Callable[[JobFacts], JobFacts]:
    """Every second rank does not answer; with a state, its neighbour has seen its process."""

    def change(job: JobFacts) -> JobFacts:
        seen = tuple(process(rank, state) for rank in range(1, job.world_size, 2)) if state else ()
        return replace(job, ranks=job.ranks[::2], witnessed=seen)

    return change


def not_joined(job: JobFacts) -> JobFacts:
    """Every second rank has not joined the process group, and fills its memory."""
    waiting = next(scene for scene in SCENES if scene.name == "not yet joined").build(GLOO).ranks[0]
    ranks = tuple(
        replace(waiting, rank=one.rank, local_rank=one.local_rank, host=one.host, host_facts=HOST)
        for one in job.ranks[::2]
    )
    grows = {"rss_bytes": 61 << 30, "memory_growth_bytes_per_s": 200_000_000}
    seen = tuple(process(rank, "running", **grows) for rank in range(1, job.world_size, 2))
    return replace(job, ranks=ranks, witnessed=seen)


# What happens to many ranks of a job that all wait, beside what happens to a few in the scenes.
MANY: dict[str, Callable[[JobFacts], JobFacts]] = {
    "each elsewhere": many(each_elsewhere),
    "each raised": many(each_raised),
    "two in three lost a connection": many(each_broken),
    "every second behind": many(each_behind),
    "every second gone": silenced("gone"),
    "every second stopped": silenced("stopped"),
    "every second silent": silenced(""),
    "every second not joined": not_joined,
}
ALL_WAIT = next(scene for scene in SCENES if scene.name == "link is broken")


def build(name: str, net: Backend, world: int) -> JobFacts:
    scene = next((scene for scene in SCENES if scene.name == name), ALL_WAIT)
    made = large(scene.build(net), world, net)
    return MANY[name](made) if name in MANY else made


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def read(job: JobFacts) -> tuple[JobFacts, float, int, int]:
    """The job as its reporter gets it: from what each rank publishes. Seconds, bytes in all and of the largest rank."""
    decoded, spent_s, sizes = [], 0.0, []
    for facts in job.ranks:
        data = codec.encode(facts)
        sizes.append(len(data))
        began = time.process_time()
        decoded.append(codec.decode(RankFacts, data))
        spent_s += time.process_time() - began
    return replace(job, ranks=tuple(decoded)), spent_s, sum(sizes), max(sizes)


def measure(name: str, net: Backend, world: int, *, decode: bool, save: bool) -> dict[str, object]:
    job = build(name, net, world)
    row: dict[str, object] = {"scene": name, "net": net.name, "ranks": world}
    if decode:
        job, row["decode_s"], row["bytes"], row["largest"] = read(job)
        row["decoded_mb"] = peak_mb()
    began = time.process_time()
    diagnosis = judge(job)
    judged = time.process_time()
    text = render_text(diagnosis)
    render_short(diagnosis)
    told = time.process_time()
    row |= {
        "judge_s": judged - began,
        "tell_s": told - judged,
        "text": len(text),
        "found": diagnosis.findings[0].rule if diagnosis.findings else "",
        "findings": len(diagnosis.findings),
        "failed": [line for line in diagnosis.unanswered if " failed (" in line],
    }
    if save:
        began = time.process_time()
        row["report_bytes"] = len(report_json(diagnosis))
        row["report_s"] = time.process_time() - began
    return row | {"peak_mb": peak_mb()}


def growth(name: str, net: Backend, worlds: tuple[int, int]) -> Iterator[tuple[str, str, float, float]]:
    """Seconds that each rule takes alone at two sizes, the shared answers included, and no collection of garbage."""
    gc.disable()
    jobs = [build(name, net, world) for world in worlds]
    for rule in HANG_RULES:
        spent = []
        for job in jobs:
            forget()
            began = time.process_time()
            rule.findings(job)
            spent.append(time.process_time() - began)
        forget()
        yield name, rule.name, spent[0], spent[1]


def in_a_process(*arguments: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, timeout=600, stdout=subprocess.PIPE)
    row: dict[str, object] = json.loads(done.stdout)
    return row


def table(options: argparse.Namespace, names: list[str], nets: list[Backend]) -> None:
    print(f"{options.ranks:,} ranks: seconds to judge, to tell; peak memory with the decoded facts")
    for name in names:
        for net in nets:
            flags = [flag for flag in ("--decode", "--save") if getattr(options, flag[2:])]
            row = in_a_process("--one", name, "--net", net.name, "--ranks", str(options.ranks), *flags)
            read_words = (
                f" decode {row['decode_s']:6.2f} s, {row['bytes'] / 1e6:7.1f} MB, {row['largest'] / 1e3:6.1f} kB a rank"
                if options.decode
                else ""
            )
            saved = f" report.json {row['report_s']:.2f} s, {row['report_bytes'] / 1e6:.1f} MB" if options.save else ""
            expected = next((scene.rule for scene in SCENES if scene.name == name), row["found"])
            other = f" (!) expected {expected}" if row["found"] != expected else ""
            print(
                f"{name:36} {net.name:5}{read_words} judge {row['judge_s']:6.2f} tell {row['tell_s']:5.2f}"
                f" peak {row['peak_mb']:6.0f} MB {row['found']} ({row['findings']}), text {row['text']:,}{saved}"
                f"{other}{' '.join(row['failed'])}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--decode", action="store_true", help="encode and decode what each rank publishes, too")
    parser.add_argument("--save", action="store_true", help="make report.json, too")
    parser.add_argument("--net", choices=["gloo", "nccl"])
    parser.add_argument("--scene", help="only scenes with this in their name")
    parser.add_argument("--growth", action="store_true", help="each rule alone, at --ranks and four times as many")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    nets = [net for net in (GLOO, NCCL) if options.net in (None, net.name)]
    names = [name for name in (*(scene.name for scene in SCENES), *MANY) if (options.scene or "") in name]
    if options.one:
        print(json.dumps(measure(options.one, nets[0], options.ranks, decode=options.decode, save=options.save)))
    elif options.growth:
        for name in names:
            for _, rule, small_s, large_s in growth(name, nets[0], (options.ranks, 4 * options.ranks)):
                ratio = large_s / max(small_s, 1e-3)
                mark = "  <-- more than linear" if ratio > 7 and large_s > 0.2 else ""
                print(f"{name:36} {rule:24} {small_s:7.3f} s {large_s:7.3f} s  x {ratio:.1f}{mark}", flush=True)
    else:
        table(options, names, nets)


if __name__ == "__main__":
    main()
