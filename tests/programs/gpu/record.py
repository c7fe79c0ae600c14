"""Runs the scenes and keeps their recordings: ``python tests/programs/gpu/record.py --ranks 2 4``."""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import recordings
from one_gpu import missing, run_ranks

SCRIPT = Path(__file__).with_name("nccl_rank.py")
LIMIT_S = 150
RECORDED = ("healthy", "delay", "behind", "mismatched", "sub_groups", "point_to_point", "coalesced", "mispaired")

# Timing is not switched on here: that is for the package to do.
_RECORDER: Mapping[str, str] = {"TORCH_FR_BUFFER_SIZE": "400"}
# Should NCCL notice by itself: what has hung must not be ended before its recorder is read.
_UNENDED: Mapping[str, str] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def told_by_ranks(name: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Runs a scene, an abort or a reading, and returns what each rank has written down.

    Raises:
        RuntimeError: A rank has written nothing; the message has what all have printed.
    """
    arguments = [str(SCRIPT), name, f"--ranks={ranks}", f"--folder={folder}"]
    more = {**_RECORDER, **(_UNENDED if name == "mismatched" else {})}
    ended = run_ranks(arguments, ranks, folder, timeout_s=LIMIT_S, more=more)
    paths = [folder / f"told-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        raise RuntimeError(f"Not all ranks of {name!r} have come to its end.\n{ended.story}")
    return [json.loads(path.read_text()) for path in paths]


def recording_of(scene: str, ranks: int, folder: Path) -> recordings.Recording:
    """Runs a scene and makes a recording of it."""
    return recordings.make(scene, told_by_ranks(scene, ranks, folder))


def keep(scene: str, ranks: int, folder: Path) -> bool:
    """Records one scene; where that fails it is said, and the others are recorded all the same."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            path = recordings.write(recording_of(scene, ranks, Path(scratch)), folder)
        except (RuntimeError, ValueError) as error:
            print(error, flush=True)
            return False
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="*", default=[*RECORDED])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--folder", type=Path, default=recordings.FOLDER)
    options = parser.parse_args()
    if reason := missing():
        print(f"nothing recorded: {reason}")
        return
    kept = [keep(scene, ranks, options.folder) for ranks in options.ranks for scene in options.scenes]
    raise SystemExit(not all(kept))


if __name__ == "__main__":
    main()
