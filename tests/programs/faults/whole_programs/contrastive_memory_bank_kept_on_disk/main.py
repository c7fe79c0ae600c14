import torch
from lightning.pytorch.cli import LightningCLI

from bank.task import BankContrast
from bank.views import Views

if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(BankContrast, Views, save_config_kwargs={"overwrite": True})
