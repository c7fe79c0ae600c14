from lightning.pytorch.cli import LightningCLI

from sft.data import PageData
from sft.model import ByteLM

if __name__ == "__main__":
    LightningCLI(ByteLM, PageData)
