import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback


class DomainWeights(Callback):
    """Averages the loss of each domain over all ranks, and gives more weight to domains that lag behind.

    Every domain has a process group of its own, so that large domains can later be averaged by fewer ranks.
    """

    def __init__(self, domains, every=25, rate=0.5):
        self.domains, self.every, self.rate = domains, every, rate
        self.groups, self.sums = {}, {}

    def on_fit_start(self, trainer, module):
        self.groups = {domain: dist.new_group() for domain in self.domains}
        module.weights = dict.fromkeys(self.domains, 1.0)

    def record(self, domain, loss):
        total, count = self.sums.get(domain, (0.0, 0))
        self.sums[domain] = (total + loss, count + 1)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for domain, loss in module.losses.items():
            self.record(domain, loss)
        if (batch_idx + 1) % self.every or len(self.sums) < len(self.domains):
            return
        means = {}
        for domain, (total, count) in self.sums.items():
            pair = torch.tensor([total, float(count)])
            dist.all_reduce(pair, group=self.groups[domain])  # <- here
            means[domain] = float(pair[0] / pair[1])
        average = sum(means.values()) / len(means)
        for domain, mean in means.items():
            module.weights[domain] *= (mean / average) ** self.rate
        self.sums.clear()
