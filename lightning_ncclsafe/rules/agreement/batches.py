"""How many batches ranks have, when the Trainer would end an epoch or validate, and whether they may train anyway."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.agreement.contents import differing_classes, peer_differences
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.agreement.settings import setting_errors
from lightning_ncclsafe.rules.agreement.shares import sampler_errors
from lightning_ncclsafe.rules.kit import (
    HOW_DATA_DIFFERS,
    LISTED,
    TRAIN,
    Evidence,
    Finding,
    Groups,
    Hangs,
    JobData,
    JobLoader,
    Plan,
    Questions,
    Severity,
    agreement_rule,
    clause,
    count_words,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    epoch_batches,
    grouped,
    joined,
    ranks_words,
    spread_words,
    value_evidence,
)

_BATCHES = count_words("batch")
_POLICIES = {
    "stop_together": "With on_uneven='stop_together' all ranks stop when the first one runs out, after {least:,}.",
    "repeat": "With on_uneven='repeat' the ranks that run out restart their data until all have had {most:,}.",
}


_OR_STOP = (
    " If that is not possible, callbacks=[DatasetAgreement(on_uneven='stop_together')] in the Trainer ends each epoch "
    "on all ranks with the first that runs out, and on_uneven='repeat' with the last."
)
_REMEDY = (
    "Give every rank the same number of batches: seed every split alike, pack and filter before sharding, cut or pad "
    "shards to one length, or use the same number of loader workers." + _OR_STOP
)
_REMEDY_ENDED = (
    "Give every rank the same number of batches: deal out samples so that all ranks have equally many, cut or repeat "
    "each rank's share to one length (itertools.islice with a number that all ranks have), and pack and filter before "
    "sharding." + _OR_STOP
)


@agreement_rule(after="loader-settings", remedy=_REMEDY, plan=Plan.STOP, hangs=Hangs.IF_UNEVEN, is_of_data=True)
def uneven_batches(view: JobData) -> Iterator[Finding]:
    """A loader has different numbers of batches on different ranks, or has ended on some of them only.

    Symptom:
        The run hangs at the end of an epoch, or "when saving": the ranks that have more batches wait for those that
        are done. Or ranks drift apart by an epoch.

    Cause:
        Splits without a common seed, packing or filtering after sharding, uneven shards of an IterableDataset, samples
        that are dropped while they are read.

    Remedy:
        Give every rank the same number of batches, or set a policy for uneven data.

    Cannot see:
        How many batches data of unknown length has: only that it has ended on some ranks.
    """
    for loader in view.loaders:
        ended = tuple(rank for rank, facts in loader.facts.items() if facts.ended)
        if ended and len(ended) < len(loader.facts):
            yield _ended_unevenly(view, loader, ended)
        elif not view.runs_independently and is_uneven(loader) and not _is_explained(view, loader):
            yield _different_batches(view, loader)


def is_uneven(loader: JobLoader) -> bool:
    """Whether the number of batches is known on all ranks and differs."""
    return loader.batches.differ and all(count is not None for count, _ in loader.batches.parts)


def _ends_unevenly(view: JobData, loader: JobLoader) -> bool:
    """Whether ranks would run out of a loader's data at different batches and then wait for each other."""
    if view.runs_independently or not is_uneven(loader):
        return False
    return bool(_empty(view, loader)) or (view.policy not in _POLICIES and view.by(epoch_batches).differ)


def _is_explained(view: JobData, loader: JobLoader) -> bool:
    """Whether another finding names the cause of these numbers."""
    if differing_classes(loader) or loader.unequal_samples or peer_differences(view, loader) or _is_limited(loader):
        return True
    return not loader.samples.differ and bool(setting_errors(view, loader) or sampler_errors(loader))


def _empty(view: JobData, loader: JobLoader) -> tuple[int, ...]:
    """The ranks without data, which cannot restart it under ``on_uneven="repeat"``."""
    return tuple(rank for rank, facts in loader.facts.items() if view.policy == "repeat" and not facts.batches)


def _different_batches(view: JobData, loader: JobLoader) -> Finding:
    counts = spread_words(loader.batches, _BATCHES)
    text = f"The {loader.name} differs in the number of batches between ranks: {counts}."
    return _uneven(view, loader, text, reason(view, loader))


def _uneven(view: JobData, loader: JobLoader, text: str, why: str = "") -> Finding:
    """The finding that numbers of batches differ: an error where ranks would then wait for each other."""
    empty = _empty(view, loader)
    harmless = not _ends_unevenly(view, loader)
    policy = _nothing_to_repeat(empty) if empty else _harmless(view, loader) if harmless else ""
    return disagreement(
        loader.batches.deviating,
        joined((text, policy, why)),
        severity=Severity.WARNING if harmless else Severity.ERROR,
        evidence=value_evidence(loader.batches, _BATCHES),
    )


def _nothing_to_repeat(empty: tuple[int, ...]) -> str:
    return f"With on_uneven='repeat' {clause(empty, 'has|have nothing to repeat')}."


def _harmless(view: JobData, loader: JobLoader) -> str:
    if view.policy in _POLICIES:
        counts = [count for count, _ in loader.batches.parts if count is not None]
        return _POLICIES[view.policy].format(least=min(counts), most=max(counts))
    return f"As loaders are combined in mode {next(iter(view.data.values())).mode!r}, all ranks still end together."


_END_POLICIES = {
    "raise": "All ranks stop here.",
    "stop_together": "With on_uneven='stop_together' this pass over the data ends here for all of them.",
    "repeat": "With on_uneven='repeat' the short ones restart their data until the longest has ended.",
}


def _ended_unevenly(view: JobData, loader: JobLoader, ended: tuple[int, ...]) -> Finding:
    others = tuple(rank for rank in loader.facts if rank not in set(ended))
    text = (
        f"The {loader.name} has ended on {ranks_words(ended)} after {_counts(loader, ended)} batches, while "
        f"{clause(others, 'has|have had')} {_counts(loader, others)} and may have more."
    )
    return disagreement(
        _odd_ones(loader, ended, others) if view.policy == "raise" else ended,
        joined((text, _END_POLICIES.get(view.policy, ""))),
        severity=Severity.ERROR if view.policy == "raise" else Severity.WARNING,
        evidence=tuple(_evidence(loader, rank) for rank in [*ended, *others][:LISTED]),
        remedy=_REMEDY_ENDED,
    )


def _odd_ones(loader: JobLoader, ended: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that have ended; or the others, if most have ended after equally many batches."""
    is_alike = len({loader.facts[rank].read for rank in ended}) == 1
    return others if is_alike and len(ended) > len(others) else ended


def _counts(loader: JobLoader, ranks: tuple[int, ...]) -> str:
    counts = sorted({loader.facts[rank].read or 0 for rank in ranks})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _evidence(loader: JobLoader, rank: int) -> Evidence:
    facts = loader.facts[rank]
    return Evidence(
        source="loader",
        rank=rank,
        text=f"Has had {facts.read or 0:,} batches{' and has no more' if facts.ended else ' so far'}.",
    )


# Settings that decide which loaders come next.
_DECIDE_STAGES = {
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "num_sanity_val_steps",
    "overfit_batches",
    "reload_dataloaders_every_n_epochs",
}


@agreement_rule(
    remedy=(
        "Give the Trainer the same arguments on all ranks: look for what each rank computes for itself, from a clock, "
        "the host's name, its memory, its environment or a file that only this rank reads. A fractional "
        "val_check_interval is a share of each rank's own number of training batches."
    ),
    plan=Plan.STOP,
    hangs=Hangs.LATER,
)
def different_trainer_settings(view: JobData) -> Iterator[Finding]:
    """The Trainer would end an epoch, validate, or start its first stage differently on some ranks.

    Symptom:
        One rank validates or has ended its epoch while the others train, and all wait for each other.

    Cause:
        limit_*_batches, num_sanity_val_steps, fast_dev_run or val_check_interval that each rank computes for itself.

    Remedy:
        Pass the same arguments to the Trainer on all ranks.

    Cannot see:
        Settings that do not change the next stage or its batches; validation by the clock, and fractions of loaders
        without a length.
    """
    if view.stages.differ:
        yield from _different_stages(view)
    for loader in view.loaders if not view.runs_independently else ():
        if _is_limited(loader):
            yield _different_limits(view, loader)
    if (steps := _differing_steps(view)) is not None:
        yield _different_steps(steps)


def differing_settings(view: JobData) -> tuple[str, ...]:
    """The Trainer's settings that differ between ranks."""
    settings = [data.settings for data in view.data.values()]
    names = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if len({each.get(name) for each in settings}) > 1]
    if _differing_steps(view) is not None:
        differing.append("val_check_interval")
    return tuple(dict.fromkeys(differing))


def _different_stages(view: JobData) -> Iterator[Finding]:
    settings = {rank: data.settings for rank, data in view.data.items()}
    names = dict.fromkeys(name for each in settings.values() for name in each if name in _DECIDE_STAGES)
    ask: Questions[dict[str, str]] = {name: lambda each, name=name: each.get(name, "") for name in names}  # type: ignore[misc]
    if differing := differences(settings, ask):
        yield disagreement(
            deviating(differing.values()),
            f"The Trainer's {differing_words(differing)}, so ranks start with different loaders: "
            f"{spread_words(view.stages)}.",
            evidence=differing_evidence(differing),
        )


def _is_limited(loader: JobLoader) -> bool:
    """Whether the numbers of batches differ only because the Trainer's limits do."""
    return is_uneven(loader) and _limits(loader).differ and not loader.by(lambda facts: facts.length).differ


def _limits(loader: JobLoader) -> Groups[str]:
    name = _limit_name(loader)
    return grouped({rank: data.settings.get(name, "") for rank, data in loader.data.items()})


def _limit_name(loader: JobLoader) -> str:
    return f"limit_{next(iter(loader.data.values())).stage.partition('_')[0]}_batches"


def _different_limits(view: JobData, loader: JobLoader) -> Finding:
    return _uneven(
        view,
        loader,
        f"The Trainer's {_limit_name(loader)} is {spread_words(_limits(loader))} (fast_dev_run and overfit_batches "
        f"set it, too), so the {loader.name} would end after {spread_words(loader.batches, _BATCHES)}.",
    )


def _differing_steps(view: JobData) -> Groups[int | None] | None:
    """After how many batches each rank validates, if that differs by itself."""
    steps = view.by(lambda data: data.val_check_batch)
    return steps if view.stage == TRAIN and steps.differ and not _follow_from_loaders(view) else None


def _follow_from_loaders(view: JobData) -> bool:
    """Whether validation steps differ only because the loaders do, which other findings report."""
    if view.by(lambda data: (data.stage, len(data.loaders), data.mode)).differ:
        return True
    # With a policy for uneven data, ranks train with an agreed length, and Lightning computes the step from that
    # length.
    return any(loader.batches.differ for loader in view.loaders)


def _different_steps(steps: Groups[int | None]) -> Finding:
    return disagreement(
        steps.deviating,
        f"Ranks would begin validation after different numbers of training batches: {spread_words(steps, _BATCHES)}.",
        evidence=value_evidence(steps, _BATCHES),
    )


_WAY = "To train anyway: Trainer(callbacks=[DatasetAgreement({options})])."


def is_refused(finding: Finding, job: JobFacts) -> bool:
    """Whether ranks refuse to start with this finding."""
    hangs = HOW_DATA_DIFFERS[finding.rule].hangs
    if hangs is Hangs.AT_ONCE:
        return True
    wanted = {facts.data.on_mismatch for facts in job.ranks if facts.data is not None}
    if finding.severity is not Severity.ERROR or wanted == {"warn"}:
        return False
    return "raise" in wanted or hangs is not Hangs.NO or _any_ends_unevenly(job)


def way_on(findings: tuple[Finding, ...], job: JobFacts) -> str:
    """How to train anyway, as a sentence; empty if that is impossible."""
    errors = {HOW_DATA_DIFFERS[finding.rule].hangs for finding in findings if finding.severity is Severity.ERROR}
    if errors & {Hangs.AT_ONCE, Hangs.LATER}:
        return ""
    uneven = Hangs.IF_UNEVEN in errors or _any_ends_unevenly(job)
    return _WAY.format(options='on_mismatch="warn"' + (', on_uneven="stop_together"' if uneven else ""))


def _any_ends_unevenly(job: JobFacts) -> bool:
    view = JobData(job)
    return any(_ends_unevenly(view, loader) for loader in view.loaders)
