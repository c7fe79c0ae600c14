import torch

from captioner.net import EOS


@torch.no_grad()
def greedy(model, prompt: torch.Tensor, ratio: float = 1.5, cap: int = 40) -> torch.Tensor:
    """Continue `prompt` up to `ratio` times its length, or until every row has ended."""
    ids = prompt
    limit = min(cap, int(ratio * prompt.shape[1]))
    ended = torch.zeros(len(ids), dtype=torch.bool)
    while ids.shape[1] - prompt.shape[1] < limit and not ended.all():
        logits = model(ids)[:, -1]  # <- here
        token = logits.argmax(-1)
        ended |= token == EOS
        ids = torch.cat([ids, token[:, None]], 1)
    return ids[:, prompt.shape[1] :]
