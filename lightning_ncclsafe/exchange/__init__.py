"""How ranks share without touching the training's process groups: a few keys that all of them see.

``Exchange`` is the door, over the job's TCPStore, files or memory; ``meeting`` brings all ranks to one verdict over it.
Imports facts and marks alone.
"""

from lightning_ncclsafe.exchange.directory import DirectoryExchange
from lightning_ncclsafe.exchange.fallback import FallbackExchange
from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError, comes_first
from lightning_ncclsafe.exchange.memory import MemoryExchange, SharedMemory
from lightning_ncclsafe.exchange.parts import in_parts
from lightning_ncclsafe.exchange.tcp_store import TcpStoreExchange

__all__ = [
    "DirectoryExchange",
    "Exchange",
    "ExchangeError",
    "FallbackExchange",
    "MemoryExchange",
    "SharedMemory",
    "TcpStoreExchange",
    "comes_first",
    "in_parts",
]
