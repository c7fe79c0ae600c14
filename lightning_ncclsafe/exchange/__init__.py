"""How ranks share without touching the training's process groups: a few keys that all of them see.

``Exchange`` in ``interface`` is what others use: ``tcp_store`` is the job's TCPStore, ``directory`` files on shared
storage, before there is a store or after its host has died, and ``fallback`` switches from one to the other.
``waiting`` is how ranks wait over it, and ``meeting`` how all of them reach one verdict. Imports only facts and
``code``.
"""

from lightning_ncclsafe.exchange.directory import DirectoryExchange
from lightning_ncclsafe.exchange.fallback import FallbackExchange, InTimeExchange
from lightning_ncclsafe.exchange.interface import (
    Exchange,
    ExchangeError,
    MemoryExchange,
    SharedMemory,
    comes_first,
    first_rank,
    in_parts,
)
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
