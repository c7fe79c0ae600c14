import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

PAD, EOS, VOCAB = 0, 1, 24


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, width=48, depth=3, context=96):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        length = ids.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        x = self.tokens(ids) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

    def shard(self, mesh):
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


@torch.no_grad()
def rollout(policy, prompts, max_new_tokens, temperature=1.0):
    ids = prompts
    finished = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = policy(ids)[:, -1] / temperature
        logits[:, PAD] = float("-inf")
        token = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        token = torch.where(finished, torch.full_like(token, PAD), token)
        ids = torch.cat([ids, token[:, None]], dim=1)
        finished |= token == EOS
        if finished.all():  # <- here
            break
    return ids
