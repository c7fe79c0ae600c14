"""Incidents of jobs on NCCL with what truly happened, made by the simulator; and how an answer compares with it.

``python tests/reading/simulated_incidents.py --seeds 400`` prints the score by kind of fault.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_simulator import GPU_DIES, NEVER, Call, Dump, Job, Mesh, program

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

MESHES = [
    lambda: Mesh(1, 1, 4),
    lambda: Mesh(1, 1, 8),
    lambda: Mesh(2, 1, 4),
    lambda: Mesh(2, 1, 4, experts=True),
    lambda: Mesh(2, 1, 2, experts=True),
    lambda: Mesh(1, 4, 1),
    lambda: Mesh(1, 4, 2),
    lambda: Mesh(2, 2, 2),
    lambda: Mesh(2, 4, 2, experts=True),
]
Programs = list[list[Call]]


@dataclass
class Incident:
    """A job's dumps and the truth about it.

    Attributes:
        fault: Kind of fault.
        dumps: By rank.
        rules: What may be told as its cause.
        ranks: Whose fault it is; none where nothing may be told as likely.
        among: Ranks that may be named beside these, as dumps cannot tell them apart.
        has_p2p: Whether ranks send and receive.
        words: How it was made.
    """

    fault: str
    dumps: dict[int, Dump]
    rules: tuple[str, ...]
    ranks: tuple[int, ...]
    among: tuple[int, ...] = ()
    has_p2p: bool = False
    words: str = ""
    is_knowable: bool = True
    """Whether dumps tell at all; where they do not, silence is right."""


@dataclass
class Made:
    """A job before its fault."""

    mesh: Mesh
    programs: Programs
    chance: random.Random
    how: dict[str, Any]
    words: str

    def done(self, fault: str, rules: tuple[str, ...], ranks: tuple[int, ...], **more: Any) -> Incident | None:
        """Runs it; None where the fault has come to nothing."""
        among = more.pop("among", ())
        job = Job(self.programs, self.mesh.groups).run()
        is_stuck = any(rank.place < len(rank.program) or any(t.ends is None for t in rank.tasks) for rank in job.ranks)
        if rules and not is_stuck:
            return None
        dumps = job.dumps(**{**self.how, **more})
        waits = any(entry["state"] != "completed" for dump in dumps.values() for entry in dump["entries"])
        if rules and not waits:
            return None
        return Incident(fault, dumps, rules, ranks, among, self.mesh.pipeline > 1, self.words)

    def some_rank(self) -> int:
        return self.chance.randrange(self.mesh.size)

    def somewhere(self, rank: int, least: float = 0.3) -> int:
        calls = self.programs[rank]
        return self.chance.randrange(int(len(calls) * least), int(len(calls) * 0.8))

    def calls(self, rank: int, wanted: Callable[[Call], bool]) -> list[int]:
        """Places of a rank's calls of a kind, beyond the first third."""
        own = self.programs[rank]
        return [place for place in range(len(own) // 3, int(len(own) * 0.9)) if wanted(own[place])]


def made(seed: int) -> Made:
    """A job of that seed."""
    chance = random.Random(seed)
    mesh = chance.choice(MESHES)()
    batched, blocking = chance.random() < 0.4, chance.random() < 0.6
    how = {
        "only_open": chance.random() < 0.6,
        "ring": chance.choice([2000, 2000, 60]),
        "timing": chance.random() < 0.3,
        "version": chance.choice(["2.9", "2.10", "2.3"]),
    }
    shape, steps = chance.random(), chance.randint(3, 6)
    programs = [
        program(mesh, rank, random.Random(shape), steps=steps, batched=batched, blocking=blocking)
        for rank in range(mesh.size)
    ]
    words = f"seed {seed}: tp {mesh.tensor} pp {mesh.pipeline} dp {mesh.data} ep {mesh.experts} batched {batched} {how}"
    return Made(mesh, programs, chance, how, words + (" blocking" if blocking else ""))


def _stop(job: Made, rank: int, least: float = 0.3) -> None:
    job.programs[rank].insert(job.somewhere(rank, least), Call(on_host=True, ms=NEVER))


def host_stuck(job: Made) -> Incident | None:
    rank = job.some_rank()
    _stop(job, rank)
    return job.done("host stuck", ("host-stuck",), (rank,))


def in_its_loader(job: Made) -> Incident | None:
    rank = job.some_rank()
    waits = job.calls(rank, lambda call: call.on_host)
    if not waits:
        return None
    place = job.chance.choice(waits)
    job.programs[rank][place] = Call(on_host=True, ms=NEVER)
    return job.done("in its loader", ("host-stuck",), (rank,))


def died(job: Made) -> Incident | None:
    rank = job.some_rank()
    _stop(job, rank)
    return job.done("died, no dump", ("no-dump",), (rank,), missing=(rank,))


def others_missing(job: Made) -> Incident | None:
    rank, other = job.some_rank(), job.some_rank()
    if rank == other:
        return None
    _stop(job, rank)
    return job.done("host stuck, another dump missing", ("host-stuck",), (rank,), missing=(other,))


def gpu_dead(job: Made) -> Incident | None:
    rank = job.some_rank()
    _gpu_dies(job, rank)
    incident = job.done("gpu dead", ("gpu-stuck",), (rank,))
    return incident if incident is not None and _shows(incident.dumps, rank) else None


def _gpu_dies(job: Made, rank: int) -> None:
    place = job.somewhere(rank)
    calls = job.programs[rank]
    calls.insert(place, Call(op=GPU_DIES, ms=job.chance.choice([1.0, 3.0, 8.0])))
    if job.chance.random() < 0.7:
        calls.insert(min(place + job.chance.randint(1, 25), len(calls)), Call(on_host=True, ms=NEVER))


def _shows(dumps: dict[int, Dump], rank: int) -> bool:
    """Whether anything that the rank holds open has ended on a member of its group, so that dumps can tell."""
    mine = {
        (entry["process_group"], entry["collective_seq_id"])
        for entry in dumps[rank]["entries"]
        if entry["state"] != "completed" and not entry["is_p2p"] and not entry["profiling_name"].endswith("coalesced")
    }
    for group, seq in mine:
        members = eval_ranks(dumps[rank]["pg_config"][group[0]]["ranks"])
        for other in members:
            if other != rank and other in dumps:
                theirs = [e for e in dumps[other]["entries"] if e["process_group"] == group and not e["is_p2p"]]
                seqs = {e["collective_seq_id"]: e["state"] for e in theirs}
                later = max(seqs, default=0) > seq
                if seqs.get(seq) == "completed" or (seq not in seqs and later):
                    return True
    return False


def eval_ranks(text: str) -> list[int]:
    return [int(number) for number in text.strip("[]").split(",")]


def kernel_hangs(job: Made) -> Incident | None:
    """Without timing nobody can tell a kernel that never ends from a link: what may be said is who is in it."""
    rank = job.some_rank()
    job.programs[rank].insert(job.somewhere(rank), Call(op="kernel", ms=NEVER))
    timing = job.chance.random() < 0.6
    rules = ("gpu-stuck",) if timing else ("gpu-stuck", "all-joined")
    among = () if timing else tuple(range(job.mesh.size))
    incident = job.done(f"kernel hangs, timing {timing}", rules, (rank,) if timing else (), among=among, timing=timing)
    return replace(incident, is_knowable=timing) if incident is not None else None


def crossed(job: Made) -> Incident | None:
    rank = job.some_rank()
    own = job.programs[rank]

    def is_pair(place: int) -> bool:
        one, other = own[place], own[place + 1]
        return bool(
            one.group
            and other.group
            and one.group is not other.group
            and not one.ends
            and not other.ends
            and len(set(one.group.ranks) & set(other.group.ranks)) > 1
            and one.waits
            and other.waits
        )

    places = [place for place in range(len(own) // 3, len(own) - 1) if is_pair(place)]
    if not places:
        return None
    place = job.chance.choice(places)
    one, other = own[place].group, own[place + 1].group
    own[place], own[place + 1] = own[place + 1], own[place]
    assert one is not None and other is not None
    circle = tuple(set(one.ranks) & set(other.ranks))
    return job.done("crossed groups", ("crossed-groups",), (rank,), among=circle)


def _changed(job: Made, change: Callable[[Call], Call], fault: str, rule: str) -> Incident | None:
    rank = job.some_rank()
    places = job.calls(rank, lambda call: call.group is not None and not call.ends and call.op != "all_to_all")
    if not places:
        return None
    place = job.chance.choice(places)
    call = job.programs[rank][place]
    job.programs[rank][place] = change(call)
    assert call.group is not None
    among = call.group.ranks if len(call.group.ranks) == 2 else ()
    return job.done(fault, (rule,), (rank,), among=among)


def other_size(job: Made) -> Incident | None:
    return _changed(job, lambda call: replace(call, size=call.size + 7), "other size", "mismatched-collective")


def other_operation(job: Made) -> Incident | None:
    return _changed(job, lambda call: replace(call, op="broadcast"), "other operation", "diverged-collectives")


def unmatched(job: Made) -> Incident | None:
    """A rank receives once more than the stage before sends."""
    if job.mesh.pipeline == 1:
        return None
    rank = job.some_rank()
    places = job.calls(rank, lambda call: bool(call.ends) and call.ends[0][0] == "recv")
    if not places:
        return None
    place = job.chance.choice(places)
    peer = job.programs[rank][place].ends[0][1]
    job.programs[rank].insert(place, replace(job.programs[rank][place]))
    return job.done("unmatched receive", ("unmatched-p2p",), (), among=(rank, peer))


def unmatched_send(job: Made) -> Incident | None:
    """A rank sends what nobody receives, and goes on."""
    if job.mesh.pipeline == 1:
        return None
    rank = job.some_rank()
    places = job.calls(rank, lambda call: bool(call.ends) and call.ends[0][0] == "send")
    if not places:
        return None
    place = job.chance.choice(places)
    call = job.programs[rank][place]
    job.programs[rank].insert(place, replace(call, waits=job.chance.random() < 0.7))
    return job.done("unmatched send", ("unmatched-p2p",), (), among=(rank, call.ends[0][1]))


def two_hosts(job: Made) -> Incident | None:
    """Both stand still in the same step, in different groups."""
    one, other = job.some_rank(), job.some_rank()
    if one == other or job.mesh.size < 8:
        return None
    place = job.somewhere(one)
    for rank in (one, other):
        job.programs[rank].insert(min(place, len(job.programs[rank])), Call(on_host=True, ms=NEVER))
    return _if_both_show(job.done("two hosts stuck", ("host-stuck",), tuple(sorted((one, other)))))


def host_and_gpu(job: Made) -> Incident | None:
    one, other = job.some_rank(), job.some_rank()
    if one == other or job.mesh.size < 8:
        return None
    place = job.somewhere(one)
    job.programs[one].insert(place, Call(on_host=True, ms=NEVER))
    job.programs[other].insert(min(place, len(job.programs[other])), Call(op=GPU_DIES, ms=3.0))
    incident = job.done("a host and a gpu", ("host-stuck", "gpu-stuck"), tuple(sorted((one, other))))
    if incident is None or not _shows(incident.dumps, other):
        return None
    return incident if _is_bare(incident.dumps[one]) else None


def _is_bare(dump: Dump) -> bool:
    return all(entry["state"] == "completed" for entry in dump["entries"])


def _if_both_show(incident: Incident | None) -> Incident | None:
    """A second one that came to wait for the first before it stood still cannot be told."""
    if incident is None or not all(_is_bare(incident.dumps[rank]) for rank in incident.ranks):
        return None
    return incident


def moving(job: Made) -> Incident | None:
    """Ranks dump one after the other, far apart, while the job runs."""
    run = Job(job.programs, job.mesh.groups).run()
    end = min(rank.clock for rank in run.ranks)
    at = {rank: job.chance.uniform(0.1, 0.9) * end for rank in range(job.mesh.size)}
    return job.done("still moves", (), (), at=at)


def healthy(job: Made) -> Incident | None:
    return job.done("healthy", (), ())


FAULTS: tuple[Callable[[Made], Incident | None], ...] = (
    host_stuck,
    in_its_loader,
    died,
    others_missing,
    gpu_dead,
    kernel_hangs,
    crossed,
    other_size,
    other_operation,
    unmatched,
    unmatched_send,
    two_hosts,
    host_and_gpu,
    moving,
    healthy,
)


def incidents(count: int, first: int = 0) -> list[Incident]:
    """So many, of all kinds in turn."""
    found: list[Incident] = []
    seed = first
    while len(found) < count:
        fault = FAULTS[len(found) % len(FAULTS)]
        incident = fault(made(seed))
        seed += 1
        if incident is not None:
            found.append(incident)
    return found


def diagnosis_of(dumps: dict[int, Dump]) -> Diagnosis | None:
    """What ``ncclsafe diagnose`` says of it."""
    evidence = Artifacts()
    for rank, dump in dumps.items():
        evidence.add_dump(f"nccl_trace_rank_{rank}", dump)
    job = evidence.job()
    return judge(job, RECORDED_RULES) if job is not None else None


@dataclass
class Score:
    """How answers compare with the truth."""

    right: int = 0
    of: int = 0
    wrong_likely: int = 0
    misses: list[str] = field(default_factory=list)


def is_right(incident: Incident, diagnosis: Diagnosis | None) -> tuple[bool, bool]:
    """Whether the likely answers, the first among them, are right; and whether any likely one is wrong."""
    found = diagnosis.findings if diagnosis is not None else ()
    likely = [finding for finding in found if finding.confidence is not Confidence.POSSIBLE]
    allowed = {*incident.ranks, *incident.among}
    wrong = any(finding.rule not in incident.rules or not allowed.issuperset(finding.ranks) for finding in likely)
    if not incident.rules or not incident.is_knowable:
        return not wrong, wrong
    named = {rank for finding in likely or found[:1] for rank in finding.ranks}
    kinds = {finding.rule for finding in likely or found[:1]}
    right = bool(named) and allowed >= named >= set(incident.ranks) and kinds <= set(incident.rules)
    return right, wrong


def scores(found: list[Incident]) -> dict[str, Score]:
    """By kind of fault."""
    table: dict[str, Score] = defaultdict(Score)
    for incident in found:
        diagnosis = diagnosis_of(incident.dumps)
        failed = [line for line in (diagnosis.unanswered if diagnosis else ()) if " failed (" in line]
        assert not failed, f"{incident.words}: {failed}"
        right, wrong = is_right(incident, diagnosis)
        score = table[incident.fault]
        score.of += 1
        score.right += right
        score.wrong_likely += wrong
        if not right or wrong:
            told = [(f.rule, f.confidence.value, f.ranks) for f in (diagnosis.findings if diagnosis else ())]
            score.misses.append(f"{incident.words}: truth {incident.ranks} {incident.among}, told {told}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=400, help="how many incidents")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--misses", action="store_true")
    told = parser.parse_args()
    began = time.process_time()
    found = incidents(told.seeds, told.first)
    simulated = time.process_time()
    table = scores(found)
    total = Score()
    for fault, score in sorted(table.items()):
        print(f"{fault:36} {score.right:4} of {score.of:4}   wrong likely {score.wrong_likely}")
        for miss in score.misses if told.misses else ():
            print("    ", miss)
        total.right, total.of = total.right + score.right, total.of + score.of
        total.wrong_likely += score.wrong_likely
    p2p = [is_right(incident, diagnosis_of(incident.dumps))[0] for incident in found if incident.has_p2p]
    print(f"{'all':36} {total.right:4} of {total.of:4}   wrong likely {total.wrong_likely}")
    print(f"{'with point-to-point':36} {sum(p2p):4} of {len(p2p):4}")
    print(f"simulated in {simulated - began:.1f} s, judged in {time.process_time() - simulated:.1f} s (twice p2p)")


if __name__ == "__main__":
    main()
