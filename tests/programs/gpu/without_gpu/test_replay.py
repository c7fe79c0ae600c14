"""What real Flight Recorders of NCCL have recorded, judged again; and that a recording is what it should be."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import recordings
import replay

# One rank's recorder, as torch 2.13 writes it with gloo.
RECORDER: dict[str, Any] = {
    "version": "2.10",
    "nccl_comm_state": {"0": {"hostname": "secret"}},
    "pg_config": {},
    "pg_status": {
        "0": {"last_completed_collective": "1", "last_enqueued_collective": "2", "last_started_collective": "2"}
    },
}
# A pickle of {"entries": [], "pg_status": {}}, in the words of pickletools.
NOTHING = b"\x80\x02}q\x00(X\x07\x00\x00\x00entriesq\x01]q\x02X\t\x00\x00\x00pg_statusq\x03}q\x04u."


def entry(seq: int, state: str) -> dict[str, Any]:
    return {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_000_000 * seq,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 1000,
        "is_p2p": False,
        "thread_name": "python",
        "thread_id": "1",
    }


def told(rank: int, called: int, **truth: Any) -> dict[str, Any]:
    """What a rank tells that has called so many collectives, the first of which has completed."""
    entries = [entry(seq, "completed" if seq == 1 else "started") for seq in range(1, called + 1)]
    status = {"0": RECORDER["pg_status"]["0"] | {"last_enqueued_collective": str(called)}}
    dump = {
        "rank": rank,
        "json": RECORDER | {"entries": entries, "pg_status": status},
        "pickle": base64.b64encode(NOTHING).decode(),
        "groups": {"0": [0, 1]},
    }
    return {"truth": truth, "dump": dump, "versions": {"torch": "2.13.0"}}


BEHIND = {"finding": {"rule": "rank-behind", "ranks": [1]}, "works": [1]}


@pytest.fixture
def behind() -> recordings.Recording:
    """Rank 1 has not called what rank 0 waits in."""
    return recordings.make("behind", [told(0, 2, **BEHIND), told(1, 1, **BEHIND)])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name) for path in recordings.files()]
    or [
        pytest.param(
            None,
            marks=pytest.mark.skip(
                reason="no recording of NCCL is there yet: `make gpu` on a host with a GPU makes them"
            ),
        )
    ],
)
def test_a_real_recording_is_judged_as_it_is_known_to_be(path: Path) -> None:
    recording = recordings.read(path)
    assert recording["backend"].startswith("nccl")
    assert path.stat().st_size <= recordings.MOST_BYTES
    assert replay.wrong(recording) == []


def test_the_verdict_on_a_recording_is_found(behind: recordings.Recording) -> None:
    found = replay.first_finding(behind)
    assert found is not None
    assert (found.rule, found.ranks) == ("rank-behind", (1,))


def test_another_verdict_and_another_pickle_are_said_to_be_wrong(behind: recordings.Recording) -> None:
    said = replay.wrong(behind | {"expected": BEHIND | {"finding": None}})
    assert said[0] == "first finding {'rule': 'rank-behind', 'ranks': [1]}, not None"
    assert said[1:] == [f"rank {rank}: its JSON and its pickle say different things" for rank in range(2)]


def test_a_recording_is_read_as_it_was_written(behind: recordings.Recording, tmp_path: Path) -> None:
    path = recordings.write(behind, tmp_path / "new")
    assert path.name == "behind-2.json.gz"
    assert recordings.files(tmp_path / "new") == [path]
    assert recordings.read(path) == behind
    # Without the time of day in gzip's header, equal recordings are equal files.
    assert path.read_bytes()[4:8] == bytes(4)


def test_nothing_of_the_host_is_in_a_recording(behind: recordings.Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(behind)
    assert not any(word in text for word in ("secret", "thread_name", "thread_id", "frames", "nccl_comm_state"))
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-17")
    named = told(0, 1)
    named["dump"]["json"]["entries"][0]["process_group"] = ["0", "made on gpu-box-17"]
    with pytest.raises(ValueError, match=r"recording of healthy has 'gpu-box-17' in it"):
        recordings.make("healthy", [named])
    hidden = told(0, 1)
    hidden["dump"]["pickle"] = base64.b64encode(b"\x00gpu-box-17\x00").decode()
    with pytest.raises(ValueError, match="gpu-box-17"):
        recordings.make("healthy", [hidden])


def test_a_file_that_is_too_large_is_not_written(
    behind: recordings.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"behind-2.json.gz has \d+ bytes, 100 are allowed"):
        recordings.write(behind, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_of_another_schema_is_refused(behind: recordings.Recording, tmp_path: Path) -> None:
    path = recordings.write(behind | {"schema": 0}, tmp_path)
    with pytest.raises(ValueError, match="has schema 0, known is 1: record it again"):
        recordings.read(path)


def test_a_pickle_that_imports_something_is_refused(behind: recordings.Recording) -> None:
    dump = behind["dumps"][0] | {"pickle": base64.b64encode(b"cos\nsystem\n.").decode()}
    with pytest.raises(Exception, match=r"asks for os.system"):
        replay.unpickled(dump)
