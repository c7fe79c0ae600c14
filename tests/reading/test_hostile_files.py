"""Files that nobody vouches for: nothing in them is run, memory is bounded, and each bad one is one clear error."""

import copy
import gzip
import io
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import calls_in, growth
from made_dumps import entry, idle, waiting, write

from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.reading import evidence, files, lines
from lightning_ncclsafe.reading.dumps import from_json, from_pickle, read_dump, unpickled
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.logs import Log
from lightning_ncclsafe.reading.values import ReadingError


class Harm:
    """What a pickle would call."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReadingError, match=r"refused: it would call posix\.mkdir"):
        unpickled(pickle.dumps({"entries": [Harm()]}, protocol=protocol))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(pickle.dumps(idle(), protocol=2)[:-40], "truncated", id="truncated"),
        pytest.param(b"\x80\x02]r\xff\xff\xff\xff.", "not plain data", id="a memo of four billion"),
        pytest.param(b"\x80\x02X\xff\xff\xff\xffabc.", "truncated", id="a text of four gigabytes"),
        pytest.param(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "truncated", id="bytes of eight exabytes"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7f1.", "truncated", id="a number of two gigabytes"),
        pytest.param(b"\x80\x02Pabc\n.", "not plain data", id="a persistent id"),
        pytest.param(b"\x80\x02\x82\x01.", "not plain data", id="an extension"),
        pytest.param(b"\x80\x02(lp0\n.", "not plain data", id="protocol 0"),
        pytest.param(b"\x80\x02u.", "damaged pickle", id="items without a container"),
        pytest.param(b"\x80\x02}]K\x01s.", "damaged pickle", id="a list as a key"),
        pytest.param(b"\x80\x02h\x07.", "damaged pickle", id="a missing memo"),
        pytest.param(b"\x80\x02" + b"]" * 5_000_001 + b".", "more than 5,000,000 lists", id="a bomb of lists"),
    ],
)
def test_invalid_pickles_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(ReadingError, match=said):
        unpickled(data)


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def test_a_deeply_nested_pickle_is_not_a_dump() -> None:
    with pytest.raises(ReadingError, match="not a dump"):
        from_pickle(nested(100_000))


def test_deeply_nested_json_is_an_error() -> None:
    with pytest.raises(ReadingError, match="damaged or was cut off"):
        from_json(b'{"entries":' + b"[" * 100_000)


def test_lists_that_contain_each_other_are_not_expanded() -> None:
    """Billions of frames from thirty lists that each contain the previous one twice."""
    made: list[Any] = [{"filename": "a.py"}]
    for _ in range(30):
        made = [made, made]
    one = waiting()
    one["entries"][1] |= {"frames": made, "input_sizes": made, "input_dtypes": made, "process_group": made}
    data = pickle.dumps(one, protocol=2)
    calls_in(lambda: read_dump(from_pickle(data), 0), most=10_000)


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1.5,
    float("nan"),
    "x" * 1000,
    "\x1b[31m",
    b"\0",
    [],
    [[[]]],
    {},
    {"a": {}},
    (1,),
)


def test_wrong_types_are_handled_everywhere() -> None:
    good = waiting()
    for place in ("version", "pg_config", "pg_status", "entries"):
        for wrong in WRONG:
            read_dump({**good, place: wrong}, 0)
    for key in good["entries"][1]:
        for wrong in WRONG:
            one = copy.deepcopy(good)
            one["entries"][1][key] = wrong
            one["pg_config"]["0"]["ranks"] = wrong
            one["pg_status"]["0"]["last_enqueued_collective"] = wrong
            try:
                facts = read_dump(one, 0).facts
            except ReadingError:
                assert key in ("collective_seq_id", "state"), (key, wrong)
                continue
            assert all(type(call.seq) is int and type(call.op) is str for call in facts.collectives)
            assert all(type(group.last_enqueued) is int for group in facts.groups)


@pytest.mark.parametrize(
    "changed", [{"state": -1}, {"state": None}, {"collective_seq_id": None}, {"is_p2p": True, "p2p_seq_id": ""}]
)
def test_a_dump_without_required_entry_fields_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    damaged = waiting()
    damaged["entries"][0].update(changed)
    write(tmp_path, {0: damaged, 1: idle()})
    found = Artifacts()
    found.read(str(tmp_path))
    (error,) = found.errors
    assert error.endswith("nccl_trace_rank_0: it is damaged: some of its entries have no sequence number or no state")
    assert set(found.dumps) == {1}


def test_entries_are_sorted_by_their_numbers() -> None:
    turned = waiting()
    turned["entries"].reverse()
    assert read_dump(turned, 0) == read_dump(waiting(), 0)


def test_groups_without_numbers_are_identified_by_name() -> None:
    calls = [entry(1), entry(1, state="scheduled", process_group=("1", "tp"))]
    dump = {"entries": [{key: value for key, value in call.items() if key != "pg_id"} for call in calls]}
    assert [(group.name, group.last_enqueued, group.last_completed) for group in read_dump(dump, 0).facts.groups] == [
        ("0", 1, 1),
        ("1", 1, 0),
    ]


def test_oversized_numbers_are_not_ranks() -> None:
    text = (
        b"[rank99999999999]:[E] [Rank 99999999999] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
        + b"9" * 300
    )
    log = Log()
    log.read(io.BytesIO(text + b", OpType=ALLREDUCE)\n"), 1_000_000)
    assert log.rank_logs() == ()


def test_an_endless_line_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 64 * 1024)

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"NCCL WorkNCCL(SeqNum=1 " * (size // 23)

    tracemalloc.start()
    try:
        Log().read(Endless(), 1_500_000)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A block, and what is made of it.
    assert peak < 750_000


@pytest.mark.parametrize(
    "word",
    [
        b"#0 x from y:1 from ",
        b"[PG ID 1 PG GUID ",
        b'File "',
        b"last enqueued work: ",
        b"\x1b]",
        b"[1m",
        b"ranks [1, ",
    ],
)
def test_the_time_for_repeated_words_is_proportional_to_their_number(word: bytes) -> None:
    def read(words: int) -> None:
        line = b"NCCL Stack trace of the failed collective [rank0]: " + word * words + b"\n" + word * words
        Log().read(io.BytesIO(line), 10**7)

    assert growth(read, 1000) < 9, "four times the words"


def read(path: Path) -> Artifacts:
    found = Artifacts()
    found.read(str(path))
    return found


def test_each_bad_file_is_a_single_error_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path, {0: waiting(), 1: waiting(), 3: waiting()})
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps({"entries": [Harm()]}))
    (tmp_path / "trace_5.json").write_text('{"entries": [')
    (tmp_path / "broken.log.gz").write_bytes(gzip.compress(b"Traceback (most recent call last):\n" * 1000)[:-30])
    (tmp_path / "weights.bin").write_bytes(b"\0" * 100)
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(Harm()))
    (tmp_path / "config.json").write_text('{"a": ')
    (tmp_path / "train.py").write_text("Traceback (most recent call last)")
    found = read(tmp_path)
    assert sorted(Path(error.partition(":")[0]).name for error in found.errors) == [
        "broken.log.gz",
        "nccl_trace_rank_2",
        "trace_5.json",
    ]
    assert sorted(found.dumps) == [0, 1, 3]


@pytest.mark.parametrize("name", ["nccl_trace_rank_0", "trace_0.json"])
def test_an_oversized_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_BYTES", 100)
    (error,) = read(write(tmp_path, {0: waiting()}, name)).errors
    assert "it is larger than" in error


def test_a_compressed_log_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb: it unpacks to a thousand times its size."""
    monkeypatch.setattr(evidence, "MOST_UNPACKED", 1_000_000)
    (tmp_path / "all.log.gz").write_bytes(gzip.compress(b"\n" * 30_000_000 + b"world_size=8\n"))
    found = read(tmp_path)
    assert (found.errors, found.log.world_size) == ([], 0)
    (line,) = found.missing
    assert "Only the first" in line


def test_pipes_devices_and_cyclic_links_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nccl_trace_rank_0")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "nccl_trace_rank_1").symlink_to("/dev/zero")
    assert (read(tmp_path).errors, read(tmp_path).files) == ([], 0)
    assert "neither a file nor a folder" in read(tmp_path / "nccl_trace_rank_0").errors[0]


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    write(tmp_path, {rank: idle() for rank in range(5)})
    assert "it holds more than 3 files" in read(tmp_path).errors[0]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert read(tmp_path / "no").errors == [f"{tmp_path / 'no'}: No such file or directory"]


def test_the_facts_are_marked_as_recorded(tmp_path: Path) -> None:
    job = read(write(tmp_path, {0: waiting(), 1: idle()})).job()
    assert job is not None
    assert job.incident.kind is IncidentKind.RECORDED
    assert all(facts.record is not None and facts.record.has_dump for facts in job.ranks)
