"""Rows of all ranks, with gradients for the own ones, however many each has."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """All ranks' rows in order of ranks, and the position of the first own one."""
    if not (dist.is_available() and dist.is_initialized()):
        return rows, 0
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    counts = [int(count) for count in counts]
    padded = F.pad(rows.detach(), (0, 0, 0, max(counts) - len(rows)))
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    parts[rank] = rows
    return torch.cat(parts), sum(counts[:rank])
