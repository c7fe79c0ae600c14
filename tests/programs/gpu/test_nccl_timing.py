"""Times that NCCL's recorder gives, against CUDA events, and against a delay that is known."""

from pathlib import Path
from statistics import median

import pytest
from record import LIMIT_S, recording_of, told_by_ranks

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.mark.usefixtures("needs_nccl")
def test_recorded_durations_are_those_of_cuda_events(tmp_path: Path) -> None:
    for told in told_by_ranks("durations", 2, tmp_path):
        measured_ms = told["truth"]["events_ms"]
        recorded_ms = [entry.get("duration_ms") for entry in told["dump"]["json"]["entries"]][-len(measured_ms) :]
        assert None not in recorded_ms, "the recorder has no durations: is timing on?"
        pairs = [*zip(recorded_ms, measured_ms, strict=True)]
        # The events around the call have its launch in them as well, and the turns that the ranks take on the GPU.
        assert 0.6 < median(recorded / measured for recorded, measured in pairs) <= 1.02, pairs
        assert all(recorded <= 1.02 * measured + 0.1 for recorded, measured in pairs), pairs


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_known_delay_is_found_and_is_no_transfer(ranks: int, tmp_path: Path) -> None:
    from replay import delays, wrong_about_delays

    recording = recording_of("delay", ranks, tmp_path)
    assert wrong_about_delays(recording) == []
    if recording["backend"] == "nccl":
        assert all(len(found.transfer_ms) == len(found.late_ms) for found in delays(recording).values())
