"""The hosts of all ranks on few lines: what is wrong with its remedy, and of the rest only what differs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from incidents import before_training

from lightning_ncclsafe.facts import (
    Capacity,
    DirectoryFacts,
    Frame,
    GpuFacts,
    IncidentKind,
    JobFacts,
    LoadFacts,
    NetworkFacts,
    PreflightFacts,
    SwapFacts,
)
from lightning_ncclsafe.facts.codec import decode, encode
from lightning_ncclsafe.facts.findings import Diagnosis, Severity
from lightning_ncclsafe.report.json import read_report, report_json
from lightning_ncclsafe.report.tables.preflight import preflight_table, render_preflight, render_preflight_all
from lightning_ncclsafe.report.text import render_short, render_text
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES

EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b31m\u202e\u2028\ud800"
GB = 10**9

Make = Callable[[int], PreflightFacts]


def good(rank: int) -> PreflightFacts:
    return PreflightFacts(
        capacity=Capacity(cpus=tuple(range(16)), memory_total_bytes=64 * GB, memory_available_bytes=(60 + rank) * GB),
        swap=SwapFacts(total_bytes=0, used_bytes=0, devices=("/dev/sda2",)),
        network=NetworkFacts(
            interfaces=(f"eth0 1000 Mbit/s 10.0.0.{rank % 250}",),
            default_interface="eth0",
            chosen_by="first that is up",
        ),
        directories=(DirectoryFacts(role="logs", path="/logs", filesystem="ext4", append_s=2e-5 * (rank + 1)),),
        load=LoadFacts(loader_workers=2, batches_in_flight=4, omp_threads=4),
        versions={"torch": "2.13.0", "nccl": "2.28.9"},
        settings={"NCCL_IB_TIMEOUT": "22", "LOCAL_RANK": str(rank % 4)},
        took_s=0.5 + rank / 100,
        missing=("The kernel has no /proc/pressure.",),
    )


def job(world: int, make: Make = good, silent: tuple[int, ...] = ()) -> JobFacts:
    return before_training(
        IncidentKind.PREFLIGHT, world, lambda rank: {"preflight": make(rank)}, per_host=4, silent=silent
    )


def judged(facts: JobFacts) -> Diagnosis:
    return judge(facts, PREFLIGHT_RULES)


def changed(make: Make, *only: int, **more: object) -> Make:
    return lambda rank: replace(make(rank), **more) if rank in only else make(rank)  # type: ignore[arg-type]


OLD = {"torch": "2.12.1", "nccl": "2.28.9"}
TIMEOUT = {"NCCL_TIMEOUT": "7200", "NCCL_IB_TIMEOUT": "22"}


def test_healthy_hosts_print_nothing() -> None:
    assert render_preflight(judged(job(8))) == ""


def test_each_finding_is_one_line_with_its_remedy_errors_first() -> None:
    shm = Capacity(shm_total_bytes=2**26, shm_free_bytes=2**26)
    load = LoadFacts(loader_workers=2, batches_in_flight=4, batch_bytes=10**8)
    make = changed(changed(good, 1, capacity=shm, load=load), 0, settings=TIMEOUT)
    lines = render_preflight(judged(job(2, make))).splitlines()
    assert lines[0].startswith("error: shm-too-small: Ranks 0-1 (node-0): 67.1 MB free in /dev/shm (Docker's default")
    assert " for 4 batches in flight, 400.0 MB. What to do" in lines[0]
    assert " What to do: Give the container more shared memory: docker run --shm-size=16g or --ipc=host" in lines[0]
    assert [line.split(":")[0] for line in lines[:3]] == ["error", "warning", "warning"]
    assert lines[-1] == "not known: Ranks 0-1: The kernel has no /proc/pressure."


def test_errors_come_before_more_harmful_warnings() -> None:
    dead = DirectoryFacts(role="logs", path="/logs", filesystem="ext4", problem="no answer within 2 s")
    make = changed(good, 1, directories=(dead,), versions={"torch": "1.13.1"})
    diagnosis = judged(job(3, make))
    assert [finding.rule for finding in diagnosis.findings] == ["unusable-directory", "different-versions"]
    for text in (render_preflight(diagnosis), render_preflight_all(diagnosis)):
        assert text.startswith("error: different-versions") and "\nwarning: unusable-directory" in text


def test_the_table_has_only_differences_and_equal_ranks_share_a_row() -> None:
    assert preflight_table(job(8, changed(good, 2, 5, versions=OLD))) == [
        "  rank           host     torch",
        "  0-1, 3-4, 6-7  2 hosts  2.13.0",
        "  2, 5           2 hosts  2.12.1",
    ]


def test_measurements_and_rank_specific_values_are_not_in_the_table() -> None:
    assert preflight_table(job(8)) == []  # free memory, latencies, addresses, LOCAL_RANK


def test_differing_settings_are_in_the_table() -> None:
    lines = preflight_table(job(8, changed(good, 3, settings={})))
    assert lines == [
        "  rank      host     NCCL_IB_TIMEOUT",
        "  0-2, 4-7  2 hosts  22",
        "  3         node-0   not set",
    ]


def test_similar_sizes_are_equal_and_unknowns_are_shown() -> None:
    close = lambda rank: changed(good, rank, capacity=Capacity(memory_total_bytes=64 * GB + rank * GB // 10))(rank)  # noqa: E731
    assert preflight_table(job(4, close)) == []
    lines = preflight_table(job(4, changed(good, 1, gpu=GpuFacts(index=0, total_bytes=80 * GB, name="H100"))))
    assert lines[0] == "  rank    host    GPU memory  GPU"
    assert lines[1:] == ["  0, 2-3  node-0  none        unknown", "  1       node-0  80.0 GB     H100"]


def test_a_share_of_cores_is_in_the_table() -> None:
    lines = preflight_table(
        job(8, changed(good, 0, 1, 2, 3, capacity=Capacity(cpus=(0, 1, 2, 3), memory_total_bytes=64 * GB)))
    )
    assert lines == ["  rank  host    cores", "  0-3   node-0  1.0", "  4-7   node-1  4.0"]


def test_many_columns_and_rows_are_truncated_and_counted() -> None:
    names = {f"NCCL_{index}": str(index) for index in range(30)}
    make: Make = lambda rank: replace(good(rank), settings={name: f"{value}{rank}" for name, value in names.items()})  # noqa: E731
    lines = preflight_table(job(32, make))
    assert len(lines) == 1 + 8 + 1 + 1
    assert lines[-2] == "  … 24 more rows are in ncclsafe preflight --all"
    assert lines[-1].endswith(", 14 more differ too") and lines[-1].count(",") == 8
    (single,) = [line for line in preflight_table(job(2, lambda rank: nine(rank))) if "too" in line]
    assert single == "  … NCCL_8 differs too"


def nine(rank: int) -> PreflightFacts:
    return replace(good(rank), settings={f"NCCL_{index}": str(rank) for index in range(9)})


def test_a_thousand_ranks_take_less_than_forty_lines() -> None:
    def make(rank: int) -> PreflightFacts:
        return replace(
            nine(rank),
            capacity=Capacity(cpus=tuple(range(rank)), memory_total_bytes=rank * GB, memory_available_bytes=1),
            swap=SwapFacts(used_bytes=rank * GB, memory_stalled=0.3),
            versions={"torch": str(rank)},
            load=LoadFacts(loader_workers=90 + rank),
        )

    text = render_preflight(judged(job(1_024, make, silent=(9,))))
    assert 12 < len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) < 1_000


def test_a_long_summary_leaves_room_for_the_remedy() -> None:
    names = {f"NCCL_{index}": "1" for index in range(3)}
    text = render_preflight(judged(job(2, changed(good, 1, settings={name: "x" * 900 for name in names}))))
    assert "… What to do: Set it in one place for all ranks" in text.splitlines()[0]


def test_the_full_report_has_everything() -> None:
    text = render_preflight_all(judged(job(8, changed(good, 2, versions=OLD), silent=(7,))))
    assert text.startswith("warning: different-versions, rank 2\n   - Rank 2 (node-0): torch is 2.13.0 on ranks 0-1")
    assert "   What to do: Start all ranks in the same environment" in text
    assert "- torch: 2.13.0 on ranks 0-1, 3-6, 2.12.1 on rank 2\n" in text
    assert "- interface chosen by: first that is up on ranks 0-6\n" in text
    assert "- memory available: 60.0 GB (rank 0) to 66.0 GB (rank 6)\n" in text
    assert "- append, logs at /logs: 0.02 ms (rank 0) to 0.14 ms (rank 6)\n" in text
    assert "- swap in use: 0 bytes on ranks 0-6\n" in text
    assert "- LOCAL_RANK: 0 on ranks 0, 4" in text
    assert "- quota: unknown\n" in text
    assert "- Ranks 0-6: The kernel has no /proc/pressure." in text
    assert render_preflight_all(judged(job(3))).startswith("Nothing is wrong with the hosts of ranks 0-2.\n\n")


def test_the_full_report_of_a_thousand_ranks_is_short() -> None:
    text = render_preflight_all(judged(job(1_024, nine)))
    assert "- NCCL_1: 0 on rank 0, 1 on rank 1, " in text and " 1,012 more\n" in " ".join(text.split()).replace(
        " - ", "\n- "
    )
    assert len(text.splitlines()) < 200


# In the report


def test_the_report_shows_hosts_and_omits_hangs() -> None:
    facts = job(4, changed(good, 3, versions=OLD))
    stack = (Frame(file="train.py", line=1, function="main"),)
    text = render_text(judged(replace(facts, ranks=tuple(replace(rank, stack=stack) for rank in facts.ranks))))
    assert text.startswith("different-versions: Rank 3 (node-0): torch is 2.13.0 on ranks 0-2 but 2.12.1 on rank 3.\n")
    assert "Incident 1: all 4 ranks checked their hosts.\n" in text
    assert "The hosts of all ranks\n----------------------\n  rank  host    torch\n  0-2   node-0  2.13.0\n" in text
    assert "All ranks" not in text and "Stack of" not in text and "The data of" not in text


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (job(1), "the only rank checked its host."),
        (job(4, silent=(1,)), "3 of 4 ranks checked their hosts."),
        (replace(job(2), ranks=()), "0 of 2 ranks checked their hosts."),
    ],
)
def test_the_report_names_the_checked_ranks(facts: JobFacts, said: str) -> None:
    assert f"Incident 1: {said}\n" in render_text(judged(facts))


def test_a_report_without_findings_is_written() -> None:
    assert render_text(judged(job(4))).startswith("Nothing found: nothing is wrong with the ranks' hosts.\n")


def test_the_short_report_lists_other_findings() -> None:
    text = render_short(judged(job(4, changed(good, 3, versions=OLD, settings=TIMEOUT))))
    assert "  also found: different-settings (rank 3), ignored-settings (rank 3)" in text


def test_a_host_diagnosis_round_trips() -> None:
    gpu = GpuFacts(index=0, uuid="GPU-1", free_bytes=GB, throttled_by=("thermal slowdown",), pending_repair=True)
    diagnosis = judged(job(9, lambda rank: replace(good(rank), gpu=gpu, clock_offset_s=rank / 3)))
    assert len(diagnosis.findings) == 3
    assert read_report(report_json(diagnosis)) == diagnosis
    assert decode(JobFacts, encode(diagnosis.job)) == diagnosis.job


def test_escape_codes_in_facts_are_escaped() -> None:
    def make(rank: int) -> PreflightFacts:
        return replace(
            good(rank),
            network=NetworkFacts(interfaces=(EVIL,), default_interface=f"{EVIL}{rank}", chosen_by=EVIL),
            directories=(DirectoryFacts(role=EVIL, path=EVIL, filesystem=f"{EVIL}{rank}", append_s=1.0, problem=EVIL),),
            versions={EVIL: f"{EVIL}{rank}"},
            settings={f"NCCL_{EVIL}": f"{EVIL}{rank}", "NCCL_TIMEOUT": EVIL},
            missing=(EVIL,),
        )

    facts = job(4, make)
    facts = replace(facts, ranks=tuple(replace(rank, host=EVIL) for rank in facts.ranks))
    diagnosis = judged(facts)
    for text in (render_preflight(diagnosis), render_preflight_all(diagnosis), render_text(diagnosis)):
        assert not [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
        assert not {"\u202e", "\u2028", "\ud800"} & set(text)
        assert "\\x1b[2J" in text
        text.encode()
    assert {finding.severity for finding in diagnosis.findings} == {Severity.WARNING}
