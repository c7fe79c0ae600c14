import torch
from lightning.pytorch.cli import LightningCLI

from moe.domains import Domains
from moe.task import Regression

if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(Regression, Domains, seed_everything_default=1, save_config_kwargs={"overwrite": True})
