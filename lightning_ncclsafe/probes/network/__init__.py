"""How this host reaches others: interfaces that NCCL and gloo take, InfiniBand, and whether anybody answers."""
