"""Whatever a dump or a log holds is read or refused with one error, and what comes of it can be judged and reported."""

import io
import json
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_dumps import entry, idle, waiting

from lightning_ncclsafe.reading import dumps
from lightning_ncclsafe.reading.dumps import Dump, from_json, from_pickle, read_dump
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.values import ReadingError
from lightning_ncclsafe.report.text import render_text
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

LOGS = Path(__file__).with_name("logs")
QUICK = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
TEXT = st.text('aZ09 .,:[]()<>-"\\\n\x00\x1b\u2028ü', max_size=12)
WRONG = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 61, 2**31, 2**63, 10**40, 1.5, float("nan"), float("inf"), b"\0", (), "0", "nccl:"])
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(0, 3), inner, max_size=3),
    max_leaves=4,
)


def judged(found: Artifacts) -> None:
    job = found.job()
    if job is not None:
        diagnosis = judge(job, RECORDED_RULES)
        assert not [line for line in diagnosis.unanswered if " failed (" in line]
        text = render_text(diagnosis)
        assert "\x1b" not in text and "\0" not in text


def beside_others(dump: dict[Any, Any]) -> None:
    """A dump of rank 0 is read, and judged with two others."""
    found = Artifacts()
    for rank, one in enumerate((dump, waiting(), idle())):
        with suppress(ReadingError):
            found.add_dump(f"trace_{rank}", one)
    assert {1, 2} <= set(found.dumps)
    judged(found)


WORK = st.fixed_dictionaries(
    {},
    optional={
        "collective_seq_id": st.integers(55, 62) | WRONG,
        "p2p_seq_id": st.integers(0, 3) | WRONG,
        "op_id": st.integers(55, 62) | WRONG,
        "pg_id": st.integers(0, 2) | WRONG,
        "process_group": st.sampled_from([("0", "default_pg"), ("1", "tp"), ["2", ""], "3"]) | WRONG,
        "profiling_name": st.sampled_from(["nccl:send 0->1", "nccl:recv 0<-1", "nccl:coalesced", "gloo:barrier"])
        | WRONG,
        "state": st.sampled_from(["scheduled", "started", "completed"]) | WRONG,
        "retired": st.booleans() | WRONG,
        "is_p2p": st.booleans() | WRONG,
        "time_created_ns": st.integers(0, 2**63) | WRONG,
        "time_discovered_completed_ns": st.integers(0, 2**63) | WRONG,
        "duration_ms": st.floats() | WRONG,
        "timeout_ms": WRONG,
        "input_sizes": WRONG,
        "output_sizes": WRONG,
        "input_dtypes": WRONG,
        "frames": WRONG,
    },
)
STATUS = st.dictionaries(
    st.sampled_from(["last_enqueued_collective", "last_started_collective", "last_completed_collective"]),
    st.integers(-1, 62) | WRONG,
)
CONFIG = st.fixed_dictionaries(
    {}, optional={"name": TEXT | WRONG, "desc": TEXT | WRONG, "ranks": st.just("[0, 1, 2]") | WRONG}
)
NAMES = st.sampled_from(["0", "1", "2", 0])
DUMP = st.fixed_dictionaries(
    {},
    optional={
        "version": st.sampled_from(["2.10", "1.5", "9"]) | WRONG,
        "entries": st.lists(WORK.map(lambda changed: entry(61) | changed) | WRONG, max_size=6) | WRONG,
        "pg_status": st.dictionaries(NAMES, STATUS | WRONG, max_size=3) | WRONG,
        "pg_config": st.dictionaries(NAMES, CONFIG | WRONG, max_size=3) | WRONG,
        "nccl_comm_state": WRONG,
    },
)


@settings(QUICK, max_examples=80)
@given(dump=DUMP)
def test_any_dump_is_read_or_refused(dump: dict[Any, Any]) -> None:
    beside_others(dump)


STATES = (*[("completed", True)] * 6, ("completed", False), ("scheduled", False), ("scheduled", True))
OPS = (*["nccl:all_reduce"] * 8, "nccl:send 0->1", "nccl:coalesced")


@pytest.mark.parametrize("seed", range(40))
def test_skipped_entries_of_a_full_ring_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(drawn.randint(2, 8)):
        number, (state, retired), op = drawn.randint(0, 2), drawn.choice(STATES), drawn.choice(OPS)
        of_run = {"pg_id": number, "process_group": (str(number), ""), "retired": retired, "is_p2p": "send" in op}
        for _ in range(drawn.randint(1, 120)):
            made.append(entry(len(made) + 1, state=state, op=op, **of_run))
    status = {"0": {"last_enqueued_collective": len(made), "last_completed_collective": len(made) // 2}}
    dump = {"entries": made, "pg_status": drawn.choice([status, {}])}
    read_all = read_dump(dump, 0)
    monkeypatch.setattr(dumps, "_of_use", list)
    assert read_all == read_dump(dump, 0)


PICKLED = pickle.dumps(waiting(), protocol=2)
WRITTEN = json.dumps(waiting()).encode()


def edits(data: bytes) -> st.SearchStrategy[bytes]:
    """The data with up to three places changed, and cut off somewhere now and then."""
    one = st.tuples(st.integers(0, len(data)), st.integers(0, 20), st.binary(max_size=8))

    def applied(changes: list[tuple[int, int, bytes]], kept: int | None) -> bytes:
        changed = data
        for place, cut, put in changes:
            changed = changed[:place] + put + changed[place + cut :]
        return changed[:kept]

    return st.builds(applied, st.lists(one, min_size=1, max_size=3), st.none() | st.integers(0, len(data)))


def read(data: bytes) -> Dump | None:
    try:
        plain = from_pickle(data) if data[:1] == b"\x80" else from_json(data)
        return read_dump(plain, 0) if isinstance(plain, dict) else None
    except ReadingError as error:
        assert 0 < len(str(error)) < 300
        return None


@pytest.mark.parametrize("data", [PICKLED, WRITTEN], ids=["pickle", "JSON"])
@settings(QUICK, max_examples=100)
@given(draw=st.data())
def test_damaged_dumps_are_read_or_refused(data: bytes, draw: st.DataObject) -> None:
    read(draw.draw(edits(data)))


@QUICK
@given(data=st.binary(max_size=64).map(lambda data: b"\x80\x02" + data + b"."))
def test_any_pickle_opcodes_are_followed_or_refused(data: bytes) -> None:
    read(data)


LINES = sorted({line[:400] for path in LOGS.rglob("*.log") for line in path.read_bytes().splitlines() if line.strip()})
LINE = st.sampled_from(LINES).flatmap(lambda line: st.just(line) | edits(line)) | TEXT.map(str.encode)


@QUICK
@given(told=st.lists(LINE, max_size=12), end=st.sampled_from([b"\n", b"\r\n", b"\r", b" "]))
def test_log_lines_may_come_in_any_order(told: list[bytes], end: bytes) -> None:
    found = Artifacts()
    data = end.join(told)
    found.log.read(io.BytesIO(data), len(data) + 1)
    judged(found)
