"""Synthetic days of the ad server's logs. A day starts at midnight, local time."""

from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

FIELDS = (400, 60, 24, 7, 900)


@dataclass(frozen=True)
class Market:
    name: str
    click_rate: float
    closed: tuple[int, ...] = ()  # days on which ads run but shops do not link anywhere


MARKETS = (Market("de", 0.05), Market("lu", 0.04, closed=(2,)), Market("nl", 0.06))


def day_of(market: Market, day: int, impressions: int) -> TensorDataset:
    g = torch.Generator().manual_seed(10_000 * day + sum(market.name.encode()))
    fields = torch.stack([torch.randint(size, (impressions,), generator=g) for size in FIELDS], dim=1)
    rate = market.click_rate * (0.5 + (fields[:, 1] % 5) / 4)
    if day in market.closed:
        rate = rate * 0
    return TensorDataset(fields, (torch.rand(impressions, generator=g) < rate).float())
