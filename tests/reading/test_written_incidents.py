"""Incidents on NCCL that were written without sight of the rules: the culprit, the kind, and nothing false."""

import pytest
from written_incidents import INCIDENTS, diagnosed, wrong

# Told as possible only. A rank that has called nothing at all is also what a job looks like that has just begun; what
# the ring has lost, or an ended send, leaves nothing by which it could be known.
MISSED = ("the_first_call_connects", "the_ring_has_lost_it", "pipelines_and_data_device_freezes")


@pytest.mark.parametrize("name", INCIDENTS)
def test_who_is_to_blame(name: str) -> None:
    answer = wrong(INCIDENTS[name], diagnosed(INCIDENTS[name]))
    assert not answer.startswith("FALSE"), answer
    assert bool(answer) is (name in MISSED), answer
