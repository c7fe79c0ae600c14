import torch
import torch.distributed as dist


class AgreedLoader:
    """Ends the epoch on all ranks as soon as one of them has no batch left."""

    def __init__(self, loader):
        self.loader = loader
        self.group = None

    def __iter__(self):
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        it = iter(self.loader)
        while True:
            batch = next(it, None)
            left = torch.tensor([0 if batch is None else 1])
            dist.all_reduce(left, op=dist.ReduceOp.MIN, group=self.group)
            if left.item() == 0:
                return
            yield batch
