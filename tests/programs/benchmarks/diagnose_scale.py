"""Processor time of ``ncclsafe diagnose``: ``python tests/programs/benchmarks/diagnose_scale.py --ranks 16384``.

A synthetic folder of Flight Recorder dumps with one culprit, read and judged in a process of its own, so that the peak
is that of the work alone.
"""

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.report.text import render_text
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

BEGAN_NS = 1_790_000_000_000_000_000
CULPRIT = 5
LAST = 10_000
SCENES = ("host-stuck", "no-dump", "diverged-collectives", "all-joined", "gpu-stuck", "mesh")
TENSOR = 8


def entry(seq: int, *, state: str, op: str = "nccl:all_reduce", frames: list[dict[str, Any]]) -> dict[str, Any]:
    """An entry as torch's recorder writes it."""
    return {
        # torch shares the frames of its entries, and not the lists of them.
        "frames": list(frames),
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": BEGAN_NS + seq * 1_000_000,
        "input_sizes": [[25_557_032]],
        "input_dtypes": ["Float"],
        "output_sizes": [[25_557_032]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def dump(scene: str, rank: int, world: int, entries: int) -> bytes:
    """The dump of one rank: all have come to number 10,000, in which the others wait for the culprit."""
    frames = [
        {"name": f"f{depth}", "filename": f"/home/me/project/train_{depth % 3}.py", "line": 10 + depth}
        for depth in range(20)
    ]
    is_late = rank == CULPRIT
    last = LAST - 1 if is_late and scene == "host-stuck" else LAST
    done = last if last < LAST or (scene == "gpu-stuck" and not is_late) else LAST - 1
    made = [entry(seq, state="completed", frames=frames) for seq in range(LAST + 1 - entries, LAST)]
    if last == LAST:
        op = "nccl:broadcast" if is_late and scene == "diverged-collectives" else "nccl:all_reduce"
        made.append(entry(LAST, state="completed" if done == LAST else "started", op=op, frames=frames))
    status = {"last_enqueued_collective": last, "last_started_collective": last, "last_completed_collective": done}
    config = {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}
    plain = {"version": "2.10", "pg_config": {"0": config}, "pg_status": {"0": status}, "entries": made}
    return pickle.dumps(plain, protocol=2)


def mesh_dump(rank: int, world: int, entries: int) -> bytes:
    """One rank of a job with tensor and data parallel groups, in each of which all ranks wait for the culprit's row."""
    frames = [{"name": f"f{depth}", "filename": "/home/me/project/train.py", "line": 10 + depth} for depth in range(20)]
    row, column = rank // TENSOR, rank % TENSOR
    tensor, data = f"{1 + row}", f"d{column}"
    members = {
        "0": list(range(world)),
        tensor: [row * TENSOR + place for place in range(TENSOR)],
        data: list(range(column, world, TENSOR)),
    }
    is_stuck_row = row == CULPRIT // TENSOR
    in_tensor = LAST - (rank == CULPRIT)
    in_data = LAST - is_stuck_row
    made = []
    for seq in range(LAST + 1 - entries // 2, LAST + 1):
        for number, name, about, last in ((1, tensor, "tp", in_tensor), (2, data, "dp", in_data)):
            waits = seq == LAST and (number == 2 or is_stuck_row)
            if seq <= last:
                one = entry(seq, state="scheduled" if waits else "completed", frames=frames)
                made.append(one | {"pg_id": number, "process_group": (name, about)})
    status = {
        "1": {"last_enqueued_collective": in_tensor, "last_completed_collective": LAST - is_stuck_row},
        "2": {"last_enqueued_collective": in_data, "last_completed_collective": LAST - 1},
    }
    config = {
        name: {"name": name, "desc": about, "ranks": str(members[name])}
        for name, about in (("0", "default_pg"), (tensor, "tp"), (data, "dp"))
    }
    return pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": status, "entries": made}, protocol=2)


def write(folder: Path, scene: str, world: int, entries: int) -> int:
    """Writes the dumps; returns their bytes."""
    if scene == "mesh":
        sizes = [
            (folder / f"nccl_trace_rank_{rank}").write_bytes(mesh_dump(rank, world, entries)) for rank in range(world)
        ]
        return sum(sizes)
    likely = dump(scene, 0, world, entries)
    written = 0
    for rank in range(world):
        if rank == CULPRIT and scene == "no-dump":
            continue
        data = dump(scene, rank, world, entries) if rank == CULPRIT else likely
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        written += len(data)
    return written


def work(scene: str, world: int, entries: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), scene, world, entries)
        began = time.process_time()
        evidence = Artifacts()
        evidence.read(folder)
        job = evidence.job()
        read = time.process_time()
    assert job is not None
    diagnosis = judge(job, RECORDED_RULES)
    judged = time.process_time()
    report = render_text(diagnosis)
    done = time.process_time()
    first = diagnosis.findings[0]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(
        f"{scene:22} {world:7,} ranks {size / 1e6:9,.1f} MB: read {read - began:6.2f} s, judge {judged - read:5.2f} s, "
        f"report {done - judged:5.2f} s ({len(report):,} bytes), peak {peak_mb:,.0f} MB: {first.rule} "
        f"{first.confidence.value} {first.ranks[:3]}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--entries", type=int, default=40, help="entries of each dump; torch keeps 2,000 at most")
    parser.add_argument("--scene", choices=SCENES, action="append")
    parser.add_argument("--here", action="store_true", help="in this process")
    told = parser.parse_args()
    for scene in told.scene or SCENES:
        if told.here:
            work(scene, told.ranks, told.entries)
        else:
            options = ["--ranks", str(told.ranks), "--entries", str(told.entries), "--scene", scene]
            subprocess.run([sys.executable, __file__, "--here", *options], check=True, timeout=600)


if __name__ == "__main__":
    main()
