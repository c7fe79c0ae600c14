"""Diagnoses that the report tests share: written out by hand, so that no rule is needed to test a rendering."""

from dataclasses import replace

from lightning_ncclsafe.facts import (
    Action,
    Frame,
    Incident,
    IncidentKind,
    JobFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Evidence, Finding

EVALUATE = Frame(file="/home/me/train.py", line=73, function="evaluate", code="score(x)", user=True)
BROADCAST = Frame(file="/venv/site-packages/torch/distributed/distributed_c10d.py", line=3150, function="broadcast")

FINDING = Finding(
    rule="rank-zero-only-work",
    confidence=Confidence.CERTAIN,
    summary="Rank 0 is working alone in Net.on_train_epoch_end at train.py:73 in evaluate, for 41 s.",
    ranks=(0,),
    location="/home/me/train.py:73 in evaluate",
    evidence=(
        Evidence(source="source code", rank=0, text="if trainer.is_global_zero encloses line 73."),
        Evidence(source="stack", rank=0, text="Is in user code."),
        Evidence(source="stack", rank=1, text="Is in a collective."),
        Evidence(source="flight recorder", text="Ranks 1-3 wait in sequence number 61."),
    ),
    remedy="Share this work among all ranks.",
)


def facts(rank: int) -> RankFacts:
    actions = (Action(name="[LightningModule]Net.on_train_epoch_end", for_s=41.0),) if rank == 0 else ()
    progress = Progress(phase=Phase.TRAIN, actions=actions, epoch=2, batch_idx=118, idle_s=20.0 + rank % 7)
    return RankFacts(
        rank=rank, progress=progress, stack=(EVALUATE if rank == 0 else BROADCAST,), host=f"node-{rank // 8}"
    )


def diagnosis(world: int = 4, silent: tuple[int, ...] = (3,)) -> Diagnosis:
    incident = Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=1, idle_s=23, suspect_after_s=20, timeout_s=1800)
    ranks = tuple(facts(rank) for rank in range(world) if rank not in silent)
    seen = tuple(ProcessFacts(pid=4000 + rank, rank=rank, state="stopped") for rank in silent)
    job = JobFacts(incident=incident, world_size=world, ranks=ranks, witnessed=seen)
    return Diagnosis(job=job, findings=(FINDING,), unanswered=("Rank 3 did not answer.",))


def with_first(**changes: object) -> Diagnosis:
    """The same diagnosis with some of the first finding's fields replaced."""
    base = diagnosis()
    return replace(base, findings=(replace(base.findings[0], **changes),))  # type: ignore[arg-type]
