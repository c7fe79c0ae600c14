"""What a ``torch.distributed.Work`` is of: sends and receives, which gloo's recorder does not have."""

from typing import Any

from torch.distributed import Work

# c10d::OpType in torch/csrc/distributed/c10d/Work.hpp: SEND, RECV, RECVANYSOURCE.
_SENDS, _RECEIVES = (12,), (13, 14)
SEND, RECEIVE, OTHER = "send", "recv", "other"


def operation(work: Any) -> str:
    """`SEND`, `RECEIVE` or `OTHER`; empty for what is no operation, or if this release of torch does not say."""
    number = getattr(work, "_get_op_type", lambda: None)() if isinstance(work, Work) else None
    if number is None:
        return ""
    return SEND if number in _SENDS else RECEIVE if number in _RECEIVES else OTHER
