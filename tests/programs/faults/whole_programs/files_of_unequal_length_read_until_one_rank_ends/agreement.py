import torch
import torch.distributed as dist


class UntilOneEnds:
    """Batches of a loader until the first rank has none left; then all ranks stop."""

    def __init__(self, loader):
        self.loader = loader
        self._group = None

    @property
    def group(self):
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def __iter__(self):
        group = self.group
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            has_batch = torch.tensor([batch is not None], dtype=torch.int32)
            dist.all_reduce(has_batch, op=dist.ReduceOp.MIN, group=group)
            if not has_batch.item():
                return
            yield batch
