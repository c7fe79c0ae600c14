"""Flight Recorder dumps as torch writes them, of any version that is read, and the pickles and JSON of them."""

import json
import pickle
from pathlib import Path
from typing import Any

FRAMES = [
    {
        "name": "all_reduce",
        "filename": "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py",
        "line": 3000,
    },
    {"name": "training_step", "filename": "/home/me/train.py", "line": 40},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 90},
]
BEGAN_NS = 1_790_000_000_000_000_000


def entry(seq: int, *, state: str = "completed", op: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    """An entry of version 2.10, as a pickle has it."""
    return {
        "frames": FRAMES,
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": BEGAN_NS + seq * 1_000_000_000,
        "input_sizes": [[128, 10]],
        "input_dtypes": ["Float"],
        "output_sizes": [[128, 10]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def dump(
    *entries: dict[str, Any], enqueued: int, completed: int, world: int = 4, version: str = "2.10", **more: Any
) -> dict[str, Any]:
    """A dump with the default group alone."""
    status = {
        "last_enqueued_collective": enqueued,
        "last_started_collective": enqueued,
        "last_completed_collective": completed,
    }
    return {
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {"0": status},
        "entries": list(entries),
        **more,
    }


def waiting(seq: int = 61, **more: Any) -> dict[str, Any]:
    """A rank that has called ``seq`` and waits in it."""
    return dump(entry(seq - 1), entry(seq, state="started", **more), enqueued=seq, completed=seq - 1)


def idle(seq: int = 60) -> dict[str, Any]:
    """A rank that has finished all that it called."""
    return dump(entry(seq - 1), entry(seq), enqueued=seq, completed=seq)


def as_json(made: dict[str, Any]) -> dict[str, Any]:
    """The same as torch's JSON: without stacks, with numbers of positions as text."""
    plain = json.loads(json.dumps(made))
    plain["pg_status"] = {key: {k: str(v) for k, v in status.items()} for key, status in plain["pg_status"].items()}
    for one in plain["entries"]:
        del one["frames"]
    return plain  # type: ignore[no-any-return]


def write(folder: Path, made: dict[int, dict[str, Any]], name: str = "nccl_trace_rank_{}") -> Path:
    """Writes dumps as pickles, or as JSON where the name says so; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, one in made.items():
        path = folder / name.format(rank)
        if path.suffix == ".json":
            path.write_text(json.dumps(as_json(one)))
        else:
            path.write_bytes(pickle.dumps(one, protocol=2))
    return folder
