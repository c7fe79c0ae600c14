"""Every cause of ranks that disagree about their data: found with its ranks, alone, and not in what is healthy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from effort import calls_in
from presented_builders import (
    own_loader,
    presenting,
    split_loader,
    states,
    stream_loader,
    with_data,
    with_loader,
    with_sampler,
)

from lightning_ncclsafe.facts import JobFacts, LoaderFacts, ProcessFacts, RoundedArray, RoundedValues, SamplerFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.agreement.batches import is_refused, way_on
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.rule import SECTIONS, Rule

ERROR, WARNING = Severity.ERROR, Severity.WARNING
NO_SAMPLER = SamplerFacts(name="Mine")
RANDOM = SamplerFacts(name="RandomSampler", order="random")
LISTED = SamplerFacts(name="list", order="listed")
OWN = {"sampler": SamplerFacts(name="SequentialSampler", order="sequential")}
SAME = {"files": "same", "values": "same"}
PREDICTION = {"stage": "predict_dataloader", "val_check_batch": None, "mode": "sequential"}
VALIDATION = {"stage": "val_dataloader", "val_check_batch": None, "mode": "sequential"}


def found(job: JobFacts) -> tuple[Finding, ...]:
    diagnosis = judge(job, AGREEMENT_RULES)
    assert not diagnosis.unanswered
    return diagnosis.findings


@dataclass(frozen=True)
class Scene:
    """What ranks present, and all that has to be found, with words that have to be in the first answer."""

    name: str
    job: JobFacts
    rule: str
    ranks: tuple[int, ...]
    says: tuple[str, ...] = ()
    severity: Severity = ERROR


SHARED = presenting(4, split_loader)
OWNED = presenting(4, own_loader)
STREAMED = presenting(4, stream_loader)


def pairs(job: JobFacts) -> JobFacts:
    """The same ranks as tensor-parallel peers, two by two."""
    return with_data(job, data_rank=lambda rank: rank // 2, data_ranks=2)


def rounded(rank: int, shard: int = 0) -> RoundedValues:
    """What shows that ranks have the same values of a shard but for rounding."""
    return RoundedValues(rest="", arrays=(RoundedArray(numbers=(shard + rank * 1e-7, 0.5), bounds=(1e-5, 1e-5)),))


PEERS = pairs(with_loader(OWNED, fingerprints=lambda rank: {"values": str(rank // 2), "paths": str(rank)}))


def uneven(job: JobFacts, *ranks: int, count: int = 22, **more: object) -> JobFacts:
    """Other lengths on some ranks, with what Lightning makes of them for validation."""
    changed = with_loader(job, *ranks, length=count, batches=count, **more)
    return with_data(changed, *ranks, val_check_batch=count)


def two_validation_loaders(world: int = 4) -> JobFacts:
    named = (lambda rank, world, name=f"val_dataloader[{i}]": own_loader(rank, world, name=name) for i in (0, 1))
    return presenting(world, *named, **VALIDATION)


def first_only(job: JobFacts, *ranks: int) -> JobFacts:
    loaders: Callable[[int], tuple[LoaderFacts, ...]] = lambda rank: job.ranks[rank].data.loaders[:1]  # type: ignore[union-attr] # noqa: E731
    return with_data(job, *ranks, loaders=loaders)


def indices(rank: int) -> dict[str, str]:
    return {"indices": f"{rank:012x}"}


def on_hosts(job: JobFacts, size: int) -> JobFacts:
    """The same on hosts of so many ranks each."""
    return replace(job, ranks=tuple(replace(facts, host=f"node-{facts.rank // size}") for facts in job.ranks))


def halves(rank: Callable[[int], int] = lambda rank: rank % 2, **more: object) -> JobFacts:
    """Four ranks with samplers for two."""
    return with_loader(with_sampler(SHARED, replicas=2, rank=rank), **more)


def ended(*counts: int, shortest: int, on_uneven: str = "raise") -> JobFacts:
    """How far each rank has come when the first one has no more."""
    job = with_data(presenting(len(counts), stream_loader), *range(len(counts)), on_uneven=on_uneven)
    for rank, count in enumerate(counts):
        job = with_loader(job, rank, read=count, ended=count == shortest, length=None, batches=None)
    return job


SCENES = (
    Scene(
        "one rank's stream has ended",
        ended(41, 41, 40, shortest=40),
        "uneven-batches",
        (2,),
        ("The train_dataloader has ended on rank 2 after 40 batches, while ranks 0-1 have had 41 and may have more.",),
    ),
    Scene(
        "all streams but one have ended after as many batches",
        ended(7, 7, 8, shortest=7),
        "uneven-batches",
        (2,),
        ("has ended on ranks 0-1 after 7 batches, while rank 2 has had 8",),
    ),
    Scene(
        "as many streams have ended as go on",
        ended(7, 8, shortest=7),
        "uneven-batches",
        (0,),
        ("has ended on rank 0 after 7 batches, while rank 1 has had 8",),
    ),
    Scene(
        "all streams but one have ended, and that is allowed",
        ended(7, 7, 8, shortest=7, on_uneven="repeat"),
        "uneven-batches",
        (0, 1),
        ("has ended on ranks 0-1 after 7 batches, while rank 2 has had 8", "the short ones restart their data"),
        WARNING,
    ),
    Scene(
        "one rank's stream has ended, and so does the epoch",
        ended(1, 0, shortest=0, on_uneven="stop_together"),
        "uneven-batches",
        (1,),
        ("ends here for all of them",),
        WARNING,
    ),
    Scene(
        "a peer holds other data",
        with_loader(PEERS, 3, fingerprints={"values": "other"}),
        "different-peers",
        (2, 3),
        ("fingerprint of values is 1 on rank 2 but other on rank 3",),
    ),
    Scene(
        "peers of whom no sampler splits anything hold different data",
        with_data(
            with_sampler(with_loader(SHARED, 1, fingerprints={"indices": "other"}), replicas=1, rank=0),
            data_rank=0,
            data_ranks=1,
        ),
        "different-peers",
        (1,),
        ("of data-parallel rank 0 the fingerprint of indices is a1b2c3d4 on ranks 0, 2-3 but other on rank 1",),
    ),
    Scene(
        "a peer draws another order",
        with_data(with_loader(PEERS, sampler=RANDOM), random=lambda rank: states(min(rank, 1), differ="torch")),
        "different-peers",
        (0, 1),
        ("of data-parallel rank 0 the random order is torch-0 on rank 0 but torch-1 on rank 1",),
    ),
    Scene(
        "a peer has read something else",
        with_loader(pairs(STREAMED), fingerprints=lambda rank: {"first batches": str(rank)}),
        "different-peers",
        (0, 1, 2, 3),
        ("fingerprint of first batches is 0 on rank 0 but 1 on rank 1",),
    ),
    Scene(
        "a peer has one batch more, which a policy cannot mend",
        with_data(uneven(PEERS, 1, count=21, samples=641), on_uneven="stop_together"),
        "different-peers",
        (0, 1),
        ("number of batches is 20 on rank 0 but 21 on rank 1", "The numbers of batches differ with that"),
    ),
    Scene(
        "uneven shares to predict with, for a model that is split among ranks",
        with_data(uneven(presenting(3, own_loader, **PREDICTION), 0, count=5), forward_communicates=True),
        "uneven-batches",
        (0,),
        ("5 batches on rank 0",),
    ),
    Scene(
        "one rank has one loader less",
        first_only(two_validation_loaders(), 3),
        "loader-count",
        (3,),
        ("the number of loaders in val_dataloader is 2 on ranks 0-2 but 1 on rank 3",),
    ),
    Scene(
        "one rank is in another stage",
        with_loader(with_data(SHARED, 1, **VALIDATION), 1, batches=5, length=5, samples=9),
        "loader-count",
        (1,),
        ("the stage is train_dataloader on ranks 0, 2-3 but val_dataloader on rank 1",),
    ),
    Scene(
        "one rank combines otherwise",
        with_data(SHARED, 2, mode="min_size"),
        "loader-count",
        (2,),
        ("mode in train_dataloader is max_size_cycle on ranks 0-1, 3 but min_size on rank 2",),
    ),
    Scene(
        "one rank is silent",
        presenting(4, split_loader, silent=(3,), witnessed=(ProcessFacts(pid=7, rank=3, state="stopped"),)),
        "unpresented-loader",
        (3,),
        ("Rank 3 never presented its train_dataloader, ranks 0-2 did.",),
    ),
    Scene(
        "all but one are silent",
        presenting(3, own_loader, silent=(0, 2), **VALIDATION),
        "unpresented-loader",
        (0, 2),
        ("Ranks 0, 2 never presented their val_dataloader, rank 1 did.",),
    ),
    Scene(
        "one rank has no length",
        with_loader(OWNED, 1, length=None, batches=None, samples=None, datasets=("Stream",), dataset="Stream"),
        "sized-and-unsized",
        (1,),
        ("a length (Subset) on ranks 0, 2-3 but no length (Stream) on rank 1",),
    ),
    Scene(
        "another class below",
        with_loader(SHARED, 2, datasets=("Subset", "FakeData"), fingerprints={"indices": "0"}),
        "different-datasets",
        (2,),
        ("dataset is Subset of ImageFolder on ranks 0-1, 3 but Subset of FakeData on rank 2",),
    ),
    Scene(
        "another class and size",
        uneven(with_loader(SHARED, 2, datasets=("FakeData",)), 2, samples=9),
        "different-datasets",
        (2,),
        ("20 batches on ranks 0-1, 3 but 22 batches on rank 2",),
    ),
    Scene(
        "another class and size of a rank's own data",
        uneven(with_loader(OWNED, 2, datasets=(), dataset="FakeData"), 2, samples=9),
        "different-datasets",
        (2,),
        ("FakeData on rank 2",),
    ),
    Scene(
        "another class of which nothing is below",
        with_loader(with_loader(OWNED, datasets=()), 1, dataset="FakeData"),
        "different-datasets",
        (1,),
        ("dataset is Subset on ranks 0, 2-3 but FakeData on rank 1",),
    ),
    Scene("another class of loader", with_loader(OWNED, 0, loader="Mine"), "different-datasets", (0,), ("loader is ",)),
    Scene("iterated on one", with_loader(STREAMED, 0, iterable=False), "different-datasets", (0,), ("iterable is ",)),
    Scene(
        "an unseeded split of other sizes",
        uneven(with_loader(SHARED, fingerprints=indices), 3, samples=2_816),
        "unequal-samples",
        (3,),
        (
            "2,560 samples on ranks 0-2 but 2,816 samples on rank 3",
            "20 batches on ranks 0-2 but 22 batches on rank 3",
            "so a filter or a file list probably depends on the rank or its host",
        ),
    ),
    Scene(
        "an unseeded split",
        with_data(with_loader(SHARED, fingerprints=indices), random=lambda rank: states(rank, drawn="numpy")),
        "different-data",
        (0, 1, 2, 3),
        (
            "fingerprint of indices: 00000000 on rank 0",
            "Numpy's random state differs between ranks and has been drawn from (torch's agrees): the split was "
            "probably drawn from numpy; call seed_everything(seed)",
        ),
    ),
    Scene(
        "files in another order",
        with_loader(with_loader(SHARED, fingerprints={"files": "same"}), 1, fingerprints={"files": "x", **indices(1)}),
        "different-data",
        (1,),
        ("(fingerprint of files: same on ranks 0, 2-3 but x on rank 1)",),
    ),
    Scene(
        "other indices into the same files",
        with_loader(SHARED, fingerprints=lambda rank: {"files": "same", **indices(rank)}),
        "different-data",
        (0, 1, 2, 3),
    ),
    Scene(
        "other items, same indices",
        with_loader(SHARED, fingerprints=lambda rank: {"items": str(rank), "indices": "same"}),
        "different-data",
        (0, 1, 2, 3),
        severity=WARNING,
    ),
    Scene(
        "other values and items",
        with_loader(SHARED, fingerprints=lambda rank: {"items": str(rank), "values": str(rank == 1)}),
        "different-data",
        (0, 1, 2, 3),
    ),
    Scene(
        "another class of sampler", with_sampler(SHARED, 1, name="Mine"), "sampler-disagreement", (1,), ("class is",)
    ),
    Scene(
        "another number of replicas",
        uneven(with_sampler(SHARED, 1, replicas=2), 1, count=40),
        "sampler-disagreement",
        (1,),
        ("replicas is 4 on ranks 0, 2-3 but 2 on rank 1", "20 batches on ranks 0, 2-3 but 40 batches on rank 1"),
    ),
    Scene(
        "another seed",
        with_sampler(SHARED, 2, seed=1_234),
        "sampler-disagreement",
        (2,),
        ("seed is 0 on ranks 0-1, 3 but 1234 on rank 2",),
    ),
    Scene("another epoch", with_sampler(SHARED, 2, epoch=1), "sampler-disagreement", (2,), ("epoch is ",)),
    Scene("shuffles alone", with_sampler(SHARED, 2, shuffle=False), "sampler-disagreement", (2,), ("shuffle is ",)),
    Scene("drops alone", with_sampler(SHARED, 2, drop_last=True), "sampler-disagreement", (2,), ("drop_last is ",)),
    Scene("no sampler on one", with_loader(SHARED, 2, sampler=None), "sampler-disagreement", (2,), ("none on rank 2",)),
    Scene(
        "no sampler that splits on two",
        with_loader(with_loader(SHARED, fingerprints=SAME), 2, 3, **OWN),
        "sampler-disagreement",
        (0, 1, 2, 3),
        ("class is DistributedSampler on ranks 0-1 but SequentialSampler on ranks 2-3",),
    ),
    Scene("a negative share", with_sampler(SHARED, 0, rank=-1), "sampler-disagreement", (0,), ("does not exist",)),
    Scene(
        "replicas of two among four",
        halves(rank=lambda rank: rank // 2, fingerprints={"values": "same"}),
        "sampler-disagreement",
        (0, 1, 2, 3),
        ("it splits the data among 2 replicas where 4 ranks read data", "ranks 0-1 take share 0, ranks 2-3 take"),
    ),
    Scene(
        "replicas of two among four of one host that have the same files",
        halves(fingerprints={"paths": "same"}),
        "sampler-disagreement",
        (0, 1, 2, 3),
    ),
    Scene(
        "replicas of two among four, each with files of the same names on its host",
        on_hosts(halves(fingerprints={"paths": "same", "files": "same"}), 2),
        "sampler-disagreement",
        (0, 1, 2, 3),
        severity=WARNING,
    ),
    Scene(
        "replicas of two among four that cannot be compared",
        halves(fingerprints={}),
        "sampler-disagreement",
        (0, 1, 2, 3),
        severity=WARNING,
    ),
    Scene(
        "a share that does not exist among replicas of two",
        with_sampler(halves(fingerprints={}), rank=lambda rank: rank % 2 if rank else 2),
        "sampler-disagreement",
        (0, 1, 2, 3),
    ),
    Scene(
        "another seed of a sampler of the user's own",
        with_sampler(with_sampler(SHARED, name="Mine"), 2, seed=1_234),
        "sampler-disagreement",
        (2,),
        severity=WARNING,
    ),
    Scene(
        "another class below a seed of its own",
        with_sampler(with_sampler(SHARED, name="Mine"), 2, name="Other", seed=1_234),
        "sampler-disagreement",
        (2,),
    ),
    Scene(
        "a batch size of its own with as many batches",
        with_loader(SHARED, 3, batch_size=16),
        "loader-settings",
        (3,),
        severity=WARNING,
    ),
    Scene(
        "a batch size of its own and an unknown number of batches",
        with_loader(STREAMED, 3, batch_size=16, batches=None),
        "loader-settings",
        (3,),
    ),
    Scene(
        "another batch size to predict with",
        uneven(with_loader(presenting(4, split_loader, **PREDICTION), 3, batch_size=16), 3, count=40),
        "loader-settings",
        (3,),
        severity=WARNING,
    ),
    Scene(
        "more workers on a stream that stops together",
        with_loader(with_data(STREAMED, on_uneven="stop_together"), 2, num_workers=3),
        "loader-settings",
        (2,),
        severity=WARNING,
    ),
    Scene(
        "nothing to repeat",
        with_loader(with_data(OWNED, on_uneven="repeat"), 2, samples=0, length=0, batches=0),
        "uneven-batches",
        (2,),
        ("With on_uneven='repeat' rank 2 has nothing to repeat.",),
    ),
    Scene(
        "sized to predict with on some ranks",
        with_loader(presenting(4, own_loader, **PREDICTION), 1, length=None, batches=None),
        "sized-and-unsized",
        (1,),
    ),
    Scene(
        "two ranks take one share",
        with_sampler(SHARED, 2, rank=1),
        "sampler-disagreement",
        (1, 2),
        ("together: ranks 1-2 take share 1.",),
    ),
    Scene(
        "a share that does not exist",
        with_sampler(SHARED, 3, rank=4),
        "sampler-disagreement",
        (3,),
        ("rank 3 takes a share that does not exist",),
    ),
    Scene(
        "another batch size",
        uneven(with_loader(SHARED, 3, batch_size=16), 3, count=40),
        "loader-settings",
        (3,),
        ("batch_size is 32 on ranks 0-2 but 16 on rank 3", "20 batches on ranks 0-2 but 40 batches on rank 3"),
    ),
    Scene("drops its last batch", with_loader(OWNED, 0, drop_last=True), "loader-settings", (0,), ("drop_last is",)),
    Scene("more workers on a stream", with_loader(STREAMED, 2, num_workers=3), "loader-settings", (2,), ("is 2 on",)),
    Scene(
        "another step of validation",
        with_data(SHARED, 0, val_check_batch=10),
        "different-trainer-settings",
        (0,),
        ("20 batches on ranks 1-3 but 10 batches on rank 0",),
    ),
    Scene(
        "uneven shards",
        uneven(OWNED, 3, samples=700),
        "uneven-batches",
        (3,),
        ("20 batches on ranks 0-2 but 22 batches on rank 3",),
    ),
    Scene(
        "uneven shards that stop together",
        uneven(with_data(OWNED, on_uneven="stop_together"), 3, samples=700),
        "uneven-batches",
        (3,),
        ("all ranks stop when the first one runs out, after 20.",),
        WARNING,
    ),
    Scene(
        "uneven shards that are repeated",
        uneven(with_data(OWNED, on_uneven="repeat"), 3, samples=700),
        "uneven-batches",
        (3,),
        ("restart their data until all have had 22.",),
        WARNING,
    ),
    Scene(
        "uneven beside what is longer",
        with_loader(presenting(4, own_loader, own_loader), 1, batches=12, length=12),
        "uneven-batches",
        (1,),
        ("As loaders are combined in mode 'max_size_cycle', all ranks still end together.",),
        WARNING,
    ),
    Scene(
        "uneven beside what is shorter",
        with_loader(presenting(4, own_loader, own_loader, mode="min_size"), 1, batches=12, length=12),
        "uneven-batches",
        (1,),
    ),
    Scene(
        "uneven one after the other",
        with_loader(presenting(4, own_loader, own_loader, mode="sequential"), 1, batches=12, length=12),
        "uneven-batches",
        (1,),
    ),
    Scene(
        "uneven beside what has no length",
        with_loader(
            with_loader(presenting(4, own_loader, own_loader, stream_loader), index=2, batches=None, length=None),
            1,
            batches=12,
            length=12,
        ),
        "uneven-batches",
        (1,),
    ),
    Scene("another policy", with_data(OWNED, 1, on_uneven="repeat"), "settings-disagreement", (1,), ("on_uneven is",)),
    Scene("warns alone", with_data(OWNED, 1, on_mismatch="warn"), "settings-disagreement", (1,), ("on_mismatch is",)),
    Scene(
        "looks alone",
        with_data(OWNED, 1, content="full"),
        "settings-disagreement",
        (1,),
        ("content is sample on ranks 0, 2-3 but full on",),
    ),
    Scene(
        "every rank reads everything",
        with_loader(OWNED, fingerprints=SAME),
        "same-shard",
        (0, 1, 2, 3),
        ("Every rank reads the same data of the train_dataloader, as nothing splits it among ranks.",),
    ),
    Scene(
        "two pairs read the same",
        with_loader(OWNED, fingerprints=lambda rank: {"paths": str(rank // 2)}),
        "same-shard",
        (0, 1, 2, 3),
        ("Ranks 0-1, as well as ranks 2-3 each read the same data",),
    ),
    Scene(
        "two of four read the same",
        with_loader(OWNED, 1, 3, fingerprints=SAME),
        "same-shard",
        (1, 3),
        ("Ranks 1, 3 read the same data",),
    ),
    Scene(
        "two of four evaluate the same",
        with_loader(
            presenting(4, own_loader, **VALIDATION),
            fingerprints=lambda rank: {"values": str(max(rank, 1))},
            name="val_dataloader",
        ),
        "same-shard",
        (0, 1),
        ("Ranks 0-1 evaluate the same data of the val_dataloader",),
        WARNING,
    ),
    Scene(
        "the same files on one of two hosts",
        on_hosts(with_loader(OWNED, fingerprints=lambda rank: {"files": "same", "paths": str(rank // 3)}), 2),
        "same-shard",
        (0, 1),
    ),
    Scene("the same values", with_loader(OWNED, fingerprints={"values": "same"}), "same-shard", (0, 1, 2, 3)),
    Scene(
        "a listed order",
        with_loader(OWNED, fingerprints={"batches": "same", "items": "same"}, sampler=LISTED),
        "same-shard",
        (0, 1, 2, 3),
    ),
    Scene(
        "equal indices into what was not seen",
        with_loader(OWNED, fingerprints={"indices": "same"}),
        "same-shard",
        (0, 1, 2, 3),
        ("that they point into the same dataset could not be seen",),
        WARNING,
    ),
    Scene("a common random order", with_loader(OWNED, fingerprints=SAME, sampler=RANDOM), "same-shard", (0, 1, 2, 3)),
    Scene(
        "a random order that two ranks share",
        with_data(
            with_loader(OWNED, fingerprints=SAME, sampler=RANDOM),
            random=lambda rank: states(max(rank, 1), differ="torch", drawn="torch"),
        ),
        "same-shard",
        (0, 1),
    ),
    Scene(
        "a sampler made too early",
        with_sampler(with_loader(SHARED, fingerprints=SAME), replicas=1, rank=0),
        "same-shard",
        (0, 1, 2, 3),
        ("Its sampler was made for a single replica, probably before the process group existed",),
    ),
    Scene(
        "the first batches of two streams are the same",
        with_loader(STREAMED, fingerprints=lambda rank: {"first batches": str(rank % 3)}),
        "same-shard",
        (0, 3),
        ("Ranks 0, 3 read the same data of the train_dataloader.",),
    ),
    Scene(
        "something could not be read",
        with_loader(SHARED, 1, 2, problems=("dataset.files raised OSError: gone",)),
        "unreadable-loader",
        (1, 2),
        ("The train_dataloader could not be read in full on ranks 1-2: dataset.files raised OSError: gone.",),
        WARNING,
    ),
    Scene(
        "a length that raises",
        with_loader(OWNED, 1, length=None, batches=None, problems=("len(loader) raised OSError: gone.",)),
        "unreadable-loader",
        (1,),
        ("len(loader) raised OSError: gone.",),
    ),
)


def by_name(scene: Scene) -> str:
    return scene.name


@pytest.mark.parametrize("scene", SCENES, ids=by_name)
def test_the_cause_is_found_alone(scene: Scene) -> None:
    findings = found(scene.job)
    assert [(f.rule, f.ranks, f.severity) for f in findings] == [(scene.rule, scene.ranks, scene.severity)], findings
    for words in scene.says:
        assert words in findings[0].summary


@pytest.mark.parametrize("scene", SCENES, ids=by_name)
def test_findings_are_complete(scene: Scene) -> None:
    for finding in found(scene.job):
        assert finding.summary.endswith(".") and "  " not in finding.summary and ".." not in finding.summary
        assert finding.summary[0].isupper()
        assert finding.remedy.endswith(".")
        assert finding.evidence and all(item.text.endswith(".") for item in finding.evidence)


def test_every_rule_has_a_scene() -> None:
    assert {scene.rule for scene in SCENES} == {rule.name for rule in AGREEMENT_RULES}


@pytest.mark.parametrize("rule", AGREEMENT_RULES, ids=lambda rule: rule.name)
def test_rules_explain_themselves(rule: Rule[Any]) -> None:
    assert rule.summary and tuple(rule.sections) == SECTIONS


UNEVEN_EVALUATION = with_data(uneven(presenting(3, own_loader, **VALIDATION), 0, count=5), on_mismatch="raise_on_hang")
SILENT = {
    "uneven shares to evaluate with, by the strategy alone": UNEVEN_EVALUATION,
    "the same made-up data on every rank": with_loader(OWNED, fingerprints=SAME, all_alike=True),
    "uneven shares to predict with": uneven(presenting(3, split_loader, **PREDICTION), 0, count=5),
    "the same counters on every rank": with_loader(OWNED, fingerprints={"counts": "same"}),
    "files of the same names in folders of each rank": with_loader(
        OWNED, fingerprints=lambda rank: {"files": "same", "names": "same", "paths": str(rank)}
    ),
    "the same paths on each host": on_hosts(with_loader(OWNED, fingerprints={"files": "same", "paths": "same"}), 1),
    "a copy of the data on each rank": with_loader(
        SHARED, fingerprints=lambda rank: {"files": "same", "paths": str(rank)}
    ),
    "data of each host that its ranks split": halves(fingerprints=lambda rank: {"values": str(rank // 2)}),
    "items of each host that its ranks split": halves(fingerprints=lambda rank: {"items": str(rank // 2)}),
    "augmented data of each host that its ranks split": halves(
        fingerprints=lambda rank: {"values": str(rank // 2), "items": str(rank), "paths": str(rank)}
    ),
    "data of each host of its own size": halves(samples=lambda rank: 640 + rank // 2),
    "peers that split the data of their host": with_data(
        with_sampler(
            with_loader(presenting(8, split_loader), fingerprints=lambda rank: {"values": str(rank // 4)}),
            replicas=2,
            rank=lambda rank: rank // 2 % 2,
        ),
        data_rank=lambda rank: rank // 2,
        data_ranks=4,
    ),
    "equal lengths, shuffled": SHARED,
    "shards of equal size": OWNED,
    "streams": STREAMED,
    "validation": presenting(4, own_loader, **VALIDATION),
    "no loaders": with_data(SHARED, loaders=()),
    "nothing known of any loader": with_data(SHARED, loaders=(LoaderFacts(),)),
    "a number of samples that only some ranks know": with_loader(SHARED, 1, samples=None),
    "replicas known, shares not": with_sampler(SHARED, rank=None),
    "padding of a DistributedSampler": with_loader(SHARED, samples=2_557),
    "a kind that only some ranks have": with_loader(SHARED, 1, fingerprints={"files": "x"}),
    "no fingerprints": with_loader(SHARED, fingerprints={}),
    "no fingerprints of a rank's own data": with_loader(OWNED, fingerprints={}),
    "augmentation of the same files": with_loader(
        SHARED, fingerprints=lambda rank: {"items": str(rank), "files": "same"}
    ),
    "values that ranks have rounded differently": with_loader(
        SHARED, fingerprints=lambda rank: {"items": str(rank), "values": str(rank)}, rounded=rounded
    ),
    "peers that have rounded differently": pairs(
        with_loader(
            OWNED,
            fingerprints=lambda rank: {"items": str(rank), "values": str(rank)},
            rounded=lambda rank: rounded(rank, shard=rank // 2),
        )
    ),
    "augmentation of the same values": with_loader(
        SHARED, fingerprints=lambda rank: {"items": str(rank), "values": "same"}
    ),
    "first batches of what a sampler splits": with_loader(
        SHARED, fingerprints=lambda rank: {"first batches": str(rank)}
    ),
    "shards of other sizes and equal batches": with_loader(OWNED, 1, samples=633),
    "a seed that is not used": with_sampler(with_sampler(SHARED, shuffle=False), 1, seed=7, epoch=3),
    "more workers on a map-style dataset": with_loader(OWNED, 1, num_workers=4),
    "no workers and one worker": with_loader(with_loader(STREAMED, num_workers=0), 1, num_workers=1),
    "a custom sampler that splits": with_sampler(SHARED, name="Mine", seed=None, epoch=None, shuffle=None),
    "a custom sampler without attributes": with_loader(OWNED, fingerprints=SAME, sampler=NO_SAMPLER),
    "a stream of the same files": with_loader(STREAMED, fingerprints=SAME, **OWN),
    "a stream that a node splits": with_loader(STREAMED, fingerprints=SAME),
    "nothing to read": with_loader(OWNED, fingerprints=SAME, samples=0, length=0, batches=0),
    "first batches that only some ranks tell of": with_loader(STREAMED, 0, 2, fingerprints={"first batches": "same"}),
    "items alone are the same": with_loader(OWNED, fingerprints={"items": "same"}),
    "other items of the same files": with_loader(
        OWNED, fingerprints=lambda rank: {"items": str(rank), "files": "same"}
    ),
    "each its own random order": with_data(
        with_loader(OWNED, fingerprints=SAME, sampler=RANDOM), random=lambda rank: states(rank, differ="torch")
    ),
    "a random order of an unknown state": with_data(with_loader(OWNED, fingerprints=SAME, sampler=RANDOM), random=()),
    "one order is sequential, one listed": with_loader(
        with_loader(presenting(2, own_loader), fingerprints=SAME), 1, sampler=LISTED
    ),
    "replicas of one with seeds of their own": with_sampler(
        with_loader(SHARED, fingerprints=SAME), replicas=1, rank=0, seed=lambda rank: rank
    ),
    "other data below the same names": with_loader(OWNED, fingerprints=SAME, samples=lambda rank: 640 + rank),
    "tensor-parallel peers": with_data(with_loader(OWNED, fingerprints=SAME), data_rank=0, data_ranks=1),
    "peers with copies of their own": PEERS,
    "peers that draw one order": with_data(with_loader(PEERS, sampler=RANDOM), random=lambda rank: states(rank // 2)),
    "two pairs of tensor-parallel peers": with_data(
        with_loader(OWNED, fingerprints=lambda rank: {"files": str(rank // 2)}),
        data_rank=lambda rank: rank // 2,
        data_ranks=2,
    ),
    "two pairs that a sampler serves": with_data(
        with_sampler(SHARED, replicas=2, rank=lambda rank: rank // 2),
        data_rank=lambda rank: rank // 2,
        data_ranks=2,
    ),
    "peers that all read the whole": with_data(with_loader(OWNED, fingerprints=SAME), data_ranks=1),
    "fast_dev_run": with_data(with_loader(SHARED, length=20, batches=1), val_check_batch=1),
    "no length anywhere": with_loader(STREAMED, length=None, batches=None),
    "a world of one": with_loader(
        presenting(1, split_loader), sampler=replace(NO_SAMPLER, replicas=2, rank=5), problems=("len(loader) failed.",)
    ),
    "ranks without data": replace(SHARED, ranks=tuple(replace(facts, data=None) for facts in SHARED.ranks)),
    "one rank without data": replace(OWNED, ranks=(replace(OWNED.ranks[0], data=None), *OWNED.ranks[1:])),
    "nobody presented anything": replace(SHARED, ranks=()),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_healthy_is_not_found(name: str) -> None:
    assert found(SILENT[name]) == ()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("make", [split_loader, own_loader, stream_loader])
def test_a_healthy_job_of_any_size(world: int, make: Callable[[int, int], LoaderFacts]) -> None:
    assert found(presenting(world, make, make)) == ()


@pytest.mark.parametrize(
    ("counts", "deviating"),
    [
        ((20, 22), (0, 1)),
        ((20, 20, 22), (2,)),
        ((20, 21, 22), (0, 1, 2)),
        ((22, 20, 20, 20), (0,)),
        ((20, 20, 22, 22), (0, 1, 2, 3)),
        ((20, 20, 21, 22), (0, 1, 2, 3)),  # two of four are most frequent and no majority
        ((20, 20, 20, 21, 22), (3, 4)),
    ],
)
def test_ranks_that_deviate_from_a_majority_are_named(counts: tuple[int, ...], deviating: tuple[int, ...]) -> None:
    job = presenting(len(counts), own_loader)
    for rank, count in enumerate(counts):
        job = uneven(job, rank, count=count, samples=32 * count)
    assert [(finding.rule, finding.ranks) for finding in found(job)] == [("uneven-batches", deviating)]


# Reasons


def summary(job: JobFacts) -> str:
    return found(job)[0].summary


def split(**more: object) -> JobFacts:
    return with_loader(SHARED, fingerprints=indices, **more)


@pytest.mark.parametrize(
    ("differ", "drawn", "words"),
    [
        (
            "numpy python",
            "numpy",
            "Numpy's random state differs between ranks and has been drawn from (torch's agrees)",
        ),
        ("numpy python", "python", "drawn from Python;"),
        (
            "torch",
            "torch",
            "Torch's random state differs between ranks and has been drawn from (Python's and numpy's agree)",
        ),
        (
            "numpy python torch",
            "numpy torch",
            "Numpy's and torch's random states differ between ranks and have been drawn",
        ),
        (
            "numpy python",
            "torch",
            "No global random state that differs between ranks has been drawn from, so the split",
        ),
        ("", "numpy", "The ranks' global random states agree, so the split probably came from a separate generator"),
    ],
)
def test_the_random_states_show_where_a_split_came_from(differ: str, drawn: str, words: str) -> None:
    assert words in summary(with_data(split(), random=lambda rank: states(rank, differ=differ, drawn=drawn)))


def test_a_generator_that_one_rank_has_drawn_from() -> None:
    job = with_data(split(), random=states(0, differ=""))
    assert "drawn from numpy" in summary(with_data(job, 2, random=states(2, differ="numpy", drawn="numpy")))


def test_a_generator_that_only_some_ranks_have_is_not_compared() -> None:
    job = with_data(split(), random=lambda rank: states(rank, drawn="numpy"))
    assert "numpy's" not in summary(with_data(job, 1, random=states(1)[2:])).lower()


def test_without_random_states_no_reason_is_given() -> None:
    assert summary(with_data(split(), random=())).endswith("on rank 3).")


def test_what_depends_on_the_rank() -> None:
    expected = "so a filter or a file list probably depends on the rank or its host."
    sizes = with_data(uneven(OWNED, 3, samples=700), random=states(0, differ=""))
    assert expected in summary(with_loader(sizes, fingerprints={}))
    files = with_loader(SHARED, fingerprints=lambda rank: {"files": str(rank)})
    assert expected in summary(files)
    assert expected not in summary(split())


def test_unequal_shards_are_the_reason() -> None:
    job = with_loader(uneven(STREAMED, 1), shards=lambda rank: 2 if rank == 1 else 3)
    assert "The ranks read different numbers of shards: 3 on ranks 0, 2-3 but 2 on rank 1." in summary(job)
    assert "random state" not in summary(job)
    assert "shards" not in summary(with_loader(job, 0, shards=None))


def limited(job: JobFacts, **more: object) -> JobFacts:
    """One rank's Trainer ends the epoch after its first batch."""
    return with_loader(
        with_data(job, settings=lambda rank: {"limit_train_batches": "1" if rank == 1 else "1.0"}), **more
    )


def test_limits_that_differ_are_settings_of_the_trainer() -> None:
    job = with_data(uneven(SHARED, 1, count=1), random=states(0, differ="numpy"))
    finding = found(limited(job, length=20))[0]
    assert (finding.rule, finding.ranks) == ("different-trainer-settings", (1,))
    assert "limit_train_batches is 1.0 on ranks 0, 2-3 but 1 on rank 1 (" in finding.summary
    assert "random state" not in finding.summary
    for other in (with_loader(job, length=20), limited(job, length=lambda rank: 1 if rank == 1 else 20)):
        assert {finding.rule for finding in found(other)} == {"uneven-batches"}


def test_another_first_stage_is_explained_by_settings_that_decide_it() -> None:
    def presented(settings: Callable[[int], dict[str, str]]) -> JobFacts:
        return with_data(with_data(SHARED, 1, **VALIDATION), settings=settings)

    unlike = presented(lambda rank: {"num_sanity_val_steps": str(2 * (rank == 1)), "precision": str(rank)})
    first, second = found(unlike)
    assert (first.rule, first.ranks, second.rule) == ("different-trainer-settings", (1,), "loader-count")
    assert "num_sanity_val_steps is 0 on ranks 0, 2-3 but 2 on rank 1, so ranks start with different" in first.summary
    assert "precision" not in first.summary
    alike = presented(lambda rank: {"num_sanity_val_steps": "2", "precision": str(rank)})
    assert [finding.rule for finding in found(alike)] == ["loader-count"]


def test_limits_that_differ_are_no_error_where_ranks_end_together() -> None:
    job = limited(with_data(uneven(SHARED, 1, count=1), on_uneven="stop_together"), length=20)
    assert [(one.rule, one.severity) for one in found(job)] == [("different-trainer-settings", WARNING)]
    independent = limited(with_data(uneven(SHARED, 1, count=1), on_mismatch="raise_on_hang", **VALIDATION), length=20)
    assert found(independent) == ()


def test_the_number_of_parts_of_a_dataset_is_a_reason_and_no_other_class() -> None:
    parts = "TensorDataset", "TensorDataset \N{MULTIPLICATION SIGN}2"
    job = uneven(SHARED, 1, samples=700)
    finding = found(with_loader(job, datasets=lambda rank: ("ConcatDataset", parts[rank == 1])))[0]
    assert (finding.rule, finding.ranks) == ("unequal-samples", (1,))
    told = f"ConcatDataset of {parts[0]} on ranks 0, 2-3 but ConcatDataset of {parts[1]} on rank 1."
    assert f"different parts: {told}" in finding.summary
    other = found(with_loader(job, datasets=lambda rank: ("ConcatDataset", f"{'Other' * (rank == 1)}Dataset")))[0]
    assert other.rule == "different-datasets"


def tail(**more: object) -> JobFacts:
    """Ranks whose last batch is incomplete, or not there."""
    return uneven(OWNED, 3, count=21, samples=650, **more)


def test_the_incomplete_last_batch_is_the_reason() -> None:
    words = "With drop_last=True all would have 20 batches."
    assert words in summary(tail())
    assert words not in summary(with_loader(tail(), drop_last=True))
    assert words not in summary(with_loader(tail(), 3, samples=700))
    assert words not in summary(with_loader(tail(), 3, length=30))
    assert words not in summary(with_loader(tail(), batch_size=None))
    # What a sampler gives to a rank is not all that the rank holds.
    assert "drop_last" not in summary(uneven(SHARED, 3, samples=2_570))
    small = with_loader(with_loader(OWNED, samples=0, batches=0, length=0), 3, samples=5, batches=1, length=1)
    assert "drop_last" not in summary(small)


def test_the_remedy_names_shards_of_a_rank_s_own() -> None:
    for job in (split(), with_loader(SHARED, 1, samples=9)):
        assert "set use_distributed_sampler=False" in found(job)[0].remedy
    only_items = with_loader(SHARED, 1, fingerprints={"indices": "a1b2c3d4e5f6", "items": "other"})
    only_items = with_loader(only_items, 0, 2, 3, fingerprints={"indices": "a1b2c3d4e5f6", "items": "same"})
    assert "augmentation" in found(only_items)[0].remedy
    assert "augmentation" not in found(split())[0].remedy
    assert "random state" not in summary(only_items)


# One cause is one finding


def test_a_loader_without_a_name_has_its_number() -> None:
    job = with_loader(presenting(4, own_loader, own_loader), index=1, name="")
    assert "The loader 1 makes batches differently" in summary(with_loader(job, 1, index=1, drop_last=True))


def test_numbers_of_replicas_that_differ_are_reported_once() -> None:
    assert "ranks read data" not in summary(with_sampler(SHARED, 1, replicas=2))


def test_a_sampler_of_a_single_replica_is_named_only_where_there_is_one() -> None:
    assert "single replica" not in summary(with_loader(OWNED, fingerprints=SAME))


def test_evaluating_all_data_on_every_rank_is_not_reported() -> None:
    evaluation = with_loader(presenting(4, own_loader, **VALIDATION), fingerprints=SAME)
    assert found(evaluation) == ()
    of_its_host = with_loader(on_hosts(evaluation, 2), fingerprints=lambda rank: {"paths": "same"})
    assert found(of_its_host) == ()
    some = with_loader(evaluation, 3, fingerprints={"values": "of its own"})
    assert found(some)[0].remedy.startswith("If these ranks should evaluate the same data, there is nothing to do")


def test_what_is_just_iterated_is_not_sent_to_a_sampler() -> None:
    same_batches = {"fingerprints": {"first batches": "same"}}
    streamed = found(with_loader(STREAMED, **same_batches))[0].remedy
    assert "DistributedSampler" not in streamed
    assert "__iter__" in streamed and "seed" in streamed and "depends on the rank" in streamed
    listed = found(with_loader(OWNED, **same_batches))[0].remedy
    assert "DistributedSampler" in listed and "__iter__" not in listed


# Refused with each on_mismatch, by what the ranks disagree about, and what a user may set to train all the same.
GOING_ON = {
    "other data on each rank": (halves(fingerprints=lambda rank: {"values": str(rank)}), "raise", "warn"),
    "the same data on each rank": (with_loader(OWNED, fingerprints=SAME), "raise", "warn"),
    "a sampler of another seed": (with_sampler(SHARED, 2, seed=1), "raise", "warn"),
    "more samples, as many batches": (with_loader(SHARED, 2, samples=2561), "raise", "warn"),
    "more samples and batches": (uneven(SHARED, 2, count=21, samples=2_700), "raise raise_on_hang", "uneven"),
    "more batches": (with_loader(OWNED, 2, length=21, batches=21), "raise raise_on_hang", "uneven"),
    "a length on some ranks": (with_loader(STREAMED, 2, length=None, batches=None), "raise raise_on_hang", "uneven"),
    "validation after other batches": (with_data(OWNED, 1, val_check_batch=7), "raise raise_on_hang", ""),
    "another number of loaders": (with_data(OWNED, 1, loaders=()), "raise raise_on_hang warn", ""),
}


@pytest.mark.parametrize("on_mismatch", ["raise", "raise_on_hang", "warn"])
@pytest.mark.parametrize("name", GOING_ON)
def test_a_refusal_says_how_to_train_anyway(name: str, on_mismatch: str) -> None:
    job, refused, way = GOING_ON[name]
    job = with_data(job, on_mismatch=on_mismatch)
    findings = judge(job, AGREEMENT_RULES).findings
    assert findings[0].severity is ERROR
    assert any(is_refused(finding, job) for finding in findings) == (on_mismatch in refused.split())
    sentence = way_on(findings, job)
    assert bool(sentence) == bool(way)
    assert ('DatasetAgreement(on_mismatch="warn"' in sentence) == bool(way)
    assert ('on_uneven="stop_together"' in sentence) == (way == "uneven")


def test_uneven_data_that_still_ends_together_would_not_hang() -> None:
    unequal = uneven(SHARED, 2, count=21, samples=2_700)
    job = with_data(unequal, on_mismatch="raise_on_hang", on_uneven="stop_together")
    findings = judge(job, AGREEMENT_RULES).findings
    assert findings[0].rule == "unequal-samples"
    assert not any(is_refused(finding, job) for finding in findings)


@pytest.mark.parametrize(
    "changes",
    [
        {"on_mismatch": "raise"},
        {"on_mismatch": "warn"},
        {"on_uneven": "stop_together"},
        {"forward_communicates": True},
        {"stage": "train_dataloader"},
    ],
    ids=str,
)
def test_uneven_evaluation_is_reported_if_asked_for_or_if_ranks_need_each_other(changes: dict[str, Any]) -> None:
    assert [finding.rule for finding in found(with_data(UNEVEN_EVALUATION, **changes))] == ["uneven-batches"]


def test_a_rank_with_nothing_to_evaluate_is_reported() -> None:
    """Lightning raises there, and the others wait."""
    nothing = uneven(UNEVEN_EVALUATION, 0, count=0)
    assert [finding.rule for finding in found(nothing)] == ["uneven-batches"]


def test_a_length_that_only_some_ranks_know_is_an_error_in_evaluation_too() -> None:
    assert found(with_loader(UNEVEN_EVALUATION, 2, length=None, batches=None))[0].rule == "sized-and-unsized"


def test_the_line_that_says_that_there_is_no_length_is_named() -> None:
    place = "/train.py:12 in __len__"
    (finding, *_) = found(with_loader(UNEVEN_EVALUATION, 2, length=None, batches=None, no_length_at=place))
    assert finding.location == place
    assert finding.summary.endswith("On rank 2, it raises at train.py:12 in __len__.")


def test_ranks_that_predict_each_for_itself_do_not_hang_on_uneven_data() -> None:
    job = with_data(uneven(SHARED, 2, count=21), on_mismatch="raise_on_hang", stage="predict_dataloader")
    assert not any(is_refused(finding, job) for finding in judge(job, AGREEMENT_RULES).findings)
    assert found(with_loader(OWNED, fingerprints=SAME))[0].remedy.startswith("Keep use_distributed_sampler=True")


def test_loaders_that_all_ranks_have_are_compared_where_some_have_fewer() -> None:
    job = with_loader(first_only(two_validation_loaders(), 3), 1, batches=5, length=5, samples=160)
    assert [finding.rule for finding in found(job)] == ["loader-count", "uneven-batches"]


def test_a_second_loader_is_compared() -> None:
    job = with_loader(two_validation_loaders(), 1, index=1, batches=5, length=5, samples=160)
    assert "The val_dataloader[1] differs in the number" in summary(job)


def test_all_that_differs_between_loaders_to_go_through_is_evidence() -> None:
    finding = found(first_only(with_data(two_validation_loaders(), 3, mode="min_size"), 3))[0]
    assert {item.text.split(": ")[1].split(" ")[0] for item in finding.evidence} == {"number", "mode"}


def test_different_validation_steps_are_not_reported_beside_their_cause() -> None:
    halfway = with_data(uneven(OWNED, 1), val_check_batch=lambda rank: 11 if rank == 1 else 10)
    assert {finding.rule for finding in found(halfway)} == {"uneven-batches"}
    other = with_data(SHARED, 1, mode="min_size", val_check_batch=5)
    assert {finding.rule for finding in found(other)} == {"loader-count"}


@pytest.mark.parametrize("on_uneven", ["stop_together", "repeat"])
def test_with_a_policy_the_step_of_validation_is_agreed_on(on_uneven: str) -> None:
    uneven_job = with_data(uneven(OWNED, 1, samples=700), on_uneven=on_uneven)
    earlier = with_data(uneven_job, val_check_batch=lambda rank: 11 if rank == 1 else 10)
    for job in (uneven_job, earlier, with_data(uneven_job, 0, val_check_batch=10)):
        assert [(finding.rule, finding.severity) for finding in found(job)] == [("uneven-batches", WARNING)]
    even = with_data(OWNED, on_uneven=on_uneven)
    assert [finding.rule for finding in found(with_data(even, 0, val_check_batch=10))] == ["different-trainer-settings"]


def test_data_of_hosts_that_their_ranks_do_not_split_alike_is_different() -> None:
    unseeded = halves(fingerprints=lambda rank: {"values": str(rank)})
    assert {finding.rule for finding in found(unseeded)} == {"different-data", "sampler-disagreement"}


def test_a_seed_that_may_be_meant_explains_no_uneven_batches() -> None:
    job = uneven(with_sampler(with_sampler(SHARED, name="Mine"), 2, seed=1_234), 2)
    assert [(finding.rule, finding.severity) for finding in found(job)] == [
        ("sampler-disagreement", WARNING),
        ("uneven-batches", ERROR),
    ]


def test_more_workers_do_not_explain_that_there_is_nothing_to_repeat() -> None:
    job = with_loader(with_data(STREAMED, on_uneven="repeat"), 2, num_workers=3, length=0, batches=0)
    assert [(finding.rule, finding.severity) for finding in found(job)] == [
        ("loader-settings", WARNING),
        ("uneven-batches", ERROR),
    ]


def test_uneven_shards_are_not_to_be_seeded() -> None:
    drawn = with_data(uneven(OWNED, 3, samples=700), random=lambda rank: states(rank, drawn="numpy"))
    shards = with_loader(drawn, dataset="Mine", datasets=("Mine",))
    assert "random" not in summary(shards)
    assert "random" not in summary(uneven(with_data(STREAMED, random=drawn.ranks[0].data.random), 3))  # type: ignore[union-attr]
    for selected in (
        drawn,
        with_loader(shards, datasets=("Dataset \N{MULTIPLICATION SIGN}2",)),
        with_loader(shards, fingerprints=indices),
    ):
        assert "call seed_everything(seed)" in summary(selected)


def test_a_step_of_validation_counts_in_training_only() -> None:
    assert found(with_data(presenting(4, own_loader, **VALIDATION), 1, val_check_batch=3)) == ()


def test_ranks_that_disagree_on_a_policy_have_none() -> None:
    job = with_data(uneven(OWNED, 1, samples=700), 0, 2, 3, on_uneven="stop_together")
    assert [(finding.rule, finding.severity) for finding in found(job)] == [
        ("uneven-batches", ERROR),
        ("settings-disagreement", ERROR),
    ]


def test_settings_do_not_explain_data_of_other_sizes() -> None:
    job = uneven(with_loader(OWNED, 1, batch_size=16), 1, samples=700)
    assert {finding.rule for finding in found(job)} == {"loader-settings", "uneven-batches"}


def test_a_certain_error_comes_before_a_likely_one() -> None:
    job = with_loader(SHARED, 1, fingerprints={"items": "x"}, batch_size=16)
    job = with_loader(job, 0, 2, 3, fingerprints={"items": "y"})
    assert [(finding.rule, finding.confidence) for finding in found(job)] == [
        ("loader-settings", Confidence.CERTAIN),
        ("different-data", Confidence.LIKELY),
    ]


def test_a_length_that_raises_on_one_rank_hides_none_that_another_lacks() -> None:
    job = with_loader(OWNED, 1, length=None, batches=None, problems=("len(loader) raised OSError: gone.",))
    job = with_loader(job, 2, length=None, batches=None)
    assert [finding.rule for finding in found(job)] == ["sized-and-unsized", "unreadable-loader"]


def test_problems_of_a_length_and_others_are_told_apart() -> None:
    job = with_loader(OWNED, 1, problems=("len(loader) raised OSError.", "dataset.x raised KeyError", "y failed."))
    job = with_loader(job, 2, problems=("z failed.",))
    findings = found(job)
    assert [(finding.severity, finding.ranks) for finding in findings] == [(ERROR, (1,)), (WARNING, (1, 2))]
    assert findings[1].summary.endswith(
        "rank 1: dataset.x raised KeyError. y failed. 1 more such sentence is in the evidence."
    )


def test_problems_of_a_loader_that_only_some_ranks_have_are_reported() -> None:
    job = first_only(with_loader(two_validation_loaders(), 1, index=1, problems=("x failed.",)), 3)
    assert [finding.rule for finding in found(job)] == ["loader-count", "unreadable-loader"]


# Many ranks, and the judge


def test_a_silent_rank_s_process_is_evidence() -> None:
    job = presenting(4, silent=(3,), witnessed=(ProcessFacts(pid=7, rank=3, state="stopped"),))
    assert "Process 7 is stopped." in [item.text for item in found(job)[0].evidence]


def test_the_judge_does_not_speak_of_hangs() -> None:
    job = presenting(4, split_loader, silent=(3,), missing=("The store was slow.",))
    job = replace(job, ranks=(replace(job.ranks[0], missing=("no facts",)), *job.ranks[1:]))
    assert judge(job, AGREEMENT_RULES).unanswered == ("The store was slow.", "Rank 0: no facts")


def test_the_rules_of_hangs_are_not_asked() -> None:
    assert not set(AGREEMENT_RULES) & set(HANG_RULES)


def many(world: int = 1_024) -> JobFacts:
    """Two loaders on each rank, and something wrong for most rules."""
    job = presenting(world, split_loader, own_loader, random=states(0, drawn="numpy"))
    job = with_loader(job, fingerprints=indices, num_workers=lambda rank: rank)
    job = with_loader(job, index=1, batches=lambda rank: 20 + rank, samples=lambda rank: 640 + rank)
    job = with_loader(job, index=1, problems=lambda rank: (f"file {rank} is gone.",))
    job = with_data(job, val_check_batch=lambda rank: rank, random=lambda rank: states(rank, drawn="numpy"))
    return with_sampler(job, seed=lambda rank: rank)


def test_the_effort_is_proportional_to_the_ranks() -> None:
    few, all_ranks = many(128), many(1_024)
    assert calls_in(lambda: judge(all_ranks, AGREEMENT_RULES)) < 9 * calls_in(lambda: judge(few, AGREEMENT_RULES))


def test_a_thousand_different_ranks_are_reported_briefly() -> None:
    findings = found(many())
    assert {"different-data", "uneven-batches", "sampler-disagreement", "unreadable-loader"} <= {
        finding.rule for finding in findings
    }
    for finding in findings:
        assert len(finding.summary) < 1_000 and len(finding.evidence) <= 24
    assert "1,020 more values on other ranks" in findings[0].summary


@pytest.mark.parametrize("world", [2, 3, 1_024])
def test_one_rank_of_many_is_named(world: int) -> None:
    job = with_loader(presenting(world, split_loader), world - 1, samples=9)
    expected = (world - 1,) if world > 2 else (0, 1)
    assert [(finding.rule, finding.ranks) for finding in found(job)] == [("unequal-samples", expected)]


def test_ranks_that_read_the_same_are_cut() -> None:
    job = with_loader(presenting(1_024, own_loader), fingerprints=lambda rank: {"values": str(rank // 2)})
    finding = found(job)[0]
    assert "508 more groups of ranks each read the same data" in finding.summary
    assert len(finding.ranks) == 1_024 and len(finding.evidence) == 8


def test_shares_that_are_taken_twice_are_cut() -> None:
    job = with_sampler(presenting(1_024, split_loader), rank=lambda rank: rank // 2)
    assert "508 more shares are taken twice" in found(job)[0].summary
