"""Agreement of neighbouring tiles along their common border, for models that are trained on a ring of tiles."""

import torch
import torch.distributed as dist


class Borders:
    """One group per border; border i lies between tile i and tile i + 1."""

    def __init__(self, tiles: int, tile: int) -> None:
        self.tiles, self.tile = tiles, tile
        self.groups = [dist.new_group(sorted({i, (i + 1) % tiles})) for i in range(tiles)]

    @property
    def west(self):
        return self.groups[(self.tile - 1) % self.tiles]

    @property
    def east(self):
        return self.groups[self.tile]

    def average(self, west: torch.Tensor, east: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        west, east = west.clone(), east.clone()
        dist.all_reduce(west, group=self.west)  # <- here
        dist.all_reduce(east, group=self.east)
        return west / 2, east / 2
