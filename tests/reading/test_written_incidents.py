"""Incidents on NCCL that were written without sight of the rules: the culprit, the kind, and nothing false."""

from functools import cache

import pytest
from further_incidents import FURTHER
from late_incidents import LATE
from mixed_incidents import MIXED
from running_incidents import RUNNING
from written_incidents import INCIDENTS, diagnosed, wrong

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis

# Told as possible only. A rank that has called nothing at all is also what a job looks like that has just begun; what
# the ring has lost, or an ended send, leaves nothing by which it could be known. And of two hosts that are stuck in
# one group, the one that is ahead may as well wait for what the other has not called: only that one is named. Whoever
# waits for an idle rank by way of one without a dump is held up by that as far as dumps tell; one rank of four that
# waits may still move; and numbers that begin again are also those of an earlier moment. Of two jobs the later one
# counts, even with few dumps; and groups of unknown members that each process names by itself cannot be told apart. A
# host whose clock is hours behind has dumps like those of an earlier start. What ranks send each other in an all-to-all
# may differ in size, which is not recorded.
MISSED = (
    "the_first_call_connects",
    "the_ring_has_lost_it",
    "pipelines_and_data_device_freezes",
    "two_hosts_stuck_in_one_group",
    "the_end_of_a_chain_of_which_a_link_is_missing",
    "tied_embeddings",
    "a_rank_that_came_back",
    "two_ranks_have_dumps_of_another_job",
    "names_of_each_process_and_members_unknown",
    "a_clock_two_hours_behind",
    "experts32_an_exchange_never_ends",
)


@cache
def told(name: str) -> Diagnosis | None:
    """What is said of an incident."""
    return diagnosed(INCIDENTS[name])


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_culprit_is_named(name: str) -> None:
    answer = wrong(INCIDENTS[name], told(name))
    assert not answer.startswith("FALSE"), answer
    assert bool(answer) is (name in MISSED), answer


def test_every_incident_has_a_test() -> None:
    assert (len(FURTHER), len(MIXED), len(RUNNING), len(LATE)) == (28, 45, 71, 34)
    assert {*FURTHER, *MIXED, *RUNNING, *LATE} < set(INCIDENTS)


def test_a_pair_with_both_sides_called_is_named_before_its_waiters() -> None:
    diagnosis = told("pipelines_and_data_device_freezes")
    found = [(finding.rule, finding.ranks, finding.confidence) for finding in diagnosis.findings] if diagnosis else []
    assert found == [("all-joined", (4, 6), Confidence.POSSIBLE)]


def test_a_rank_without_calls_still_has_a_dump() -> None:
    diagnosis = told("the_first_call_connects")
    (finding,) = diagnosis.findings if diagnosis else ()
    assert (finding.rule, finding.ranks) == ("host-stuck", (3,))
    assert "no dump" not in finding.summary.lower()


def test_a_dead_device_in_a_receive_is_reported_with_its_peer() -> None:
    diagnosis = told("megatron16_device_dies_in_a_send")
    (finding,) = diagnosis.findings if diagnosis else ()
    assert "GPU of rank 9 has not completed recv 2<-1" in finding.summary
    assert finding.summary.endswith("although the other side has reached it.")
