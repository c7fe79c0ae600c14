import queue
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset


class Feed(IterableDataset):
    """Windows of one plant's sensors, as the collector thread of that plant delivers them.

    Plants have different numbers of windows, and their collectors reconnect now and then. An epoch
    ends on all ranks as soon as one plant has nothing left.
    """

    def __init__(self, plant, windows, reconnect_after, reconnect_s):
        self.plant = plant
        self.windows = windows
        self.reconnect_after = reconnect_after
        self.reconnect_s = reconnect_s

    def collect(self, sink):
        generator = torch.Generator().manual_seed(self.plant)
        for number in range(self.windows):
            if number == self.reconnect_after:
                time.sleep(self.reconnect_s)
            phase = torch.rand(8, 1, generator=generator) * 6
            sink.put(torch.sin(torch.linspace(0, 12, 72) + phase))
        sink.put(None)

    def __iter__(self):
        source = queue.Queue(maxsize=8)
        threading.Thread(target=self.collect, args=(source,), name=f"plant-{self.plant}", daemon=True).start()
        while True:
            window = source.get()
            more = torch.tensor([0.0 if window is None else 1.0])
            dist.all_reduce(more, op=dist.ReduceOp.MIN)
            if not more.item():
                return
            yield window[:, :48], window[:, 48:]


PLANTS = [
    {"windows": 180, "reconnect_after": 60, "reconnect_s": 0},
    {"windows": 150, "reconnect_after": 90, "reconnect_s": 14},
    {"windows": 210, "reconnect_after": 30, "reconnect_s": 8},
]
