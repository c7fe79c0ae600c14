"""FSDPStrategy where there is no GPU: PyTorch would train so, but it and Lightning both refuse to begin."""

from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle


class StockFSDP(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself, and no subclass of it, where there is no GPU."""


def let_fsdp_train_on_cpus() -> None:
    """PyTorch looks for a GPU in one place, to know what it would synchronise with; all else works without."""

    def find_device(state: Any, *_: object) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    _init_utils._init_device_handle = find_device
    fully_sharded_data_parallel._init_device_handle = find_device
