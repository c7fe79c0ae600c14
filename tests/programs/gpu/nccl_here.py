"""One rank in front of the Flight Recorder: its device, what it agrees on with the others, what it has recorded."""

import base64
import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as _c10d

from lightning_ncclsafe._torch import process_groups, recorders

# Collectives before timing is switched on; the first one makes what NCCL has not made yet.
WARM_UP = 5
# 4 MiB: some milliseconds over loopback sockets.
NUMEL = 1 << 20
# What the watchdog of NCCL's back end needs to see that a collective has ended: it looks ten times a second.
_SETTLE_S = 10.0
_MEET_S = timedelta(seconds=60)


@dataclass(frozen=True)
class Here:
    """One rank.

    Attributes:
        rank: Its number.
        ranks: How many there are.
        device: What its tensors are on.
        store: A connection to the job's store, for what ranks agree on beside their collectives.
        server: The job's store, which rank 0 serves: an abort gives up the process group's hold on it.
    """

    rank: int
    ranks: int
    device: torch.device
    store: Any
    server: Any

    def ones(self, numel: int = NUMEL) -> torch.Tensor:
        """A tensor on this rank's device."""
        return torch.ones(numel, device=self.device)

    def sync(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self, name: str) -> None:
        """Waits for all ranks, without a collective."""
        if self.store.add(f"{name}/here", 1) == self.ranks:
            self.store.set(f"{name}/all", "")
        self.store.wait([f"{name}/all"], _MEET_S)

    def dump(self) -> dict[str, Any]:
        """What the recorder of this rank's back end holds, in both of its forms, and who its groups' members are."""
        kind = "nccl" if self.device.type == "cuda" else "fr"
        as_json: bytes = getattr(_c10d, f"_dump_{kind}_trace_json")(True, False)
        as_pickle: bytes = getattr(_c10d, f"_dump_{kind}_trace")(True, False, False)
        return {
            "rank": self.rank,
            "json": json.loads(as_json),
            "pickle": base64.b64encode(as_pickle).decode(),
            "groups": {group.name: list(group.ranks) for group in process_groups.own_groups()},
        }

    def settle(self) -> None:
        """Waits for the device, and until the recorder has learned of the end of what it has seen begin; at most 10 s.

        What is coalesced is not waited for: only the whole has an end of its own.
        """
        self.sync()
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            entries = [entry for found in recorders.entries() for entry in found]
            if all(_is_settled(entry) for entry in entries):
                return
            time.sleep(0.05)


def _is_settled(entry: dict[str, Any]) -> bool:
    if not entry["profiling_name"].endswith(":all_reduce"):
        return True
    # The first ones were made before timing was switched on.
    has_duration = not entry["profiling_name"].startswith("nccl") or entry.get("duration_ms") is not None
    return entry["retired"] and (has_duration or entry["op_id"] <= WARM_UP)
