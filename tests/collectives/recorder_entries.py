"""Entries as torch 2.13's Flight Recorder dumps them, and a recorder that keeps the last of them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

MS = 1_000_000
BEGAN_NS = 1_700_000_000_000_000_000


def entry(
    record_id: int,
    seq: int | None = None,
    *,
    group: tuple[str, str] = ("0", "default_pg"),
    name: str = "gloo:all_reduce",
    state: str = "scheduled",
    retired: bool = True,
    duration_ms: float | None = None,
    at_ms: float | None = None,
    sizes: Any = ((10,),),
    is_p2p: bool = False,
) -> dict[str, Any]:
    """One call; without a time the calls are a millisecond apart."""
    made = {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": group,
        "thread_name": "python",
        "thread_id": "139972040735616",
        "collective_seq_id": 0 if is_p2p else record_id + 1 if seq is None else seq,
        "p2p_seq_id": seq or 0 if is_p2p else 0,
        "op_id": record_id + 1,
        "profiling_name": name,
        "time_created_ns": BEGAN_NS + int((record_id if at_ms is None else at_ms) * MS),
        "input_sizes": [list(shape) for shape in sizes],
        "input_dtypes": ["Float"],
        "output_sizes": [list(shape) for shape in sizes],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": retired,
        "timeout_ms": 1_800_000,
        "is_p2p": is_p2p,
    }
    return made if duration_ms is None else {**made, "duration_ms": duration_ms}


def nccl(record_id: int, *, duration_ms: float | None = None, **more: Any) -> dict[str, Any]:
    """One call on NCCL; with a duration it is over."""
    over = (
        {"state": "completed", "retired": True} if duration_ms is not None else {"state": "started", "retired": False}
    )
    return entry(record_id, name="nccl:all_reduce", duration_ms=duration_ms, **{**over, **more})


class Recorder:
    """A ring of entries."""

    def __init__(self, size: int = 1000) -> None:
        self.ring: deque[dict[str, Any]] = deque(maxlen=size)

    def add(self, *entries: dict[str, Any]) -> None:
        self.ring.extend(entries)

    def finish(self, record_id: int, duration_ms: float) -> None:
        for number, known in enumerate(self.ring):
            if known["record_id"] == record_id:
                self.ring[number] = {**known, "state": "completed", "retired": True, "duration_ms": duration_ms}

    def entries(self) -> Iterator[list[dict[str, Any]]]:
        yield [*self.ring]
