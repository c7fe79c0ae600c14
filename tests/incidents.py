"""Incidents as they are recorded, of any number of ranks: deep stacks, many collectives, hosts, workers, loaders."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from lightning_ncclsafe.facts import (
    Action,
    Collective,
    DataFacts,
    DirectoryFacts,
    Frame,
    Group,
    HostFacts,
    Incident,
    IncidentKind,
    JobFacts,
    LoaderFacts,
    Phase,
    PreflightFacts,
    ProcessFacts,
    Progress,
    RankFacts,
    RecordFacts,
    SamplerFacts,
    StorageFacts,
)
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

SITE = "/opt/conda/lib/python3.12/site-packages"
S = 1_000_000_000
NOW_NS = 1_795_278_881_000_000_000
PER_HOST = 8
STALL_S = 41.0
CALLS = 64

LIGHTNING = ("trainer/trainer.py", "trainer/call.py", "loops/fit_loop.py", "loops/training_epoch_loop.py")
MAIN = (
    Frame(file="/home/me/project/train.py", line=142, function="<module>", code="main()", user=True),
    Frame(file="/home/me/project/train.py", line=131, function="main", code="trainer.fit(model, data)", user=True),
)
RUN = tuple(
    Frame(file=f"{SITE}/lightning/pytorch/{file}", line=100 + number, function=function, code="return fn(*args)")
    for file in LIGHTNING
    for number, function in enumerate(("_run", "advance", "run", "_call_and_handle_interrupt"))
)
EVALUATE = (
    Frame(
        file="/home/me/project/model.py",
        line=70,
        function="on_train_epoch_end",
        code="self.evaluate()",
        user=True,
        rank_condition="if self.trainer.is_global_zero:  (line 69)",
    ),
    Frame(file="/home/me/project/model.py", line=93, function="evaluate", code="score = self.score(image)", user=True),
)
WAIT = tuple(
    Frame(file=f"{SITE}/torch/{file}", line=line, function=function, code=code)
    for file, line, function, code in (
        ("autograd/graph.py", 850, "_engine_run_backward", "return Variable._execution_engine.run_backward("),
        ("distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
        ("distributed/distributed_c10d.py", 3256, "all_reduce", "work.wait()"),
    )
)


def rank_facts(rank: int, *, world: int = 2, late: int = 0) -> RankFacts:
    """One rank: the late one evaluates, the others wait for it in the gradients of the next step."""
    is_late = rank == late
    done = 345
    last = done if is_late else done + 1
    idle_s = STALL_S + rank % 5 / 10
    action = "[LightningModule]Net.on_train_epoch_end" if is_late else "[Strategy]SafeDDP.backward"
    return RankFacts(
        rank=rank,
        local_rank=rank % PER_HOST,
        host=f"node-{rank // PER_HOST:03d}",
        pid=4_000 + rank,
        taken_ns=NOW_NS + rank * 1_000_000,
        progress=Progress(
            phase=Phase.TRAIN,
            actions=(
                Action(name="run_training_epoch", for_s=STALL_S + 300),
                Action(name="run_training_batch", for_s=STALL_S + 0.1),
                Action(name=action, for_s=idle_s),
            ),
            epoch=1,
            batch_idx=118,
            global_step=1_234,
            idle_s=idle_s,
        ),
        stack=(*MAIN, *RUN, *(EVALUATE if is_late else WAIT)),
        groups=(
            Group(
                name="0",
                description="default_pg",
                ranks=tuple(range(world)),
                last_enqueued=last,
                last_completed=done,
            ),
        ),
        collectives=tuple(_call(seq, rank, done) for seq in range(done - CALLS + 2, last + 1)),
        host_facts=HostFacts(
            rss_bytes=3_000_000_000 + rank * 1_000_000,
            memory_total_bytes=1_000_000_000_000,
            memory_available_bytes=700_000_000_000 - rank,
            swap_total_bytes=0,
            cores=64,
            load_1min=12.5 + rank % 8,
        ),
        workers=tuple(ProcessFacts(pid=90_000 + rank * 8 + n, state="sleeping", cpu_s=12.25) for n in range(4)),
        loaders=(
            LoaderFacts(name="train_dataloader", loader="DataLoader", dataset="Images", num_workers=4, batches=400),
        ),
        storage=(StorageFacts(owner="ModelCheckpoint", path="/scratch/run", filesystem="lustre"),),
        versions={"torch": "2.13.0", "nccl": "2.28.9"},
    )


def _call(seq: int, rank: int, done: int) -> Collective:
    return Collective(
        group="0",
        seq=seq,
        op="all_reduce",
        backend="gloo",
        completed=seq <= done,
        input_sizes=((25_557_032,),),
        dtypes=("Float",),
        created_ns=NOW_NS - round(STALL_S * S) - (done - seq) * S // 4 + rank * 1_000,
        timeout_ms=1_800_000,
    )


def job_of(world: int, *, late: int = 0, silent: tuple[int, ...] = ()) -> JobFacts:
    """A job in which one rank evaluates alone, and some may not answer."""
    return JobFacts(
        incident=Incident(
            number=1,
            kind=IncidentKind.SUSPECT,
            opened_by=1,
            opened_ns=NOW_NS,
            idle_s=STALL_S,
            suspect_after_s=20.0,
            timeout_s=1_800.0,
        ),
        world_size=world,
        ranks=tuple(rank_facts(rank, world=world, late=late) for rank in range(world) if rank not in silent),
        witnessed=tuple(ProcessFacts(pid=4_000 + rank, rank=rank, state="stopped") for rank in silent),
    )


def incident_of(world: int, *, late: int = 0, silent: tuple[int, ...] = ()) -> Diagnosis:
    """The same, judged."""
    return judge(job_of(world, late=late, silent=silent))


def all_different(world: int) -> Diagnosis:
    """No two ranks stand at the same line."""
    base = job_of(world)
    ranks = tuple(
        replace(facts, stack=(*facts.stack, replace(EVALUATE[1], line=1_000 + facts.rank))) for facts in base.ranks
    )
    return judge(replace(base, ranks=ranks))


def of_kind(kind: IncidentKind, ranks: tuple[RankFacts, ...]) -> JobFacts:
    """A comparison before training."""
    return JobFacts(
        incident=Incident(number=2, kind=kind, opened_by=0, opened_ns=NOW_NS), world_size=len(ranks), ranks=ranks
    )


def data_incident(world: int) -> Diagnosis:
    """Ranks whose shares of the data are not equal: one of them has drawn another split."""

    def loader(rank: int) -> LoaderFacts:
        samples = 40_000 if rank != 1 else 39_000
        sampler = SamplerFacts(name="DistributedSampler", replicas=world, rank=rank, seed=0, shuffle=True)
        return LoaderFacts(
            name="train_dataloader",
            datasets=("Subset", "ImageFolder"),
            batches=samples // 32,
            samples=samples,
            sampler=sampler,
        )

    ranks = (
        replace(
            rank_facts(rank, world=world),
            data=DataFacts(stage="train_dataloader", loaders=(loader(rank),), data_rank=rank, data_ranks=world),
        )
        for rank in range(world)
    )
    return judge(of_kind(IncidentKind.DATA, tuple(ranks)), AGREEMENT_RULES)


def preflight_incident(world: int) -> Diagnosis:
    """Hosts, one of which has another torch and no directory for logs."""

    def checked(rank: int) -> PreflightFacts:
        problem = "Permission denied" if rank == 1 else ""
        return PreflightFacts(
            directories=(DirectoryFacts(role="logs", path="/scratch/logs", filesystem="nfs4", problem=problem),),
            versions={"torch": "2.12.0" if rank == 1 else "2.13.0"},
            took_s=0.5,
        )

    ranks = (replace(rank_facts(rank, world=world), preflight=checked(rank)) for rank in range(world))
    return judge(of_kind(IncidentKind.PREFLIGHT, tuple(ranks)), PREFLIGHT_RULES)


def recorded_incident(world: int) -> Diagnosis:
    """What dumps of the same ranks would say: their collectives and nothing else, and not when that was."""
    base = job_of(world)
    ranks = (
        RankFacts(
            rank=facts.rank,
            progress=Progress(phase=Phase.UNKNOWN),
            groups=facts.groups,
            collectives=facts.collectives,
            record=RecordFacts(has_dump=True),
        )
        for facts in base.ranks
    )
    incident = replace(base.incident, kind=IncidentKind.RECORDED)
    return judge(replace(base, incident=incident, ranks=tuple(ranks)), RECORDED_RULES)


MARKUP = (
    "</style></title><script>pwned = 1</script><img src=x onerror='pwned = 1'>]]>--><a href=\"javascript:pwned\">&amp;"
)
ESCAPES = "\x00\x07\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\u061c\u2028\ud800\r\n"
HOSTILE = f"{MARKUP}{ESCAPES}`{{{{ 7 * 7 }}}}{{% raw %}}"


def before_training(
    kind: IncidentKind,
    world: int,
    told: Callable[[int], Mapping[str, Any]],
    *,
    per_host: int = PER_HOST,
    silent: tuple[int, ...] = (),
    **more: Any,
) -> JobFacts:
    """A job before its first step, in which each rank has told something, but for the silent ones."""
    ranks = tuple(
        RankFacts(rank=rank, host=f"node-{rank // per_host}", progress=Progress(phase=Phase.INIT), **told(rank))
        for rank in range(world)
        if rank not in silent
    )
    return JobFacts(incident=Incident(number=1, kind=kind, opened_by=0), world_size=world, ranks=ranks, **more)


def poisoned(facts: Any, text: str = HOSTILE) -> Any:
    """The same facts, or findings, with this text in the place of every text in them."""
    if isinstance(facts, str) and not isinstance(facts, Enum):
        return text
    if isinstance(facts, tuple):
        return tuple(poisoned(item, text) for item in facts)
    if isinstance(facts, dict):
        return {f"{text}{number}": poisoned(item, text) for number, item in enumerate(facts.values())}
    if not is_dataclass(facts) or isinstance(facts, type):
        return facts
    changed = {field.name: poisoned(getattr(facts, field.name), text) for field in fields(facts)}
    return replace(facts, **changed)
