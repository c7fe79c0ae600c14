"""The cause different-data: data that a sampler splits among ranks is not the same on all of them."""

from collections.abc import Callable, Iterator

from lightning_ncclsafe.rules.agreement.different_datasets import unlike
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.agreement.unequal_samples import OWN_SHARDS
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Differences,
    Finding,
    JobData,
    JobLoader,
    Severity,
    agreement_rule,
    deviating,
    disagreement,
    grouped,
    joined,
    spread,
    told,
)

# What comes out of a loader is a rank's own share, also where the data is the same on all ranks; so is the place where
# it keeps its copy.
_OWN = ("first batches", "paths")
_SOURCES = ("files", "names", "values")
_REMEDY = (
    "Let every rank hold the same data in the same order: call seed_everything(seed) before any split, give a split's "
    f"own generator a fixed seed, and sort lists of files. {OWN_SHARDS}"
)
_AUGMENTATION = (
    "An augmentation that depends on the rank looks the same; if these samples are meant to differ, there is nothing "
    "to do."
)


@agreement_rule(after="unequal-samples")
def different_data(view: JobData) -> Iterator[Finding]:
    """A sampler splits the data among ranks, and these do not hold the same data although it has the same size.

    Symptom:
        Nothing hangs: training samples leak into validation, some are read by several ranks and others by none.

    Cause:
        Every rank split its data by itself, without a common seed; or lists files in another order.

    Remedy:
        Seed every split alike and sort lists of files.

    Cannot see:
        Data of which no fingerprint could be had on all ranks.
    """
    for loader in view.loaders:
        if loader.replicated and not loader.unequal_samples and not unlike(loader):
            found = _differing(loader)
            if found:
                yield _finding(view, loader, found)


def _differing(loader: JobLoader) -> Differences:
    """The kinds that differ. Items of one and the same data differ only by what is done to them after reading."""
    all_kinds = {kind: grouped(_prints(loader, kind)) for kind in loader.kinds if kind not in _OWN}
    same_source = any(kind in all_kinds and not all_kinds[kind].differ for kind in _SOURCES)
    found: Differences = {kind: groups for kind, groups in all_kinds.items() if groups.differ}
    return {} if same_source and set(found) == {"items"} else found


def _prints(loader: JobLoader, kind: str) -> dict[int, object]:
    return {rank: facts.fingerprints[kind] for rank, facts in loader.facts.items()}


def _finding(view: JobData, loader: JobLoader, found: Differences) -> Finding:
    only_items = set(found) == {"items"}
    listed = "; ".join(f"fingerprint of {kind}: {spread(groups, _short)}" for kind, groups in found.items())
    text = f"The {loader.name}'s data is split among ranks by a sampler and is not the same on all of them ({listed})."
    return disagreement(
        deviating(found.values()),
        joined((text, "" if only_items else reason(view, loader))),
        severity=Severity.WARNING if only_items else Severity.ERROR,
        confidence=Confidence.LIKELY if only_items else Confidence.CERTAIN,
        evidence=tuple(item for kind, groups in found.items() for item in told(groups, _words(kind))),
        remedy=joined((_REMEDY, _AUGMENTATION if only_items else "")),
    )


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:8]


def _words(kind: str) -> Callable[[object], str]:
    return lambda fingerprint: f"fingerprint of {kind} {_short(fingerprint)}"
