"""What ranks have compared before they train, while nobody waits, in words."""

from lightning_ncclsafe.facts import IncidentKind, JobFacts

_NOTHING = {
    IncidentKind.DATA: "Nothing found: the ranks' data agrees.",
    IncidentKind.PREFLIGHT: "Nothing found: nothing is wrong with the ranks' hosts.",
}


def compares(job: JobFacts) -> bool:
    """Whether ranks were asked in order to be compared, and not because something is wrong."""
    return job.incident.kind in _NOTHING


def nothing_words(job: JobFacts) -> str:
    """The answer where nothing was found."""
    return _NOTHING[job.incident.kind]


def compared_words(job: JobFacts) -> str:
    """``"all 4 ranks presented their train_dataloader"``, ``"3 of 4 ranks checked their hosts"``."""
    if job.incident.kind is IncidentKind.PREFLIGHT:
        checked = sum(facts.preflight is not None for facts in job.ranks)
        return _words(checked, job.world_size, "checked its host", "checked their hosts")
    stages = [facts.data.stage for facts in job.ranks if facts.data is not None]
    what = max(stages, key=stages.count, default="data")
    return _words(len(stages), job.world_size, f"presented its {what}", f"presented their {what}")


def _words(done: int, world_size: int, one: str, many: str) -> str:
    if done < world_size:
        return f"{done} of {world_size} ranks {many}"
    return f"the only rank {one}" if done == 1 else f"all {done} ranks {many}"
