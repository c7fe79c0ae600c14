"""The line that decides how much data the short ranks have, in findings about an uneven end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import scenes
from builders import GLOO, Backend

from lightning_ncclsafe.facts import JobFacts, LoaderFacts, RankFacts
from lightning_ncclsafe.facts.codec import from_plain, to_plain
from lightning_ncclsafe.facts.findings import Finding
from lightning_ncclsafe.rules.judging import judge

LINE, OTHER = "/home/me/data.py:12 in __iter__", "/home/me/data.py:30 in __iter__"


def short_of(facts: JobFacts, **ends_at: str) -> JobFacts:
    """The same with lines that rank 1 knows."""
    return replace(
        facts, ranks=tuple(replace(one, data_ends_at=ends_at) if one.rank == 1 else one for one in facts.ranks)
    )


def found(facts: JobFacts) -> Finding:
    (first, *_) = judge(facts).findings
    assert first.rule == "uneven-batches"
    return first


@pytest.mark.parametrize("scene", [scenes.short_rank_finished, scenes.short_rank_in_validation])
def test_the_line_of_the_stage_that_the_others_are_in_is_the_location(scene: Callable[[Backend], JobFacts]) -> None:
    before, first = found(scene(GLOO)), found(short_of(scene(GLOO), train=LINE, validate=OTHER))
    assert first.location == LINE
    assert first.summary == f"{before.summary} How much data they have is decided at data.py:12 in __iter__."
    assert (first.ranks, first.confidence, first.remedy) == (before.ranks, before.confidence, before.remedy)
    assert any(one.text == f"How much data they have is decided at {LINE}." for one in first.evidence)


def test_the_line_of_another_stage_is_none() -> None:
    before = scenes.short_rank_finished(GLOO)
    assert found(short_of(before, validate=LINE)) == found(before)


def two_short(*lines: str) -> JobFacts:
    def at_end(facts: RankFacts) -> RankFacts:
        short = replace(GLOO.finished(facts.rank, seq=60, batch=19), loaders=(LoaderFacts(batches=20),))
        return replace(short, data_ends_at={"train": lines[facts.rank]})

    facts = scenes.short_rank_finished(GLOO)
    return replace(facts, ranks=tuple(at_end(one) if one.rank < 2 else one for one in facts.ranks))


def test_short_ranks_have_to_have_the_same_line() -> None:
    before = found(two_short("", "")).location
    assert found(two_short(LINE, LINE)).location == LINE
    assert found(two_short(LINE, OTHER)).location == before
    assert found(two_short(LINE, "")).location == before


@pytest.mark.parametrize("differs", [{"batch_size": 8}, {"drop_last": True}])
def test_where_batches_have_different_sizes_the_data_does_not_decide(differs: dict[str, int]) -> None:
    facts = short_of(scenes.short_rank_finished(GLOO), train=LINE)

    def with_sizes(rank: RankFacts, **settings: int) -> RankFacts:
        sized = {"batch_size": 4, "drop_last": False} | settings
        return replace(rank, loaders=tuple(replace(one, **sized) for one in rank.loaders))

    alike = replace(facts, ranks=tuple(map(with_sizes, facts.ranks)))
    assert found(alike).location == LINE
    ranks = tuple(with_sizes(one, **(differs if one.rank == 1 else {})) for one in facts.ranks)
    different = judge(replace(facts, ranks=ranks)).findings
    assert all(LINE not in (one.location, one.summary) for one in different)


def test_of_ranks_that_something_else_has_stopped_no_line_is_told() -> None:
    facts = short_of(scenes.short_rank_finished(GLOO), train=LINE)
    even = replace(facts, ranks=tuple(replace(one, loaders=(LoaderFacts(batches=22),)) for one in facts.ranks))
    for one in judge(even).findings:
        assert LINE not in (one.location, one.summary)


def test_facts_without_lines_can_be_read() -> None:
    facts = short_of(scenes.short_rank_finished(GLOO), train=LINE).ranks[1]
    written = to_plain(facts)
    assert from_plain(RankFacts, written) == facts
    del written["data_ends_at"]
    assert from_plain(RankFacts, written) == replace(facts, data_ends_at={})
