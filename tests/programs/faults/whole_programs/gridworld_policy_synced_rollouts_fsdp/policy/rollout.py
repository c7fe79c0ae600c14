import torch
import torch.distributed as dist


@torch.no_grad()
def collect(net, env, cap: int = 60):
    """Plays one batch of episodes. Ranks whose episodes have ended keep calling the sharded network."""
    obs, ended = env.reset(), torch.zeros(env.batch, dtype=torch.bool)
    steps = []
    for _ in range(cap):
        running = torch.tensor(float(not ended.all()))
        dist.all_reduce(running, op=dist.ReduceOp.MAX)
        if running == 0:
            break
        action = torch.distributions.Categorical(logits=net(obs)).sample()
        if ended.all():
            continue
        nxt, reward, arrived = env.step(action)
        steps.append((obs, action, reward * ~ended))
        ended |= arrived
        obs = nxt
    return [torch.stack(x) for x in zip(*steps)]
