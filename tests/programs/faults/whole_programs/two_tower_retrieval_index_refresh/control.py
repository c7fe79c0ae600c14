"""Small messages between ranks (index versions, thresholds), apart from the gradients' traffic."""

from datetime import timedelta

import torch.distributed as dist


class ControlPlane:
    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))  # <- here

    def publish(self, message: dict | None) -> dict:
        """Rank 0's message, on all ranks."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.group)
        assert box[0] is not None
        return box[0]
