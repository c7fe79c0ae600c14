"""Checkpoints go to the node's scratch disk, which is much faster than the home file system."""

import os
from pathlib import Path

import torch


def scratch_dir(run):
    base = os.environ.get("SCRATCH", "scratch")
    return Path(base) / f"node{int(os.environ['GROUP_RANK']) + int(os.environ['LOCAL_RANK']):02d}" / run


def readable(path):
    try:
        return "state_dict" in torch.load(path, map_location="cpu", weights_only=False)
    except (EOFError, RuntimeError, OSError):
        return False


def newest_checkpoint(folder):
    """The newest complete checkpoint, or None for a fresh start."""
    candidates = sorted(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((str(p) for p in candidates if readable(p)), None)
