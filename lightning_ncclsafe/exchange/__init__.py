"""How ranks share without touching the training's process groups: a few keys that all of them see.

``Exchange`` is the interface, over the job's TCPStore, files or memory. ``waiting`` is how ranks wait over it, and
``meeting`` how all of them reach one verdict. Imports only facts and marks.
"""

from lightning_ncclsafe.exchange.directory import DirectoryExchange
from lightning_ncclsafe.exchange.interface import (
    Exchange,
    ExchangeError,
    MemoryExchange,
    SharedMemory,
    comes_first,
    first_rank,
    in_parts,
)
from lightning_ncclsafe.exchange.over_another import FallbackExchange, InTimeExchange
from lightning_ncclsafe.exchange.tcp_store import TcpStoreExchange
from lightning_ncclsafe.exchange.waiting import keep_trying, poll_interval_s, wait_for, wait_for_keys

__all__ = [
    "DirectoryExchange",
    "Exchange",
    "ExchangeError",
    "FallbackExchange",
    "InTimeExchange",
    "MemoryExchange",
    "SharedMemory",
    "TcpStoreExchange",
    "comes_first",
    "first_rank",
    "in_parts",
    "keep_trying",
    "poll_interval_s",
    "wait_for",
    "wait_for_keys",
]
