"""The data of all ranks side by side: alike ranks on one line, what differs marked, nothing that grows or bites."""

from collections.abc import Callable
from dataclasses import replace

from incidents import before_training

from lightning_ncclsafe.facts import (
    DataFacts,
    Frame,
    IncidentKind,
    JobFacts,
    LoaderFacts,
    SamplerFacts,
)
from lightning_ncclsafe.facts.findings import Diagnosis, Severity
from lightning_ncclsafe.report.tables.data import data_table, render_mismatch
from lightning_ncclsafe.report.text import render_short, render_text
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.judging import judge

EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b31m\u202e\u2028\ud800"


def shared(rank: int, **more: object) -> LoaderFacts:
    sampler = SamplerFacts(name="DistributedSampler", replicas=4, rank=rank, seed=0, epoch=0, shuffle=True)
    options: dict[str, object] = {
        "name": "train_dataloader",
        "datasets": ("Subset", "ImageFolder"),
        "length": 1_250,
        "batches": 1_250,
        "samples": 40_000,
        "sampler": sampler,
        "fingerprints": {"indices": "a1b2c3d4e5f6", "files": "ffff0000ffff"},
    }
    return LoaderFacts(**options | more)  # type: ignore[arg-type]


def own(rank: int, **more: object) -> LoaderFacts:
    return shared(rank, **{"sampler": None, "fingerprints": {"files": f"{rank}fffeeee0000"}} | more)


def job(
    world: int,
    make: Callable[[int], tuple[LoaderFacts, ...]],
    *,
    silent: tuple[int, ...] = (),
    stage: str = "train_dataloader",
) -> JobFacts:
    def told(rank: int) -> dict[str, object]:
        return {"data": DataFacts(stage=stage, loaders=make(rank), data_rank=rank, data_ranks=world)}

    return before_training(IncidentKind.DATA, world, told, per_host=4, silent=silent)


def judged(facts: JobFacts) -> Diagnosis:
    return judge(facts, AGREEMENT_RULES)


def short_on(*ranks: int) -> Callable[[int], tuple[LoaderFacts, ...]]:
    changes = {"batches": 1_240, "length": 1_240, "samples": 39_680, "fingerprints": {"indices": "b", "files": "c"}}
    return lambda rank: (shared(rank, **changes if rank in ranks else {}),)


def test_equal_ranks_share_a_row() -> None:
    lines = list(data_table(job(4, short_on(3))))
    assert lines == [
        "train_dataloader",
        "  rank  host    batches  samples  fingerprint                      sampler"
        "                               differs",
        "  0-2   node-0  1,250    40,000   files:ffff0000 indices:a1b2c3d4  DistributedSampler, 0-2 of 4, seed=0",
        "  3     node-0  1,240    39,680   files:c indices:b                "
        "DistributedSampler, 3 of 4, seed=0    "
        "batches, samples, fingerprint",
    ]


def test_equal_data_takes_one_row() -> None:
    lines = list(data_table(job(16, lambda rank: (shared(rank),))))
    assert len(lines) == 3
    assert lines[2].startswith("  0-15  4 hosts  1,250")
    assert lines[2].endswith("DistributedSampler, 0-15 of 4, seed=0")


def test_a_share_read_twice_is_marked() -> None:
    same = {"sampler": SamplerFacts(name="Mine", replicas=4, rank=1)}
    lines = list(data_table(job(4, lambda rank: (shared(rank, **same if rank == 2 else {}),))))
    assert "Mine, 1 of 4  " in lines[-1] and lines[-1].endswith("  sampler")


def test_differing_sampler_settings_are_shown() -> None:
    early = SamplerFacts(name="DistributedSampler", replicas=4, rank=2, seed=0, epoch=3, shuffle=True)
    lines = list(data_table(job(4, lambda rank: (shared(rank, **{"sampler": early} if rank == 2 else {}),))))
    assert "DistributedSampler, 0-1, 3 of 4, seed=0, epoch=0" in lines[2]
    assert "DistributedSampler, 2 of 4, seed=0, epoch=3" in lines[3]


def test_differing_columns_are_added() -> None:
    def make(rank: int) -> tuple[LoaderFacts, ...]:
        return (own(rank, batch_size=16 + rank, iterable=True, num_workers=rank % 2, shards=3, drop_last=rank > 0),)

    title, *rows = list(data_table(job(3, make)))[1:]
    assert title.split()[-4:] == ["batch_size", "drop_last", "num_workers", "differs"]
    assert rows[0].endswith("batch_size, drop_last")  # of three batch sizes none is that of most
    assert rows[1].endswith("batch_size, num_workers")


def test_differing_classes_and_shards_are_shown() -> None:
    def make(rank: int) -> tuple[LoaderFacts, ...]:
        return (own(rank, loader=f"L{rank}", datasets=("Subset", f"D{rank}"), shards=rank),)

    title, first, _ = list(data_table(job(2, make)))[1:]
    assert title.split()[-4:] == ["loader", "dataset", "shards", "differs"]
    assert first.endswith("  loader, dataset, shards") and "L0      Subset of D0  0 " in first


def test_rank_specific_data_is_not_a_difference() -> None:
    assert len(list(data_table(job(8, lambda rank: (own(rank),))))) == 3
    sizes = list(data_table(job(3, lambda rank: (own(rank, samples=rank),))))
    assert len(sizes) == 5 and not any("samples" in line for line in sizes[2:])


def test_the_location_of_a_copy_is_not_a_difference() -> None:
    prints = lambda rank: {"fingerprints": {"files": "a", "paths": str(rank)}}  # noqa: E731
    assert len(list(data_table(job(4, lambda rank: (shared(rank, **prints(rank)),))))) == 3
    assert "paths:1" in list(data_table(job(4, lambda rank: (own(rank, **prints(rank // 2)),))))[3]


def ending(*counts: int) -> JobFacts:
    last = min(counts)
    unknown = {"batches": None, "length": None, "samples": None, "fingerprints": {}, "datasets": ("Stream",)}
    return job(
        len(counts),
        lambda rank: (own(rank, **unknown, iterable=True, read=counts[rank], ended=counts[rank] == last),),
    )


def test_ended_data_is_marked_even_if_it_ended_on_most_ranks() -> None:
    assert list(data_table(ending(40, 41, 40))) == [
        "train_dataloader",
        "  rank  host    batches    dataset  differs",
        "  0, 2  node-0  40, ended  Stream   batches",
        "  1     node-0  41 so far  Stream",
    ]


def test_the_class_of_an_iterable_is_shown() -> None:
    unknown = {"batches": None, "samples": None, "fingerprints": {}, "datasets": ("Chain", "Stream")}
    lines = list(data_table(job(2, lambda rank: (own(rank, **unknown, iterable=True),))))
    assert lines[1:] == ["  rank  host    dataset", "  0-1   node-0  Chain of Stream"]


def test_ranks_with_equal_own_data_are_grouped() -> None:
    lines = list(data_table(job(4, lambda rank: (own(rank // 2),))))
    assert [line.split()[0] for line in lines[2:]] == ["0-1", "2-3"]
    assert "files:0fffeeee" in lines[2] and not lines[2].endswith("fingerprint")


def test_fingerprints_are_compared_beyond_the_shown_part() -> None:
    prints = lambda rank: {"fingerprints": {"files": f"00000000{rank}"}}  # noqa: E731
    assert len(list(data_table(job(2, lambda rank: (shared(rank, **prints(rank)),))))) == 4


def test_many_rows_are_truncated() -> None:
    lines = list(data_table(job(1_024, lambda rank: (shared(rank, samples=rank),))))
    assert len(lines) == 23 and lines[-1] == "  … 1,004 more"


def test_differing_loaders_come_first() -> None:
    def make(rank: int) -> tuple[LoaderFacts, ...]:
        few = {"batches": 3} if rank == 1 else {}
        return tuple(own(rank, name=f"loader {i}", **few if i == 6 else {}) for i in range(8))

    lines = list(data_table(job(3, make)))
    assert [line for line in lines if line.startswith("loader")] == ["loader 6", "loader 0", "loader 1", "loader 2"]
    assert lines[-1] == "… 4 more loaders are in report.json"


def test_silent_ranks_are_named() -> None:
    assert list(data_table(job(4, lambda rank: (shared(rank),), silent=(1, 3))))[-1] == "ranks 1, 3: never presented"


def test_an_empty_table_is_empty() -> None:
    assert list(data_table(job(1, lambda rank: (shared(rank),)))) == []
    assert list(data_table(replace(job(2, lambda rank: ()), ranks=()))) == []


def test_long_names_are_truncated() -> None:
    lines = list(data_table(job(2, lambda rank: (shared(rank, datasets=("x" * 900 + str(rank),)),))))
    assert max(map(len, lines)) < 400


# In the report


def test_the_report_shows_data_and_omits_hangs() -> None:
    facts = job(4, short_on(3))
    stack = (Frame(file="train.py", line=1, function="main"),)
    text = render_text(judged(replace(facts, ranks=tuple(replace(rank, stack=stack) for rank in facts.ranks))))
    assert "Incident 1: all 4 ranks presented their train_dataloader.\n" in text
    assert "The data of all ranks\n---------------------\ntrain_dataloader\n  rank  host" in text
    assert "differs\n  0-2   node-0" in text
    assert "All ranks" not in text and "Stack of" not in text and "answered" not in text
    assert text.startswith("unequal-samples: The train_dataloader's data is split among ranks by a sampler")


def test_the_report_names_silent_ranks() -> None:
    text = render_text(judged(job(4, lambda rank: (shared(rank),), silent=(3,), stage="val_dataloader")))
    assert "Incident 1: 3 of 4 ranks presented their val_dataloader.\n" in text
    assert "rank 3: never presented" in text


def test_a_report_without_findings_or_facts_is_written() -> None:
    alike = judged(job(4, lambda rank: (shared(rank),)))
    assert render_text(alike).startswith("Nothing found: the ranks' data agrees.")
    alone = judged(job(1, lambda rank: (shared(rank),)))
    assert "Incident 1: the only rank presented its train_dataloader." in render_text(alone)
    nobody = judged(replace(job(4, lambda rank: ()), ranks=()))
    assert "Incident 1: 0 of 4 ranks presented their data." in render_text(nobody)
    assert render_mismatch(nobody) == ""


def test_the_short_report_lists_other_findings() -> None:
    text = render_short(judged(job(4, lambda rank: (own(rank, batches=rank, drop_last=rank > 1),), silent=(2,))))
    assert "  also found: loader-settings (rank" in text and "possible" not in text


# The exception's text


def test_the_exception_has_the_problem_the_table_and_the_remedy() -> None:
    diagnosis = judged(job(4, short_on(3)))
    text = render_mismatch(diagnosis)
    assert text.startswith("unequal-samples: The train_dataloader's data is split among ranks by a sampler")
    assert "\ntrain_dataloader\n  rank  host" in text
    assert "\nWhat to do: Let every rank hold the same whole dataset" in text
    assert text.index("unequal-samples") < text.index("differs") < text.index("What to do")


def test_the_exception_lists_errors_without_warnings() -> None:
    diagnosis = judged(job(4, lambda rank: (shared(rank, problems=("x failed.",)),) if rank else (shared(rank),)))
    assert "unreadable-loader: " in render_mismatch(diagnosis)  # nothing else is there
    both = judged(job(4, lambda rank: (replace(short_on(3)(rank)[0], problems=("x failed.",)),)))
    assert {finding.severity for finding in both.findings} == {Severity.ERROR, Severity.WARNING}
    assert "unequal-samples: " in render_mismatch(both) and "unreadable-loader" not in render_mismatch(both)


def test_the_exception_is_always_short() -> None:
    def make(rank: int) -> tuple[LoaderFacts, ...]:
        names = ("a" * 30, "b" * 30, "c" * 30)
        return tuple(
            shared(rank, name=name, samples=rank, batches=rank, batch_size=rank, loader=str(rank)) for name in names
        )

    text = render_mismatch(judged(job(1_024, make)))
    assert len(text.splitlines()) <= 60
    assert "more findings are in the report" in text and "… the whole table is in the report" in text
    assert "\nWhat to do: " in text


def test_escape_codes_in_facts_are_escaped() -> None:
    def make(rank: int) -> tuple[LoaderFacts, ...]:
        sampler = SamplerFacts(name=EVIL, replicas=4, rank=rank)
        prints = {EVIL: f"{EVIL}{rank}"[::-1]}
        names = {"name": EVIL, "loader": EVIL, "datasets": (f"{EVIL}{rank}",), "dataset": EVIL, "problems": (EVIL,)}
        return (shared(rank, sampler=sampler, fingerprints=prints, **names), own(rank))

    facts = job(4, make, silent=(3,), stage=EVIL)
    facts = replace(facts, ranks=tuple(replace(rank, host=EVIL) for rank in facts.ranks))
    diagnosis = judged(facts)
    for text in (
        "\n".join(data_table(facts)),
        render_mismatch(diagnosis),
        render_text(diagnosis),
        render_short(diagnosis),
    ):
        assert not [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
        assert not {"\u202e", "\u2028", "\ud800"} & set(text)
        assert "\\x1b[2J" in text
        text.encode()
