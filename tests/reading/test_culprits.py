"""Who is to blame by the dumps of a job on NCCL: of real jobs, and of simulated ones."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_incidents import FAULTS, Incident, Made, diagnosis_of, incidents, made, scores, unmatched, unmatched_send

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis

HERE = Path(__file__).parent / "nccl_dumps"
EVERYBODY = tuple(range(16))
Fault = Callable[[Made], Incident | None]


def real(name: str) -> dict[int, Any]:
    return {rank: pickle.loads((HERE / name / f"_dump_{rank}").read_bytes()) for rank in EVERYBODY}


def judged(dumps: dict[int, Any]) -> Diagnosis:
    return diagnosis_of(dumps) or pytest.fail()


def told(dumps: dict[int, Any]) -> list[tuple[str, tuple[int, ...], Confidence]]:
    return [(finding.rule, finding.ranks, finding.confidence) for finding in judged(dumps).findings]


@pytest.mark.parametrize(
    ("name", "rule", "ranks"), [("gpu_error_1st", "gpu-stuck", (12, 14)), ("lock_gil_2nd", "host-stuck", (10, 15))]
)
def test_real_jobs_are_diagnosed(name: str, rule: str, ranks: tuple[int, ...]) -> None:
    """Both culprits of each job, of the right kind, and no other rank: see fault_injection.log."""
    assert told(real(name)) == [(rule, ranks, Confidence.LIKELY)]


def test_consequences_are_marked() -> None:
    (finding,) = judged(real("lock_gil_2nd")).findings
    assert finding.evidence[-1].text == (
        "Ranks 0-9, 11-14 wait for this, also by way of others: that is a consequence."
    )


def test_an_empty_dump_is_not_a_missing_dump() -> None:
    diagnosis = judged(real("lock_gil_2nd"))
    said = [finding.summary for finding in diagnosis.findings] + list(diagnosis.unanswered)
    assert not [text for text in said if "no dump" in text.lower() or "nothing was read" in text.lower()]


def test_a_culprit_without_a_dump_does_not_hide_the_other() -> None:
    dumps = real("lock_gil_2nd")
    del dumps[15]
    likely = [one for one in told(dumps) if one[2] is not Confidence.POSSIBLE]
    assert likely == [("host-stuck", (10,), Confidence.LIKELY)]


@pytest.mark.parametrize("missing", [0, 7, 9, 13])
def test_innocents_without_a_dump_are_not_accused(missing: int) -> None:
    for name, expected in (("gpu_error_1st", ("gpu-stuck", (12, 14))), ("lock_gil_2nd", ("host-stuck", (10, 15)))):
        dumps = real(name)
        del dumps[missing]
        likely = [one[:2] for one in told(dumps) if one[2] is not Confidence.POSSIBLE]
        if name == "gpu_error_1st" and missing == 13:
            # What rank 12 holds open has ended on rank 13, and on 15 in the group of experts.
            assert ("gpu-stuck", (12, 14)) in likely
        else:
            assert likely == [expected]


def test_a_rank_with_a_disabled_recorder_has_a_dump() -> None:
    dumps = real("lock_gil_2nd")
    dumps[10] = {"version": "2.9", "pg_config": {}, "pg_status": {}}
    diagnosis = judged(dumps)
    assert [f.ranks for f in diagnosis.findings if f.confidence is not Confidence.POSSIBLE] == [(15,)]
    assert all("no dump" not in f.summary for f in diagnosis.findings)


def member(rank: int, first: str, second: str) -> dict[str, Any]:
    """A rank that has called number 7 of two groups with the same members, in this order; neither ends."""
    config = {name: {"name": name, "desc": name, "ranks": "[0, 1, 2]"} for name in ("tp", "ep")}
    entries = [
        {
            "record_id": record,
            "pg_id": ("tp", "ep").index(name),
            "process_group": (name, name),
            "collective_seq_id": 7,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_758_610_505_000_000_000 + record,
            "input_sizes": [[8]],
            "output_sizes": [[8]],
            "state": "scheduled",
            "retired": False,
            "is_p2p": False,
        }
        for record, name in enumerate((first, second))
    ]
    counters = {"last_enqueued_collective": 7, "last_started_collective": -1, "last_completed_collective": 6}
    return {"version": "2.9", "pg_config": config, "pg_status": {"0": counters, "1": counters}, "entries": entries}


def test_crossed_groups_are_found_by_call_order() -> None:
    dumps = {0: member(0, "tp", "ep"), 1: member(1, "ep", "tp"), 2: member(2, "tp", "ep")}
    (finding,) = judged(dumps).findings
    assert (finding.rule, finding.ranks) == ("crossed-groups", (1,))
    assert "rank 1 uses a different order from most" in finding.summary


def test_different_sizes_with_one_sequence_number_blame_the_code() -> None:
    dumps = {rank: member(rank, "tp", "ep") for rank in range(3)}
    for rank, elements in ((0, 131_072), (1, 122_880), (2, 131_072)):
        dumps[rank]["entries"][0] |= {"profiling_name": "nccl:_all_gather_base", "input_sizes": [[elements]]}
    diagnosis = judged(dumps)
    assert told(dumps) == [("mismatched-collective", (1,), Confidence.CERTAIN)]
    assert "link or a device" not in diagnosis.findings[0].summary


def test_a_barrier_beside_an_all_reduce_blames_the_code() -> None:
    dumps = {rank: member(rank, "tp", "ep") for rank in range(3)}
    dumps[2]["entries"][0]["profiling_name"] = "nccl:broadcast"
    assert told(dumps)[0][:2] == ("diverged-collectives", (2,))


# Of one incident of each kind, made with the seeds from one on: how many are diagnosed, as far as dumps tell at all.
@pytest.mark.parametrize(("first", "least"), [(0, 13), (29, 14), (82, 15), (111, 14), (140, 15), (170, 15)])
def test_simulated_incidents_are_diagnosed(first: int, least: int) -> None:
    """The floors are what was reached; see ``python tests/reading/simulated_incidents.py``."""
    table = scores(incidents(len(FAULTS), first))
    right, wrong = sum(score.right for score in table.values()), sum(score.wrong_likely for score in table.values())
    misses = [miss for score in table.values() for miss in score.misses]
    assert (right >= least, wrong <= 1) == (True, True), "\n".join(misses)
    for fault in ("host stuck", "in its loader", "gpu dead", "died, no dump", "crossed groups", "healthy"):
        assert table[fault].right == table[fault].of == 1, table[fault].misses


@pytest.mark.parametrize(("fault", "seed"), [(unmatched, 5497), (unmatched_send, 5062), (unmatched_send, 5192)])
def test_ranks_whose_devices_form_a_circle_are_named(fault: Fault, seed: int) -> None:
    """All other ranks wait for these two, and each has made a further call that no other rank has reached."""
    incident = fault(made(seed))
    assert incident is not None
    (found,) = told(incident.dumps)
    assert found == ("unmatched-p2p", tuple(sorted(incident.among)), Confidence.LIKELY)


def test_entries_lost_by_a_short_ring_lower_the_confidence() -> None:
    incident = unmatched(made(5588))
    assert incident is not None
    (found,) = told(incident.dumps)
    assert found[2] is Confidence.POSSIBLE
