"""Where things are on the cluster: checkpoints go to the node's own disk, and are synced home at night."""

import os
from pathlib import Path

GPUS_PER_NODE = 2


def node_scratch(base: str = "scratch") -> Path:
    node = int(os.environ.get("RANK", 0)) // GPUS_PER_NODE
    path = Path(base) / f"node{node:02d}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def latest_checkpoint(folder: Path):
    found = sorted(folder.glob("**/*.ckpt"), key=lambda p: p.stat().st_mtime)
    return str(found[-1]) if found else None
