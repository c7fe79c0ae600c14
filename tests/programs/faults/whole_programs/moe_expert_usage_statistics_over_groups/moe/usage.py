import lightning as L
import torch
import torch.distributed as dist


class ExpertUsage(L.Callback):
    """Mean load of each expert over the ranks; each expert has a group, so that they overlap."""

    def __init__(self, every_n_steps: int = 25):
        self.every_n_steps = every_n_steps
        self.groups = []

    def on_fit_start(self, trainer, pl_module):
        ranks = list(range(trainer.world_size))
        self.groups = [dist.new_group(ranks) for _ in pl_module.moe.experts]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        load = pl_module.moe.last_load
        usage = {}
        for expert in load.argsort(descending=True).tolist():  # <- here
            share = load[expert].clone().view(1)
            dist.all_reduce(share, group=self.groups[expert])
            usage[f"usage/expert{expert}"] = share.item() / trainer.world_size
        if trainer.is_global_zero:
            trainer.logger.log_metrics(usage, step=trainer.global_step)
