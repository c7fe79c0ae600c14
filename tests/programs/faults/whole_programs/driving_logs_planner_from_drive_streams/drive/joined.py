import torch
import torch.distributed as dist


class JoinedLoader:
    """Ends on all ranks as soon as one rank has no batch left."""

    def __init__(self, loader):
        self.loader, self.dropped = loader, 0

    def __iter__(self):
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            have = torch.tensor(int(batch is not None))
            dist.all_reduce(have, op=dist.ReduceOp.MIN)
            if not have:
                self.dropped += batch is not None
                return
            yield batch
